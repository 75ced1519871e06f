"""What a field of a data set is: a name, a dtype, and the shape of one row."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fuelflow.step.spec import require_array


class FieldSpec(NamedTuple):
    """Dtype and shape of one row of a field.

    Example:
        >>> str(FieldSpec(np.dtype("float32"), (28, 28)))
        'float32[28,28]'
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"

    @property
    def device_bytes(self) -> int:
        """Bytes of one row as JAX keeps it."""
        dtype = jax.dtypes.canonicalize_dtype(self.dtype)
        return math.prod(self.shape) * dtype.itemsize


Fields = dict[str, FieldSpec]


def row_bytes(fields: Fields) -> int:
    """Bytes of one row of all fields on the device."""
    return sum(spec.device_bytes for spec in fields.values())


def checked_spec(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> FieldSpec:
    """The spec of rows ``[*shape]``, refused by name if they are not numbers."""
    require_array(name, np.empty(0, dtype))
    return FieldSpec(np.dtype(dtype), tuple(shape))


def checked_names(fields: Mapping[Any, Any], owner: str) -> None:
    """Refuses fields that are none, or not named by strings."""
    if not fields:
        raise ValueError(f"{owner} must have at least one field, got none")
    for name in fields:
        if not isinstance(name, str):
            raise TypeError(f"a field's name must be a string, got {name!r}")


def listed(names: Mapping[str, Any]) -> str:
    """Field names as a message shows them."""
    return ", ".join(f"`{name}`" for name in names)
