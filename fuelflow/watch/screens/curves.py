"""Curves of a run: one number over its steps."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuelflow.watch.record.records import number
from fuelflow.watch.record.story import Story

Record = Mapping[str, Any]
# The step that a record is of, and its value of some name; None if it has none.
_Read = Callable[[Record, str], tuple[int, Any]]

_OWN = ("loss", "grad_norm", "lr")
# A curve that falls by more is drawn over the logarithm: its end would look flat.
_LEAST_LOG_RATIO = 10.0


@dataclass(frozen=True)
class Curve:
    """A number over the steps of a run.

    Attributes:
        steps: Where it was taken, in order.
        values: What it was; NaN and infinities are in it.
    """

    steps: Sequence[float]
    values: Sequence[float]

    def thinned(self, most: int) -> "Curve":
        """The curve in at most some points, each the mean of those it stands for.

        The points stand for equal stretches of steps; a stretch without a value has no
        point, and one with a value that is not finite has no finite one.
        """
        if len(self.values) <= most:
            return self
        steps = np.asarray(self.steps, np.float64)
        width = (steps[-1] - steps[0]) / most or 1.0
        places = np.minimum((steps - steps[0]) // width, most - 1).astype(int)
        counts = np.bincount(places)
        is_there = counts > 0
        with np.errstate(invalid="ignore", over="ignore"):
            means = np.bincount(places, self.values)[is_there] / counts[is_there]
        middles = steps[0] + (np.nonzero(is_there)[0] + 0.5) * width
        # The newest value stands where it was taken.
        middles[-1] = steps[-1]
        return Curve(middles.tolist(), means.tolist())


@dataclass(frozen=True)
class Scale:
    """How far up a value is drawn, between the least and the largest.

    Attributes:
        low: What is drawn at the bottom.
        high: What is drawn at the top.
        is_log: Whether equal ways are equal ratios.
    """

    low: float
    high: float
    is_log: bool

    def height(self, value: float) -> float:
        """From 0 at the bottom to 1 at the top; half for a curve without any."""
        if self.high == self.low:
            return 0.5
        if self.is_log:
            low, high, at = map(math.log, (self.low, self.high, value))
        else:
            low, high, at = self.low, self.high, value
        return min(max((at - low) / (high - low), 0.0), 1.0)


def scale_of(values: Iterable[float]) -> Scale | None:
    """The scale that some values fill, in order; None if none of them is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    # The way from one to the other must be a number too.
    low, high = max(low, -1e300), min(high, 1e300)
    has_fallen = finite[-1] < 0.5 * low + 0.5 * high
    return Scale(low, high, has_fallen and low > 0 and high / low >= _LEAST_LOG_RATIO)


class Curves:
    """The curves of a story, of which only what is new is read each time."""

    def __init__(self) -> None:
        self._story = Story()
        self._read: dict[tuple[str, str], _Reading] = {}

    def of(self, story: Story) -> "Curves":
        """The curves of a story, from now on."""
        self._story = story
        return self

    def steps(self, name: str) -> Curve:
        """The loss, ``grad_norm``, ``lr`` or a metric as the sampled steps had it."""
        return self._curve("steps", name, self._story.steps, _step_value)

    def epochs(self, name: str) -> Curve:
        """The mean of the loss or a metric over each epoch or pass, at its end."""
        return self._curve("epochs", name, self._story.epochs, _epoch_mean)

    def evals(self, name: str) -> Curve:
        """The loss or a metric of the evaluation after each epoch."""
        return self._curve("evals", name, self._story.epochs, _eval_mean)

    def training(
        self, names: Sequence[str], *, is_over: bool
    ) -> tuple[str, Callable[[str], Curve]]:
        """What the newest values of these curves are of, and what gives the curves.

        Those of steps, of a run that goes on; of one that is over the means of epochs.
        The other ones where there are none.
        """
        has_means = any(self.epochs(name).values for name in names)
        if has_means and (is_over or not any(self.steps(n).values for n in names)):
            return "last epoch", self.epochs
        return "last step", self.steps

    def _curve(
        self, kind: str, name: str, records: Sequence[Record], read: _Read
    ) -> Curve:
        reading = self._read.get((kind, name))
        if reading is None or not reading.goes_on_in(records):
            reading = self._read[kind, name] = _Reading()
        return reading.read(records, name, read)


class _Reading:
    """A curve, and how far it was read."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._values: list[float] = []
        self._count = 0
        self._last: Any = None

    def goes_on_in(self, records: Sequence[Record]) -> bool:
        """Whether the records read are still there, none before them forgotten."""
        if self._count == 0:
            return True
        return self._count <= len(records) and records[self._count - 1] is self._last

    def read(self, records: Sequence[Record], name: str, read: _Read) -> Curve:
        """The curve with what is new in the records."""
        for record in records[self._count :]:
            step, value = read(record, name)
            if value is not None:
                self._steps.append(step)
                self._values.append(number(value))
            self._last = record
        self._count = len(records)
        return Curve(self._steps, self._values)


def train_names(story: Story) -> list[str]:
    """The loss and the metrics, in the order of the newest step or epoch."""
    if story.steps:
        return ["loss", *story.steps[-1]["metrics"]]
    if not story.epochs:
        return ["loss"]
    last = story.epochs[-1]
    means = last["means"] if last["kind"] == "pass" else last["metrics"]["scalars"]
    return list(dict.fromkeys(["loss", *means]))


def eval_names(story: Story) -> list[str]:
    """The loss and the metrics of the newest evaluation."""
    for record in reversed(story.epochs):
        if record["kind"] == "epoch" and record["metrics"]["evaluation"]:
            return list(record["metrics"]["evaluation"])
    return []


def _step_value(record: Record, name: str) -> tuple[int, Any]:
    values = record if name in _OWN else record["metrics"]
    return record["step"], values.get(name)


def _epoch_mean(record: Record, name: str) -> tuple[int, Any]:
    if record["kind"] == "pass":
        return record["step"], record["means"].get(name)
    metrics = record["metrics"]
    mean = metrics["avg_loss"] if name == "loss" else metrics["scalars"].get(name)
    return metrics["global_step"], mean


def _eval_mean(record: Record, name: str) -> tuple[int, Any]:
    if record["kind"] == "pass":
        return record["step"], None
    metrics = record["metrics"]
    return metrics["global_step"], metrics["evaluation"].get(name)
