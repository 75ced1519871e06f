"""Learning rates: the shape they come in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fuelflow._types import Schedule


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
