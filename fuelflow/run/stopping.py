"""Ending a run early, on all processes after the same step."""

import threading

import jax
import numpy as np

NUM_DISPATCHES_BETWEEN_LOOKS = 32


class StopSign:
    """A wish to stop, which any thread of any process may have.

    Processes must take the same steps, so several of them ask each other whether one
    wishes to stop: at the end of every epoch, and after every so many dispatches.
    """

    def __init__(self) -> None:
        self._wish = threading.Event()

    def put_up(self) -> None:
        """Wishes to stop."""
        self._wish.set()

    def take_down(self) -> None:
        """Forgets the wish."""
        self._wish.clear()

    def is_up(self, num_dispatches: int = 0) -> bool:
        """Whether to stop here.

        Args:
            num_dispatches: How many the epoch has had; 0 between epochs.
        """
        if jax.process_count() == 1:
            return self._wish.is_set()
        if num_dispatches % NUM_DISPATCHES_BETWEEN_LOOKS:
            return False
        from jax.experimental import multihost_utils

        wish = np.asarray(self._wish.is_set(), np.int32)
        return bool(multihost_utils.process_allgather(wish).any())
