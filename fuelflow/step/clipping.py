"""Gradient clipping by global norm and by value."""

import functools
import operator
from collections.abc import Sequence

import jax.numpy as jnp

from fuelflow._types import Array, Grads, Scalar


def square_sum(grad: Array) -> Scalar:
    """The sum of a gradient's squares, in float32 or wider, ``[]``.

    The global norm is the root of their sum over all gradients, in order, and rounds as
    `optax.tree.norm` does. Taken apart, each can be computed while others' gradients
    still are, and tells on its own whether its gradient is finite.

    Example:
        >>> float(square_sum(jnp.array([3.0, 4.0])))
        25.0
    """
    return jnp.sum(jnp.square(_widened(grad)))


def sum_in_order(terms: Sequence[Scalar]) -> Scalar:
    """The sum of scalars, added from first to last."""
    return functools.reduce(operator.add, terms)


def clip_by_global_norm(grads: Grads, norm: Scalar, max_norm: float) -> Grads:
    """Gradients scaled so that their global norm is at most ``max_norm``.

    Equals ``grads * min(1, max_norm / norm)``, rounded as
    `optax.clip_by_global_norm` does. Where the norm is not finite the gradients stay as
    they are, so that one NaN does not spread to every parameter.

    Args:
        grads: Gradients by name.
        norm: Their global norm, float32 ``[]``.
        max_norm: Largest norm to keep, positive.

    Returns:
        The clipped gradients, dtypes kept.

    Example:
        >>> grads = {"w": jnp.array([3.0, 4.0])}
        >>> clip_by_global_norm(grads, jnp.float32(5.0), 2.5)["w"].tolist()
        [1.5, 2.0]
    """
    is_kept = (norm < max_norm) | ~jnp.isfinite(norm)

    def clip(grad: Array) -> Array:
        scaled = (_widened(grad) / norm) * max_norm
        return jnp.where(is_kept, grad, scaled.astype(grad.dtype))

    return {name: clip(grad) for name, grad in grads.items()}


def clip_by_value(grads: Grads, max_value: float) -> Grads:
    """Gradients with every entry held within ``[-max_value, max_value]``.

    Example:
        >>> clip_by_value({"w": jnp.array([-3.0, 0.5])}, 1.0)["w"].tolist()
        [-1.0, 0.5]
    """
    return {name: jnp.clip(grad, -max_value, max_value) for name, grad in grads.items()}


def _widened(grad: Array) -> Array:
    """In float32 at least: the square of a float16 overflows at 256."""
    return grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
