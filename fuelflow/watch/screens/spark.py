"""Small drawings of a curve in letters: a line of blocks, a field of dots."""

import math
from collections.abc import Sequence

from fuelflow.watch.screens.curves import Curve, scale_of

# What stands where a value is not finite.
MARK = "×"
_BLOCKS = "▁▂▃▄▅▆▇█"
_LETTERS = "_.-~=+*#"
_ASCII_MARK = "x"
# The bits of a braille letter's dots, from the top down, left and right.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800


def sparkline(curve: Curve, width: int, *, is_ascii: bool = False) -> str:
    """A curve in one line of at most some letters, one for each value if they suffice.

    Args:
        curve: What is drawn.
        width: How many letters there may be.
        is_ascii: Whether blocks cannot be shown.

    Example:
        >>> sparkline(Curve(range(4), [0.0, 7.0, float("nan"), 3.0]), 10)
        '▁█×▄'
    """
    values = curve.thinned(max(width, 1)).values
    scale = scale_of(values)
    levels, mark = (_LETTERS, _ASCII_MARK) if is_ascii else (_BLOCKS, MARK)
    if scale is None:
        return mark * len(values)
    top = len(levels) - 1
    return "".join(
        levels[round(top * scale.height(value))] if math.isfinite(value) else mark
        for value in values
    )


def dotted(curve: Curve, width: int, rows: int) -> list[str]:
    """A curve as a field of braille letters, from the top down.

    Args:
        curve: What is drawn; where it is not finite there is a gap with a mark below.
        width: Letters in a row; each is two dots wide.
        rows: How many rows; each is four dots high.
    """
    thin = curve.thinned(2 * width)
    scale = scale_of(thin.values)
    field = [[0] * width for _ in range(rows)]
    marked: set[int] = set()
    last: tuple[int, int] | None = None
    for at, value in zip(_columns(thin.steps, 2 * width), thin.values, strict=True):
        if scale is None or not math.isfinite(value):
            marked.add(at // 2)
            last = None
            continue
        point = at, round((4 * rows - 1) * (1 - scale.height(value)))
        for across, down in _line(last or point, point):
            field[down // 4][across // 2] |= _DOTS[across % 2][down % 4]
        last = point
    lines = ["".join(chr(_BRAILLE | bits) for bits in row) for row in field]
    if marked:
        lines[-1] = "".join(
            MARK if place in marked else letter
            for place, letter in enumerate(lines[-1])
        )
    return lines


def _columns(steps: Sequence[float], count: int) -> list[int]:
    """Where the points stand; as far apart as their steps are."""
    if len(steps) < 2 or steps[-1] == steps[0]:
        return [0] * len(steps)
    way = (count - 1) / (steps[-1] - steps[0])
    return [round((step - steps[0]) * way) for step in steps]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots from one to another."""
    across, down = end[0] - start[0], end[1] - start[1]
    count = max(abs(across), abs(down), 1)
    return [
        (start[0] + round(across * i / count), start[1] + round(down * i / count))
        for i in range(count + 1)
    ]
