"""A run in a notebook: one output below the cell, which is replaced as it goes on."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.curves import Curves
from fuelflow.watch.screens.lines import end_line, epoch_line, start_line
from fuelflow.watch.screens.newest import NewestMetrics
from fuelflow.watch.screens.panel import panel_html

# Seconds between two drawings: each is stored by the page that shows it.
_PAUSE = 1.0
_EMPTY = '<div style="opacity:0.65">the run is about to begin</div>'


class NotebookView:
    """Shows a run live in a notebook, and leaves its last picture there.

    The output is placed in the cell that runs when the view is made.

    Args:
        clock: What tells the time, in seconds since 1970.

    Raises:
        ValueError: If this is no notebook.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._newest = NewestMetrics()
        self._curves = Curves()
        self._drawn_at = -_PAUSE
        self._ended: Any = None
        self._handle = _placed()

    def show(self, story: Story) -> None:
        """Draws the run as it stands, unless that was done in the last second."""
        with self._lock:
            is_early = time.monotonic() < self._drawn_at + _PAUSE
            if story.run is None or story.run is self._ended or is_early:
                return
            self._draw(story)

    def close(self, story: Story) -> None:
        """Draws the run for the last time."""
        with self._lock:
            if story.run is None or story.run is self._ended:
                return
            self._ended = story.run
            self._draw(story)

    def _draw(self, story: Story) -> None:
        now = self._clock()
        html = panel_html(story, self._curves.of(story), self._newest.of(story), now)
        data = {"text/html": html, "text/plain": _text(story, now)}
        self._handle.update(data, raw=True)
        self._drawn_at = time.monotonic()


def _placed() -> Any:
    """The handle of an output that is empty yet."""
    # Imported by the kernel, if there is one.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        raise ValueError(
            '`display="notebook"` must be asked for in a notebook, and this is none; '
            '"auto" shows a run wherever it is'
        )
    from IPython.display import display

    data = {"text/html": _EMPTY, "text/plain": ""}
    return display(data, raw=True, display_id=True)


def _text(story: Story, now: float) -> str:
    """What stands for the picture where there are none."""
    lines = [start_line(story.run)] if story.run else []
    lines += [epoch_line(record) for record in story.epochs[-1:]]
    lines += [end_line(story, now)] if story.end else []
    return "\n".join(lines)
