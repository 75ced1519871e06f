"""Records as JSON lines in one file, of bounded size, that survives its writer."""

import json
import os
import time
from pathlib import Path
from typing import Any, final

from fuelflow.step.checks import checked_count
from fuelflow.watch.record.files import replace
from fuelflow.watch.record.reading import FILE_NAME, read_record, read_records
from fuelflow.watch.record.records import LIVE_KINDS, Record, folded, thinned

MAX_BYTES = 64 * 2**20
_SECS_BETWEEN_TRIES = 60.0
# What is thinned out to make room, in this order, and to how much of the whole.
_ROOM = 0.5
_THINNED = ("step", "event", "compile", "pass", "epoch")


@final
class JsonLines:
    """Appends each record as one line of JSON to a file.

    A line is written at once and whole, so a writer that is killed leaves every earlier
    one. A torn last line, of an earlier writer, is taken away. When the file would get
    too large, one with fewer records takes its place at once: without steps that were
    done anew, and with every other step, or fewer; then, if that is not enough, with
    fewer events, compilations and, last of all, epochs.

    Args:
        path: The file, or a directory, in which it is ``records.jsonl``.
        max_bytes: How large the file gets at most, at least 10 kB.

    Raises:
        TypeError: If ``max_bytes`` is no number.
        ValueError: If it is too small.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_bytes = checked_count("max_bytes", max_bytes, least=10_000)
        file = Path(path)
        self._path = file if file.suffix else file / FILE_NAME
        self._file: Any = None
        self._size = 0
        self._tried = -_SECS_BETWEEN_TRIES

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def __call__(self, record: dict[str, Any]) -> None:
        """Appends a record.

        Raises:
            OSError: If it cannot be written; the lines before stay.
        """
        if record["kind"] in LIVE_KINDS:
            return
        line = encoded(record)
        if self._file is None:
            self._open()
        if self._size + len(line) > self._max_bytes:
            self._make_room(len(line))
        self._write(line)

    def close(self) -> None:
        """Closes the file; another record opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _mend(self._path)
        self._file = self._path.open("ab", buffering=0)
        self._size = self._file.tell()

    def _write(self, line: bytes) -> None:
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            if written:  # on a full disk there is room to take away
                self._file.truncate(self._size)
            raise
        self._size += len(line)

    def _make_room(self, num_bytes: int) -> None:
        if time.monotonic() - self._tried < _SECS_BETWEEN_TRIES:
            raise OSError(f"{self._path} is full, and could not be made smaller")
        self._tried = time.monotonic()
        limit = int(self._max_bytes * _ROOM) - num_bytes
        lines = [encoded(each) for each in made_smaller(self._path, limit)]
        text = b"".join(lines).decode()
        replace(self._path, text)
        self.close()
        self._open()
        self._tried = -_SECS_BETWEEN_TRIES


def encoded(record: dict[str, Any]) -> bytes:
    """A record as one line."""
    text = json.dumps(record, allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def made_smaller(path: Path, num_bytes: int) -> list[Record]:
    """Records of a file that take at most so many bytes, if that can be."""
    records = folded(read_records(path))
    for kind in _THINNED:
        excess = sum(len(encoded(each)) for each in records) - num_bytes
        if excess <= 0:
            break
        some = [each for each in records if each["kind"] == kind]
        size = sum(len(encoded(each)) for each in some)
        share = max(1 - excess / size, 0.0) if size else 0.0
        kept = _some_of(kind, some, int(len(some) * share))
        ids = {id(each) for each in kept}
        records = [each for each in records if each["kind"] != kind or id(each) in ids]
    return records


def _some_of(kind: str, records: list[Any], most: int) -> list[Any]:
    if kind == "step":
        return thinned(records, max(most, 2))
    if kind == "epoch" and most:
        every = -(-len(records) // most)
        return records[::-1][::every][::-1]
    return records[len(records) - most :]


def _mend(path: Path) -> None:
    """Takes a torn last line away, or ends it if only that is missing."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start, tail = size, b""
        while start and b"\n" not in tail:
            start = max(start - 65_536, 0)
            file.seek(start)
            tail = file.read(size - start)
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        if read_record(last) is not None:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(size - len(last))
