"""Weighted means: the one way a loss or metric becomes a number."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fuelflow._types import Array, Scalar


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Weighted:
    """Values with the weight each carries; stands for their weighted mean.

    Means ``sum(value * weight) / sum(weight)``. Over microbatches, batches and ranks
    the sums are added before the division, so that every token counts the same wherever
    it falls. A value of weight 0 counts for nothing, even if it is NaN; its gradient
    is multiplied by 0, which does not stop a NaN or infinity there, so make masked
    inputs harmless before ``log`` or a division sees them.

    Args:
        value: Floating array of any shape, such as the loss of each token
            ``[batch, time]``. A leading axis of the batch's size is taken for the
            batch's.
        weight: Array that broadcasts to ``value``, such as a mask; not negative.

    Example:
        >>> weighted = Weighted(jnp.array([1.0, 3.0]), jnp.array([3.0, 1.0]))
        >>> float(read_form(weighted, "the loss", 2, None).mean)
        1.5
    """

    value: Any
    weight: Any


class Mean(NamedTuple):
    """A weighted mean together with the weight it stands for.

    ``mean`` is 0 where the weight is 0, so that it can take part in sums and gradients.
    """

    mean: Scalar
    weight: Scalar


def read_form(
    form: Any,
    what: str,
    num_rows: int,
    row_weight: Array | None,
    *,
    is_loss: bool = True,
) -> Mean:
    """The weighted mean that a loss or metric stands for, in float32 or wider.

    Args:
        form: A scalar (the mean over the batch), a vector ``[num_rows]``, or
            `Weighted`.
        what: How errors name it.
        num_rows: Rows in the batch.
        row_weight: Weight of each row ``[num_rows]``, or None for 1 each. A scalar
            cannot be told apart by row, so it keeps its value (see `is_maskable`).
        is_loss: Whether the value must be floating; metrics may also be bool or
            integer.

    Raises:
        TypeError: If the value's dtype is wrong.
        ValueError: If the value's shape is wrong.
    """
    value = form.value if isinstance(form, Weighted) else form
    value = read_value(value, what, is_loss=is_loss)
    if isinstance(form, Weighted):
        weight = broadcast_weight(form.weight, value, what)
        if row_weight is not None and is_maskable(form, num_rows):
            shape = (num_rows,) + (1,) * (value.ndim - 1)
            weight = weight * row_weight.reshape(shape)
        return weighted_mean(value, weight)
    if value.ndim == 0:
        rows = jnp.float32(num_rows) if row_weight is None else jnp.sum(row_weight)
        return Mean(value, rows)
    if value.shape != (num_rows,):
        raise ValueError(
            f"{what} must be a scalar, a vector of one value per example [{num_rows}], "
            f"or ff.Weighted(value, weight), got {value.dtype}{list(value.shape)}"
        )
    if row_weight is not None:
        return weighted_mean(value, row_weight)
    # A constant divisor keeps the bits of `jnp.mean` and of its gradient.
    return Mean(jnp.sum(value) / num_rows, jnp.float32(num_rows))


def is_maskable(form: Any, num_rows: int) -> bool:
    """Whether single rows can be left out of what a form stands for."""
    value = form.value if isinstance(form, Weighted) else form
    return jnp.ndim(value) > 0 and jnp.shape(value)[0] == num_rows


def read_value(
    value: Any,
    what: str,
    *,
    is_loss: bool = False,
    forms: str = "a scalar, a vector of one value per example, or "
    "ff.Weighted(value, weight)",
) -> Array:
    """A number or array as floats of 32 bits or more.

    Args:
        value: The value.
        what: What it is, for errors.
        is_loss: Whether it must be floating, and not integer or bool.
        forms: What it may be, for errors.

    Raises:
        TypeError: If it is something else.
    """
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what} must be {forms}, got a {type(value).__name__}"
        ) from error
    kinds = (jnp.floating,) if is_loss else (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        rule = "floating" if is_loss else "floating, integer or bool"
        raise TypeError(f"{what} must be {rule}, got {array.dtype}{list(array.shape)}")
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def broadcast_weight(weight: Any, value: Array, what: str) -> Array:
    """A weight as large as its value.

    Raises:
        TypeError: If it is no array of real numbers.
        ValueError: If it does not broadcast to the value.
    """
    array = read_value(weight, f"the weight of {what}")
    try:
        return jnp.broadcast_to(array, value.shape)
    except ValueError as error:
        raise ValueError(
            f"the weight of {what} must broadcast to its value {list(value.shape)}, "
            f"got {list(array.shape)}"
        ) from error


def weighted_mean(value: Array, weight: Array) -> Mean:
    """``sum(value * weight) / sum(weight)`` of arrays of one shape, and that weight."""
    weight = jax.lax.stop_gradient(weight)
    total = jnp.sum(jnp.where(weight == 0, 0, value) * weight)
    sum_weight = jnp.sum(weight)
    return Mean(total / jnp.where(sum_weight == 0, 1, sum_weight), sum_weight)
