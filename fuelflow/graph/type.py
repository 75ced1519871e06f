"""What is known of a lazy array before it is run: its type."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuelflow.step.spec import require_array


class Type:
    """Shape, dtype and weakness of an array; one object for all that are alike."""

    __slots__ = ("__weakref__", "dtype", "shape", "weak")

    def __init__(self, shape: tuple[int, ...], dtype: Any, *, weak: bool) -> None:
        self.shape = shape
        self.dtype = dtype
        self.weak = weak

    def struct(self) -> jax.ShapeDtypeStruct:
        """The same, for tracing."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak)


known_types: dict[Hashable, Type] = {}
"""Types by shape, dtype and weakness, and by what JAX calls an array's type."""


def type_of(shape: tuple[int, ...], dtype: Any, weak: bool) -> Type:  # noqa: FBT001
    """The type with these properties."""
    found = known_types.get((shape, dtype, weak))
    if found is None:
        if not jnp.issubdtype(dtype, jax.dtypes.extended):
            canonical = jax.dtypes.canonicalize_dtype(dtype)
            if canonical != dtype:
                found = type_of(shape, canonical, weak)
        found = found or Type(shape, dtype, weak=weak)
        known_types[shape, dtype, weak] = found
    return found


def type_of_array(array: Any) -> Type:
    """The type of an array.

    Raises:
        TypeError: If it is no array of numbers.
    """
    kind = (array.shape, array.dtype, getattr(array, "weak_type", False))
    found = known_types.get(kind)
    if found is None or type(array) is np.ma.MaskedArray:
        require_array("an argument of a lazy function", array)
        found = type_of(*kind)
    return found
