"""The kinds of sources, each with the one adapter that reads it."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from fuelflow.data.arrays import ArrayTable
from fuelflow.data.fields import Fields
from fuelflow.data.memory import Empty, aligned_empty
from fuelflow.data.sequences import ColumnTable, SequenceTable
from fuelflow.data.streams import Stream


class Table(Protocol):
    """Rows of named fields that are had by number, from several threads at once."""

    fields: Fields
    num_rows: int
    is_in_memory: bool

    def take(
        self, rows: np.ndarray, empty: Empty = aligned_empty
    ) -> dict[str, np.ndarray]:
        """Rows of each field ``[len(rows), ...]``, in arrays that nobody else has.

        Args:
            rows: From 0 to ``num_rows - 1``.
            empty: Makes such arrays, for sources that need not make their own.
        """
        ...

    def whole(self) -> dict[str, Any]:
        """All rows of each field, in arrays that are not to be changed."""
        ...


def make_source(source: Any) -> Table | Stream:
    """The adapter of a source.

    Raises:
        TypeError: If it is of no known kind.
        ValueError: If it has no rows or no fields, or fields of different lengths.
    """
    if isinstance(source, Mapping):
        return _with_rows(ArrayTable(source))
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        if isinstance(source, str | bytes) or hasattr(source, "dtype"):
            raise TypeError(
                "`source` must name its fields, got a bare "
                f'{type(source).__name__}: write {{"x": values}}'
            )
        if hasattr(source, "column_names") and hasattr(source, "with_format"):
            return ColumnTable(source)
        return SequenceTable(source)
    if callable(source):
        return Stream(source)
    raise TypeError(
        "`source` must be a mapping of arrays, a sequence of rows with `__len__` and "
        "`__getitem__`, or a function that gives an iterator of rows, got a "
        f"{type(source).__name__}{_remedy(source)}"
    )


def _with_rows(table: ArrayTable) -> ArrayTable:
    if table.num_rows == 0:
        raise ValueError("`source` must have at least one row, got none")
    return table


def _remedy(source: Any) -> str:
    if hasattr(source, "__next__"):
        return (
            ": an iterator can be used for one epoch only, pass the function that "
            "makes it"
        )
    if isinstance(source, Iterable):
        return ": pass `lambda: iter(source)` to read it as a stream"
    return ""
