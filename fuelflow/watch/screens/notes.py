"""What happened in a run that a person should know of, the newest last."""

import time
from dataclasses import dataclass
from typing import Any

from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.text import clean

_NUM_LOOKED_AT = 50


@dataclass(frozen=True)
class Note:
    """Something that happened.

    Attributes:
        time: When it happened last, as the clock on the wall showed.
        level: ``"info"``, ``"warning"`` or ``"error"``.
        text: What it was, on one line.
        count: How many times in a row.
    """

    time: str
    level: str
    text: str
    count: int = 1

    @property
    def line(self) -> str:
        """The text, and how many times it was so."""
        return self.text if self.count == 1 else f"{self.text} (× {self.count})"


def notes_of(story: Story, most: int) -> list[Note]:
    """The last few notes; the same one in a row counts as one."""
    notes: list[Note] = []
    for event in _happened(story):
        text = clean(str(event["text"] or event["what"]))
        count = 1
        if notes and (notes[-1].level, notes[-1].text) == (event["level"], text):
            count += notes.pop().count
        notes.append(Note(wall_time(event["time"]), event["level"], text, count))
    return notes[max(len(notes) - most, 0) :]


def wall_time(secs: float) -> str:
    """A time of the day, here."""
    return time.strftime("%H:%M:%S", time.localtime(secs))


def _happened(story: Story) -> list[dict[str, Any]]:
    """The last events; a compile that came again is one, if nothing else told of it."""
    events = story.events[-_NUM_LOOKED_AT:]
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
