"""Names, figures and times as a screen shows them."""

import math
import textwrap
from typing import Any

from fuelflow.metrics.wording import number_text
from fuelflow.watch.record.records import number

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def clean(text: str) -> str:
    """Text on one line: what would move a terminal's cursor is a blank in it."""
    return "".join(char if char.isprintable() else " " for char in text)


def clipped(text: str, length: int, ellipsis: str = "…") -> str:
    """Text of at most some letters, its middle left out where it is too long.

    Both ends stay, as names differ in the last part of their path.
    """
    if len(text) <= length:
        return text
    if length <= len(ellipsis) + 1:
        return text[: max(length, 0)]
    room = length - len(ellipsis)
    return text[: room - room // 2] + ellipsis + text[len(text) - room // 2 :]


def wrapped(text: str, width: int, most: int, ellipsis: str = "…") -> list[str]:
    """Text in at most some lines; what is too much is cut off at its end.

    Example:
        >>> wrapped("the loss is nan in step 7", 12, 2)
        ['the loss is', 'nan in step…']
    """
    lines = textwrap.wrap(text, max(width, 1)) or [""]
    if len(lines) <= most:
        return lines
    room = max(width - len(ellipsis), 0)
    return [*lines[: most - 1], f"{lines[most - 1][:room]}{ellipsis}"[: max(width, 0)]]


def figure(value: Any) -> str:
    """A number of a record to four digits; a dash where there is none."""
    return number_text(None if value is None else number(value))


def clock_text(secs: float) -> str:
    """A time as a clock shows it: 0:07, 12:30, 3:04:05, 2 d 03:04.

    Example:
        >>> clock_text(7.4), clock_text(3725), clock_text(2 * 86400 + 3600)
        ('0:07', '1:02:05', '2 d 01:00')
    """
    whole = max(round(secs), 0) if math.isfinite(secs) else 0
    minutes, seconds = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def bytes_text(count: float) -> str:
    """A number of bytes in the unit that suits it, three digits.

    Example:
        >>> bytes_text(812_345_678), bytes_text(96)
        ('812 MB', '96 B')
    """
    size, unit = float(count), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if size >= 99.95 or unit == 0 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {_UNITS[unit]}"


def speed_text(per_sec: Any) -> str:
    """How many a second: three digits, thousands set apart; a dash if not known.

    Example:
        >>> speed_text(52736.2), speed_text(0.5123)
        ('52,736', '0.512')
    """
    if per_sec is None:
        return "—"
    rate = number(per_sec)
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def percent_text(share: Any) -> str:
    """A fraction in percent; a dash if not known."""
    return "—" if share is None else f"{100 * number(share):.0f} %"


def counted(count: int, noun: str) -> str:
    """A count and its noun, which takes an s unless it is one.

    Example:
        >>> counted(1, "epoch"), counted(12000, "step")
        ('1 epoch', '12,000 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
