"""What held an epoch back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

from fuelflow.metrics.wording import share_text

if TYPE_CHECKING:
    from fuelflow.metrics.epoch import EpochMetrics

Kind = Literal["input", "callback", "rank", "compute", "nothing"]

# A cause that took a smaller part of the time is not worth a person's.
_LEAST_SHARE = 0.1
_LEAST_MS = 10.0
_NUM_CANDIDATES = 8


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """What held an epoch back, and for how much of the time.

    ``str()`` says it in a sentence.

    Attributes:
        kind: ``"input"``: the devices waited for data. ``"rank"``: the others waited
            for one rank. ``"callback"``: the user's callbacks kept the run from its
            next epoch. ``"compute"``: none of these for a tenth of the time, and the
            devices were at work for most of it. ``"nothing"``: none of these.
        share: The part of the time, 0 to 1: of the epoch, but for ``"callback"`` of the
            epoch, its evaluation and its callbacks together. For ``"compute"`` the part
            that the devices were at work, for ``"nothing"`` the part that they were
            idle, none of the causes above being the reason.
        rank: The rank that the others waited for, with ``"rank"``, and with ``"input"``
            if one process alone was short of data; None otherwise. Of a process with
            several ranks it is the latest one.
        process: The process of that rank, if there are several.
        ratio: How many times as long as the others that rank took, with ``"rank"``;
            otherwise 1.
    """

    kind: Kind
    share: float
    rank: int | None = None
    process: int | None = None
    ratio: float = 1.0

    @property
    def is_notable(self) -> bool:
        """Whether there is a cause to remove: input, a rank or callbacks."""
        return self.kind in {"input", "rank", "callback"}

    def __str__(self) -> str:
        share = share_text(self.share)
        rank = f"rank {self.rank}"
        if self.process is not None:
            rank += f" (process {self.process})"
        waited = f"{share} of the epoch was spent waiting for data"
        if self.rank is not None:
            waited = f"{rank} spent {share} of the epoch waiting for data"
        sentences: dict[Kind, str] = {
            "input": f"input: {waited}",
            "rank": f"{rank} took {self.ratio:.1f} × as long as the median of the "
            f"others; the rest waited {share} of the epoch",
            "callback": f"callbacks took {share} of the time between epochs' starts",
            "compute": f"compute: the devices were at work for {share} of the epoch",
            "nothing": f"nothing stood out; the devices were idle for {share} of the "
            "epoch",
        }
        return sentences[self.kind]


class RankTimes(NamedTuple):
    """How a rank's share of an epoch was spent, in ms; they sum to ``complete``.

    Attributes:
        complete: From the epoch's start to the rank's last step done.
        compute: The device had a step to do.
        input: The device had none, and the process waited for data.
        host: The device had none, and the process did something else.
    """

    complete: float
    compute: float
    input: float
    host: float


def split_times(metrics: "EpochMetrics") -> list[RankTimes]:
    """How each rank spent its share of an epoch.

    Waiting for data counts as input only while the device had nothing to do: steps
    under way hide a slow loader, and then it costs nothing.
    """
    return [
        _split(complete, compute, starve)
        for complete, compute, starve in zip(
            metrics.per_rank_share_complete_ms,
            metrics.per_rank_compute_only_ms,
            metrics.per_rank_data_starve_ms,
            strict=True,
        )
    ]


def _split(complete: float, compute: float, starve: float) -> RankTimes:
    compute = min(compute, complete)
    idle = complete - compute
    waited = min(starve, idle)
    return RankTimes(complete, compute, waited, idle - waited)


def find_bottleneck(metrics: "EpochMetrics") -> Bottleneck:
    """What held an epoch back, from its fields alone.

    Every rank's time to its last step is split, see `split_times`, into ``compute``,
    ``input`` and ``host``. A device that waits inside a step, in a collective, for
    another rank counts as at work, since the host cannot tell; so in a lockstep run the
    late rank is the one that is *idle* while the others seem busy. With ``others`` the
    ranks of other processes, or the other ranks if there is one process:

    - input, lost time: the largest ``input`` of a rank. It names that rank if the
      median of the others' is less than half of it.
    - rank, lost time: of the rank where it is largest, the larger of two.
      ``host - median(others' host)``: it was late with its steps. ``complete -
      median(others' complete)``: it was done later; of this is taken off what it waited
      longer for data than the median of the others, and, if there are several
      processes, ``callback_ms + compile_ms``, since their epochs may begin that far
      apart. ``ratio = complete / (complete - lost)``.
    - rank, seen in its passes, which in lockstep all others wait for: with ``pass`` the
      longest ``pass_ms`` and ``usual`` the median of the others', it lost ``num_steps *
      (pass - usual)``, and no more than ``1 - usual / pass`` of its ``compute``.
      ``ratio = pass / usual``.
    - callback, lost time: ``callback_ms``. Its share is of ``epoch_ms + eval_ms +
      callback_ms``, less what processes that had no callbacks waited for the one that
      did, which is in their epochs already: ``min(callback_ms, the spread of
      complete)``.

    The cause with the most lost time is named, if its share is a tenth or more and it
    lost 10 ms or more. Without one it is ``"compute"`` if the median rank's ``compute``
    is at least half of ``epoch_ms``, and otherwise ``"nothing"``. Compile time is in no
    share.

    Shares are lower bounds where causes take turns: processes whose loaders are slow in
    different steps lose more than any one of them. Ranks of which half or more are late
    together hide each other.

    Returns:
        The bottleneck; ``"nothing"`` with a share of 0 if no time passed.
    """
    times = split_times(metrics)
    causes = [
        (lost, found)
        for lost, found in (
            _input(metrics, times),
            _slow_rank(metrics, times),
            _slow_pass(metrics, times),
            _callbacks(metrics, times),
        )
        if found.share >= _LEAST_SHARE and lost >= _LEAST_MS
    ]
    if causes:
        return max(causes, key=lambda cause: cause[0])[1]
    if metrics.epoch_ms == 0:
        return Bottleneck(kind="nothing", share=0.0)
    busy = _share(median(time.compute for time in times), metrics.epoch_ms)
    if busy >= 0.5:
        return Bottleneck(kind="compute", share=busy)
    return Bottleneck(kind="nothing", share=1 - busy)


def _input(
    metrics: "EpochMetrics", times: Sequence[RankTimes]
) -> tuple[float, Bottleneck]:
    lost = max(time.input for time in times)
    rank = [time.input for time in times].index(lost)
    share = _share(lost, metrics.epoch_ms)
    # Devices of one process share its loader, so there none is shorter of data.
    rest = [times[other].input for other in _others(metrics, rank)]
    if not _has_processes(metrics) or 2 * median(rest) >= lost:
        return lost, Bottleneck(kind="input", share=share)
    process = metrics.process_indices[rank]
    return lost, Bottleneck(kind="input", share=share, rank=rank, process=process)


def _slow_rank(
    metrics: "EpochMetrics", times: Sequence[RankTimes]
) -> tuple[float, Bottleneck]:
    if len(times) == 1:
        return 0.0, Bottleneck(kind="rank", share=0.0)
    # To look at all would take the square of their number.
    latest = sorted(range(len(times)), key=lambda rank: -times[rank].complete)
    busiest = max(range(len(times)), key=lambda rank: times[rank].host)
    lags = {
        rank: _lag(metrics, times, rank)
        for rank in sorted({*latest[:_NUM_CANDIDATES], busiest})
    }
    lost = max(lags.values())
    rank = next(rank for rank, lag in lags.items() if lag == lost)
    needed = times[rank].complete - lost
    return lost, Bottleneck(
        kind="rank",
        share=_share(lost, metrics.epoch_ms),
        rank=rank,
        process=metrics.process_indices[rank] if _has_processes(metrics) else None,
        ratio=times[rank].complete / needed if needed > 0 else float("inf"),
    )


def _slow_pass(
    metrics: "EpochMetrics", times: Sequence[RankTimes]
) -> tuple[float, Bottleneck]:
    passes = metrics.per_rank_pass_ms
    longest = max(passes)
    rank = passes.index(longest)
    rest = [passes[other] for other in range(len(passes)) if other != rank]
    usual = median(rest) if rest else 0.0
    if usual == 0.0:  # not measured, or nothing to compare with
        return 0.0, Bottleneck(kind="rank", share=0.0)
    lost = min(
        metrics.num_steps * (longest - usual),
        times[rank].compute * (1 - usual / longest),
    )
    return lost, Bottleneck(
        kind="rank",
        share=_share(lost, metrics.epoch_ms),
        rank=rank,
        process=metrics.process_indices[rank] if _has_processes(metrics) else None,
        ratio=longest / usual,
    )


def _lag(metrics: "EpochMetrics", times: Sequence[RankTimes], rank: int) -> float:
    """What the others waited for a rank, for another reason than its data."""
    own, rest = times[rank], [times[other] for other in _others(metrics, rank)]
    skew = metrics.callback_ms + metrics.compile_ms if _has_processes(metrics) else 0
    late = own.complete - median(time.complete for time in rest) - skew
    late -= max(0.0, own.input - median(time.input for time in rest))
    return max(0.0, late, own.host - median(time.host for time in rest))


def _callbacks(
    metrics: "EpochMetrics", times: Sequence[RankTimes]
) -> tuple[float, Bottleneck]:
    completes = [time.complete for time in times]
    spread = max(completes) - min(completes) if _has_processes(metrics) else 0.0
    twice = min(metrics.callback_ms, spread)
    whole = metrics.epoch_ms + metrics.eval_ms + metrics.callback_ms - twice
    share = _share(metrics.callback_ms, whole)
    return metrics.callback_ms, Bottleneck(kind="callback", share=share)


def _others(metrics: "EpochMetrics", rank: int) -> Iterator[int]:
    """The ranks that one is compared with."""
    processes = metrics.process_indices
    several = _has_processes(metrics)
    for other, process in enumerate(processes):
        if process != processes[rank] if several else other != rank:
            yield other


def _has_processes(metrics: "EpochMetrics") -> bool:
    return len(set(metrics.process_indices)) > 1


def _share(part: float, whole: float) -> float:
    return min(part / whole, 1.0) if whole > 0 else 0.0
