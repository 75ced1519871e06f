"""The place of one process among those of a run, and how it is told to the process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

# The first is JAX's own name; the other two are what JAX calls these arguments, and
# neither jax 0.8 nor 0.12 reads them.
COORDINATOR_ADDRESS = "JAX_COORDINATOR_ADDRESS"
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS_ID = "JAX_PROCESS_ID"


@dataclass(frozen=True, kw_only=True)
class Place:
    """What one process knows of its run; None where it knows nothing.

    Attributes:
        coordinator_address: Where process 0 is met, ``host:port``.
        num_processes: How many processes there are.
        process_id: Which of them this one is, from 0.

    Raises:
        ValueError: If one is out of range, or the address has no port.
        TypeError: If a number is no integer.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self) -> None:
        if self.coordinator_address is not None:
            _port_of(self.coordinator_address)
        for name, least in (("num_processes", 1), ("process_id", 0)):
            number = getattr(self, name)
            if number is None:
                continue
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"`{name}` must be an integer, got {number!r}")
            if number < least:
                raise ValueError(f"`{name}` must be at least {least}, got {number}")
        if self.num_processes is None or self.process_id is None:
            return
        if self.process_id >= self.num_processes:
            raise ValueError(
                f"`process_id` must be less than `num_processes`, {self.num_processes},"
                f" as they count from 0, got {self.process_id}"
            )

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str] = os.environ,
        *,
        given: "Place | None" = None,
    ) -> "Place":
        """What is given, and the rest as environment variables tell it.

        Raises:
            ValueError: If a variable cannot be read, or a number is out of range.
        """
        told = {
            "coordinator_address": environment.get(COORDINATOR_ADDRESS),
            "num_processes": _integer(environment, NUM_PROCESSES),
            "process_id": _integer(environment, PROCESS_ID),
        }
        return cls(**{**told, **(given.known if given else {})})

    def to_environment(self) -> dict[str, str]:
        """The variables that tell this place."""
        told = {
            COORDINATOR_ADDRESS: self.coordinator_address,
            NUM_PROCESSES: self.num_processes,
            PROCESS_ID: self.process_id,
        }
        return {name: str(value) for name, value in told.items() if value is not None}

    @property
    def known(self) -> dict[str, str | int]:
        """What is known, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def missing(self) -> list[str]:
        """The names of what is not known."""
        return [name for name, value in vars(self).items() if value is None]


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of a checked address; an IPv6 host loses its brackets."""
    return address.rpartition(":")[0].strip("[]"), _port_of(address)


def _port_of(address: str) -> int:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            "`coordinator_address` must be the host of process 0 and a port that is "
            f"free there, such as 10.0.0.1:1234, got {address!r}"
        )
    return int(port)


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable {name} must be an integer, got {text!r}"
        ) from None
