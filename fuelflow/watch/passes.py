"""Loops written by hand: their batches as they are taken, and what is logged."""

import contextlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from fuelflow.run.compiling import secs_compiled
from fuelflow.step.batch import Batch, Stretch, Stretchable
from fuelflow.step.checks import checked_count
from fuelflow.step.outcome import METRIC, StepOutcome
from fuelflow.watch.following import Pending
from fuelflow.watch.record.making import (
    make_event,
    make_loose_run,
    make_record,
    plain_metrics,
)
from fuelflow.watch.record.records import Record
from fuelflow.watch.record.sampler import Sampler, Sight

logger = logging.getLogger("fuelflow")

T = TypeVar("T")
_LOSS = ("loss", "grad_norm", "lr")
# So many logged steps wait for the end of a pass at most; some are added up before.
_MAX_LOGGED = 4096


class Pass:
    """One pass over batches, and what was logged in it.

    Attributes:
        epoch: Its number.
        num_batches: How many there will be, if that is known.
        num_given: How many were given so far.
        num_logged: How many steps were logged.
        secs_waited: Seconds spent waiting for batches, compiling apart.
        rows: Rows of the first batch, if it has some.
        last: The last step that was logged.
        is_exhausted: Whether all batches were given.
        is_overtaken: Whether another pass began before that.
    """

    def __init__(self, epoch: int, num_batches: int | None, step: int) -> None:
        self.epoch = epoch
        self.num_batches = num_batches
        self.first_step = step
        self.num_given = self.num_logged = 0
        self.secs_waited = 0.0
        self.rows: int | None = None
        self.is_exhausted = self.is_overtaken = False
        self.logged: deque[Sight] = deque()
        self.last: Sight | None = None
        self.started = time.perf_counter()
        self._compiled = secs_compiled()
        self._compiled_then: float | None = None
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._nums: defaultdict[str, int] = defaultdict(int)
        self.secs = 0.0

    @property
    def num_steps(self) -> int:
        """The steps so far: batches that were given, or logs where there are none."""
        return self.num_given or self.num_logged

    @property
    def secs_compiling(self) -> float:
        """How long it has compiled so far, or had when it ended, at most."""
        now = secs_compiled() if self._compiled_then is None else self._compiled_then
        return now - self._compiled

    def close(self) -> None:
        """Takes the time."""
        self._compiled_then = secs_compiled()
        secs = time.perf_counter() - self.started
        self.secs = max(secs - self.secs_compiling, 0.0) or secs
        self.at = time.time()

    def add_up(self, num_kept: int = 0) -> Exception | None:
        """Adds up what was logged, in one transfer, but for the last some.

        Returns:
            What was raised by a step that could not be read, if one was left out.
        """
        num = len(self.logged) - num_kept
        sights = [self.logged.popleft() for _ in range(num)]
        outcomes = [each.outcome for each in sights]
        with contextlib.suppress(Exception):  # of one of them, as is found below
            jax.device_get(
                [o.unread() for o in outcomes if isinstance(o, StepOutcome)]
            )  # each keeps what came
        found: Exception | None = None
        for sight in sights:
            try:
                numbers = list(_numbers_in(sight))
            except Exception as error:
                logger.debug("a step could not be read", exc_info=True)
                found = error
                continue
            for name, values in numbers:
                self._sums[name] += float(values.sum())
                self._nums[name] += values.size
        return found

    def means(self) -> dict[str, float]:
        """The mean of each number over the logged steps that have it."""
        return {name: self._sums[name] / num for name, num in self._nums.items() if num}


def _numbers_in(sight: Sight) -> Iterator[tuple[str, np.ndarray]]:
    """Each number of a logged step, or steps, without those of steps left out."""
    is_good: Any = slice(None)
    if isinstance(sight.outcome, StepOutcome):
        said = sight.outcome.realize()
        if "loss" in said:
            is_good = np.atleast_1d(said["finite"]) != 0
        said = {n: v for n, v in said.items() if n in _LOSS or n.startswith(METRIC)}
    else:
        said = sight.outcome
    for name, value in said.items():
        values = np.atleast_1d(np.asarray(value, np.float64))
        yield name.removeprefix(METRIC), values[is_good]
    for name, value in sight.scalars.items():
        yield name, np.atleast_1d(np.asarray(value, np.float64))


class HandFollower:
    """Records of a loop written by hand.

    Args:
        directory: Where records are kept, if they are.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._sampler = Sampler()
        self._pending = Pending(self._sampler)
        self._is_begun = False
        self._passes: deque[Pass] = deque()
        self._current: Pass | None = None
        self._next_epoch = 0
        self._step = 0
        self._newest: Sight | None = None
        self._added: Sight | None = None
        self._opened: Pass | None = None
        self._has_left_out = False

    # Called by the thread that trains.

    def track(self, batches: Iterable[T], epoch: int | None) -> "Tracked[T]":
        """The batches of another pass."""
        if epoch is not None:
            epoch = checked_count("epoch", epoch, least=0)
        if self._current is not None:
            self._current.is_overtaken = True
        self.end_pass()
        current = self._begin_pass(_length(batches), epoch)
        return Tracked(batches, current, self)

    def log(
        self, outcome: StepOutcome | Mapping[str, Any], scalars: Mapping[str, Any]
    ) -> None:
        """Takes note of a step, or several."""
        current = self._current or self._begin_pass(None, None)
        if isinstance(outcome, StepOutcome):
            outcome = outcome.detached()
            current.num_logged += outcome.num_steps
        else:
            current.num_logged += 1
        sight = Sight(
            outcome,
            epoch=current.epoch,
            epoch_step=current.num_steps,
            step=current.first_step + current.num_steps,
            started=time.perf_counter(),
            secs_waited=current.secs_waited,
            scalars=scalars,
        )
        self._newest = current.last = sight
        if isinstance(outcome, StepOutcome) and outcome.layout.histograms:
            # Thousands may wait for the means of a pass, which need no histograms.
            sight = sight._replace(outcome=outcome.detached(with_histograms=False))
        current.logged.append(sight)
        if current.is_exhausted:  # they came after all batches, as of `loop.run`
            self.end_pass(current)

    def exhaust(self, current: Pass) -> None:
        """There are no more batches; what was done with them may be logged yet."""
        current.is_exhausted = True
        if current.num_logged:
            self.end_pass(current)

    def end_pass(self, current: Pass | None = None) -> None:
        """The pass is over, if it is the one under way."""
        ended = self._current
        if ended is None or (current is not None and current is not ended):
            return
        ended.close()
        self._step += ended.num_steps
        self._passes.append(ended)
        self._current = None

    def _begin_pass(self, num_batches: int | None, epoch: int | None) -> Pass:
        number = self._next_epoch if epoch is None else epoch
        self._next_epoch = number + 1
        self._current = Pass(number, num_batches, self._step)
        return self._current

    # Called by the thread that watches.

    def poll(self) -> Iterator[Record]:
        """The records of what happened since the last time."""
        newest, current = self._newest, self._current
        while self._passes:
            yield from self._closed(self._passes.popleft())
        if current is not None:
            yield from self._begun(current)
            if len(current.logged) > _MAX_LOGGED:
                yield from self._left_out(current.add_up(_MAX_LOGGED // 2))
            if newest is not None and newest is not self._added:
                self._open(current)
                self._added = newest
                self._sampler.rows_per_step = current.rows
                self._pending.add(newest)
            yield from self._sampled(self._pending.poll, current.secs_compiling)

    def _sampled(self, sample: Callable[..., list[Record]], *what: Any) -> list[Record]:
        """The records of steps, without those that cannot be read."""
        try:
            return sample(*what)
        except Exception as error:  # of what was logged, whatever it may be
            logger.debug("a step could not be read", exc_info=True)
            self._pending.forget()
            return self._left_out(error)

    def _left_out(self, error: Exception | None) -> list[Record]:
        """The event of something that was logged and could not be read, once."""
        if error is None or self._has_left_out:
            return []
        self._has_left_out = True
        text = (
            "something that was logged could not be read, and is left out, as will be "
            f"all further such things: {type(error).__name__}: {error}"
        )
        logger.warning("%s", text)
        return [make_event("warning", "logged", text, self._step)]

    def _begun(self, current: Pass) -> Iterator[Record]:
        if not self._is_begun and (current.num_given or current.num_logged):
            self._is_begun = True
            yield make_loose_run(
                epoch=current.epoch,
                step=current.first_step,
                steps_per_epoch=current.num_batches,
                directory=self._directory,
            )

    def _open(self, current: Pass) -> None:
        """Has the speed of a pass measured from its beginning."""
        if self._opened is current:
            return
        self._opened = current
        beginning = Sight(
            {},
            epoch=current.epoch,
            epoch_step=0,
            step=current.first_step,
            started=current.started,
            secs_waited=0.0,
        )
        self._sampler.open(beginning, current.first_step, 0.0)

    def _closed(self, ended: Pass) -> Iterator[Record]:
        if not ended.num_steps:
            return
        yield from self._begun(ended)
        last = ended.last
        self._sampler.rows_per_step = ended.rows
        if last is not None:
            self._open(ended)
            self._added = last
            yield from self._sampled(
                self._pending.end, last, ended.at, ended.secs_compiling
            )
        yield from self._left_out(ended.add_up())
        yield make_record(
            "pass",
            at=ended.at,
            epoch=ended.epoch,
            step=ended.first_step + ended.num_steps,
            num_steps=ended.num_steps,
            secs=ended.secs,
            means=plain_metrics(ended.means()),
        )


class Tracked(Iterable[T]):
    """Batches, as they come from what is tracked, once.

    Args:
        batches: What they come from.
        current: The pass over them.
        follower: Told when there are no more.
    """

    def __init__(
        self, batches: Iterable[T], current: Pass, follower: HandFollower
    ) -> None:
        self._batches = batches
        self._iterator = iter(batches)
        self._current = current
        self._follower = follower

    def __len__(self) -> int:
        num_batches = self._current.num_batches
        if num_batches is None:
            raise TypeError(f"a {type(self._batches).__name__} has no length")
        return num_batches

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        current = self._current
        if current.is_overtaken:
            raise RuntimeError(
                f"pass {current.epoch} was ended by another `track` before all its "
                "batches were given: give an evaluation's numbers to `log`, without "
                "`track`, or follow it with a monitor of its own"
            )
        compiled, start = secs_compiled(), time.perf_counter()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._follower.exhaust(current)
            raise
        secs = time.perf_counter() - start
        current.secs_waited += max(secs - (secs_compiled() - compiled), 0.0)
        if not current.num_given:
            current.rows = _num_rows(batch)
        current.num_given += 1
        return batch

    def stretch(self, num_steps: int) -> Stretch | None:
        """The next batches in one, if they are on the device."""
        if not isinstance(self._iterator, Stretchable):
            return None
        stretch = self._iterator.stretch(num_steps)
        if stretch is not None:
            self._current.num_given += num_steps
        return stretch

    def close(self) -> None:
        """Ends the pass, and lets go of what was made ahead."""
        self._follower.end_pass(self._current)
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> "Tracked[T]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _length(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:
        return None


def _num_rows(batch: Any) -> int | None:
    if isinstance(batch, Batch):
        return batch.size
    values = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, Mapping | tuple | list):
        for value in values:
            shape = getattr(value, "shape", ())
            return int(shape[0]) if shape else None
    return None
