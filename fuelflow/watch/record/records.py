"""Records: what is known of a run, one dict after the other, and all there is."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from fuelflow.metrics.plain import from_plain

VERSION = 1
# Kinds that only say how things are now, and are never written down.
LIVE_KINDS = ("phase",)

_SPEEDS = ("steps_per_sec", "samples_per_sec", "data_wait")


class Record(dict[str, Any]):
    """One record: a dict of plain values that any JSON has.

    Every one has its ``kind`` and its ``time``, in seconds since 1970. The kinds:

    - ``run``: a run begins or goes on, with settings, versions, parameters and ranks.
    - ``step``: one of the steps, a few each second.
    - ``epoch``: `EpochMetrics.to_dict` of one, as ``metrics``.
    - ``pass``: the means over one pass of a loop written by hand.
    - ``compile``, ``event``: what happened.
    - ``end``: that the run is over, and why.
    """

    @property
    def kind(self) -> str:
        """What it is of."""
        return self["kind"]

    @property
    def step(self) -> int | None:
        """The updates done when it was made, if that is known."""
        if self.kind == "epoch":
            return self["metrics"]["global_step"]
        return self.get("step")

    @property
    def epoch(self) -> int | None:
        """The number of the epoch it is of, if it is of one."""
        return self["metrics"]["epoch"] if self.kind == "epoch" else self.get("epoch")

    @property
    def scalars(self) -> dict[str, float]:
        """Its numbers by name, for tools that draw one curve a name.

        A step's have their own names, such as ``loss``; those of speed and memory begin
        with ``speed/``, ``memory/`` and ``host/``. An epoch's begin with ``epoch/`` and
        ``eval/``, those of a pass with ``epoch/``. Other kinds have none.
        """
        if self.kind == "step":
            return _step_scalars(self)
        if self.kind == "epoch":
            return _epoch_scalars(self["metrics"])
        if self.kind == "pass":
            return _numbers({f"epoch/{n}": v for n, v in self["means"].items()})
        return {}


R = TypeVar("R", bound=Mapping[str, Any])


def number(value: Any) -> float:
    """A number of a record, whose words for NaN and infinities are turned back."""
    return float(from_plain("a record", value))


def thinned(records: Sequence[R], most: int) -> list[R]:
    """Some of the records of steps, spread evenly, the first and the newest kept.

    Args:
        records: Records of kind ``step``, in order.
        most: How many are kept at most, at least 2.
    """
    if len(records) <= most:
        return list(records)
    steps = [record["step"] for record in records]
    ways = [max(later - step, 0) for step, later in pairwise(steps)]
    apart = sum(ways) / (most - 1)
    kept, way = [records[0]], 0.0
    for record, more in zip(records[1:-1], ways[:-1], strict=True):
        way += more
        if way >= apart and len(kept) < most - 1:
            kept.append(record)
            way = 0.0
    return [*kept, records[-1]]


def is_done_anew(record: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Whether a run that goes on does again what an earlier record is of."""
    if record["kind"] == "step":
        return record["step"] > run["step"]
    if record["kind"] == "epoch":
        return record["metrics"]["epoch"] >= run["epoch"]
    return record["kind"] == "pass" and record["epoch"] >= run["epoch"]


def folded(records: Iterable[R]) -> list[R]:
    """The records without those that were done anew later."""
    kept: list[R] = []
    for record in records:
        if record["kind"] == "run":
            kept = [each for each in kept if not is_done_anew(each, record)]
        kept.append(record)
    return kept


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: number(value) for name, value in values.items() if value is not None}


def _step_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    values = {name: record.get(name) for name in ("loss", "grad_norm", "lr")}
    values |= record["metrics"]
    values |= {f"speed/{name}": record.get(name) for name in _SPEEDS}
    values |= {f"memory/{each['device']}": each["used"] for each in record["memory"]}
    values |= {f"host/{name}": value for name, value in record["host"].items()}
    return _numbers(values)


def _epoch_scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    values = {"epoch/loss": metrics["avg_loss"], "epoch/lr": metrics["lr"]}
    values |= {f"epoch/{name}": value for name, value in metrics["scalars"].items()}
    values |= {f"eval/{name}": value for name, value in metrics["evaluation"].items()}
    secs = number(metrics["epoch_ms"]) / 1e3
    values["epoch/secs"] = secs
    if secs > 0:
        values["epoch/samples_per_sec"] = sum(metrics["per_rank_samples"]) / secs
    return _numbers(values)
