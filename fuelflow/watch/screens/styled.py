"""Lines of styled text for a terminal, each of a width that is known."""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment

from fuelflow.watch.screens.glyphs import Glyphs

# A text and its style, as rich names styles; a line is some of them in a row.
Span = tuple[str, str]
Line = list[Span]


class Lines:
    """Lines for rich to show as they are, without wrapping."""

    def __init__(self, lines: Sequence[Line], glyphs: Glyphs) -> None:
        self._lines = lines
        self._glyphs = glyphs

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        for line in self._lines:
            for text, style in line:
                shown = self._glyphs.shown(text)
                yield Segment(shown, console.get_style(style) if style else None)
            yield Segment.line()


def width_of(line: Line) -> int:
    """How many columns a line takes."""
    return sum(cell_len(text) for text, _ in line)


def fitted(line: Line, width: int) -> Line:
    """A line of exactly some columns: blanks are added, or its end is cut off."""
    kept: Line = []
    left = width
    for text, style in line:
        length = cell_len(text)
        if length > left:
            # Half of a wide letter becomes a blank.
            kept.append((set_cell_size(text, left), style))
            return kept
        kept.append((text, style))
        left -= length
    return [*kept, (" " * left, "")] if left else kept


def column(text: str, width: int, style: str = "", *, to_right: bool = False) -> Span:
    """A text in a column of its own."""
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width), style
    blanks = " " * (width - length)
    return (blanks + text if to_right else text + blanks), style


def spread(left: Line, right: Line, width: int) -> Line:
    """Two lines at both ends of one; the right one is left out if there's no room."""
    room = width - width_of(left) - width_of(right)
    if room < 1:
        return fitted(left, width)
    return [*left, (" " * room, ""), *right]


def beside(left: Sequence[Line], right: Sequence[Line], width: int) -> list[Line]:
    """Lines next to lines, the left ones filled up to some columns."""
    rows = max(len(left), len(right))
    lefts = [*left, *([[]] * (rows - len(left)))]
    rights = [*right, *([[]] * (rows - len(right)))]
    return [
        [*fitted(a, width), *b] if b else a for a, b in zip(lefts, rights, strict=True)
    ]


def separated(blocks: Iterable[Sequence[Line]], *, is_airy: bool) -> list[Line]:
    """The lines of all blocks that have some, a blank line between them if airy."""
    lines: list[Line] = []
    for block in blocks:
        if block and lines and is_airy:
            lines.append([])
        lines += block
    return lines
