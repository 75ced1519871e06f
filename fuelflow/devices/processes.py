"""Several processes that train as one: JAX's multi-controller runtime, joined."""

import atexit
import contextlib
import errno
import functools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax

from fuelflow._errors import InitializeError
from fuelflow.devices.place import Place, host_and_port

# JAX aborts the process where it gives up, so it gives up only after we have.
_MARGIN_SECS = 60
_PROBE_SECS = 2.0


class _Joined:
    """What `initialize` was last told in this process; None before it was called."""

    place: Place | None = None


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    timeout_secs: int = 300,
    heartbeat_timeout_secs: int = 100,
) -> None:
    """Joins this process with the others of its run, by `jax.distributed.initialize`.

    To be called before anything asks for devices; afterwards `jax.devices()` are those
    of all processes. Each must run the same program. What is not given is what the
    environment variables ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and
    ``JAX_PROCESS_ID`` say, which `fuelflow launch` sets, or else what JAX learns from
    Slurm, Open MPI, Kubernetes or Cloud TPU. Where all three stay unknown this is the
    only process, and nothing is done: the same program runs on a laptop. Called again
    with the same arguments, or with none, it does nothing.

    From here on an error that ends this process does so at once, without JAX's wait at
    exit for the others, who may wait for this one; what was registered with `atexit`
    before is then left out. A process that is killed is missed by the others when they
    compute with it, or after ``heartbeat_timeout_secs``, and they end too. JAX takes
    SIGTERM for a notice of preemption, and no longer dies of it.

    Args:
        coordinator_address: Host of process 0, and a port that is free there.
        num_processes: How many processes there are.
        process_id: Which of them this is, from 0.
        local_device_ids: The GPUs of this host to use, if not all; the default is
            ``JAX_LOCAL_DEVICE_IDS`` if set, and with Slurm and Open MPI one each.
        timeout_secs: How long to wait for the other processes.
        heartbeat_timeout_secs: After how long a silent process counts as dead.

    Raises:
        ValueError: If an argument or environment variable is out of range, or some of
            the three first are known and the others are not.
        TypeError: If a number is no integer.
        InitializeError: If devices were used before, if this process has joined others
            in another place, if the coordinator's port is taken, or if the others do
            not come in time. End the process then and start it again.

    Example:
        The first lines of a program, ``train.py``::

            import fuelflow as ff

            ff.initialize()

        ``python train.py`` runs it in one process, ``fuelflow launch -n 2 train.py``
        and ``srun python train.py`` in several.
    """
    given = Place(
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
    )
    times = {
        "timeout_secs": timeout_secs,
        "heartbeat_timeout_secs": heartbeat_timeout_secs,
    }
    for name, secs in times.items():
        if secs < 1:
            raise ValueError(f"`{name}` must be at least 1, got {secs}")
    _initialize(given, local_device_ids, **times)


def _initialize(
    given: Place,
    local_device_ids: int | Sequence[int] | None,
    timeout_secs: int,
    heartbeat_timeout_secs: int,
) -> None:
    place = Place.from_environment(given=given)
    if _has_joined(place, is_asked=bool(given.known)):
        return
    options: dict[str, Any] = {
        "local_device_ids": local_device_ids,
        "heartbeat_timeout_seconds": heartbeat_timeout_secs,
    }
    if not given.known and not place.missing:
        # Else a launcher's processes inside one Slurm step would all get its device.
        options["cluster_detection_method"] = "deactivate"
    if place.process_id == 0 and place.coordinator_address is not None:
        _require_free(place.coordinator_address)
    try:
        _join(place, timeout_secs, options)
    finally:
        if jax.distributed.is_initialized():  # also while it still waits
            _leave_at_once_after_errors()
    _Joined.place = place


def _has_joined(place: Place, *, is_asked: bool) -> bool:
    """Whether nothing is left to do.

    Raises:
        InitializeError: If the process is in another place already.
    """
    if not jax.distributed.is_initialized():
        return not place.known and _Joined.place == place
    if not is_asked or place == _Joined.place:
        return True
    raise InitializeError(
        f"this process was initialized before, with {_listed(_Joined.place)}, and "
        f"cannot be again with {_listed(place)}: call `initialize` once, first thing "
        "in the program, or in a notebook restart the kernel",
        place.coordinator_address,
    )


def _listed(place: Place | None) -> str:
    if place is None:
        return "what `jax.distributed.initialize` was given"
    return ", ".join(f"{k}={v!r}" for k, v in place.known.items()) or "no arguments"


def _join(place: Place, timeout_secs: int, options: dict[str, Any]) -> None:
    """Has JAX connect, in a thread: its wait hears no Ctrl-C and ends in an abort."""
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                **place.known,
                **options,
                initialization_timeout=timeout_secs + _MARGIN_SECS,
            )
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=connect, name="fuelflow-initialize", daemon=True)
    thread.start()
    thread.join(timeout_secs)
    if thread.is_alive():
        raise InitializeError(
            _who_is_missing(place, timeout_secs), place.coordinator_address
        )
    if errors:
        _raise_in_plain_words(errors[0], place)


def _raise_in_plain_words(error: BaseException, place: Place) -> None:
    """Raises what JAX raised, or returns if it only found no other process.

    JAX has no question for "is this a cluster" or "were devices used", so its answers
    are told apart by their words; tests hold them for each version of JAX.
    """
    if isinstance(error, ValueError) and str(error).endswith("be defined."):
        if not place.known:
            return
        raise ValueError(
            f"of this process's place only {_listed(place)} is known, and JAX finds "
            f"no cluster that tells {_named(place.missing)}: give all three, or none"
        ) from error
    if isinstance(error, jax.errors.JaxRuntimeError):
        raise InitializeError(
            f"JAX could not join the processes ({_listed(place)}): {error}",
            place.coordinator_address,
        ) from error
    if isinstance(error, RuntimeError) and "must be called before" in str(error):
        raise InitializeError(
            "`initialize` must be called before devices are used, and they have been: "
            "by a computation, an array, or a question such as `jax.devices()`. Move "
            "the call to the top of the program, or in a notebook restart the kernel",
            place.coordinator_address,
        ) from error
    raise error


def _named(names: Sequence[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _who_is_missing(place: Place, timeout_secs: int) -> str:
    address = place.coordinator_address
    if address is not None and place.process_id != 0 and not _is_reachable(address):
        return (
            f"no coordinator answered at {address} within {timeout_secs} s: is process "
            "0 running there, and is the port open to this host?"
        )
    every = "the" if place.num_processes is None else f"all {place.num_processes}"
    return (
        f"not {every} processes of the run came within {timeout_secs} s: see whether "
        "each was started, with the same coordinator and an id of its own. This "
        f"one has {_listed(place)}"
    )


def _is_reachable(address: str) -> bool:
    try:
        socket.create_connection(host_and_port(address), _PROBE_SECS).close()
    except OSError:
        return False
    return True


def _require_free(coordinator_address: str) -> None:
    """Refuses a port that is taken, on which jax 0.12 would crash.

    Raises:
        InitializeError: If it is.
    """
    _, port = host_and_port(coordinator_address)
    bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{port}")
    host, port = host_and_port(bound)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with contextlib.closing(socket.socket(family)) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host, port))
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            return  # for JAX to judge: a host may lack IPv6
        raise InitializeError(
            f"the coordinator's port {port} cannot be had on this host "
            f"({os.strerror(error.errno)}): choose another, or end what listens there",
            coordinator_address,
        ) from error


@functools.cache
def _leave_at_once_after_errors() -> None:
    """From now on an error that ends the process ends it without waiting for others."""
    show = sys.excepthook
    statuses: list[int] = []

    def note(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        show(kind, error, traceback)
        if not hasattr(sys, "ps1"):  # an interactive session survives its errors
            is_interrupt = issubclass(kind, KeyboardInterrupt)
            statuses.append(128 + signal.SIGINT if is_interrupt else 1)

    def leave() -> None:
        if statuses:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(statuses[-1])

    sys.excepthook = note
    atexit.register(leave)
