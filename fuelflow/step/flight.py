"""The steps on their way: how far the host may run ahead, and what it sees of them."""

import logging
import math
import weakref
from collections import deque
from dataclasses import dataclass
from typing import NoReturn

from fuelflow._errors import NonFiniteError
from fuelflow.step.outcome import StepOutcome

logger = logging.getLogger("fuelflow")


class Flight:
    """The steps of one run that the host has dispatched and not yet looked at.

    The host looks at one outcome in every half window. By its running count of skipped
    steps that one speaks for all before it, so bounding the run-ahead and checking for
    bad steps costs well under a microsecond a step.

    Args:
        step: Completed updates before the first dispatch.
        num_skipped: Skipped steps before the first dispatch.
    """

    def __init__(self, step: int, num_skipped: int) -> None:
        self._step = step
        self._seen_skipped = num_skipped
        self.num_dispatched = 0
        self._pending: deque[StepOutcome] = deque()
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

    def add(
        self, outcome: StepOutcome, num_steps: int, log_interval: int | None
    ) -> None:
        """Takes note of a dispatch of ``num_steps`` steps."""
        self._pending.append(outcome)
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
        """Raises an error, and does not count its step as unseen any more."""
        self._seen_skipped = max(self._seen_skipped, error.num_skipped)
        raise error.with_traceback(None)

    def set_step(self, step: int) -> None:
        """Takes note that the step count was set."""
        self._step = step

    def _look(self, count: int) -> NonFiniteError | None:
        has_new = self._pending[count - 1].last_skipped() > self._seen_skipped
        while count and self._pending:
            error = (
                self._pending[0].first_error(self._seen_skipped) if has_new else None
            )
            if error is not None:
                return error
            self._pending.popleft()
            count -= 1
        return None


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
