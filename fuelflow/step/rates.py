"""Learning rates: the arguments they are made of, and the shape they come in."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp

from fuelflow._types import Schedule

_LARGEST_STEP = 2**31 - 1


def elementwise(rate: Callable[[Any], Any]) -> Schedule:
    """The rate function with int32 steps of any shape in, strong float32 out."""

    def schedule(step: Any) -> jax.Array:
        if not jnp.issubdtype(jnp.result_type(step), jnp.integer):
            raise TypeError(f"`step` must be an integer, got {jnp.result_type(step)}")
        step = jnp.asarray(step, jnp.int32)
        return jnp.broadcast_to(jnp.asarray(rate(step), jnp.float32), step.shape)

    return schedule


def between(start: float, end: float, weight: Any) -> Any:
    """``start`` at weight 0 and ``end`` at weight 1, both exactly."""
    return start * (1 - weight) + end * weight


def checked_number(name: str, value: object) -> float:
    """The value as a float, refused by name if it is not a real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"`{name}` must be a number, got {value!r} of type {type(value).__name__}"
        )
    return float(value)


def checked_rate(name: str, value: object) -> float:
    """The value as a float, refused by name if it is negative or not finite."""
    number = checked_number(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"`{name}` must be finite and at least 0, got {value}")
    return number


def checked_positive(name: str, value: object) -> float:
    """The value as a float, refused by name if it is not positive or not finite."""
    number = checked_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"`{name}` must be finite and more than 0, got {value}")
    return number


def checked_count(name: str, value: object, *, least: int) -> int:
    """The value as an int, refused by name if it is none, too small or no int32."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"`{name}` must be an integer, got {value!r} of type {type(value).__name__}"
        )
    count = int(value)
    if count < least:
        raise ValueError(f"`{name}` must be at least {least}, got {count}")
    if count > _LARGEST_STEP:
        raise ValueError(f"`{name}` must fit in an int32, got {count}")
    return count


def checked_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """The value, refused by name if it is none of the choices."""
    if value not in choices:
        listed = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"`{name}` must be {listed}, got {value!r}")
    return value
