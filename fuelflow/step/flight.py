"""The steps on their way: how far the host may run ahead, and what it sees of them."""

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from fuelflow._errors import NonFiniteError
from fuelflow.step.batch import Stretch
from fuelflow.step.outcome import StepOutcome
from fuelflow.step.packing import Layout
from fuelflow.step.state import evolve

logger = logging.getLogger("fuelflow")

Taken = tuple[Any, Any]
"""The engine of a dispatch, and the batch it took, or its stacked batches."""

# What batches may take that are done with, and kept only until the host looks.
MAX_HELD_BYTES = 64 * 2**20


class Flight:
    """The steps of one run that the host has dispatched and not yet looked at.

    The host looks at one outcome in every half window. By its running count of skipped
    steps that one speaks for all before it, so bounding the run-ahead and checking for
    bad steps costs well under a microsecond a step.

    A loop that stops at a bad step changes its state no more after one, until the host
    has raised it. So the last state of the flight is the one which that step met, and
    its batch is held here too: those of small size until the host looks, others until
    they are seen done.

    Args:
        step: Completed updates before the first dispatch.
        num_skipped: Skipped steps before the first dispatch.
        stops: Whether it is of a loop that stops at a bad step.

    Attributes:
        stops: The same.
        num_seen: Skipped steps that are no news.
        is_over: Whether a bad step of it was raised; what comes after is another one.
        latest: The state after the last dispatch, if anybody has it.
    """

    def __init__(self, step: int, num_skipped: int, *, stops: bool = False) -> None:
        self.stops = stops
        self.num_seen = num_skipped
        self.is_over = False
        self.latest: Callable[[], Any] | None = None
        self.num_dispatched = 0
        self._step = step
        self._error: NonFiniteError | None = None
        self._pending: deque[StepOutcome] = deque()
        self._taken: deque[Taken | None] = deque()
        self._layout: Layout | None = None
        self._num_free = 0  # outcomes in front whose batches were let go
        self._max_held = 1
        self._due: deque[_DueRecord] = deque()
        # What is due is logged even if nobody looks again.
        weakref.finalize(self, _log_all, self._due)

    def make_room(self, max_in_flight: int) -> NonFiniteError | None:
        """Waits until one more dispatch is allowed.

        Returns:
            The error of the first bad step among those looked at, still to be raised.
        """
        while self._due and self._due[0].outcome.is_ready():
            self._due.popleft().log()
        if len(self._pending) < max_in_flight:
            return None
        return self._look((max_in_flight + 1) // 2)

    def await_room(self, max_in_flight: int) -> None:
        """Waits until one more dispatch is allowed, and raises what was bad meanwhile.

        Raises:
            NonFiniteError: If a step that was looked at was not finite.
        """
        error = self.make_room(max_in_flight)
        if error is not None:
            self.raise_once(error)

    def add(
        self,
        outcome: StepOutcome,
        num_steps: int,
        log_interval: int | None,
        taken: Taken | None = None,
    ) -> None:
        """Takes note of a dispatch of ``num_steps`` steps, and of what it took."""
        self._pending.append(outcome)
        self._taken.append(taken)
        if taken is not None:
            if outcome.layout is not self._layout:
                self._layout = outcome.layout
                self._max_held = MAX_HELD_BYTES // max(1, _num_bytes(taken[1]))
            if len(self._taken) > self._max_held:
                self._let_go()
        self.num_dispatched += 1
        if log_interval is not None:
            done = self._step // log_interval
            if (self._step + num_steps) // log_interval > done:
                record = _DueRecord(outcome.detached(), self._step + 1, log_interval)
                self._due.append(record)
        self._step += num_steps

    def land(self, num_dispatched: int | None = None) -> None:
        """Waits for every dispatch so far, or for those up to a number of them.

        Raises:
            NonFiniteError: If one of them was not finite and has not been raised yet.
        """
        count = len(self._pending)
        if num_dispatched is None:
            _log_all(self._due)
        else:
            count -= self.num_dispatched - num_dispatched
        error = self._look(count) if count > 0 else None
        if error is not None:
            self.raise_once(error)

    def raise_once(self, error: NonFiniteError) -> NoReturn:
        """Raises an error; the next step is the first of another flight."""
        self.is_over = True
        self._pending.clear()
        self._taken.clear()
        raise error.with_traceback(None)

    def set_step(self, step: int) -> None:
        """Takes note that the step count was set."""
        self._step = step

    def find(self) -> NonFiniteError | None:
        """The error of the first bad step of all, waited for; None if all were good."""
        for outcome, taken in zip(self._pending, self._taken, strict=True):
            if self._error is not None:
                break
            found = outcome.first_bad()
            if found is not None:
                self._error = self._explained(*found, taken)
        return self._error

    def _explained(
        self, error: NonFiniteError, index: int | None, taken: Taken | None
    ) -> NonFiniteError:
        """The error with what caused it."""
        from fuelflow.step.replay import Cause  # which most runs never need

        state = None if self.latest is None else self.latest()
        if state is not None and state.sums is not None:
            # A trainer's account of an epoch ends with that epoch.
            state = evolve(state, sums=None)
        error.state = state
        if taken is not None:
            error.hold(Cause(*taken, index=index, error=error))
        return error

    def _look(self, count: int) -> NonFiniteError | None:
        is_news = self._pending[count - 1].last_skipped() > self.num_seen
        if is_news and self.stops:
            return self.find()
        while count and self._pending:
            self._pending.popleft()
            self._taken.popleft()
            count -= 1
        self._num_free = 0
        while self._num_free < len(self._taken) and not self._taken[self._num_free]:
            self._num_free += 1
        return None

    def _let_go(self) -> None:
        """Lets go of batches that are done with, if they are large."""
        while len(self._taken) - self._num_free > self._max_held:
            oldest = self._pending[self._num_free]
            # One that is not ready has its batch on the device all the same.
            if not oldest.is_ready() or oldest.first_bad() is not None:
                return
            self._taken[self._num_free] = None
            self._num_free += 1


def _num_bytes(batch: Any) -> int:
    held = batch.steps() if isinstance(batch, Stretch) else batch
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(held))


@dataclass(frozen=True)
class _DueRecord:
    """An outcome to be logged once it is ready."""

    outcome: StepOutcome
    first_step: int
    interval: int

    def log(self) -> None:
        """Logs the steps of the outcome that fall on the interval."""
        for step, row in enumerate(self.outcome.rows(), start=self.first_step):
            if step % self.interval == 0:
                facts = {
                    "step": int(row["global_step"]),
                    "loss": float(row["loss"]),
                    "lr": float(row.get("lr", math.nan)),
                    "grad_norm": float(row["grad_norm"]),
                }
                logger.info(
                    "step %d: loss %.6g, lr %.4g, grad_norm %.4g",
                    *facts.values(),
                    extra=facts,
                )


def _log_all(due: deque[_DueRecord]) -> None:
    while due:
        due.popleft().log()
