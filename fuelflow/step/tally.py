"""Sums over many steps, rank by rank, kept on the devices until somebody reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuelflow._types import Array
from fuelflow.step.weighted import Mean


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Tally:
    """The weighted sums of the loss and metrics, and the rows, of each rank.

    Every sum is a float32 and the error it has so far: together they hold some 48 bits,
    so that no number of steps wears a count of tokens or a mean away.

    Attributes:
        sums: Sum of value times weight, then the weight, of each name, ``[num_ranks,
            2 * num_names]``.
        errors: What is to be taken from them, of the same shape.
        num_rows: Rows that counted, int32 ``[num_ranks]``.
        names: ``loss``, then the metrics; static.
    """

    sums: Any
    errors: Any
    num_rows: Any
    names: tuple[str, ...] = field(metadata={"static": True})

    def plus(self, means: Mapping[str, Mean], num_rows: Array) -> "Tally":
        """The tally with one step's means ``[num_ranks]`` and rows added.

        References:
            W. Kahan, "Further remarks on reducing truncation errors", 1965.
        """
        columns = [
            column
            for mean in (means[name] for name in self.names)
            for column in (mean.mean * mean.weight, mean.weight)
        ]
        new = jnp.stack(columns, axis=1).astype(self.sums.dtype) - self.errors
        sums = self.sums + new
        # Without the barrier a compiler that knows algebra would find this to be zero.
        errors = (jax.lax.optimization_barrier(sums) - self.sums) - new
        return Tally(sums, errors, self.num_rows + num_rows, self.names)

    def without_means(self, before: "Tally", is_bad: Array) -> "Tally":
        """The tally with the sums of an earlier one, if the step was bad."""
        return Tally(
            jnp.where(is_bad, before.sums, self.sums),
            jnp.where(is_bad, before.errors, self.errors),
            self.num_rows,
            self.names,
        )


def zero_tally(names: Sequence[str], num_ranks: int) -> Tally:
    """A tally of nothing, in NumPy arrays."""
    zeros = np.zeros((num_ranks, 2 * len(names)), np.float32)
    return Tally(zeros, zeros.copy(), np.zeros(num_ranks, np.int32), tuple(names))


@dataclass(frozen=True)
class Totals:
    """A tally that was read: float64 and int64 arrays ``[num_ranks]``.

    Attributes:
        sums: Sum of value times weight, by name.
        weights: Sum of the weights, by name.
        num_rows: Rows that counted.
    """

    sums: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    num_rows: np.ndarray


def totals_of(tally: Tally) -> Totals:
    """The sums in a tally whose arrays are on the host."""
    table = np.asarray(tally.sums, np.float64) - np.asarray(tally.errors, np.float64)
    return Totals(
        {name: table[:, 2 * index] for index, name in enumerate(tally.names)},
        {name: table[:, 2 * index + 1] for index, name in enumerate(tally.names)},
        np.asarray(tally.num_rows, np.int64),
    )
