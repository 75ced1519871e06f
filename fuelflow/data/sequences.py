"""Sources of rows that are had by number: `__len__` and `__getitem__`."""

from typing import Any, final

import numpy as np

from fuelflow._errors import RowError
from fuelflow.data.fields import Fields, checked_names, checked_spec, listed
from fuelflow.data.memory import Empty, aligned_empty, copied
from fuelflow.data.rows import specs_of_row, stack_rows

_MAX_LISTED = 8


@final
class SequenceTable:
    """Rows that are mappings, such as those of a torch dataset or a grain source.

    ``source.__getitems__`` is used where there is one. An error of the source's own
    comes out as it is, with a note that names the row.

    Args:
        source: Read at row 0, for the fields.

    Raises:
        TypeError: If rows are no mappings from names to numbers.
        ValueError: If there is no row, or no field.
    """

    is_in_memory = False

    def __init__(self, source: Any) -> None:
        self._source = source
        self.num_rows = _checked_length(source)
        self.fields: Fields = specs_of_row(self._row(0))

    def take(
        self, rows: np.ndarray, empty: Empty = aligned_empty
    ) -> dict[str, np.ndarray]:
        """Rows of each field, as new arrays."""
        numbers = rows.tolist()
        return stack_rows(self._rows(numbers), numbers, self.fields, empty)

    def whole(self) -> dict[str, np.ndarray]:
        """All rows of each field."""
        return self.take(np.arange(self.num_rows))

    def _rows(self, numbers: list[int]) -> list[Any]:
        if not hasattr(self._source, "__getitems__"):
            return [self._row(number) for number in numbers]
        rows = _read_many(self._source.__getitems__, numbers)
        if len(rows) != len(numbers):
            raise ValueError(
                f"`__getitems__` of the source must give the {len(numbers)} rows it "
                f"is asked for, got {len(rows)}"
            )
        return rows

    def _row(self, number: int) -> Any:
        try:
            return self._source[number]
        except BaseException as error:
            error.add_note(f"while reading row {number} of the source")
            raise


@final
class ColumnTable:
    """A Hugging Face dataset: several rows at once come as columns.

    A dataset without a format of its own is read as NumPy arrays.

    Args:
        source: Read at row 0, for the fields.

    Raises:
        TypeError: If a column does not hold numbers.
        ValueError: If there is no row, or no column.
    """

    is_in_memory = False

    def __init__(self, source: Any) -> None:
        has_format = source.format["type"] is not None
        self._source = source if has_format else source.with_format("numpy")
        self.num_rows = _checked_length(source)
        checked_names(dict.fromkeys(source.column_names), "`source`")
        first = self._columns([0])
        self.fields: Fields = {
            name: checked_spec(name, values.dtype, values.shape[1:])
            for name, values in first.items()
        }

    def take(
        self, rows: np.ndarray, empty: Empty = aligned_empty
    ) -> dict[str, np.ndarray]:
        """Rows of each field, as new arrays."""
        numbers = rows.tolist()
        columns = self._columns(numbers)
        for name, spec in self.fields.items():
            values = columns[name]
            if values.dtype != spec.dtype or values.shape[1:] != spec.shape:
                # One of the rows is to blame: the same rows singly tell which.
                singles = [self._single(number) for number in numbers]
                return stack_rows(singles, numbers, self.fields, empty)
        # A dataset may show memory of its own.
        return {name: copied(values) for name, values in columns.items()}

    def whole(self) -> dict[str, np.ndarray]:
        """All rows of each field."""
        return self.take(np.arange(self.num_rows))

    def _single(self, number: int) -> dict[str, np.ndarray]:
        return {name: values[0] for name, values in self._columns([number]).items()}

    def _columns(self, numbers: list[int]) -> dict[str, np.ndarray]:
        columns = _read_many(self._source.__getitem__, numbers)
        arrays = {name: np.asarray(values) for name, values in columns.items()}
        for name, values in arrays.items():
            if values.shape[:1] != (len(numbers),):
                raise RowError(
                    numbers[0],
                    f"and {len(numbers) - 1} more must give {len(numbers)} values of "
                    f"`{name}`, got shape {values.shape}; its columns are "
                    f"{listed(arrays)}",
                )
        return arrays


def _read_many(read: Any, numbers: list[int]) -> Any:
    try:
        return read(numbers)
    except BaseException as error:
        more = ", ..." if len(numbers) > _MAX_LISTED else ""
        some = ", ".join(map(str, numbers[:_MAX_LISTED]))
        error.add_note(f"while reading rows {some}{more} of the source")
        raise


def _checked_length(source: Any) -> int:
    num_rows = len(source)
    if num_rows == 0:
        raise ValueError("`source` must have at least one row, got none")
    return num_rows
