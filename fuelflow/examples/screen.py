"""What ``fuelflow demo`` shows: lines that stay, and in a terminal a bar below them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from rich.color import Color
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.style import Style
from rich.text import Text

_MARGIN = "  "
# Each as wide as its longest entry and the blanks before it.
_COLUMNS = {
    "epoch": 5,
    "loss": 8,
    "train": 9,
    "held out": 10,
    "lr": 9,
    "grad norm": 11,
    "steps/s": 9,
    "misread": 9,
}
_WIDEST_BAR = 40
# Short of the right edge, so that the ^C a terminal echoes does not wrap.
_BAR_WIDTH = 36
_PICTURE_WIDTH = 8


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What one epoch came to.

    Attributes:
        number: From 1.
        loss: Mean over the steps.
        train_accuracy: Mean over the steps, each before its update and with dropout.
        held_out_accuracy: Of the model after the epoch, in eval mode.
        lr: The learning rate of the last step.
        grad_norm: Mean over the steps, before clipping.
        steps_per_sec: By the wall clock, without compiling and evaluating.
    """

    number: int
    loss: float
    train_accuracy: float
    held_out_accuracy: float
    lr: float
    grad_norm: float
    steps_per_sec: float


@dataclass(frozen=True)
class Misread:
    """A digit that the model takes for another.

    Attributes:
        image: ``[8, 8]``, 0 to 1.
        label: What it is.
        guess: What the model says it is.
    """

    image: np.ndarray
    label: int
    guess: int


class Screen:
    """Shows a run: in a terminal with colours and a live bar, elsewhere as plain lines.

    A context manager: leaving it, however that happens, takes the bar away and gives
    the cursor back. A pipe gets ASCII, each line as soon as it is known.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._console = Console(highlight=False)
        is_unicode = self._console.encoding.startswith("utf")
        self._is_live = self._console.is_interactive and is_unicode
        self._num_held_out = 0
        self._full_bar = 0
        self._progress = Progress(
            TextColumn(" "),
            SpinnerColumn(),
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=_BAR_WIDTH),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._is_live,
        )
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> "Screen":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def wait(self, reason: str) -> None:
        """Says next to the bar what takes its time."""
        self._progress.update(self._task, description=reason)

    def introduce(self, num_held_out: int, **facts: str) -> None:
        """Shows what is about to be trained, and the headings of the epochs."""
        self._num_held_out = num_held_out
        self._print()
        for name, fact in facts.items():
            self._print((f"{name:<7}", "dim"), fact)
        self._print()
        headings = "".join(f"{name:>{width}}" for name, width in _COLUMNS.items())
        self._print((headings, "dim"))

    def start(self, num_steps: int) -> None:
        """Starts to count steps, the first of which waits for the compiler."""
        self._progress.update(self._task, total=num_steps, description="compiling")

    def advance(self) -> None:
        """Counts a step."""
        self._progress.update(self._task, advance=1, description="training")

    def show(self, epoch: Epoch) -> None:
        """Shows an epoch as one line."""
        num_misread = round((1 - epoch.held_out_accuracy) * self._num_held_out)
        entries = (
            (f"{epoch.number}", "dim"),
            (f"{epoch.loss:.4f}", ""),
            (f"{epoch.train_accuracy:.2%}", ""),
            (f"{epoch.held_out_accuracy:.2%}", "bold green"),
            (f"{epoch.lr:.1e}", "dim"),
            (f"{epoch.grad_norm:.3f}", "dim"),
            (f"{epoch.steps_per_sec:,.0f}", "cyan"),
            (f"{num_misread}", ""),
        )
        cells = [
            (f"{text:>{width}}", style)
            for (text, style), width in zip(entries, _COLUMNS.values(), strict=True)
        ]
        self._print(*cells, " ", (self._bar(num_misread), "magenta"))

    def _bar(self, num_misread: int) -> str:
        """A bar in eighths of a letter. The first epoch's takes all the room."""
        self._full_bar = self._full_bar or max(num_misread, 1)
        room = self._console.width - sum(_COLUMNS.values()) - 2 * len(_MARGIN)
        if not self._is_live or room < 1:
            return ""
        part = min(num_misread / self._full_bar, 1)
        eighths = round(8 * min(room, _WIDEST_BAR) * part)
        return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8]

    def conclude(self, misread: Sequence[Misread], compile_secs: float) -> None:
        """Shows what the run came to, which digits it misreads, and where to go on."""
        self._progress.stop()
        accuracy = 1 - len(misread) / self._num_held_out
        secs = time.perf_counter() - self._started
        self._print()
        self._print(
            (f"{accuracy:.2%}", "bold green"),
            " of the held-out digits read right. "
            f"Took {secs:.1f} s, {compile_secs:.1f} s of it compiling.",
        )
        self._show_misread(misread)
        self._print()
        for line in (
            "Next: the README puts this loop around a model of yours; the one here",
            "is in fuelflow.examples. Or watch it with --graph, --linen or --plain.",
        ):
            self._print((line, "dim"))
        self._print()

    def _show_misread(self, misread: Sequence[Misread]) -> None:
        """Shows misread digits side by side: pictures where there are colours."""
        if not misread:
            return
        num_shown = (self._console.width - len(_MARGIN)) // (_PICTURE_WIDTH + 2)
        shown = misread[: max(num_shown, 1)]
        more = f", the first {len(shown)} of them" if len(shown) < len(misread) else ""
        self._print()
        self._print(f"The {len(misread)} it misreads{more}:")
        self._print()
        if self._is_live and self._console.color_system and not self._console.no_color:
            for line in zip(*[_drawn(digit.image) for digit in shown], strict=True):
                self._print(*[part for cell in line for part in (cell, _MARGIN)])
        labels = (f"{digit.label} as {digit.guess}" for digit in shown)
        self._print(*[f"{label:<{_PICTURE_WIDTH}}{_MARGIN}" for label in labels])

    def _print(self, *parts: str | tuple[str, str] | Text) -> None:
        line = Text.assemble(_MARGIN, *parts)
        line.rstrip()
        self._console.print(line, soft_wrap=True)


def _drawn(image: np.ndarray) -> list[Text]:
    """A picture as lines of half blocks, each in the greys of two pixels."""
    greys = [[Color.from_rgb(*[255 * pixel] * 3) for pixel in row] for row in image]
    return [
        Text.assemble(
            *[
                ("▀", Style(color=top, bgcolor=bottom))
                for top, bottom in zip(upper, lower, strict=True)
            ]
        )
        for upper, lower in zip(greys[::2], greys[1::2], strict=True)
    ]
