"""The account of one epoch: what each rank did, and how long it took."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.metrics.ranks import RankRecord, reduce_ranks
from fuelflow.run.observer import Observation
from fuelflow.step.tally import Totals


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """What one process measured of an epoch, in seconds.

    Attributes:
        start: When the epoch began, by `time.perf_counter`.
        compiling: Tracing and compiling in it.
        waiting: Waiting for batches.
        evaluating: The evaluation after it.
        calling_back: The user's callbacks before it.
        seen: What its devices were seen doing.
        passing: A pass of each rank over its own rows, 0 for ranks of other processes;
            None if that was not measured.
    """

    start: float
    compiling: float
    waiting: float
    evaluating: float
    calling_back: float
    seen: Observation
    passing: np.ndarray | None = None


_COLUMNS = (
    "epoch_ms",
    "compile_ms",
    "share_complete_ms",
    "compute_only_ms",
    "data_starve_ms",
    "eval_ms",
    "callback_ms",
    "pass_ms",
)


def make_metrics(
    devices: Sequence[Any],
    totals: Totals,
    clocks: Clocks,
    **facts: Any,
) -> EpochMetrics:
    """The metrics of an epoch; of several processes each must ask.

    Args:
        devices: The device of each rank, in their order.
        totals: What the devices added up.
        clocks: What this process measured.
        **facts: What else `reduce_ranks` asks for.
    """
    times = _over_processes(_own_times(devices, clocks))
    records = [
        RankRecord(
            device_index=device.id,
            process_index=device.process_index,
            samples=int(totals.num_rows[rank]),
            sums=_sums(totals, rank),
            **dict(zip(_COLUMNS, times[rank].tolist(), strict=True)),
        )
        for rank, device in enumerate(devices)
    ]
    return reduce_ranks(records, **facts)


def _own_times(devices: Sequence[Any], clocks: Clocks) -> np.ndarray:
    """Milliseconds ``[num_ranks, columns]``, 0 for ranks of other processes."""
    table = np.zeros((len(devices), len(_COLUMNS)))
    own = [rank for rank, device in enumerate(devices) if device in clocks.seen.done]
    last = max(clocks.seen.done.values())
    for rank in own:
        device = devices[rank]
        table[rank] = [
            last - clocks.start - clocks.compiling,
            clocks.compiling,
            clocks.seen.done[device] - clocks.start - clocks.compiling,
            clocks.seen.busy[device],
            clocks.waiting,
            clocks.evaluating,
            clocks.calling_back,
            0.0 if clocks.passing is None else clocks.passing[rank],
        ]
    return np.maximum(table, 0.0) * 1e3


def _over_processes(table: np.ndarray, reduce: Any = np.sum) -> np.ndarray:
    """The table with the rows that each process has of it."""
    if jax.process_count() == 1:
        return table
    from jax.experimental import multihost_utils

    gathered = np.asarray(multihost_utils.process_allgather(table), np.float64)
    return reduce(gathered.reshape(-1, *table.shape), axis=0)


def _sums(totals: Totals, rank: int) -> Mapping[str, tuple[float, float]]:
    return {
        name: (float(sums[rank]), float(totals.weights[name][rank]))
        for name, sums in totals.sums.items()
    }


def longest(secs: float) -> float:
    """The longest of some seconds that each process has, asked for by all of them."""
    return float(_over_processes(np.array([secs]), np.max)[0])


class Stopwatch:
    """Seconds spent inside of ``with``, added up."""

    def __init__(self) -> None:
        self.secs = 0.0

    def __enter__(self) -> "Stopwatch":
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.secs += time.perf_counter() - self._start

    def reset(self) -> float:
        """The seconds so far, which are forgotten."""
        secs, self.secs = self.secs, 0.0
        return secs
