"""Reading records back from a file, whatever became of whoever wrote it."""

import json
import os
from pathlib import Path

from fuelflow.watch.record.records import Record

FILE_NAME = "records.jsonl"


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a run, in order.

    Lines that are no records are passed over, such as the last one of a writer that was
    killed. Steps and epochs that were done anew are in it each time.

    Args:
        path: The file, or the directory that has it as ``records.jsonl``.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE_NAME
    lines = file.read_bytes().split(b"\n")
    return [record for line in lines if (record := read_record(line)) is not None]


def read_record(line: bytes) -> Record | None:
    """The record of a line; None if it is none."""
    try:
        record = json.loads(line)
    except ValueError:  # torn, or no text at all
        return None
    is_one = isinstance(record, dict) and isinstance(record.get("kind"), str)
    return Record(record) if is_one else None
