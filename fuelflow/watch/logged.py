"""What is logged by hand: refused where it is written, if it can be no number."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp


def checked_numbers(numbers: Mapping[Any, Any]) -> dict[str, Any]:
    """The numbers by name, as they are now, without waiting for any.

    Args:
        numbers: Each a number, or a row of them, one of each step: also an array of
            NumPy or of JAX, which may not be there yet.

    Raises:
        TypeError: If a name is no string, or a value no number or row of them.
    """
    for name, value in numbers.items():
        if not isinstance(name, str):
            raise TypeError(
                f"what is logged must be named by strings, got {name!r} of type "
                f"{type(name).__name__}"
            )
        kind = _fault(value)
        if kind is not None:
            raise TypeError(
                f"`{name}` must be a number, or an array of a number for each step, "
                f"to be logged, got {kind}"
            )
    return dict(numbers)


def _fault(value: Any) -> str | None:
    """What a value is, if it is no number."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        kind = type(value).__name__
        # Of other libraries too; a complex number has no such method.
        return None if hasattr(type(value), "__float__") else f"a {kind}"
    try:
        is_real = jnp.issubdtype(dtype, jnp.bool_) or (
            jnp.issubdtype(dtype, jnp.number)
            and not jnp.issubdtype(dtype, jnp.complexfloating)
        )
    except TypeError:  # another library's
        is_real = True
    if not is_real or len(shape) > 1 or 0 in shape:
        return f"an array of {dtype} {list(shape)}"
    return None
