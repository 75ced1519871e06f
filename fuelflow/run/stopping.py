"""Ending a run early, on all processes after the same step."""

import itertools
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import jax
import numpy as np

from fuelflow.devices import messages

logger = logging.getLogger("fuelflow")
NUM_DISPATCHES_BETWEEN_LOOKS = 32
# How long processes that have all come to a place wait there for each other.
_SECS_TO_MEET = 3.0
# After how long one that waits for data alone says so.
_SECS_ALONE = 3.0
# What processes tell each other is a number: a place in this list.
_REASONS = ("", "stop", "stop_when", "SIGTERM")
# Not every version of jax declares its flags to type checkers.
_config: Any = jax.config
# Runs of this process so far, which all processes of a run have had as many of.
_runs = itertools.count(1)


class StopSign:
    """A wish to stop, which any thread of any process may have.

    Processes must take the same steps, so several of them ask each other whether one
    wishes to stop: at the end of every epoch, and after every so many dispatches. If
    all of them wait for data in the same place, they stop there.

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
        self._run = 0
        self._has_told = False
        # Where this process came last to wait for data, when, and whether all others
        # may still come there.
        self._place = ""
        self._came = 0.0
        self._are_to_meet = False

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

    def wait(self, secs: float | None) -> None:
        """Waits for a wish, or for being told, or for so long."""
        with suppress(Empty):
            self._news.get(timeout=secs)

    def take_down(self) -> None:
        """Forgets the wish, as another run begins."""
        self.reason = None
        self._wish = ""
        self._run = next(_runs)
        self._has_told = False

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

    def confer(self) -> None:
        """Has the other processes know of the wish, or puts up the sign at theirs.

        They hear of it where they wait for data, and call this too.
        """
        if self._wish != "SIGTERM" and _is_heard_by_jax() and messages.is_noticed():
            self.put_up("SIGTERM")
        key = f"fuelflow: run {self._run} is to stop"
        if not self._wish:
            told = messages.read(key)
            if told is not None:
                self.put_up(told)
        elif not self._has_told:
            self._has_told = True
            messages.write(key, self._wish)

    def is_up_where(self, place: str) -> bool:
        """Whether to stop in a place where this process waits for data.

        Of several processes all must wait there, for which each is to ask again and
        again. Once one has left it the others must come along, as it needs them.
        """
        if jax.process_count() == 1:
            return self.is_up()
        if not jax.distributed.is_initialized():
            return False
        key = f"fuelflow: run {self._run} stops at {place}"
        if key != self._place:
            self._place, self._came = key, time.monotonic()
            self._are_to_meet = True
            messages.write(f"{key}, since", self._wish)
            messages.come_to(key)
        if self._are_to_meet and messages.have_all_come_to(key):
            self._are_to_meet = False
            if messages.meet(key, _SECS_TO_MEET):
                self.reason = messages.read(f"{key}, since")
        if self.reason is None and time.monotonic() > self._came + _SECS_ALONE:
            self._came = math.inf  # said once for each place
            logger.warning(
                "process %d waits for data and is asked to stop (%s): it will when its "
                "batch comes, or when all processes wait for the same step",
                jax.process_index(),
                self._wish,
            )
        return self.reason is not None

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
    # Older versions of jax have no such flag, and always hear it.
    return getattr(_config, "jax_enable_preemption_service", True)
