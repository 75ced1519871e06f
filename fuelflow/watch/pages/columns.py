"""Rows of named numbers as columns, and fewer rows that draw the same curve."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
_MIN_STRETCHES = 16
_DIGITS = 7
_TIME_DIGITS = 13  # seconds since 1970, to a millisecond


def columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """All names of the rows, each with its value in every row, None where absent.

    Numbers are rounded to seven digits, which is more than a screen shows, and times
    to milliseconds.

    Example:
        >>> columns([{"step": 1, "loss": 0.5}, {"step": 2, "loss": "NaN", "lr": 0.1}])
        {'step': [1, 2], 'loss': [0.5, 'NaN'], 'lr': [None, 0.1]}
    """
    names = dict.fromkeys(name for row in rows for name in row)
    digits = {name: _TIME_DIGITS if name == "time" else _DIGITS for name in names}
    return {
        name: [rounded(row.get(name), digits[name]) for row in rows] for name in names
    }


def rounded(value: Any, digits: int = _DIGITS) -> Any:
    """A float with some digits; whole numbers without a fraction; others as they are.

    Example:
        >>> rounded(0.123456789), rounded(12.0), rounded(None), rounded("NaN")
        (0.1234568, 12, None, 'NaN')
    """
    if not isinstance(value, float):
        return value
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def thin(rows: Sequence[Row], axis: str, most: int) -> list[Row]:
    """Some of the rows, such that no curve of them loses an extreme.

    The axis is parted into equal stretches. Of each are kept, for every column, the
    rows with its least and greatest value, and the first that is no finite number. The
    first and the last row of all are kept as well.

    Args:
        rows: In order of the axis.
        axis: The column that is drawn along.
        most: About how many are kept; a few more, if there are many columns.
    """
    if len(rows) <= most:
        return list(rows)
    names = [n for n in dict.fromkeys(n for row in rows for n in row) if n != axis]
    # Of very many columns, extremes of the first are kept.
    names = names[: most // (2 * _MIN_STRETCHES)]
    num_stretches = most // (2 * max(len(names), 1))
    first, last = rows[0][axis], rows[-1][axis]
    width = (last - first) / num_stretches or 1
    stretches: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        stretches.setdefault(int((row[axis] - first) / width), []).append(index)
    kept = {0, len(rows) - 1}
    for stretch in stretches.values():
        for name in names:
            kept.update(_extremes(rows, stretch, name))
    return [rows[index] for index in sorted(kept)]


def _extremes(rows: Sequence[Row], stretch: Sequence[int], name: str) -> list[int]:
    values = [(rows[index].get(name), index) for index in stretch]
    numbers = [pair for pair in values if isinstance(pair[0], int | float)]
    words = [index for value, index in values if isinstance(value, str)]
    kept = words[:1]
    if numbers:
        kept += [min(numbers)[1], max(numbers)[1]]
    return kept
