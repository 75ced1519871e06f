"""A run as plain lines, for logs, pipes and CI."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.lines import end_line, epoch_line, event_line, start_line
from fuelflow.watch.screens.tail import Tail

_TOLD_LEVELS = ("warning", "error")


class PlainView:
    """Writes a line for a run's start, each of its epochs, each warning and its end.

    There are no control characters in them, and each is written as soon as it is known.

    Args:
        stream: Where they are written; by default what ``sys.stdout`` is at the time.
        clock: What tells the time, in seconds since 1970.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._run: Any = None
        self._ended: Any = None
        self._epochs, self._events = Tail(), Tail()

    def show(self, story: Story) -> None:
        """Writes what is new."""
        if story.run is None or story.run is self._ended:
            return
        lines: list[tuple[float, str]] = []
        if story.run is not self._run:
            self._run = story.run
            self._write([start_line(story.run)])
        # What a run that this one goes on from has told is not told again.
        began = story.run["time"] if story.run["step"] else -math.inf
        lines += [
            (_time_of(record), epoch_line(record))
            for record in self._epochs.later(story.epochs)
            if _time_of(record) >= began
        ]
        lines += [
            (_time_of(event), event_line(event))
            for event in self._events.later(story.events)
            if event["level"] in _TOLD_LEVELS and _time_of(event) >= began
        ]
        self._write([line for _, line in sorted(lines, key=lambda each: each[0])])

    def close(self, story: Story) -> None:
        """Writes what is new, and how the run ended."""
        if story.run is None or story.run is self._ended:
            return
        self.show(story)
        self._ended = story.run
        self._write([end_line(story, self._clock())])

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        stream = self._stream or sys.stdout
        text = "".join(f"{line}\n" for line in lines)
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()


def _time_of(record: dict[str, Any]) -> float:
    return record["time"]
