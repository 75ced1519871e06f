"""Batches made on the host, ahead of use, and put on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from fuelflow.data.device import Programs
from fuelflow.data.layout import Layout
from fuelflow.data.memory import (
    PREFETCH_SHARE,
    copied,
    free_device_bytes,
    free_host_bytes,
)
from fuelflow.data.placement import Placement
from fuelflow.data.pool import Pool
from fuelflow.data.prefetch import Supply
from fuelflow.data.sources import Table
from fuelflow.data.streams import StreamReader
from fuelflow.data.transforms import HostTransform
from fuelflow.data.weights import Weights
from fuelflow.step.batch import Batch, Stretch, filled_up
from fuelflow.step.spec import num_rows

FIRST_DEPTH = 2  # until a batch was seen, and the least
MAX_DEPTH = 16
_CHUNK_BYTES = 4 * 2**20


class Made(NamedTuple):
    """A batch on its way to the device, before what is compiled is applied to it.

    ``size`` rows are true, and ``held`` are to be. ``number`` is the batch's number in
    its epoch, for a compiled transform; ``state`` that of a stream's iterator after it.
    """

    fields: dict[str, Any]
    size: int
    held: int
    number: Any
    state: Any = None


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What is done on the host to the rows of a batch.

    Attributes:
        transform: Applied to true rows.
        make_rng: The generator of a batch, or a part of it, by its number.
        held: Rows that a batch is filled up to; None to leave it as it is.
        fills_here: Whether it is filled up here, and not after a compiled transform.
        is_numbered: Whether a compiled transform asks for the batch's number.
        placement: Where the arrays go.
    """

    transform: HostTransform | None
    make_rng: Callable[..., np.random.Generator]
    held: int | None
    fills_here: bool
    is_numbered: bool
    placement: Placement

    def own_rows(self, size: int) -> Any:
        """Which of a batch's true rows this process makes; one at least."""
        held = size if self.held is None else self.held
        own = self.placement.own_rows(held)
        if own is None:
            return slice(None)
        return own[own < size] if own[0] < size else np.array([size - 1])

    def pack(
        self, fields: dict[str, Any], size: int, number: int, state: Any = None
    ) -> Made:
        """This process' rows of a batch of ``size``, transformed and filled up."""
        held = size if self.held is None else self.held
        own = self.placement.own_rows(held)
        if self.transform is not None:
            # No process with other rows of the batch has the same random numbers.
            part = () if own is None else (int(own[0]),)
            made = self.transform(fields, lambda n: self.make_rng(n, *part), number)
            fields = _owned(made, given=fields)
        num_here, num_held = (
            (size, held) if own is None else (num_rows(fields), len(own))
        )
        if num_here < num_held and self.fills_here:
            fields = filled_up(fields, num_held)
        at = np.array(number, np.int32) if self.is_numbered else None
        return Made(fields, size, held, at, state)

    def send(self, made: list[Made]) -> list[Made]:
        """Batches on the device: putting several at once takes less time for each."""
        put = self.placement.rows(
            [batch.fields for batch in made], [batch.held for batch in made]
        )
        numbers: list[Any] = [None] * len(made)
        if self.is_numbered:
            numbers = self.placement.whole([batch.number for batch in made])
        return [
            batch._replace(fields=fields, number=number)
            for batch, fields, number in zip(made, put, numbers, strict=True)
        ]


def _owned(made: dict[str, Any], given: dict[str, np.ndarray]) -> dict[str, Any]:
    """What a transform made, in memory that it cannot use again."""
    ours = {id(values) for values in given.values()}
    return {
        name: values
        if id(values) in ours or isinstance(values, jax.Array)
        else copied(values)
        for name, values in made.items()
    }


@dataclass(frozen=True)
class TableBatches:
    """The batches of rows that are had by number."""

    table: Table
    order: np.ndarray
    layout: Layout
    packing: Packing
    pool: Pool

    def make(self, number: int) -> Made:
        """One batch, made by any thread."""
        first, stop = self.layout.bounds(number)
        own = self.packing.own_rows(stop - first)
        fields = self.table.take(self.order[first:stop][own], self.pool.empty)
        return self.packing.pack(
            fields, stop - first, self.layout.first_number + number
        )

    def finish(self, made: list[Made]) -> list[Made]:
        """The batches on the device."""
        return self.packing.send(made)


class StreamBatches:
    """The batches of a stream, which one thread makes in their order.

    Args:
        start: The reader of the stream; called by that thread, since it may read much.
        first_number: The number in its epoch of the first batch.
        batch_size: Rows of a full batch.
        drop_last: Whether a batch that is not full is dropped.
        packing: What is done to each.
    """

    def __init__(
        self,
        start: Callable[[], StreamReader],
        first_number: int,
        batch_size: int,
        *,
        drop_last: bool,
        packing: Packing,
    ) -> None:
        self._start = start
        self._reader: StreamReader | None = None
        self._first_number = first_number
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._packing = packing

    def make(self, number: int) -> Made | None:
        """The next batch, None after the last."""
        if self._reader is None:
            self._reader = self._start()
        piece = self._reader.read()
        if piece is None or (self._drop_last and piece.size < self._batch_size):
            return None
        number += self._first_number
        own = self._packing.own_rows(piece.size)
        fields = {name: values[own] for name, values in piece.fields.items()}
        return self._packing.pack(fields, piece.size, number, piece.state)

    def finish(self, made: list[Made]) -> list[Made]:
        """The batches on the device."""
        return self._packing.send(made)


class HostBatches:
    """The batches of one epoch that are made on the host.

    Args:
        supply: Makes them.
        programs: What is compiled for them.
        has_transform: Whether that transforms.
        key: Base of its keys.
        weights: The weights of their rows.
        placement: Where they are.
        measures_depth: Whether the supply's depth follows the size of the first batch.
        chunks: Whether small batches are made several at a time.
    """

    def __init__(
        self,
        supply: Supply[Made],
        *,
        programs: Programs,
        has_transform: bool,
        key: jax.Array,
        weights: Weights,
        placement: Placement,
        measures_depth: bool,
        chunks: bool,
    ) -> None:
        self._supply = supply
        self._programs = programs
        self._has_transform = has_transform
        self._key = key
        self._weights = weights
        self._placement = placement
        self._measures_depth = measures_depth
        self._chunks = chunks
        self._is_measured = False
        self.state: Any = None

    def __next__(self) -> Batch:
        """The next batch, waited for if it is not there."""
        made = next(self._supply)
        if not self._is_measured:
            self._measure(made.fields)
        fields = made.fields
        if self._has_transform:
            with self._placement.context():
                fields = self._programs.finish(
                    fields, self._key, made.number, held=made.held
                )
        self.state = made.state
        return self._weights.batch(fields, made.size, made.held)

    def _measure(self, fields: dict[str, jax.Array]) -> None:
        arrays = list(fields.values())
        num_bytes = sum(values.nbytes for values in arrays)
        num_bytes //= len(arrays[0].sharding.device_set)  # of one device
        if self._measures_depth:
            self._supply.depth = depth_within(free_where(arrays[0]), num_bytes)
        if self._chunks:
            self._supply.chunk = chunk_within(self._supply.depth, num_bytes)
        self._is_measured = True

    def stretch(self, num_steps: int) -> Stretch | None:
        """None: the rows are not on the device."""
        del num_steps

    def close(self) -> None:
        """Drops what was made, and lets the threads end."""
        self._supply.close()


def free_where(array: jax.Array) -> int:
    """Bytes that are free both on the host and where an array is."""
    device = next(iter(array.sharding.addressable_devices))
    return min(free_host_bytes(), free_device_bytes(device))


def depth_within(free: int, batch_bytes: int) -> int:
    """Batches that a share of the free memory holds, from 2 to 16.

    Example:
        >>> [depth_within(16 * 2**30, size) for size in (2**20, 2**27, 2**40)]
        [16, 8, 2]
    """
    fitting = int(free * PREFETCH_SHARE / max(1, batch_bytes))
    return max(FIRST_DEPTH, min(MAX_DEPTH, fitting))


def chunk_within(depth: int, batch_bytes: int) -> int:
    """Batches to make at a time: handing one over takes as long as copying 1 MiB does.

    Example:
        >>> [chunk_within(16, size) for size in (2**10, 2**21, 2**40)]
        [4, 2, 1]
    """
    return max(1, min(depth // 4, _CHUNK_BYTES // max(1, batch_bytes)))
