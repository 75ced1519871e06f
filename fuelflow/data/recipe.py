"""What a loader makes its epochs from, and how it makes one."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from fuelflow.data.device import (
    PLAIN,
    Programs,
    make_programs,
    make_rank_programs,
    plain_rank_programs,
)
from fuelflow.data.fields import row_bytes
from fuelflow.data.layout import Layout
from fuelflow.data.memory import num_cores
from fuelflow.data.options import Prefetch as Depth
from fuelflow.data.placement import OverRanks, Placement
from fuelflow.data.pool import Pool
from fuelflow.data.position import Progress
from fuelflow.data.prefetch import Direct, Maker, Prefetch, Supply
from fuelflow.data.resident import ResidentBatches
from fuelflow.data.samplers import Indices, Sampler, draw
from fuelflow.data.seeds import batch_rng, device_key, order_rng
from fuelflow.data.sources import Table
from fuelflow.data.streaming import (
    FIRST_DEPTH,
    HostBatches,
    Made,
    Packing,
    StreamBatches,
    TableBatches,
)
from fuelflow.data.streams import Stream, StreamReader
from fuelflow.data.transforms import HostTransform
from fuelflow.data.weights import Weights
from fuelflow.step.batch import Transform

_MAX_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The checked settings of a loader.

    Attributes:
        batch_size: Rows of a full batch; no more than an epoch has, if that is known.
        drop_last: What becomes of rows that fill no batch.
        seed: Of the order, and of transforms.
        transform: Applied on the host.
        device_transform: Applied on the device.
        prefetch: Batches made ahead of use.
        placement: Where arrays go.
    """

    batch_size: int
    drop_last: bool | None
    seed: int
    transform: HostTransform | None
    device_transform: Transform | None
    prefetch: Depth
    placement: Placement

    def resident(
        self, data: dict[str, jax.Array], order: np.ndarray, progress: Progress
    ) -> ResidentBatches:
        """The batches of an epoch of rows that are on the device."""
        return ResidentBatches(
            data,
            order,
            self.layout(len(order), progress),
            programs=self._programs,
            transform=self.device_transform,
            key=self._key(progress.epoch),
            placement=self.placement,
        )

    def streamed(
        self, table: Table, order: np.ndarray, progress: Progress
    ) -> HostBatches:
        """The batches of an epoch of rows that are picked on the host."""
        layout = self.layout(len(order), progress)
        packing = self._packing(progress.epoch)
        maker = TableBatches(table, order, layout, packing, self._pool)
        supply = self._supply(maker, layout.num_batches, _MAX_THREADS)
        return self._host_batches(supply, progress, has_weight=layout.has_weight)

    def read(self, stream: Stream, progress: Progress) -> HostBatches:
        """The batches of an epoch of a stream."""
        maker = StreamBatches(
            partial(
                StreamReader, stream, self.batch_size, progress.rows, progress.iterator
            ),
            progress.rows // self.batch_size,
            self.batch_size,
            drop_last=bool(self.drop_last),
            packing=self._packing(progress.epoch),
        )
        supply = self._supply(maker, 0 if progress.is_done else None, 1)
        has_weight = self.drop_last is None
        if stream.num_rows is not None:
            has_weight = self.layout(stream.num_rows, progress).has_weight
        return self._host_batches(supply, progress, has_weight=has_weight)

    def layout(self, num_samples: int, progress: Progress) -> Layout:
        """How the rest of an epoch is cut into batches."""
        start = num_samples if progress.is_done else progress.rows
        return Layout(num_samples, self.batch_size, self.drop_last, start)

    def names(self, source: Table | Stream) -> tuple[str, ...]:
        """The fields of batches: what transforms make of the first rows."""
        if self.transform is None and self.device_transform is None:
            return tuple(source.fields)
        fields: dict[str, Any] = _first_rows(source, self.batch_size)
        if self.transform is not None:
            fields = self.transform(fields, partial(batch_rng, self.seed, 0), 0)
        if self.device_transform is not None:
            fields = jax.eval_shape(self.device_transform, fields, self._key(0))
        return tuple(fields)

    def _host_batches(
        self, supply: Supply[Made], progress: Progress, *, has_weight: bool
    ) -> HostBatches:
        return HostBatches(
            supply,
            programs=self._programs,
            has_transform=self.device_transform is not None,
            key=self._key(progress.epoch),
            weights=Weights(self.batch_size, self.placement, has_weight=has_weight),
            placement=self.placement,
            measures_depth=self.prefetch == "auto",
            chunks=self.transform is None,
        )

    def _supply(
        self,
        maker: Maker[Made],
        num_batches: int | None,
        num_threads: int,
    ) -> Supply[Made]:
        if self.prefetch == 0:
            return Direct(maker, num_batches)
        depth = FIRST_DEPTH if self.prefetch == "auto" else self.prefetch
        most = _MAX_THREADS if self.prefetch == "auto" else self.prefetch
        num_threads = min(num_threads, num_cores(), most)
        return Prefetch(maker, num_batches, depth=depth, num_threads=num_threads)

    def _packing(self, epoch: int) -> Packing:
        return Packing(
            transform=self.transform,
            make_rng=partial(batch_rng, self.seed, epoch),
            held=None if self.drop_last is False else self.batch_size,
            fills_here=self.device_transform is None or self._is_over_ranks,
            is_numbered=self.device_transform is not None,
            placement=self.placement,
        )

    def _key(self, epoch: int) -> jax.Array:
        if self.device_transform is not None and self.device_transform.takes_key:
            return device_key(self.seed, epoch)
        return self._unused_key

    @cached_property
    def _unused_key(self) -> jax.Array:
        return device_key(self.seed, 0)

    @cached_property
    def _pool(self) -> Pool:
        return Pool()

    @cached_property
    def _programs(self) -> Programs:
        if not isinstance(self.placement, OverRanks):
            transform = self.device_transform
            return PLAIN if transform is None else make_programs(transform)
        if self.device_transform is None:
            return plain_rank_programs(self.placement.mesh)
        return make_rank_programs(self.device_transform, self.placement.ranks)

    @property
    def _is_over_ranks(self) -> bool:
        return isinstance(self.placement, OverRanks)


def make_order(sampler: Sampler, num_rows: int, seed: int, epoch: int) -> Indices:
    """The rows of an epoch, which depend on nothing else."""
    return draw(sampler, num_rows, order_rng(seed, epoch))


def whole_bytes(table: Table) -> int:
    """Bytes of all rows on the device."""
    return table.num_rows * row_bytes(table.fields)


def _first_rows(source: Table | Stream, size: int) -> dict[str, np.ndarray]:
    if isinstance(source, Stream):
        piece = StreamReader(source, size).read()
        if piece is None:
            raise ValueError("`source` must give at least one row, got none")
        return piece.fields
    return source.take(np.arange(min(size, source.num_rows)))
