"""Finished epochs as rows of one table, the columns that fit a terminal."""

from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

from fuelflow.metrics.wording import secs_text
from fuelflow.watch.record.records import number
from fuelflow.watch.screens.glyphs import Glyphs
from fuelflow.watch.screens.styled import Line, column
from fuelflow.watch.screens.text import clean, clipped, figure, speed_text

_MARGIN = "  "
_LEAST_WIDTH, _MOST_WIDTH = 9, 22
_GAP = 2


@dataclass(frozen=True)
class _Column:
    """A column: its heading, and how the figures in it look."""

    name: str
    style: str = ""

    @property
    def width(self) -> int:
        least = 0 if self.name == "epoch" else _LEAST_WIDTH
        return _GAP + min(max(cell_len(self.name), least), _MOST_WIDTH)


class EpochRows:
    """Makes a row of each epoch or pass, under headings that the first one decides.

    Args:
        glyphs: What it draws with.
    """

    def __init__(self, glyphs: Glyphs) -> None:
        self._glyphs = glyphs
        self._columns: list[_Column] = []
        self._width = 0

    def lines(self, record: dict[str, Any], width: int) -> list[Line]:
        """The row of a record; headings above it, if they are not there yet.

        Args:
            record: Of kind ``epoch`` or ``pass``.
            width: Columns of the terminal; what does not fit is left out.
        """
        cells = _cells(record)
        names = [name for name in cells if name not in {c.name for c in self._columns}]
        head: list[Line] = []
        if (names and self._width != width) or not self._columns:
            self._columns = _chosen(cells, width - 1)
            self._width = width
            head = [[], self._row({c.name: c.name for c in self._columns}, "dim")]
        return [*head, self._row(cells)]

    def _row(self, cells: dict[str, str], style: str | None = None) -> Line:
        line: Line = [(_MARGIN, "")]
        for each in self._columns:
            text = clipped(
                cells.get(each.name, "—"), each.width - _GAP, self._glyphs.ellipsis
            )
            look = each.style if style is None else style
            line.append(column(text, each.width, look, to_right=True))
        return line


def _chosen(cells: dict[str, str], width: int) -> list[_Column]:
    """The columns that fit, the most telling ones first; in the order of the cells."""
    names = list(cells)
    first = [name for name in ("epoch", "loss", "eval loss", "time") if name in cells]
    chosen: list[str] = []
    room = width - len(_MARGIN)
    for name in [*first, *(name for name in names if name not in first)]:
        wide = _styled(name).width
        if wide <= room:
            chosen.append(name)
            room -= wide
    return [_styled(name) for name in names if name in chosen]


def _styled(name: str) -> _Column:
    if name in ("epoch", "time", "samples/s", "lr"):
        return _Column(name, "dim")
    return _Column(name, "yellow" if name.startswith("eval ") else "")


def _cells(record: dict[str, Any]) -> dict[str, str]:
    """Heading and text of all that is told of an epoch, in order."""
    if record["kind"] == "pass":
        secs = number(record["secs"])
        means = {"loss": None, **record["means"]}
        return {
            "epoch": f"{record['epoch']}",
            **{clean(name): figure(value) for name, value in means.items()},
            "time": secs_text(1e3 * secs),
        }
    metrics = record["metrics"]
    epoch_ms = number(metrics["epoch_ms"])
    samples = sum(metrics["per_rank_samples"])
    cells = {"epoch": f"{metrics['epoch']}", "loss": figure(metrics["avg_loss"])}
    cells |= {clean(name): figure(v) for name, v in metrics["scalars"].items()}
    for name, value in metrics["evaluation"].items():
        cells[f"eval {clean(name)}"] = figure(value)
    cells["samples/s"] = speed_text(1e3 * samples / epoch_ms if epoch_ms > 0 else None)
    cells["time"] = secs_text(epoch_ms)
    if metrics["lr"] is not None:
        cells["lr"] = figure(metrics["lr"])
    return cells
