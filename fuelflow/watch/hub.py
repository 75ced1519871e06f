"""The thread that watches: it takes what a run tells, and hands it to all who look."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from fuelflow.watch.following import Follower
from fuelflow.watch.record.log import RecordLog
from fuelflow.watch.record.records import LIVE_KINDS, Record
from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.views import View
from fuelflow.watch.sinks.delivery import Delivery

logger = logging.getLogger("fuelflow")

TICK_SECS = 0.2
DRAIN_SECS = 2.0


class Hub:
    """Takes records from a follower a few times a second, and hands them out.

    Its first error is logged and ends it; a view that raises is given up.

    Args:
        follower: Where records come from.
        log: Keeps them.
        story: What they come to.
        deliveries: Bring them to the sinks.
        view: Shows them.
        prepare: Gives what there is before all else, asked by the hub's thread.
    """

    def __init__(
        self,
        follower: Follower,
        log: RecordLog,
        story: Story,
        *,
        deliveries: Sequence[Delivery],
        view: View,
        prepare: Callable[[], Iterable[Record]],
    ) -> None:
        self._follower = follower
        self._log = log
        self._story = story
        self._deliveries = deliveries
        self._view: View | None = view
        self._prepare = prepare
        self._posted: deque[Record] = deque()
        self._is_ending = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="fuelflow monitor", daemon=True
        )

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Takes what is left, closes the view, and says whether that was done in time.

        Args:
            timeout: Seconds that it is waited for.
        """
        self._is_ending.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def post(self, record: Record) -> None:
        """Has a record handed out that is not from the follower."""
        self._posted.append(record)

    def _watch(self) -> None:
        try:
            for record in self._prepare():
                self._hand_out(record)
            while not self._is_ending.wait(TICK_SECS):
                self._tick()
            self._tick()
        except Exception:
            logger.exception("the monitor failed, and training goes on without it")
        finally:
            self._close_view()
            deadline = time.monotonic() + DRAIN_SECS
            for delivery in self._deliveries:
                delivery.drain(max(deadline - time.monotonic(), 0.0))
            self._hand_out_posted()  # what became of the last ones

    def _tick(self) -> None:
        for record in self._follower.poll():
            self._hand_out(record)
        self._hand_out_posted()
        for delivery in self._deliveries:
            delivery.look()
        if self._view is not None:
            try:
                self._view.show(self._story)
            except Exception:
                logger.exception("the display failed, and is given up")
                self._close_view()

    def _hand_out_posted(self) -> None:
        while self._posted:
            self._hand_out(self._posted.popleft())

    def _hand_out(self, record: Record) -> None:
        self._log.append(record)
        self._story.add(record)
        if record.kind not in LIVE_KINDS:
            for delivery in self._deliveries:
                delivery.put(record)

    def _close_view(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            try:
                view.close(self._story)
            except Exception:
                logger.exception("the display could not be closed")
