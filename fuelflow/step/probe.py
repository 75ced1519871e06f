"""`probe`: a number recorded by name, from anywhere inside a model or a loss."""

import sys
from contextvars import ContextVar
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from fuelflow._types import Array
from fuelflow.step.probed import take_note
from fuelflow.step.weighted import broadcast_weight, read_value
from fuelflow.step.witness import Witness

witness: ContextVar[Witness | None] = ContextVar("witness", default=None)
"""Who is told what is recorded where nothing is traced, as with jit disabled."""


def probe(name: str, value: Any, weight: Any = None) -> None:
    """Records a number under a name, among the metrics of the step it is part of.

    A statement for the inside of a model or a loss, at any depth, also in ``jit``,
    ``scan``, ``cond``, loops, ``checkpoint``, ``vmap`` and functions with derivatives
    of their own. It then stands among the metrics that the loss returns: in an outcome,
    an evaluation and the means of an epoch. It has no part in the gradient. Outside of
    a step it does nothing.

    A name that is recorded several times in a pass, as by a layer that is called often
    or inside a ``scan``, stands for the mean of them all. Where `jax.vmap` runs a
    condition or a loop that goes another way for each row, it runs every way for every
    row, and so are they recorded; a ``weight`` of 0 leaves out what is not meant.

    Of rows of weight 0, such as fill a last batch up, nothing is recorded: the leading
    axis of a value is taken for the batch's if it has the batch's size, and if not, an
    axis of that size that a `jax.vmap` goes over. A value without one cannot be told
    apart by row, so it is left out of a batch that has such rows, with weight 0. (A
    scalar metric instead keeps a batch from being filled up; to observe changes
    nothing.)

    Args:
        name: The name of the metric.
        value: A real number or array, which stands for its mean.
        weight: An array that broadcasts to ``value``, not negative, for the mean
            ``sum(value * weight) / sum(weight)``, as of `Weighted`. Without it the
            mean counts as a metric of the batch: by its rows.

    Raises:
        TypeError: If the name is no string, or the value or weight not real numbers.
        ValueError: If the name is empty, ``loss`` or begins with ``eval.``, the value
            is an empty array, or the weight does not broadcast to it. As a step is
            traced: if the loss returns a metric of that name, or the name is recorded
            both with a weight and without.

    Example:
        >>> import fuelflow as ff, jax.numpy as jnp, numpy as np, optax
        >>> def loss_fn(params, batch):
        ...     error = params["w"] * batch["x"] - batch["y"]
        ...     ff.probe("bias", error)
        ...     return error**2
        >>> loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
        >>> state = loop.init({"w": jnp.float32(0.0)})
        >>> batch = {"x": np.float32([1, 2]), "y": np.float32([2, 4])}
        >>> state, outcome = loop.step(state, batch)
        >>> outcome.metrics
        {'bias': -3.0}
    """
    _check_name(name)
    take_note()
    what = f"the probe `{name}`"
    array = _read_value(value, what)
    operands = (array,)
    if weight is not None:
        operands = (array, broadcast_weight(weight, array, what))
    record.bind(*operands, name=name, num_mapped=0)


def _read_value(value: Any, what: str) -> Array:
    array = read_value(value, what, forms="a real number or an array of them")
    if not array.size:
        raise ValueError(
            f"{what} must have at least one value, got {array.dtype}{list(array.shape)}"
        )
    return array


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a probe must be a string, got {name!r}")
    if not name or name == "loss" or name.startswith("eval."):
        raise ValueError(
            "the name of a probe must not be empty, `loss`, nor begin with `eval.`, as "
            f"an evaluation's do, got {name!r}"
        )


# JAX allows this effect everywhere. It has no public name.
@cache
def _effects() -> Any:
    def look(x: Any) -> None:
        jax.debug.callback(lambda _: None, x)

    return jax.make_jaxpr(look)(np.float32(0)).effects


def _abstract(*operands: Any, **facts: Any) -> tuple[list[Any], Any]:
    """No results, and an effect that keeps it in a program."""
    del operands, facts
    return [], _effects()


def _impl(*operands: Any, name: str, num_mapped: int) -> list[Any]:
    """Outside of any trace."""
    told = witness.get()
    if told is not None:
        told.add(name, *operands, num_mapped=num_mapped)
    return []


def _jvp(primals: Any, tangents: Any, **facts: Any) -> tuple[list[Any], list[Any]]:
    """Of the values alone."""
    del tangents
    return record.bind(*primals, **facts), []


def _batched(
    operands: Any, axes: Any, *, name: str, num_mapped: int
) -> tuple[list[Any], list[Any]]:
    """Of all that it is mapped over, as a leading axis."""
    size = next(
        operand.shape[axis]
        for operand, axis in zip(operands, axes, strict=True)
        if axis is not None
    )
    rows = [
        jnp.broadcast_to(operand, (size, *operand.shape))
        if axis is None
        else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes, strict=True)
    ]
    return record.bind(*rows, name=name, num_mapped=num_mapped + 1), []


def _kept(*arguments: Any) -> tuple[list[bool], Any]:
    """Whether its operands, and it, are kept where what is unused is taken away."""
    equation = arguments[-1]
    if _is_asked_by_linen():
        return [False] * len(equation.invars), None
    return [True] * len(equation.invars), equation


def _is_asked_by_linen() -> bool:
    """Whether `flax.linen.scan` looks at what its broadcast variables depend on.

    It takes everything that has an effect for one of them, and so refuses a body with
    one, were it a ``jax.debug.print``. What it looks at is then thrown away.

    References:
        Since https://github.com/google/flax/pull/5540; until it minds effects.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "bind":
        module = frame.f_globals.get("__name__", "")
        if module == "flax.core.axes_scan":
            return True
        if module != __name__ and not module.startswith("jax."):
            return False
        frame = frame.f_back
    return False


def _lower(context: Any, *operands: Any, **facts: Any) -> list[Any]:
    """To nothing, in a program that nobody carries it out of."""
    del context, operands, facts
    return []


record = Primitive("fuelflow_probe")
"""What a probe leaves in a traced program: its value, and its weight if it has one."""

record.multiple_results = True
record.def_impl(_impl)
record.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[record] = _jvp
batching.primitive_batchers[record] = _batched
pe.dce_rules[record] = _kept
mlir.register_lowering(record, _lower)
