"""What ranks make of one pass together: one model, whatever each of them saw."""

from typing import Any

import jax
import jax.numpy as jnp

from fuelflow._types import Array, Scalar, Variables
from fuelflow.devices.ranks import Ranks
from fuelflow.step.weighted import Mean

Sown = tuple[Variables, Variables]
"""What a pass created: with a leading axis of its rows, and other."""


def part_of_mean(mean: Mean, ranks: Ranks) -> tuple[Scalar, Scalar]:
    """This rank's part of the mean over all ranks, and the weight of them all.

    The parts add up to ``sum(mean * weight) / sum(weight)``, and so do their gradients,
    also where ranks see each other through a collective.
    """
    if ranks.count == 1:
        return mean.mean, mean.weight
    weight = ranks.total(mean.weight)
    return mean.mean * (mean.weight / jnp.where(weight == 0, 1, weight)), weight


def combined(means: dict[str, Mean], ranks: Ranks) -> dict[str, Mean]:
    """The weighted means over all ranks, of means of each of them."""
    if ranks.count == 1:
        return means
    parts = {name: part_of_mean(mean, ranks) for name, mean in means.items()}
    totals = ranks.total({name: part for name, (part, _) in parts.items()})
    return {name: Mean(totals[name], weight) for name, (_, weight) in parts.items()}


def own_variables(variables: Variables, ranks: Ranks) -> Variables:
    """The variables a rank's pass begins with: its random keys are its own."""
    return {
        name: ranks.own_key(value) if _is_key(value) else value
        for name, value in variables.items()
    }


def settled(
    before: Variables, given: Variables, after: Variables, ranks: Ranks
) -> Variables:
    """The variables after a pass, one value for all ranks.

    Statistics that the pass changed are averaged over the ranks; counters and keys that
    it changed are the first rank's; what it left alone is as it was.

    Args:
        before: The variables before the pass.
        given: What this rank's pass was given for them.
        after: What it left.
        ranks: The ranks.
    """
    is_changed = {name: after[name] is not given[name] for name in before}
    changed = {name: after[name] for name, is_new in is_changed.items() if is_new}
    agreed = _agreed(changed, ranks)
    return {name: agreed.get(name, before[name]) for name in before}


def sown_by_rows(sown: Variables, num_rows: int, ranks: Ranks) -> Sown:
    """What a pass created, told apart by whether the ranks' values are put together.

    A value with a leading axis of the pass's rows is one over all of them; another is
    averaged if it is floating, and else the first rank's.
    """
    if ranks.count == 1:
        return sown, {}
    by_rows = {
        name: value for name, value in sown.items() if value.shape[:1] == (num_rows,)
    }
    others = {name: value for name, value in sown.items() if name not in by_rows}
    return by_rows, _agreed(others, ranks)


def _agreed(values: dict[str, Array], ranks: Ranks) -> dict[str, Any]:
    if ranks.count == 1:
        return values
    floating = {
        name: value
        for name, value in values.items()
        if jnp.issubdtype(value.dtype, jnp.floating)
    }
    others = {name: value for name, value in values.items() if name not in floating}
    found = {**ranks.mean(floating), **ranks.first(others)}
    return {name: found[name] for name in values}


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
