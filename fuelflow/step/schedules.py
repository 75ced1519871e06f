"""Learning rate schedules: pure functions from a step to a rate.

A schedule is asked about the step about to be taken, so the first update uses
``schedule(0)``. It takes an integer of Python, NumPy or JAX, traced or not, or an array
of them, and answers elementwise with strong float32. Arguments are checked when a
schedule is built, never while it runs.

The curves are optax's wherever it has them exactly; where it has not, a comment says
why. Rates are right to the float32 rounding of ``base``, and past the end a schedule
answers its last value exactly.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fuelflow._types import Schedule
from fuelflow.step.checks import checked_count, checked_positive, checked_rate
from fuelflow.step.cycles import cyclic, one_cycle
from fuelflow.step.plateau import Plateau
from fuelflow.step.rates import between, elementwise

__all__ = [
    "Plateau",
    "as_schedule",
    "constant",
    "cosine",
    "cyclic",
    "exponential",
    "linear_scaling",
    "linear_warmup",
    "multistep",
    "one_cycle",
    "polynomial",
    "sequential",
    "step_decay",
    "warmup_linear",
]


def constant(value: float) -> Schedule:
    """A schedule that answers the same rate at every step.

    Args:
        value: The rate, at least 0.

    Raises:
        TypeError: If the rate is not a number.
        ValueError: If the rate is negative or not finite.

    Example:
        >>> float(constant(0.5)(1_000))
        0.5
    """
    return elementwise(optax.constant_schedule(checked_rate("value", value)))


def linear_warmup(base: float, warmup_steps: int) -> Schedule:
    """A schedule that rises in a line from 0 to ``base``, and stays there.

    ``base * min(step / warmup_steps, 1)``.

    Args:
        base: The rate from step ``warmup_steps`` on, at least 0.
        warmup_steps: Steps of the rise; 0 begins at ``base``.

    Raises:
        TypeError: If an argument is not a number, or the count not an integer.
        ValueError: If an argument is negative or not finite.

    References:
        Goyal et al., `Accurate, Large Minibatch SGD
        <https://arxiv.org/abs/1706.02677>`_, 2017, section 2.2.

    Example:
        >>> schedule = linear_warmup(1.0, 4)
        >>> [float(schedule(step)) for step in (0, 1, 4, 100)]
        [0.0, 0.25, 1.0, 1.0]
    """
    base = checked_rate("base", base)
    warmup_steps = checked_count("warmup_steps", warmup_steps, least=0)
    rise, stay = _ramp(base, warmup_steps), optax.constant_schedule(base)
    return elementwise(optax.join_schedules([rise, stay], [warmup_steps]))


def cosine(
    base: float, warmup_steps: int, total_steps: int, final: float = 0.0
) -> Schedule:
    """A schedule with a linear warmup, then half a cosine down to ``final``.

    ``final + (base - final) * (1 + cos(pi * t / T)) / 2``, at ``t`` steps after the
    warmup and with ``T = total_steps - warmup_steps``.

    Args:
        base: The rate at the end of the warmup, at least 0.
        warmup_steps: Steps of the rise from 0; 0 begins at ``base``.
        total_steps: The step from which on the rate is ``final``, warmup included.
        final: The last rate, at least 0.

    Raises:
        TypeError: If an argument is not a number, or a count not an integer.
        ValueError: If a rate is negative or not finite, ``total_steps`` is less than 1,
            or ``warmup_steps`` is negative or not less than ``total_steps``.

    References:
        Loshchilov and Hutter, `SGDR: Stochastic Gradient Descent with Warm Restarts
        <https://arxiv.org/abs/1608.03983>`_, 2017, equation 5.

    Example:
        >>> schedule = cosine(1.0, 10, 100)
        >>> [round(float(schedule(step)), 6) for step in (0, 5, 10, 55, 100, 200)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    warmup_steps, total_steps = _checked_span(warmup_steps, total_steps)
    curve = optax.cosine_decay_schedule(1.0, total_steps - warmup_steps)
    return _warmup_and_decay(base, final, warmup_steps, total_steps, curve)


def warmup_linear(
    base: float, warmup_steps: int, total_steps: int, final: float = 0.0
) -> Schedule:
    """A schedule with a linear warmup, then a line down to ``final``.

    Args:
        base: The rate at the end of the warmup, at least 0.
        warmup_steps: Steps of the rise from 0; 0 begins at ``base``.
        total_steps: The step from which on the rate is ``final``, warmup included.
        final: The last rate, at least 0.

    Raises:
        TypeError: If an argument is not a number, or a count not an integer.
        ValueError: If a rate is negative or not finite, ``total_steps`` is less than 1,
            or ``warmup_steps`` is negative or not less than ``total_steps``.

    References:
        Devlin et al., `BERT <https://arxiv.org/abs/1810.04805>`_, 2019, appendix A.2.

    Example:
        >>> schedule = warmup_linear(1.0, 2, 10)
        >>> [float(schedule(step)) for step in (0, 1, 2, 6, 10, 20)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    warmup_steps, total_steps = _checked_span(warmup_steps, total_steps)
    curve = optax.linear_schedule(1.0, 0.0, total_steps - warmup_steps)
    return _warmup_and_decay(base, final, warmup_steps, total_steps, curve)


def polynomial(base: float, final: float, power: float, total_steps: int) -> Schedule:
    """A schedule that goes from ``base`` to ``final`` along a power of the way left.

    ``final + (base - final) * (1 - step / total_steps) ** power``.

    Args:
        base: The rate at step 0, at least 0.
        final: The rate from step ``total_steps`` on, at least 0.
        power: The exponent, positive; 1 is a line.
        total_steps: Steps from the first rate to the last, at least 1.

    Raises:
        TypeError: If an argument is not a number, or the count not an integer.
        ValueError: If an argument is out of the range given above.

    Example:
        >>> schedule = polynomial(1.0, 0.0, 2.0, 4)
        >>> [float(schedule(step)) for step in (0, 1, 2, 4, 100)]
        [1.0, 0.5625, 0.25, 0.0, 0.0]
    """
    power = checked_positive("power", power)
    total_steps = checked_count("total_steps", total_steps, least=1)
    curve = optax.polynomial_schedule(1.0, 0.0, power, total_steps)
    return _warmup_and_decay(base, final, 0, total_steps, curve)


def step_decay(base: float, step_size: int, gamma: float) -> Schedule:
    """A schedule whose rate is multiplied by ``gamma`` every ``step_size`` steps.

    ``base * gamma ** (step // step_size)``.

    Args:
        base: The rate before the first change, at least 0.
        step_size: Steps between two changes, at least 1.
        gamma: The factor of one change, positive.

    Raises:
        TypeError: If an argument is not a number, or the count not an integer.
        ValueError: If an argument is out of the range given above.

    Example:
        >>> schedule = step_decay(1.0, 10, 0.5)
        >>> [float(schedule(step)) for step in (0, 9, 10, 20)]
        [1.0, 1.0, 0.5, 0.25]
    """
    base = checked_rate("base", base)
    step_size = checked_count("step_size", step_size, least=1)
    gamma = checked_positive("gamma", gamma)
    # Not optax's `staircase`: it floors a floating quotient, which under `jit` is a
    # product with 1 / step_size and falls short at step 41 of a step_size of 41.
    decay = optax.exponential_decay(base, 1, gamma)
    return elementwise(lambda step: decay(step // step_size))


def multistep(base: float, milestones: Sequence[int], gamma: float) -> Schedule:
    """A schedule whose rate is multiplied by ``gamma`` at each milestone.

    Args:
        base: The rate before the first milestone, at least 0.
        milestones: The steps from which on a further ``gamma`` applies, rising and at
            least 1. With none the rate is constant.
        gamma: The factor of one change, positive.

    Raises:
        TypeError: If an argument is not a number, or a milestone not an integer.
        ValueError: If an argument is out of the range given above.

    Example:
        >>> schedule = multistep(1.0, [10, 20, 30], 0.1)
        >>> [round(float(schedule(step)), 6) for step in (9, 10, 20, 30)]
        [1.0, 0.1, 0.01, 0.001]
    """
    base = checked_rate("base", base)
    gamma = checked_positive("gamma", gamma)
    scales = dict.fromkeys(_checked_milestones(milestones), gamma)
    return elementwise(optax.piecewise_constant_schedule(base, scales))


def exponential(base: float, gamma: float, *, decay_steps: int = 1) -> Schedule:
    """A schedule whose rate is multiplied by ``gamma`` over ``decay_steps`` steps.

    ``base * gamma ** (step / decay_steps)``, smooth between; `step_decay` has stairs.

    Args:
        base: The rate at step 0, at least 0.
        gamma: The factor of ``decay_steps`` steps, positive; above 1 the rate grows.
        decay_steps: Steps for one ``gamma``, at least 1.

    Raises:
        TypeError: If an argument is not a number, or the count not an integer.
        ValueError: If an argument is out of the range given above.

    Example:
        >>> schedule = exponential(1.0, 0.25, decay_steps=2)
        >>> [float(schedule(step)) for step in (0, 1, 2)]
        [1.0, 0.5, 0.25]
    """
    base = checked_rate("base", base)
    gamma = checked_positive("gamma", gamma)
    decay_steps = checked_count("decay_steps", decay_steps, least=1)
    # Not optax's: it rounds gamma to float32 before raising it to the step, which at
    # 0.9999 and step 100 000 is off by 0.2 %.
    doublings = math.log2(gamma) / decay_steps
    return elementwise(lambda step: base * jnp.exp2(doublings * step))


def sequential(
    first: float | Schedule, second: float | Schedule, switch: int
) -> Schedule:
    """A schedule that follows ``first``, and from step ``switch`` on ``second``.

    ``second`` starts at its own step 0: at ``step`` it is asked about
    ``step - switch``, and never about a step before its first.

    Args:
        first: The schedule, or rate, of the steps before ``switch``.
        second: The schedule, or rate, of the steps from ``switch`` on.
        switch: The first step of ``second``, at least 0.

    Raises:
        TypeError: If a schedule is none (see `as_schedule`), or ``switch`` no integer.
        ValueError: If ``switch`` or a rate is negative, or a rate not finite.

    Example:
        >>> schedule = sequential(linear_warmup(1.0, 4), exponential(1.0, 0.5), 4)
        >>> [float(schedule(step)) for step in (0, 2, 4, 5)]
        [0.0, 0.5, 1.0, 0.5]
    """
    before, after = as_schedule(first), as_schedule(second)
    switch = checked_count("switch", switch, least=0)
    # `join_schedules` evaluates both at every step; 1 / sqrt(step) dislikes negatives.
    parts = [before, lambda step: after(jnp.maximum(step, 0))]
    return elementwise(optax.join_schedules(parts, [switch]))


def linear_scaling(world_size: int, ratio: float = 1.0) -> float:
    """The factor by which a base rate grows with the number of ranks.

    ``1 + (world_size - 1) * ratio``: the whole of the linear scaling rule at 1, half of
    it at 0.5, none at 0. Multiply the base rate by it, and warm up to the product.

    Args:
        world_size: Ranks that share a step, at least 1.
        ratio: The share of the rule to apply, at least 0.

    Returns:
        The factor, a Python float.

    Raises:
        TypeError: If an argument is not a number, or the count not an integer.
        ValueError: If an argument is out of the range given above.

    References:
        Goyal et al., `Accurate, Large Minibatch SGD
        <https://arxiv.org/abs/1706.02677>`_, 2017, section 2.1. The ratio is flodl's.

    Example:
        >>> linear_scaling(8), linear_scaling(8, 0.5), linear_scaling(8, 0.0)
        (8.0, 4.5, 1.0)
    """
    world_size = checked_count("world_size", world_size, least=1)
    return 1.0 + (world_size - 1) * checked_rate("ratio", ratio)


def as_schedule(schedule: object) -> Schedule:
    """The schedule that a number or a function from a step to a rate stands for.

    A function is asked once, abstractly, what it returns for an int32 step: nothing is
    computed, and one that cannot be traced fails here, not in the first training step.

    Args:
        schedule: A rate, or a function of a traced int32 step, such as optax's.

    Returns:
        A schedule whose rates are strong float32, whatever the function's are.

    Raises:
        TypeError: If it is a `Plateau`, neither a number nor a function, or a function
            that does not return one real number.
        ValueError: If the number is negative or not finite.

    Example:
        >>> float(as_schedule(0.5)(7))
        0.5
        >>> float(as_schedule(optax.linear_schedule(0.0, 1.0, 4))(1))
        0.25
    """
    if isinstance(schedule, Plateau):
        raise TypeError(
            "`schedule` must be a rate or a function of the step, got a Plateau, which "
            "is told a metric on the host; leave the schedule out and use "
            "`state = loop.set_lr(state, plateau.update(metric))`"
        )
    if isinstance(schedule, Real) and not isinstance(schedule, bool):
        return constant(checked_rate("schedule", schedule))
    if not callable(schedule):
        raise TypeError(
            "`schedule` must be a rate or a function of the step, got "
            f"{schedule!r} of type {type(schedule).__name__}"
        )
    _require_rate_result(schedule)
    return elementwise(schedule)


def _ramp(base: float, warmup_steps: int) -> Schedule:
    """From 0 in steps of ``base / warmup_steps``."""
    # Not optax's line: it takes the way left from 1, which costs the first steps of a
    # long warmup their digits. Nor a division, which `jit` rounds otherwise.
    slope = base / max(warmup_steps, 1)
    return lambda step: slope * step


def _warmup_and_decay(
    base: float, final: float, warmup_steps: int, total_steps: int, curve: Schedule
) -> Schedule:
    """Up to ``base`` in a line, down to ``final`` as ``curve`` goes from 1 to 0."""
    base, final = checked_rate("base", base), checked_rate("final", final)
    phases = [
        _ramp(base, warmup_steps),
        lambda step: between(final, base, curve(step)),
        # Under `jit`, n / n may be 1 - 6e-8, whose rest a small power makes large.
        optax.constant_schedule(final),
    ]
    return elementwise(optax.join_schedules(phases, [warmup_steps, total_steps]))


def _checked_span(warmup_steps: int, total_steps: int) -> tuple[int, int]:
    total_steps = checked_count("total_steps", total_steps, least=1)
    warmup_steps = checked_count("warmup_steps", warmup_steps, least=0)
    if warmup_steps >= total_steps:
        raise ValueError(
            f"`warmup_steps` must be less than the `total_steps` of {total_steps}, "
            f"got {warmup_steps}"
        )
    return warmup_steps, total_steps


def _checked_milestones(milestones: object) -> list[int]:
    if not isinstance(milestones, Iterable):
        raise TypeError(f"`milestones` must be a sequence, got {milestones!r}")
    steps = [checked_count("milestones", step, least=1) for step in milestones]
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError(f"`milestones` must rise, got {steps}")
    return steps


def _require_rate_result(schedule: Callable[[Any], Any]) -> None:
    result = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    is_scalar = isinstance(result, jax.ShapeDtypeStruct) and result.shape == ()
    kinds = (jnp.floating, jnp.integer)
    if not is_scalar or not any(jnp.issubdtype(result.dtype, kind) for kind in kinds):
        raise TypeError(
            f"`schedule` must return one real number for a step, got {result}"
        )
