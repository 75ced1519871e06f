"""All records of a run so far, for whoever comes, however late."""

import threading
from bisect import bisect_right
from operator import itemgetter
from typing import Any

from fuelflow.watch.record.records import LIVE_KINDS, thinned

MAX_STEPS = 4000
MAX_EVENTS = 2000


class RecordLog:
    """Numbered records that any number of threads add, read and wait for.

    When there are too many records of steps, some are dropped, such that those left are
    spread evenly and the newest is there. Of events the oldest are dropped. Of a phase
    only the newest is kept.

    Args:
        max_steps: How many records of steps are kept at most.
        max_events: How many events are.
    """

    def __init__(
        self, *, max_steps: int = MAX_STEPS, max_events: int = MAX_EVENTS
    ) -> None:
        self._max_steps = max_steps
        self._max_events = max_events
        self._records: list[tuple[int, dict[str, Any]]] = []
        self._num_of_kind: dict[str, int] = {}
        self._newest = 0
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def is_closed(self) -> bool:
        """Whether no more records will come."""
        with self._changed:
            return self._is_closed

    @property
    def newest(self) -> int:
        """The number of the newest record; 0 before the first."""
        with self._changed:
            return self._newest

    def append(self, record: dict[str, Any]) -> int:
        """Adds a record, which nobody changes any more, and returns its number."""
        with self._changed:
            self._newest += 1
            kind = record["kind"]
            if kind in LIVE_KINDS and self._num_of_kind.get(kind):
                self._drop(kind, set())
            self._records.append((self._newest, record))
            num = self._num_of_kind[kind] = self._num_of_kind.get(kind, 0) + 1
            if kind == "step" and num > self._max_steps:
                steps = self._of_kind("step")
                kept = thinned([each for _, each in steps], self._max_steps // 2)
                kept_ids = {id(each) for each in kept}
                self._drop(
                    kind, {number for number, each in steps if id(each) in kept_ids}
                )
            elif kind == "event" and num > self._max_events:
                events = self._of_kind("event")[-self._max_events // 2 :]
                self._drop(kind, {number for number, _ in events})
            self._changed.notify_all()
            return self._newest

    def since(self, number: int = 0) -> list[tuple[int, dict[str, Any]]]:
        """The records with a higher number that were not dropped, in order."""
        with self._changed:
            start = bisect_right(self._records, number, key=itemgetter(0))
            return self._records[start:]

    def wait(self, number: int, timeout: float | None = None) -> bool:
        """Waits for a record with a higher number, and says whether there is one.

        It also ends, without one, when the log is closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._newest > number or self._is_closed, timeout
            )
            return self._newest > number

    def close(self) -> None:
        """Says that no more records will come."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _of_kind(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        return [pair for pair in self._records if pair[1]["kind"] == kind]

    def _drop(self, kind: str, kept: set[int]) -> None:
        """Drops the records of a kind, but for those with some numbers."""
        self._records = [
            (number, record)
            for number, record in self._records
            if record["kind"] != kind or number in kept
        ]
        self._num_of_kind[kind] = len(kept)
