"""The story of a run: its records folded into how it stands, and how long it takes."""

from collections import deque
from dataclasses import dataclass
from typing import Any

from fuelflow.watch.record.records import is_done_anew, number, thinned

MAX_STEPS = 2000
_NUM_SPANS = 100
_NUM_EPOCHS = 5
_MAX_SPAN_SECS = 15.0


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        epoch: The epoch under way, from 0; after the last one still that.
        epochs: How many there are to be, if that is known.
        epoch_step: The steps of that epoch that are done.
        steps_per_epoch: How many it has, if that is known.
        fraction: How much of the whole run is done, from 0 to 1, if that is known.
    """

    epoch: int
    epochs: int | None
    epoch_step: int
    steps_per_epoch: int | None
    fraction: float | None


class Story:
    """What the records of a run come to. Used by one thread at a time.

    A ``run`` record that goes on from before some steps and epochs has them forgotten,
    as they are done anew.

    Attributes:
        run: The newest record of that kind.
        epochs: The records of epochs and passes, in order.
        steps: Records of steps, in order, at most 2000, spread evenly; the newest is
            always there.
        compiles: The records of compilations.
        events: The records of events.
        end: How the run ended, if it did.
        phase: What it does now, in a word or three; empty if that is not known.
    """

    def __init__(self) -> None:
        self.run: dict[str, Any] | None = None
        self.epochs: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.compiles: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.end: dict[str, Any] | None = None
        self.phase = ""
        self._pace = _Pace()
        self._is_between = True

    def add(self, record: dict[str, Any]) -> None:
        """Takes note of a record."""
        kind = record["kind"]
        if kind == "run":
            self._begin(record)
        elif kind == "step":
            self.steps.append(record)
            if len(self.steps) > MAX_STEPS:
                self.steps = thinned(self.steps, MAX_STEPS // 2)
            self._pace.step(record)
            self._is_between = False
        elif kind in ("epoch", "pass"):
            self.epochs.append(record)
            self._pace.close(record)
            self._is_between = True
        elif kind == "compile":
            self.compiles.append(record)
            self._pace.secs_compiling += record["seconds"]
        elif kind == "event":
            self.events.append(record)
        elif kind == "phase":
            self.phase = record["phase"]
        elif kind == "end":
            self.end, self.phase = record, ""

    def _begin(self, run: dict[str, Any]) -> None:
        self.run, self.end = run, None
        self.steps = [each for each in self.steps if not is_done_anew(each, run)]
        self.epochs = [each for each in self.epochs if not is_done_anew(each, run)]
        self._pace.begin(run["time"])
        # A run that goes on inside an epoch stands where its last step before was.
        last = self.steps[-1]["epoch"] if self.steps else None
        self._is_between = last != run["epoch"]

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        run = self.run or {}
        epochs, per_epoch = run.get("epochs"), run.get("steps_per_epoch")
        epoch, epoch_step = self._place()
        if epochs is not None and epoch >= epochs:
            epoch = epochs - 1
            num_last = _num_steps(self.epochs[-1]) if self.epochs else 0
            epoch_step = per_epoch or num_last
        total = epochs * per_epoch if epochs and per_epoch else None
        fraction = None
        if total is not None and per_epoch is not None:
            fraction = min((epoch * per_epoch + epoch_step) / total, 1.0)
        return Progress(epoch, epochs, epoch_step, per_epoch, fraction)

    def _place(self) -> tuple[int, int]:
        """The epoch under way, and its steps done."""
        if not self._is_between:
            return self.steps[-1]["epoch"], self.steps[-1]["epoch_step"]
        begun = self.run["epoch"] if self.run else 0
        if not self.epochs:
            return begun, 0
        return max(begun, _epoch(self.epochs[-1]) + 1), 0

    def eta_secs(self, now: float) -> float | None:
        """How many seconds are left, as it goes now; None if that cannot be told.

        The steps left take as long as the last ones did, without compiling; the end of
        each epoch takes what it took before: evaluation, callbacks, saving.

        Args:
            now: The time, in seconds since 1970.
        """
        progress, per_step = self.progress, self._pace.secs_per_step
        per_epoch = progress.steps_per_epoch
        if per_epoch is None and self.epochs:
            per_epoch = _num_steps(self.epochs[-1])
        if (
            self.end is not None
            or per_step is None
            or not per_epoch
            or progress.epochs is None
        ):
            return None
        epoch, epoch_step = self._place()
        num_epochs = max(progress.epochs - epoch, 0)
        num_steps = max(num_epochs * per_epoch - epoch_step, 0)
        secs = num_steps * per_step + num_epochs * self._pace.secs_between
        return max(secs - max(now - self._pace.time - self._pace.secs_compiling, 0), 0)


class _Pace:
    """How fast it goes.

    Attributes:
        time: When it was last looked at.
        secs_compiling: Seconds of compiling since then.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self.secs_compiling = 0.0
        self._secs_compiling_epoch = 0.0
        self._last: dict[str, Any] | None = None
        self._closed: float | None = None
        self._num_closed = 0  # of this part of the run
        # Steps and seconds: between looks inside this epoch, and of whole epochs.
        self._spans: deque[tuple[int, float]] = deque(maxlen=_NUM_SPANS)
        self._epochs: deque[tuple[int, float]] = deque(maxlen=_NUM_EPOCHS)
        self._between: deque[float] = deque(maxlen=_NUM_EPOCHS)

    def begin(self, time: float) -> None:
        """A run begins or goes on, maybe elsewhere."""
        self.time = time
        self._last = self._closed = None
        self._num_closed = 0
        self.secs_compiling = self._secs_compiling_epoch = 0.0
        self._spans.clear()

    def step(self, record: dict[str, Any]) -> None:
        """Takes note of a record of a step."""
        last = self._last
        if last is not None and last["epoch"] == record["epoch"]:
            secs = record["time"] - last["time"] - self.secs_compiling
            num_steps = record["step"] - last["step"]
            if num_steps > 0 and secs > 0:
                self._spans.append((num_steps, secs))
        self._last = record
        self._look(record["time"])

    def close(self, record: dict[str, Any]) -> None:
        """Takes note of the end of an epoch or a pass."""
        secs, is_past = _secs(record), record["time"] <= self.time
        self._num_closed += not is_past
        self._spans.clear()
        if self._num_closed == 2:  # the first one had all that is done but once in it
            self._epochs.pop()
        self._epochs.append((_num_steps(record), secs))
        self._look(record["time"])
        if self._closed is not None and not is_past:
            whole = record["time"] - self._closed - self._secs_compiling_epoch
            self._between.append(max(whole - secs, 0.0))
        elif record["kind"] == "epoch":
            metrics = record["metrics"]
            self._between.append((metrics["eval_ms"] + metrics["callback_ms"]) / 1e3)
        self._closed, self._last = None if is_past else record["time"], None
        self._secs_compiling_epoch = 0.0

    def _look(self, time: float) -> None:
        self.time = time
        self._secs_compiling_epoch += self.secs_compiling
        self.secs_compiling = 0.0

    @property
    def secs_per_step(self) -> float | None:
        """Seconds that a step takes; None before the second look at one.

        By this epoch's steps, once they are seen for long enough: each look comes a
        little late, while the ends of epochs are known well.
        """
        steps, secs = (
            map(sum, zip(*self._spans, strict=True)) if self._spans else (0, 0)
        )
        if self._epochs and secs < min(max(self._epochs[-1][1], 5.0), _MAX_SPAN_SECS):
            steps = sum(num for num, _ in self._epochs)
            secs = sum(each for _, each in self._epochs)
        return secs / steps if steps else None

    @property
    def secs_between(self) -> float:
        """Seconds from the last step of an epoch to the next one's beginning."""
        return sum(self._between) / len(self._between) if self._between else 0.0


def _epoch(record: dict[str, Any]) -> int:
    return record["metrics"]["epoch"] if record["kind"] == "epoch" else record["epoch"]


def _num_steps(record: dict[str, Any]) -> int:
    is_epoch = record["kind"] == "epoch"
    return record["metrics"]["num_steps"] if is_epoch else record["num_steps"]


def _secs(record: dict[str, Any]) -> float:
    if record["kind"] == "epoch":
        return number(record["metrics"]["epoch_ms"]) / 1e3
    return record["secs"]
