"""What happened in a run that a person should know of, the newest last."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.text import clean

_NUM_LOOKED_AT = 50
_MOST_IN_A_ROW = 1000


@dataclass(frozen=True)
class Note:
    """Something that happened.

    Attributes:
        time: When it happened last, as the clock on the wall showed.
        level: ``"info"``, ``"warning"`` or ``"error"``.
        text: What it was, on one line.
        count: How many times in a row.
        is_usual: Whether it gives way to what a person must know of.
    """

    time: str
    level: str
    text: str
    count: int = 1
    is_usual: bool = False

    @property
    def line(self) -> str:
        """The text, and how many times it was so."""
        return self.text if self.count == 1 else f"{self.text} (× {self.count})"


def notes_of(story: Story, most: int) -> list[Note]:
    """A few notes, see `foremost`; the same in a row, and checkpoints, count as one."""
    notes: list[Note] = []
    what = ""
    for event in _happened(story):
        text = clean(str(event["text"] or event["what"]))
        level, before, what = event["level"], what, event["what"]
        count = 1
        is_again = bool(notes) and notes[-1].level == level and before == what
        if is_again and (what == "checkpoint" or notes[-1].text == text):
            count += notes.pop().count
        is_usual = level == "info" and what != "resumed"
        notes.append(Note(wall_time(event["time"]), level, text, count, is_usual))
    return foremost(notes, most)


def foremost(notes: Sequence[Note], most: int) -> list[Note]:
    """At most some of the notes, in order: the newest, and what is not usual first."""
    if len(notes) <= most or most < 1:
        return list(notes[: max(most, 0)])
    newest = len(notes) - 1
    order = sorted(range(newest), key=lambda at: (notes[at].is_usual, -at))
    return [notes[at] for at in sorted([*order[: most - 1], newest])]


def wall_time(secs: float) -> str:
    """A time of the day, here."""
    return time.strftime("%H:%M:%S", time.localtime(secs))


def _happened(story: Story) -> list[dict[str, Any]]:
    """The last events; a compile that came again is one, if nothing else told of it."""
    events = _last_events(story.events)
    if any(event["what"] == "recompile" for event in story.events):
        return events
    again = [
        {
            "time": each["time"],
            "level": "warning",
            "what": "recompile",
            "text": f"{each['program']} was compiled again: {each['reason']}",
        }
        for each in story.compiles[-_NUM_LOOKED_AT:]
        if not each["is_first"]
    ]
    return sorted([*events, *again], key=lambda event: event["time"])


def _last_events(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last ones, of which checkpoints in a row count as one."""
    first = len(events)
    num = 0
    while first > 0 and num < _NUM_LOOKED_AT and len(events) - first < _MOST_IN_A_ROW:
        first -= 1
        later = events[first + 1]["what"] if first + 1 < len(events) else ""
        num += not events[first]["what"] == later == "checkpoint"
    return list(events[first:])
