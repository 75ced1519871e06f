"""Records as rows of a table."""

import csv
import io
import os
from collections.abc import Iterable
from typing import Any, final

from fuelflow.watch.record.files import replace, replaceable
from fuelflow.watch.record.records import Record

_FIRST = ("kind", "epoch", "step", "time")
_KINDS = ("epoch", "pass", "step")


@final
class Csv:
    """Writes a row of numbers for each epoch, or step, into a CSV file.

    Columns are those that any row has; where a row has no such number it is blank. A
    column that comes later has the file written anew, which takes its place at once. A
    run that goes on adds to the file, without the rows that are done anew; one that
    begins anew begins the file anew.

    Args:
        path: The file, or a link to it.
        kinds: Of which records there are rows: ``"epoch"``, ``"pass"`` (of a loop
            written by hand) and ``"step"`` (a few each second).

    Raises:
        ValueError: If there is another kind, or none; or if the path is that of a
            directory or a device.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "epochs.csv"
        >>> sink = Csv(path)
        >>> means = {"loss": 0.5}
        >>> sink(Record(kind="pass", time=0.0, epoch=0, step=9, means=means))
        >>> path.read_text().splitlines()
        ['kind,epoch,step,time,loss', 'pass,0,9,0.0,0.5']
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        kinds: Iterable[str] = ("epoch", "pass"),
    ) -> None:
        self._path = replaceable(path)
        self._kinds = frozenset([kinds] if isinstance(kinds, str) else kinds)
        if not self._kinds or not self._kinds <= set(_KINDS):
            given = sorted(self._kinds)
            raise ValueError(
                f"`kinds` must be some of {', '.join(_KINDS)}, got {given}"
            )
        self._columns: list[str] | None = None

    def __call__(self, record: Record) -> None:
        """Adds a row, if the record is of a kind that has one.

        Raises:
            OSError: If it cannot be written; the rows before stay.
        """
        if record.kind == "run":
            self._begin(record)
        if record.kind not in self._kinds:
            return
        if self._columns is None:
            self._write_all([], list(_FIRST))
        assert self._columns is not None
        row = _row(record)
        new = [name for name in row if name not in self._columns]
        if new:
            self._write_all(self._rows(), [*self._columns, *new])
        self._append(_lines([row], self._columns).encode())

    def _append(self, line: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if file.write(line) == len(line):
                return
            file.truncate(size)
            raise OSError(f"{self._path} has no room for another row")

    def _begin(self, run: Record) -> None:
        """Keeps the rows of an earlier part of the run."""
        if not self._path.exists():
            return
        rows = [row for row in self._rows() if not _is_done_anew(row, run)]
        columns = dict.fromkeys([*_FIRST, *(name for row in rows for name in row)])
        self._write_all(rows, list(columns))

    def _rows(self) -> list[dict[str, str]]:
        with self._path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        return [row for row in rows if row.get("kind") in _KINDS and None not in row]

    def _write_all(self, rows: Iterable[dict[str, Any]], columns: list[str]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = ",".join(map(_quoted, columns)) + "\n" + _lines(rows, columns)
        replace(self._path, text)
        self._columns = columns


def _row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": record.kind,
        "epoch": record.epoch,
        "step": record.step,
        "time": record["time"],
    }
    for scalar, value in record.scalars.items():
        name = scalar.removeprefix("epoch/")
        row[name if name not in row else f"{name}_"] = value
    return row


def _lines(rows: Iterable[dict[str, Any]], columns: list[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()


def _quoted(name: str) -> str:
    is_plain = not set(name) & set(',"\n\r')
    return name if is_plain else '"' + name.replace('"', '""') + '"'


def _is_done_anew(row: dict[str, str], run: Record) -> bool:
    try:
        if row["kind"] == "step":
            return int(row["step"]) > run["step"]
        return int(row["epoch"]) >= run["epoch"]
    except ValueError:  # a torn row
        return True
