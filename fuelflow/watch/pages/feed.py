"""What the readers of a live page are told: all so far once, then what is new."""

import secrets
import threading
import time
from typing import Any, NamedTuple

from fuelflow.watch.pages.digest import Digest
from fuelflow.watch.pages.page import plain_json
from fuelflow.watch.record.log import RecordLog

# A reader gets all anew, in fewer rows, when it has been sent so many single records.
MAX_ADDED = 4000
# Readers that come soon after each other are sent the same beginning.
_SHARED_SECS = 5.0
_MAX_BEHIND = 500


class Frame(NamedTuple):
    """One message of server-sent events.

    Attributes:
        body: What is sent; empty if there is nothing new.
        number: The newest record that the reader then has.
        is_reset: Whether it holds all there is, not only what is new.
        num_records: How many records are in it, if it is no reset.
    """

    body: bytes
    number: int
    is_reset: bool = False
    num_records: int = 0


class Feed:
    """The messages for any number of readers, made once for all of them.

    `update` is called by one thread, `after` by another.

    Args:
        log: The records.
    """

    def __init__(self, log: RecordLog) -> None:
        self._log = log
        self._digest = Digest()
        self._number = 0
        self._lock = threading.Lock()
        # Tells readers of another server, which was here before, from its own.
        self._name = secrets.token_hex(4)
        self._beginning = Frame(b"", 0)
        self._made_at = float("-inf")
        self._newest: dict[tuple[int, int], Frame] = {}

    def update(self) -> None:
        """Takes the records that are new in the log."""
        with self._lock:
            for number, record in self._log.since(self._number):
                self._digest.add(record)
                self._number = number

    def number_of(self, event_id: str) -> int:
        """The record that a reader has, by the id of the last message it got.

        0 if it got none, or from another server.
        """
        name, _, number = event_id.partition("-")
        is_ours = name == self._name and number.isascii() and number.isdigit()
        return min(int(number[:18]), self._log.newest) if is_ours else 0

    def after(self, number: int) -> Frame:
        """What a reader that has the records up to a number is sent next; 0 for all."""
        new = self._log.since(number) if number else []
        # A run that goes on takes back what it does anew, so all is sent again.
        goes_on = any(record["kind"] == "run" for _, record in new)
        if not number or goes_on or len(new) > _MAX_BEHIND:
            return self._reset(at_least=number + 1)
        if not new:
            return Frame(b"", number)
        last = new[-1][0]
        if (number, last) not in self._newest:
            added = Digest(record for _, record in new).to_dict()
            frame = Frame(self._message("add", added, last), last, False, len(new))
            if len(self._newest) > 8:  # the readers that keep up ask for the same
                self._newest.clear()
            self._newest[number, last] = frame
        return self._newest[number, last]

    def _reset(self, at_least: int) -> Frame:
        now = time.monotonic()
        is_old = now - self._made_at > _SHARED_SECS
        if is_old or self._beginning.number < at_least:
            self.update()
            with self._lock:
                everything, number = self._digest.to_dict(), self._number
            body = self._message("reset", everything, number)
            self._beginning = Frame(body, number, is_reset=True)
            self._made_at = now
        return self._beginning

    def _message(self, kind: str, value: dict[str, Any], number: int) -> bytes:
        lines = f"event: {kind}\nid: {self._name}-{number}\ndata: {plain_json(value)}"
        return f"{lines}\n\n".encode()
