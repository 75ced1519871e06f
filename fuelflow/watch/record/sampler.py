"""Samples of steps: what one said, and how fast it went since the last one."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fuelflow.metrics.plain import to_plain
from fuelflow.step.outcome import StepOutcome
from fuelflow.watch.record.making import make_event, make_record, plain_metrics
from fuelflow.watch.record.records import Record
from fuelflow.watch.record.resources import HostUse, device_memory

# Over so many seconds a speed is measured, if they are of one epoch.
_SPEED_SECS = 1.0
_SAID = ("loss", "grad_norm", "lr", "global_step", "num_skipped", "finite")


class Sight(NamedTuple):
    """A step that may be read, or has been.

    Attributes:
        outcome: What it says, on the way; or numbers by name.
        epoch: Its epoch.
        epoch_step: The steps of the epoch up to it.
        step: The updates up to it, as far as the host can tell.
        started: When it was sent off, by `time.perf_counter`.
        secs_waited: Seconds of its epoch that were spent waiting for data before it.
        scalars: Further numbers by name.
    """

    outcome: StepOutcome | Mapping[str, Any]
    epoch: int
    epoch_step: int
    step: int
    started: float
    secs_waited: float
    scalars: Mapping[str, Any] = MappingProxyType({})

    def is_ready(self) -> bool:
        """Whether reading it would not wait."""
        if isinstance(self.outcome, StepOutcome):
            parts: list[Any] = [self.outcome]
        else:
            parts = list(self.outcome.values())
        return all(
            part.is_ready()
            for part in (*parts, *self.scalars.values())
            if hasattr(part, "is_ready")
        )

    def read(self) -> dict[str, Any]:
        """Its numbers: ``loss``, ``grad_norm``, ``lr``, and ``metrics`` by name.

        Waits for the step. None is what it does not say.
        """
        if isinstance(self.outcome, StepOutcome):
            said = {
                name: _last(v)
                for name, v in self.outcome.realize().items()
                if name in _SAID
            }
            metrics = _metrics_of(self.outcome)
            step, num_skipped = int(said["global_step"]), int(said["num_skipped"])
            # A step that was left out has the number that the next one has again.
            step -= num_skipped > 0 and not said["finite"]
        else:
            metrics = {name: _last(value) for name, value in self.outcome.items()}
            said = {n: metrics.pop(n, None) for n in ("loss", "grad_norm", "lr")}
            step, num_skipped = self.step, 0
        metrics |= {name: _last(value) for name, value in self.scalars.items()}
        named = {name: said.get(name) for name in ("loss", "grad_norm", "lr")}
        return {
            **{k: None if v is None else float(v) for k, v in named.items()},
            "step": step,
            "num_skipped": num_skipped,
            "metrics": plain_metrics(metrics),
            **_histograms_of(self.outcome),
        }


class _Mark(NamedTuple):
    """Where a sample was: when it was seen, and what had been done."""

    epoch: int
    step: int
    seen: float
    started: float
    secs_waited: float
    secs_compiling: float


class Sampler:
    """Makes records of steps that are read one after the other.

    Args:
        devices: Those of the run that this process has.
        rows_per_step: Rows of a step's batch, if that is known.
    """

    def __init__(
        self, devices: Sequence[Any] = (), rows_per_step: float | None = None
    ) -> None:
        self.devices = devices
        self.rows_per_step = rows_per_step
        self._host = HostUse()
        self._marks: deque[_Mark] = deque(maxlen=32)
        self._num_skipped: int | None = None
        self._last_step = -1

    def forget(self) -> None:
        """Begins anew, as for another run."""
        self._marks.clear()
        self._num_skipped, self._last_step = None, -1

    def open(self, sight: Sight, step: int, secs_compiling: float) -> None:
        """Takes note of an epoch's first step, from whose beginning it is timed.

        Args:
            sight: The step, or the last of several that were sent off together.
            step: The updates before it.
            secs_compiling: How long the run has compiled so far.
        """
        ago = time.perf_counter() - sight.started
        self._marks.append(
            _Mark(
                sight.epoch,
                step,
                time.time() - ago,
                sight.started,
                sight.secs_waited,
                secs_compiling,
            )
        )

    def sample(self, sight: Sight, seen: float, secs_compiling: float) -> list[Record]:
        """The records of a step, which is waited for.

        Args:
            sight: The step.
            seen: When it was seen done, in seconds since 1970.
            secs_compiling: How long the run has compiled so far.

        Returns:
            None for a step that has been sampled; else its record and, before it, that
            of an event, if steps were left out.
        """
        if sight.step <= self._last_step:
            return []
        said = sight.read()
        mark = _Mark(
            sight.epoch,
            sight.step,
            seen,
            sight.started,
            sight.secs_waited,
            secs_compiling,
        )
        rate = self._steps_per_sec(mark)
        rows = self.rows_per_step
        record = make_record(
            "step",
            at=seen,
            epoch=sight.epoch,
            epoch_step=sight.epoch_step,
            steps_per_sec=rate,
            samples_per_sec=None if None in (rate, rows) else (rate or 0) * (rows or 0),
            data_wait=self._data_wait(mark),
            memory=device_memory(self.devices),
            host=self._host.read(),
            **said,
        )
        self._marks.append(mark)
        self._last_step = sight.step
        return [*self._skipped(record), record]

    def _steps_per_sec(self, mark: _Mark) -> float | None:
        near = [each for each in self._marks if each.epoch == mark.epoch]
        if not near:
            return None
        old = [each for each in near if mark.seen - each.seen >= _SPEED_SECS]
        since = old[-1] if old else near[0]
        compiling = mark.secs_compiling - since.secs_compiling
        secs = mark.seen - since.seen - compiling
        return (mark.step - since.step) / secs if secs > 0 else None

    def _data_wait(self, mark: _Mark) -> float | None:
        since = self._marks[-1] if self._marks else None
        if since is None or since.epoch != mark.epoch:
            return None
        compiling = mark.secs_compiling - since.secs_compiling
        secs = mark.started - since.started - compiling
        waited = mark.secs_waited - since.secs_waited
        return min(max(waited / secs, 0.0), 1.0) if secs > 0 else None

    def _skipped(self, record: Record) -> list[Record]:
        before, now = self._num_skipped, record["num_skipped"]
        self._num_skipped = now
        if before is None or now <= before:
            return []
        num = now - before
        steps = "a step was" if num == 1 else f"{num} steps were"
        text = f"{steps} left out, not being finite; {now} in all"
        return [make_event("warning", "skipped", text, record["step"], record["time"])]


def _metrics_of(outcome: StepOutcome) -> dict[str, Any]:
    """The metrics of a step, or of the last of several; of parameters, where seen."""
    metrics = {name: _last(value) for name, value in outcome.metrics.items()}
    for name in outcome.layout.observed:
        seen = np.ravel(outcome.metrics[name])
        seen = seen[~np.isnan(seen)]
        if seen.size:
            metrics[name] = float(seen[-1])
        else:
            del metrics[name]
    return metrics


def _histograms_of(outcome: Any) -> dict[str, Any]:
    """What a record says of histograms, if any were made."""
    if not isinstance(outcome, StepOutcome) or not np.size(outcome.loss):
        return {}
    histograms = {
        name: {
            "low": float(np.ravel(found.low)[-1]),
            "high": float(np.ravel(found.high)[-1]),
            "counts": np.atleast_2d(found.counts)[-1].tolist(),
        }
        for name, found in outcome.histograms.items()
        if np.size(found.step)
    }
    return {"histograms": to_plain(histograms)} if histograms else {}


def _last(value: Any) -> Any:
    """A number, or the last one of several."""
    if isinstance(value, int | float):
        return value
    array = np.asarray(value)
    return array.reshape(-1)[-1].item() if array.size else None
