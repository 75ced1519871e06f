"""What probes recorded in one pass, added up by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fuelflow._types import Array
from fuelflow.step.weighted import Mean, weighted_mean

Sums = dict[str, Mean]
"""By name, the weighted sum of what was recorded, float32 ``[]``, and the weight."""


@dataclass(frozen=True)
class PassRows:
    """The rows that one pass goes through, as a probe minds them.

    Attributes:
        size: How many there are; None if values have no rows.
        weight: How much each counts ``[size]``; None for 1 each.
    """

    size: int | None
    weight: Array | None = None

    def read(
        self, value: Array, weight: Array | None = None, *, num_mapped: int = 0
    ) -> Mean:
        """The sum that a recorded value stands for, and its weight.

        Without a ``weight`` it is a mean, and counts once.

        Args:
            value: The value, behind axes that it was mapped over.
            weight: Its weight, of the same shape.
            num_mapped: How many those are.
        """
        value = jax.lax.stop_gradient(value).astype(jnp.float32)
        each = jnp.ones_like(value) if weight is None else weight.astype(jnp.float32)
        if self.weight is not None:
            axis = self._axis_of(value.shape, num_mapped)
            if axis is not None:
                each *= jnp.expand_dims(
                    self.weight, [i for i in range(value.ndim) if i != axis]
                )
            else:
                each *= jnp.all(self.weight != 0)
        mean, total = weighted_mean(value, each)
        if weight is None:
            total = (total != 0).astype(jnp.float32)
        return Mean(mean * total, total)

    def _axis_of(self, shape: tuple[int, ...], num_mapped: int) -> int | None:
        """Which axis the rows are along; None if none is."""
        own = range(num_mapped, min(num_mapped + 1, len(shape)))
        mapped = range(num_mapped)
        return next((i for i in (*own, *mapped) if shape[i] == self.size), None)

    def mean(self, sums: Mean, *, has_weight: bool) -> Mean:
        """What all that was recorded under a name comes to."""
        total, weight = sums
        mean = total / jnp.where(weight == 0, 1, weight)
        if has_weight:
            return Mean(mean, weight)
        num_rows = jnp.float32(self.size or 1)
        if self.weight is not None:
            num_rows = jnp.sum(self.weight)
        return Mean(mean, jnp.where(weight == 0, 0, num_rows))


def zero_sums(names: Mapping[str, Any]) -> Sums:
    """The sums of nothing, of some names."""
    return {name: Mean(jnp.float32(0), jnp.float32(0)) for name in names}


def added(one: Sums, other: Mapping[str, Mean]) -> Sums:
    """The sums of both."""
    both = dict(one)
    for name, (total, weight) in other.items():
        before = both.get(name)
        both[name] = (
            Mean(total, weight)
            if before is None
            else Mean(before.mean + total, before.weight + weight)
        )
    return both


class Witness:
    """Told of all that is recorded in a pass where nothing is traced.

    Args:
        rows: The rows of the pass.
    """

    def __init__(self, rows: PassRows) -> None:
        self.rows = rows
        self.sums: Sums = {}
        self.has_weight: dict[str, bool] = {}

    def add(
        self,
        name: str,
        value: Array,
        weight: Array | None = None,
        *,
        num_mapped: int = 0,
    ) -> None:
        """Takes note of one value, as `PassRows.read` takes it."""
        note(self.has_weight, name, has_weight=weight is not None)
        mean = self.rows.read(value, weight, num_mapped=num_mapped)
        self.sums = added(self.sums, {name: mean})


def note(known: dict[str, bool], name: str, *, has_weight: bool) -> None:
    """Takes note of a name, and whether it has a weight.

    Raises:
        ValueError: If it is known to be otherwise.
    """
    if known.setdefault(name, has_weight) != has_weight:
        raise ValueError(
            f"the probe `{name}` must be recorded with a weight everywhere in a pass, "
            "or nowhere"
        )
