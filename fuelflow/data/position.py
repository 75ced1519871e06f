"""Where a loader is in its epochs, to go on from there in another process."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuelflow._errors import PositionError
from fuelflow.step.checks import checked_count


@dataclass
class Progress:
    """What the consumer of an epoch was given so far.

    Attributes:
        epoch: The epoch.
        rows: Samples given, those that were only made ahead not counted.
        is_done: Whether the epoch was used up.
        iterator: The state after them of a stream's iterator, if it has one.
    """

    epoch: int = 0
    rows: int = 0
    is_done: bool = False
    iterator: Any = None


@dataclass(frozen=True)
class Identity:
    """What must be the same for a position to mean the same rows.

    Attributes:
        seed: The loader's.
        num_rows: Rows of its source; None for a stream without a length.
        fields: Dtype and shape of a row of each field.
        sampler: The sampler's name; None for a stream.
        order: A checksum of the epoch's rows; None for a stream.
    """

    seed: int
    num_rows: int | None
    fields: dict[str, str]
    sampler: str | None
    order: int | None


def make_state(progress: Progress, identity: Identity) -> dict[str, Any]:
    """A position as a dict of values that JSON has."""
    return {**vars(progress), **vars(identity)}


def read_state(state: Mapping[str, Any]) -> Progress:
    """The progress that a position tells of.

    Raises:
        TypeError: If it is no mapping, or holds values of another kind.
        ValueError: If it is not one that `DataLoader.state` made.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            "`state` must be what `DataLoader.state` returned, got a "
            f"{type(state).__name__}"
        )
    known = {*Progress.__annotations__, *Identity.__annotations__}
    missing = sorted(known - set(state))
    if missing:
        raise ValueError(
            "`state` must be what `DataLoader.state` returned, but it lacks "
            + ", ".join(f"`{name}`" for name in missing)
        )
    progress = Progress(**{name: state[name] for name in Progress.__annotations__})
    checked_count("state['epoch']", progress.epoch, least=0)
    checked_count("state['rows']", progress.rows, least=0)
    if not isinstance(progress.is_done, bool):
        raise TypeError(f"`state['is_done']` must be a bool, got {progress.is_done!r}")
    return progress


def require_same(state: Mapping[str, Any], identity: Identity) -> None:
    """Refuses a position in other data, or in another order of them.

    Raises:
        PositionError: It names what differs.
    """
    here = vars(identity)
    different = [
        (name, state[name], value)
        for name, value in here.items()
        if name != "order" and state[name] != value
    ]
    # Of what is behind it, the order tells nothing new.
    if not different and state["order"] != identity.order:
        different = [("order", state["order"], identity.order)]
    if different:
        raise PositionError(different)


def checksum(order: np.ndarray) -> int:
    """A number that tells one order of rows from another, on every machine."""
    return zlib.crc32(order.astype("<i8", copy=False).tobytes())
