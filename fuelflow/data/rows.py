"""Rows that come one by one, as mappings, made into batches of arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fuelflow._errors import RowError
from fuelflow.data.fields import Fields, checked_names, checked_spec, listed
from fuelflow.data.memory import Empty, aligned_empty


def specs_of_row(row: Any) -> Fields:
    """The fields of a source, from its first row.

    Raises:
        TypeError: If the row is no mapping from names to numbers.
        ValueError: If it has no field.
    """
    if not isinstance(row, Mapping):
        raise TypeError(
            "each row of the source must be a mapping from field names to values, got "
            f"a {type(row).__name__}: have the source give rows such as "
            '{"image": image, "label": label}'
        )
    checked_names(row, "each row of the source")
    arrays = {name: np.asarray(value) for name, value in row.items()}
    return {
        name: checked_spec(name, values.dtype, values.shape)
        for name, values in arrays.items()
    }


def stack_rows(
    rows: Sequence[Any],
    numbers: Sequence[int],
    fields: Fields,
    empty: Empty = aligned_empty,
) -> dict[str, np.ndarray]:
    """Rows stacked field by field.

    Args:
        rows: One mapping for each row.
        numbers: Their numbers in the source, for messages.
        fields: What each must have.
        empty: Makes the arrays.

    Raises:
        RowError: If a row has other fields, shapes or dtypes.
    """
    stacked = {
        name: empty((len(rows), *spec.shape), spec.dtype)
        for name, spec in fields.items()
    }
    for place, (number, row) in enumerate(zip(numbers, rows, strict=True)):
        _require_fields(number, row, fields)
        for name, spec in fields.items():
            value = np.asarray(row[name])
            if value.shape != spec.shape or value.dtype != spec.dtype:
                _require_like(number, name, value, fields)
            stacked[name][place] = value
    return stacked


def _require_fields(number: int, row: Any, fields: Fields) -> None:
    if not isinstance(row, Mapping):
        raise RowError(number, f"must be a mapping, got a {type(row).__name__}")
    if row.keys() != fields.keys():
        raise RowError(
            number,
            f"must have the fields of the first, {listed(fields)}, got {listed(row)}",
        )


def _require_like(number: int, name: str, value: np.ndarray, fields: Fields) -> None:
    spec = fields[name]
    if value.shape != spec.shape:
        raise RowError(
            number,
            f"has shape {value.shape} in the field `{name}`, the first has "
            f"{spec.shape}: pad or cut rows to one shape",
        )
    if not np.can_cast(value.dtype, spec.dtype, "safe"):
        raise RowError(
            number,
            f"has dtype {value.dtype} in the field `{name}`, which does not fit the "
            f"first row's {spec.dtype}",
        )
