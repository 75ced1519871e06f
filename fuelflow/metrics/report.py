"""An epoch as a person sees it: a line of text, a table in a notebook."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fuelflow.metrics.bottleneck import RankTimes, split_times
from fuelflow.metrics.table import Bar, table_html
from fuelflow.metrics.wording import number_text, rate_text, secs_text, share_text

if TYPE_CHECKING:
    from fuelflow.metrics.epoch import EpochMetrics

_MOST_RANKS = 64


def epoch_line(metrics: "EpochMetrics") -> str:
    """The epoch in one line, its ranks counted and not listed."""
    means = _listed({"loss": metrics.avg_loss, **metrics.scalars})
    parts = [means if metrics.num_steps > 0 else "no step"]
    if metrics.evaluation:
        parts.append(f"eval {_listed(metrics.evaluation)}")
    speed = [f"{speed_text(metrics)} samples/s", secs_text(metrics.epoch_ms)]
    if metrics.compile_ms > 0:
        speed.append(f"{secs_text(metrics.compile_ms)} compiling")
    if metrics.num_ranks > 1:
        speed.append(f"{metrics.num_ranks} ranks")
    parts.append(", ".join(speed))
    if metrics.num_skipped > 0:
        parts.append(f"{metrics.num_skipped} skipped")
    if metrics.bottleneck.is_notable:
        parts.append(lost_text(metrics))
    return f"epoch {metrics.epoch}: {'; '.join(parts)}"


def _listed(means: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number_text(mean)}" for name, mean in means.items())


def speed_text(metrics: "EpochMetrics") -> str:
    """The samples per second of all ranks together."""
    return rate_text(metrics.num_samples, metrics.epoch_ms)


def lost_text(metrics: "EpochMetrics") -> str:
    """The bottleneck in a few words; none if there is no cause to remove."""
    found = metrics.bottleneck
    causes = {
        "input": "input" + ("" if found.rank is None else f" of rank {found.rank}"),
        "rank": f"rank {found.rank}",
        "callback": "callbacks",
    }
    if found.kind not in causes:
        return ""
    return f"{share_text(found.share)} lost to {causes[found.kind]}"


def epoch_html(metrics: "EpochMetrics") -> str:
    """The epoch as a table with a row for each rank and one for all."""
    several = len(set(metrics.process_indices)) > 1
    headings = [
        *("rank", "device"),
        *(["process"] * several),
        *("loss", *metrics.scalars),
        *("samples", "share", "samples/s", "done after", "time"),
    ]
    times = split_times(metrics)
    shown = range(min(metrics.num_ranks, _MOST_RANKS))
    return table_html(
        epoch_line(metrics),
        headings,
        [_rank_row(metrics, rank, times[rank], several=several) for rank in shown],
        _notes(metrics, times[0]),
        total=[
            *("all", "", *([""] * several)),
            *map(number_text, (metrics.avg_loss, *metrics.scalars.values())),
            *(str(metrics.num_samples), "", speed_text(metrics)),
            *(secs_text(metrics.epoch_ms), ""),
        ],
    )


def _rank_row(
    metrics: "EpochMetrics", rank: int, times: RankTimes, *, several: bool
) -> list[str | Bar]:
    own = metrics.per_rank[rank]
    samples = metrics.per_rank_samples[rank]
    return [
        *(str(rank), str(metrics.device_indices[rank])),
        *([str(metrics.process_indices[rank])] * several),
        number_text(metrics.per_rank_loss[rank]),
        *(number_text(own.get(name)) for name in metrics.scalars),
        *(str(samples), share_text(metrics.per_rank_batch_share[rank])),
        rate_text(samples, times.complete),
        *(secs_text(times.complete), _bar(metrics, times)),
    ]


def _bar(metrics: "EpochMetrics", times: RankTimes) -> Bar:
    # Clocks of several processes may disagree by a little with the longest epoch.
    whole = max(metrics.epoch_ms, times.complete) or 1.0
    parts = {"steps": times.compute, "waiting for data": times.input}
    parts["idle"] = times.host
    return Bar([(part / whole, name) for name, part in parts.items()])


def _notes(metrics: "EpochMetrics", times: RankTimes) -> list[str | Bar]:
    notes: list[str | Bar] = [_bar(metrics, times), str(metrics.bottleneck)]
    if metrics.num_ranks > _MOST_RANKS:
        notes.insert(0, f"and {metrics.num_ranks - _MOST_RANKS} more ranks")
    return notes
