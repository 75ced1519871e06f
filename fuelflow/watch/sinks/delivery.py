"""Bringing records to a sink, in a thread that it can block as long as it likes."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from fuelflow.watch.record.records import Record

logger = logging.getLogger("fuelflow")

MAX_WAITING = 1000
STUCK_SECS = 10.0
# What goes first when too many wait: a later one tells the same, or more.
_DROPPED_FIRST = ("step", "event", "compile")


def checked_sinks(sinks: Iterable[Any]) -> list[Callable[[Record], Any]]:
    """What was given as sinks.

    Raises:
        TypeError: If it is not a collection of them.
    """
    if callable(sinks) or isinstance(sinks, str) or not isinstance(sinks, Iterable):
        hint = ": write `[...]`" if callable(sinks) else ""
        raise TypeError(
            f"`sinks` must be a list of sinks, got a {type(sinks).__name__}{hint}"
        )
    checked = list(sinks)
    for sink in checked:
        if not callable(sink) or isinstance(sink, type):
            raise TypeError(
                f"each of `sinks` must be callable with a record, got {sink!r}"
            )
    return checked


class Delivery:
    """A sink with a queue and a thread of its own.

    When too many records wait, those of steps are dropped first, the oldest of them,
    then events, and epochs last. An error of the sink loses that record alone. The
    first error is told, and so is that it blocks.

    Args:
        sink: Given one record after the other. If it has a ``close``, that ends it.
        tell: Told once of each kind of trouble, in a sentence.
        max_waiting: How many records wait at most.
    """

    def __init__(
        self,
        sink: Callable[[Record], Any],
        tell: Callable[[str], None],
        *,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.sink = sink
        self._tell = tell
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Record] = deque()
        self._since: float | None = None  # when the sink was given what it has
        self._is_closing = self._has_raised = self._is_stuck = False
        self._thread = threading.Thread(
            target=self._deliver, name=f"fuelflow sink {self.name}", daemon=True
        )
        self._thread.start()

    @property
    def name(self) -> str:
        """What the sink is called."""
        name = getattr(self.sink, "__qualname__", None)
        return name or type(self.sink).__name__

    def put(self, record: Record) -> None:
        """Has a record delivered, without waiting."""
        with self._changed:
            if self._is_closing:
                return
            if len(self._waiting) >= self._max_waiting:
                self._drop_one()
            self._waiting.append(record)
            self._changed.notify_all()

    def look(self) -> None:
        """Tells, the first time, that the sink has been at one record for long."""
        since = self._since
        if since is None or self._is_stuck:
            return
        secs = time.monotonic() - since
        if secs >= STUCK_SECS:
            self._is_stuck = True
            self._report(
                f"the sink `{self.name}` has been busy with one record for {secs:.0f} "
                "s; meanwhile others wait, and those of steps may be dropped"
            )

    def drain(self, timeout: float) -> bool:
        """Waits until nothing waits any more, and says whether that came about.

        One that was found stuck is not waited for again.
        """
        with self._changed:
            return self._changed.wait_for(
                self._is_idle, 0.0 if self._is_stuck else timeout
            )

    def finish(self) -> None:
        """Has the sink closed after what waits, without waiting for that."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Waits some seconds for the sink to be closed, and tells if it is not then."""
        self._thread.join(0.0 if self._is_stuck else timeout)
        if self._thread.is_alive() and not self._is_stuck:
            self._is_stuck = True
            self._report(
                f"the sink `{self.name}` did not end in time, and is left with "
                f"{len(self._waiting)} records that it was not given"
            )

    def _is_idle(self) -> bool:
        return not self._waiting and self._since is None

    def _drop_one(self) -> None:
        for kind in _DROPPED_FIRST:
            for index, record in enumerate(self._waiting):
                if record["kind"] == kind:
                    del self._waiting[index]
                    return
        self._waiting.popleft()

    def _deliver(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    break
                record = self._waiting.popleft()
                self._since = time.monotonic()
            self._guarded(self.sink, record)
            with self._changed:
                self._since, self._is_stuck = None, False
                self._changed.notify_all()
        close = getattr(self.sink, "close", None)
        if callable(close):
            self._guarded(close)

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        # The sink's, whatever it may be; an exit would end this thread alone.
        except (Exception, SystemExit) as error:
            logger.debug("a sink failed", exc_info=True)
            if not self._has_raised:
                self._has_raised = True
                self._report(
                    f"the sink `{self.name}` failed, and is given further records "
                    f"without more words: {type(error).__name__}: {error}"
                )

    def _report(self, text: str) -> None:
        logger.warning("%s", text)
        self._tell(text)
