"""A source that is a mapping from names to whole arrays."""

from collections.abc import Mapping
from typing import Any, Protocol, final

import jax
import numpy as np

from fuelflow.data.fields import Fields, checked_names, checked_spec
from fuelflow.data.memory import Empty, aligned_empty
from fuelflow.step.spec import require_array


class Column(Protocol):
    """All rows of one field, of which some can be had."""

    def take(self, rows: np.ndarray, empty: Empty) -> np.ndarray:
        """Rows in an array ``[len(rows), ...]`` that ``empty`` makes."""
        ...


@final
class MemoryColumn:
    """A NumPy array; `numpy.memmap` too, whose rows come from the file."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values.view(np.ndarray)

    def take(self, rows: np.ndarray, empty: Empty) -> np.ndarray:
        """Rows, copied once and straight to where they stay."""
        out = empty((len(rows), *self._values.shape[1:]), self._values.dtype)
        if self._values.flags.c_contiguous:
            # Rows are in range; NumPy's check of that would buffer the output.
            return self._values.take(rows, axis=0, out=out, mode="clip")
        out[...] = self._values[rows]  # `take` would copy the whole array
        return out


@final
class SlicedColumn:
    """Anything that is sliced by sorted indices, such as an HDF5 data set."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def take(self, rows: np.ndarray, empty: Empty) -> np.ndarray:
        """Rows, each read once and in the file's order."""
        wanted, places = np.unique(rows, return_inverse=True)
        first, last = int(wanted[0]), int(wanted[-1])
        if last - first + 1 == len(wanted):  # a slice is read much faster
            read = np.asarray(self._values[first : last + 1])
        else:
            read = np.asarray(self._values[wanted])
        return MemoryColumn(read).take(places, empty)


@final
class ArrayTable:
    """Rows of named arrays that share their leading axis.

    Args:
        arrays: NumPy or JAX arrays, memory maps, or what else has a shape, a dtype and
            is sliced by an index array. They are not copied.

    Raises:
        TypeError: If one is no array of numbers, or a name no string.
        ValueError: If there is none, or they disagree on the number of rows.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        checked_names(arrays, "`source`")
        self._arrays = {name: _as_array(name, x) for name, x in arrays.items()}
        self.fields: Fields = {
            name: checked_spec(name, values.dtype, values.shape[1:])
            for name, values in self._arrays.items()
        }
        self.num_rows = _common_length(self._arrays)
        self.is_in_memory = all(
            isinstance(values, jax.Array) or type(values) is np.ndarray
            for values in self._arrays.values()
        )
        # A JAX array that stays on its device is not brought to the host for this.
        self._columns: dict[str, Column] = {}

    def take(
        self, rows: np.ndarray, empty: Empty = aligned_empty
    ) -> dict[str, np.ndarray]:
        """Rows of each field, in arrays that ``empty`` makes."""
        return {name: self._column(name).take(rows, empty) for name in self._arrays}

    def whole(self) -> dict[str, Any]:
        """All rows of each field."""
        return {
            name: values if isinstance(values, jax.Array) else values[:]
            for name, values in self._arrays.items()
        }

    def _column(self, name: str) -> Column:
        if name not in self._columns:  # two threads may both do it: no harm
            self._columns[name] = _make_column(self._arrays[name])
        return self._columns[name]


def _make_column(values: Any) -> Column:
    if isinstance(values, np.ndarray | jax.Array):
        return MemoryColumn(np.asarray(values))
    return SlicedColumn(values)


def _as_array(name: str, values: Any) -> Any:
    if isinstance(values, Mapping):
        raise TypeError(
            f"`{name}` must be an array, got a {type(values).__name__}: a source's "
            "fields are flat, give each inner one a name of its own"
        )
    if not isinstance(values, np.ndarray | jax.Array):
        values = _foreign_array(name, values)
    if not values.shape:
        raise ValueError(f"`{name}` must have a leading row axis, got a scalar")
    return values


def _foreign_array(name: str, values: Any) -> Any:
    dtype = getattr(values, "dtype", None)
    if isinstance(dtype, np.dtype) and hasattr(values, "__getitem__"):
        return values
    if dtype is not None:  # such as a tensor, whose memory NumPy shares
        return np.asarray(values)
    require_array(name, values)
    return values


def _common_length(arrays: Mapping[str, Any]) -> int:
    lengths = {name: values.shape[0] for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"`{name}` has {n}" for name, n in lengths.items())
        raise ValueError(f"a source's fields must have the same rows: {listed}")
    return next(iter(lengths.values()))
