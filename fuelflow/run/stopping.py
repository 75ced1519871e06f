"""Ending a run early, on all processes after the same step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Any

import jax
import numpy as np

NUM_DISPATCHES_BETWEEN_LOOKS = 32
# What processes tell each other is a number: a place in this list.
_REASONS = ("", "stop", "stop_when", "SIGTERM")
# Not every version of jax declares its flags to type checkers.
_config: Any = jax.config


class StopSign:
    """A wish to stop, which any thread of any process may have.

    Processes must take the same steps, so several of them ask each other whether one
    wishes to stop: at the end of every epoch, and after every so many dispatches.

    Attributes:
        reason: Why the run was stopped, once it was: ``"stop"``, ``"stop_when"``
            or ``"SIGTERM"``.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        # Not an Event, whose lock the thread that a signal comes to may hold.
        self._wish = ""
        self._num_looks = 0
        # Made for being put into by whatever interrupts who puts something in.
        self._news: SimpleQueue[None] = SimpleQueue()

    def put_up(self, why: str = "stop") -> None:
        """Wishes to stop."""
        assert why in _REASONS
        self._wish = why
        self._news.put(None)

    @property
    def is_wished(self) -> bool:
        """Whether this process wishes to stop."""
        return bool(self._wish)

    def tell(self) -> None:
        """Wakes up who waits for a wish."""
        self._news.put(None)

    def wait(self) -> None:
        """Waits for a wish, or for being told."""
        self._news.get()

    def take_down(self) -> None:
        """Forgets the wish."""
        self.reason = None
        self._wish = ""

    def is_up(self, num_dispatches: int = 0) -> bool:
        """Whether to stop here.

        Args:
            num_dispatches: How many the epoch has had; 0 between epochs.
        """
        if self.reason is not None:
            return True
        if jax.process_count() == 1:
            self.reason = self._wish or None
            return self.reason is not None
        return self._is_preempted() or self._is_agreed(num_dispatches)

    def _is_agreed(self, num_dispatches: int) -> bool:
        if num_dispatches % NUM_DISPATCHES_BETWEEN_LOOKS:
            return False
        from jax.experimental import multihost_utils

        wish = np.asarray(_REASONS.index(self._wish), np.int32)
        wishes = np.asarray(multihost_utils.process_allgather(wish))
        self.reason = _REASONS[wishes.max()] or None
        return self.reason is not None

    def _is_preempted(self) -> bool:
        """Whether one of several processes was told by SIGTERM to end, which JAX hears.

        It has all of them agree on the look at which they say so.
        """
        if not _is_heard_by_jax():
            return False
        from jax.experimental import multihost_utils

        self._num_looks += 1
        if not multihost_utils.reached_preemption_sync_point(self._num_looks):
            return False
        self.reason = "SIGTERM"
        return True

    @contextmanager
    def held_up_by_sigterm(self) -> Iterator[None]:
        """Has a first SIGTERM put up the sign, and a second one end the process.

        Only where signals can be heard, in the main thread. Of several processes JAX
        hears it, unless its service for that is off.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or (jax.process_count() > 1 and _is_heard_by_jax()):
            yield
            return
        previous = signal.getsignal(signal.SIGTERM)

        def hear(number: int, frame: FrameType | None) -> None:
            del number, frame
            signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
            self.put_up("SIGTERM")

        signal.signal(signal.SIGTERM, hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _is_heard_by_jax() -> bool:
    return _config.jax_enable_preemption_service
