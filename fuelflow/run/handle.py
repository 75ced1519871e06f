"""What a run in the background is held by: its news, its end, and its result."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.metrics.history import History
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.state import TrainState


@dataclass(frozen=True, eq=False)
class TrainedState:
    """What a run led to.

    Attributes:
        state: The state after the last step.
        history: The metrics of every epoch.
        loop: The loop that trained it.
        stopped_by: What ended the run before its last epoch: ``"stop"``,
            ``"stop_when"`` or ``"SIGTERM"``; None if nothing did.
    """

    state: TrainState
    history: History
    loop: TrainingLoop
    stopped_by: str | None = None

    @cached_property
    def model(self) -> Any:
        """The user's kind of model with the trained arrays, copied."""
        return self.loop.model(self.state)

    def __repr__(self) -> str:
        return f"TrainedState({self.state!r}, {len(self.history)} epochs)"


class Mailbox:
    """Metrics on their way to whoever reads them, and the end of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[EpochMetrics] = deque()
        self._is_over = False
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether no more will come."""
        with self._changed:
            return self._is_over

    def put(self, metrics: EpochMetrics) -> None:
        """Adds an epoch's metrics."""
        with self._changed:
            self._waiting.append(metrics)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Says that no more will come, and why."""
        with self._changed:
            self._is_over, self._error = True, error
            self._changed.notify_all()

    def take_all(self) -> list[EpochMetrics]:
        """What is there, without waiting."""
        with self._changed:
            taken = list(self._waiting)
            self._waiting.clear()
            return taken

    def take(self, timeout: float | None) -> EpochMetrics | None:
        """The next one, waited for; None after the last.

        Raises:
            TimeoutError: If none came in time.
        """
        with self._changed:
            _wait(self._changed, lambda: bool(self._waiting) or self._is_over, timeout)
            if self._waiting:
                return self._waiting.popleft()
            if self._error is not None:
                raise self._error
            return None

    def wait(self, timeout: float) -> None:
        """Waits for the end so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over, timeout)

    def join(self, timeout: float | None) -> None:
        """Waits for the end.

        Raises:
            TimeoutError: If it did not come in time.
        """
        with self._changed:
            _wait(self._changed, lambda: self._is_over, timeout)
            if self._error is not None:
                raise self._error


def _wait(
    changed: threading.Condition, is_so: Callable[[], bool], timeout: float | None
) -> None:
    deadline = None if timeout is None else time.monotonic() + timeout
    while not is_so():
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError(f"nothing came within {timeout} s")
        changed.wait(left)


class TrainHandle:
    """A run in the background.

    Iterating gives the metrics of each epoch as they come. Each is given once, by
    whichever of `next_metrics`, `poll_metrics` and iteration asks first.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        result: Callable[[], TrainedState],
        stop: Callable[[], None],
        conclude: Callable[[], None],
    ) -> None:
        self._mailbox = mailbox
        self._result = result
        self._stop = stop
        self._conclude = conclude

    def poll_metrics(self) -> list[EpochMetrics]:
        """The metrics that have come since the last look, without waiting."""
        return self._mailbox.take_all()

    def next_metrics(self, timeout: float | None = None) -> EpochMetrics | None:
        """The next epoch's metrics, waited for; None when the run is over.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            BaseException: What ended the run, once all metrics were given.
            TimeoutError: If no epoch ended in time.
        """
        return self._mailbox.take(timeout)

    def __iter__(self) -> Iterator[EpochMetrics]:
        while (metrics := self.next_metrics()) is not None:
            yield metrics

    def join(self, timeout: float | None = None) -> TrainedState:
        """Waits for the end of the run.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            BaseException: What ended the run.
            TimeoutError: If it did not end in time.
        """
        try:
            self._mailbox.join(timeout)
            return self._result()
        finally:
            if self._mailbox.is_over:
                self._conclude()

    def stop(self) -> None:
        """Has the run end after its current step; does not wait for it."""
        self._stop()
