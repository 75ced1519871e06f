"""A run in a terminal: a screen that is drawn anew in place, epochs scrolling above."""

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.live import Live

from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.epoch_rows import EpochRows
from fuelflow.watch.screens.frame import Frame
from fuelflow.watch.screens.glyphs import ASCII, UNICODE, Glyphs
from fuelflow.watch.screens.handed_over import HandedOver, goes_to_terminal
from fuelflow.watch.screens.styled import Line, Lines
from fuelflow.watch.screens.tail import Tail

# Seconds between two drawings at least.
_PAUSE = 0.15


class ConsoleView:
    """Shows a run live in a terminal.

    What else is printed or logged meanwhile scrolls by above it. The cursor is hidden
    only while it draws, so that the terminal is clean however the process ends.

    Args:
        console: Where it is drawn; by default what ``print`` writes to.
        clock: What tells the time, in seconds since 1970.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._glyphs = _glyphs_of(self._console)
        self._frame = Frame(self._glyphs)
        self._rows = EpochRows(self._glyphs)
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._cursor = _CursorOnlyAtRest()
        self._handed_over: HandedOver | None = None
        self._drawn_at = -_PAUSE
        self._epochs = Tail()
        self._ended: Any = None

    def show(self, story: Story) -> None:
        """Draws the run as it stands, unless that was done just now."""
        with self._lock:
            if self._is_over(story) or time.monotonic() < self._drawn_at + _PAUSE:
                return
            self._draw(story)
            self._drawn_at = time.monotonic()

    def close(self, story: Story) -> None:
        """Leaves what the run came to, and the terminal as it was."""
        with self._lock:
            if self._is_over(story):
                return
            self._ended = story.run
            self._scroll(story)
            lines = self._frame.draw_end(story, self._clock(), self._console.width)
            live = self._live or self._open()
            live.update(Lines([[], *lines], self._glyphs))
            self._leave()

    def _is_over(self, story: Story) -> bool:
        return story.run is None or story.run is self._ended

    def _draw(self, story: Story) -> None:
        live = self._live or self._open()
        self._scroll(story)
        size = self._console.size
        lines = self._frame.draw(story, self._clock(), size.width, size.height)
        # Drawn once, here; whoever prints meanwhile only writes it again. The cursor
        # rests in a line of its own, where a ^C that the terminal echoes does no harm.
        live.update(Lines([[], *lines, []], self._glyphs), refresh=True)

    def _scroll(self, story: Story) -> None:
        """Prints the epochs that have ended since."""
        rows: list[Line] = []
        for record in self._epochs.later(story.epochs):
            rows += self._rows.lines(record, self._console.width)
        if rows:
            self._console.print(Lines(rows, self._glyphs), end="")

    def _open(self) -> Live:
        live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=goes_to_terminal("stdout"),
            redirect_stderr=goes_to_terminal("stderr"),
            vertical_overflow="crop",
        )
        before = HandedOver.streams()
        live.start()
        self._handed_over = HandedOver(before)
        self._console.push_render_hook(self._cursor)
        self._console.show_cursor(True)
        self._live = live
        atexit.register(self._leave)
        return live

    def _leave(self) -> None:
        """Stops drawing; what was drawn last stays."""
        with self._lock:
            if self._live is None:
                return
            live, self._live = self._live, None
            atexit.unregister(self._leave)
            self._console.pop_render_hook()
            if self._handed_over is not None:
                self._handed_over.take_back()
            live.stop()


class _CursorOnlyAtRest(RenderHook):
    """Hides the cursor while lines are written, and shows it again below them."""

    def process_renderables(
        self, renderables: list[ConsoleRenderable]
    ) -> list[ConsoleRenderable]:
        """The lines to write, the cursor hidden before and shown after them."""
        return [Control.show_cursor(False), *renderables, Control.show_cursor(True)]


def _glyphs_of(console: Console) -> Glyphs:
    can_show = console.encoding.startswith("utf") and not console.legacy_windows
    return UNICODE if can_show else ASCII
