"""Schedules that rise and fall: one cycle for a whole run, or cycles for ever."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fuelflow._types import Schedule
from fuelflow.step.checks import (
    checked_choice,
    checked_count,
    checked_positive,
    checked_rate,
)
from fuelflow.step.rates import between, elementwise


def one_cycle(
    max_rate: float,
    total_steps: int,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """A schedule that rises along half a cosine and falls along another.

    It goes from ``max_rate / div_factor`` at step 0 up to ``max_rate`` at step
    ``pct_start * total_steps - 1``, and down to ``max_rate / div_factor /
    final_div_factor`` at step ``total_steps - 1``, the last one taken. Equals
    ``torch.optim.lr_scheduler.OneCycleLR`` with its default cosines and two phases.

    Args:
        max_rate: The largest rate, at least 0.
        total_steps: Steps of the cycle.
        pct_start: The share of the cycle that rises, between 0 and 1, both excluded,
            and more than one step long.
        div_factor: What ``max_rate`` is divided by at the beginning, positive.
        final_div_factor: What the first rate is divided by at the end, positive.

    Raises:
        TypeError: If an argument is not a number, or the count not an integer.
        ValueError: If an argument is out of the range given above.

    References:
        Smith and Topin, `Super-Convergence <https://arxiv.org/abs/1708.07120>`_, 2018.

    Example:
        >>> schedule = one_cycle(1.0, 100)
        >>> [round(float(schedule(step)), 6) for step in (0, 29, 99, 200)]
        [0.04, 1.0, 4e-06, 4e-06]
    """
    max_rate = checked_rate("max_rate", max_rate)
    first = max_rate / checked_positive("div_factor", div_factor)
    final = first / checked_positive("final_div_factor", final_div_factor)
    rise_steps, fall_steps = _checked_phases(pct_start, total_steps)
    # optax's `cosine_onecycle_schedule` turns and ends one step later than PyTorch's.
    half_cosine = optax.cosine_decay_schedule(1.0, 1)

    def rate(step: jax.Array) -> jax.Array:
        rising = between(max_rate, first, half_cosine(step / rise_steps))
        falling = half_cosine((step - rise_steps) / fall_steps)
        return jnp.where(step <= rise_steps, rising, between(final, max_rate, falling))

    return elementwise(rate)


def cyclic(
    base: float,
    max_rate: float,
    step_size_up: int,
    step_size_down: int | None = None,
    *,
    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular",
    gamma: float = 1.0,
) -> Schedule:
    """A schedule that goes up and down in lines between two rates, for ever.

    The height above ``base`` is kept (``"triangular"``), halved with every cycle
    (``"triangular2"``) or multiplied by ``gamma ** step`` (``"exp_range"``). Equals
    ``torch.optim.lr_scheduler.CyclicLR``.

    Args:
        base: The lower rate, at least 0.
        max_rate: The upper rate, at least ``base``.
        step_size_up: Steps of the rise, at least 1.
        step_size_down: Steps of the fall, at least 1; as many as the rise by default.
        mode: What becomes of the height, as above.
        gamma: The factor of one step in mode ``"exp_range"``, positive; 1 elsewhere.

    Raises:
        TypeError: If an argument is not a number, or a count not an integer.
        ValueError: If an argument is out of the range given above.

    References:
        Smith, `Cyclical Learning Rates for Training Neural Networks
        <https://arxiv.org/abs/1506.01186>`_, 2017.

    Example:
        >>> schedule = cyclic(0.0, 1.0, 2, 4, mode="triangular2")
        >>> [float(schedule(step)) for step in (0, 1, 2, 4, 6, 8)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.5]
    """
    base, max_rate = checked_rate("base", base), checked_rate("max_rate", max_rate)
    if max_rate < base:
        raise ValueError(
            f"`max_rate` must be at least the `base` of {base}, got {max_rate}"
        )
    up = checked_count("step_size_up", step_size_up, least=1)
    down = up
    if step_size_down is not None:
        down = checked_count("step_size_down", step_size_down, least=1)
    scale = _height_scale(mode, gamma, up + down)

    def rate(step: jax.Array) -> jax.Array:
        position = step % (up + down)
        height = jnp.where(position <= up, position / up, (up + down - position) / down)
        return between(base, max_rate, height * scale(step))

    return elementwise(rate)


def _checked_phases(pct_start: float, total_steps: int) -> tuple[float, float]:
    """The steps that a cycle rises and falls."""
    total_steps = checked_count("total_steps", total_steps, least=1)
    pct_start = checked_positive("pct_start", pct_start)
    rise_steps = pct_start * total_steps - 1
    if pct_start >= 1:
        raise ValueError(f"`pct_start` must be less than 1, got {pct_start}")
    if rise_steps <= 0:
        raise ValueError(
            f"`pct_start` must be more than one of the {total_steps} `total_steps`, "
            f"got {pct_start}, which is {pct_start * total_steps:g}"
        )
    return rise_steps, total_steps - 1 - rise_steps


def _height_scale(mode: str, gamma: float, cycle_size: int) -> Callable[[Any], Any]:
    """The factor on a cycle's height at a step."""
    checked_choice("mode", mode, ("triangular", "triangular2", "exp_range"))
    gamma = checked_positive("gamma", gamma)
    if gamma != 1 and mode != "exp_range":
        raise ValueError(f'`gamma` must be 1 unless `mode` is "exp_range", got {gamma}')
    if mode == "triangular":
        return jnp.ones_like
    if mode == "triangular2":
        return lambda step: jnp.exp2(-1.0 * (step // cycle_size))
    return lambda step: jnp.exp2(math.log2(gamma) * step)
