"""How the ranks of an epoch spent it, each or the telling ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fuelflow.metrics.bottleneck import RankTimes
from fuelflow.metrics.epoch import EpochMetrics


@dataclass(frozen=True)
class RankBar:
    """How one rank spent an epoch.

    Attributes:
        rank: Its number.
        role: Why it is shown, as ``"slowest"``; empty if all are.
        device: Its device, in a word.
        samples_per_sec: Its throughput.
        steps: The part of the epoch in which its device had a step to do.
        waiting: The part in which it had none and its process waited for data.
    """

    rank: int
    role: str
    device: str
    samples_per_sec: float
    steps: float
    waiting: float


def rank_bars(
    metrics: EpochMetrics, ranks: Sequence[dict[str, Any]], most: int
) -> list[RankBar]:
    """A bar for each rank, or for three of them where there are too many.

    Those are the slowest, the median and the fastest by throughput; the slowest is the
    one that the epoch's bottleneck names, if it names one.

    Args:
        metrics: Of the epoch.
        ranks: The ranks of the run's record.
        most: How many bars there may be.
    """
    devices = {each["rank"]: str(each["device"]) for each in ranks}
    if metrics.num_ranks <= max(most, 1):
        shown = [(rank, "") for rank in range(metrics.num_ranks)]
    else:
        speeds = metrics.per_rank_throughput
        order = sorted(range(metrics.num_ranks), key=lambda rank: speeds[rank])
        named = metrics.bottleneck.rank
        slowest = order[0] if named is None else named
        shown = [(slowest, "slowest")]
        if most >= 3:
            shown += [(order[len(order) // 2], "median"), (order[-1], "fastest")]
    times = metrics.rank_times
    return [
        RankBar(
            rank,
            role,
            devices.get(rank, ""),
            1e3 * metrics.per_rank_throughput[rank],
            *_parts(metrics.epoch_ms, times[rank]),
        )
        for rank, role in shown
    ]


def _parts(epoch_ms: float, times: RankTimes) -> tuple[float, float]:
    # Clocks of several processes may disagree by a little with the longest epoch.
    whole = max(epoch_ms, times.complete) or 1.0
    return times.compute / whole, times.input / whole
