"""Ending a run early, on all processes after the same step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import jax
import numpy as np

NUM_DISPATCHES_BETWEEN_LOOKS = 32


class StopSign:
    """A wish to stop, which any thread of any process may have.

    Processes must take the same steps, so several of them ask each other whether one
    wishes to stop: at the end of every epoch, and after every so many dispatches.

    Attributes:
        reason: Why the run was stopped, once it was: ``"asked to"`` or ``"SIGTERM"``.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._wish = threading.Event()
        self._why = ""
        self._num_looks = 0

    def put_up(self, why: str = "asked to") -> None:
        """Wishes to stop."""
        self._why = why
        self._wish.set()

    def take_down(self) -> None:
        """Forgets the wish."""
        self.reason = None
        self._wish.clear()

    def is_up(self, num_dispatches: int = 0) -> bool:
        """Whether to stop here.

        Args:
            num_dispatches: How many the epoch has had; 0 between epochs.
        """
        if jax.process_count() == 1:
            if self._wish.is_set():
                self.reason = self._why
            return self._wish.is_set()
        return self._is_preempted() or self._is_agreed(num_dispatches)

    def _is_agreed(self, num_dispatches: int) -> bool:
        if num_dispatches % NUM_DISPATCHES_BETWEEN_LOOKS:
            return False
        from jax.experimental import multihost_utils

        wish = np.asarray(self._wish.is_set(), np.int32)
        is_up = bool(multihost_utils.process_allgather(wish).any())
        if is_up:
            self.reason = self._why or "asked to"
        return is_up

    def _is_preempted(self) -> bool:
        """Whether one of several processes was told by SIGTERM to end, which JAX hears.

        It has all of them agree on the look at which they say so.
        """
        from jax.experimental import multihost_utils

        self._num_looks += 1
        if not multihost_utils.reached_preemption_sync_point(self._num_looks):
            return False
        self.reason = "SIGTERM"
        return True

    @contextmanager
    def held_up_by_sigterm(self) -> Iterator[None]:
        """Has a first SIGTERM put up the sign, and a second one end the process.

        Only where signals can be heard, in the main thread, and for a run of one
        process: of several JAX hears them.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or jax.process_count() > 1:
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
