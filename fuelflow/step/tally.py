"""Sums over many steps, rank by rank, kept on the devices until somebody reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fuelflow._types import Array
from fuelflow.step.weighted import Mean

NUM_COLUMNS = 16
"""Values that a tally has room for, unless there turn out to be more."""


class NarrowTallyError(Exception):
    """A step has more values than its tally has columns; never leaves the engine.

    Attributes:
        needed: How many it has.
    """

    def __init__(self, needed: int) -> None:
        super().__init__(f"a tally needs {needed} columns")
        self.needed = needed


class Tally(NamedTuple):
    """The weighted sums of the loss and metrics, and the rows, of each rank.

    Every sum is a float32 and the error it has so far: together they hold some 48 bits,
    so that no number of steps wears a count of tokens or a mean away.

    Attributes:
        sums: Of value times weight ``[..., 0, :]`` and of weight ``[..., 1, :]``,
            ``[num_ranks, 2, num_columns]``: the loss, the metrics, and unused columns.
        errors: What is to be taken from them, of the same shape.
        num_rows: Rows that counted, int32 ``[num_ranks]``.
    """

    sums: Any
    errors: Any
    num_rows: Any

    def plus(self, means: Sequence[Mean], num_rows: Array) -> "Tally":
        """The tally with one step's means, each ``[num_ranks]``, and rows added.

        Raises:
            NarrowTallyError: If there are more means than columns.

        References:
            W. Kahan, "Further remarks on reducing truncation errors", 1965.
        """
        num_unused = self.sums.shape[-1] - len(means)
        if num_unused < 0:
            raise NarrowTallyError(len(means))
        values = jnp.stack([mean.mean * mean.weight for mean in means], axis=-1)
        weights = jnp.stack([mean.weight for mean in means], axis=-1)
        new = jnp.stack([values, weights], axis=1).astype(self.sums.dtype)
        new = jnp.pad(new, ((0, 0), (0, 0), (0, num_unused))) - self.errors
        sums = self.sums + new
        # Without the barrier a compiler that knows algebra would find this to be zero.
        errors = (jax.lax.optimization_barrier(sums) - self.sums) - new
        return Tally(sums, errors, self.num_rows + num_rows)

    def without_means(self, before: "Tally", is_bad: Array) -> "Tally":
        """The tally with the sums of an earlier one, if the step was bad."""
        return Tally(
            jnp.where(is_bad, before.sums, self.sums),
            jnp.where(is_bad, before.errors, self.errors),
            self.num_rows,
        )


def zero_tally(num_ranks: int, num_columns: int = NUM_COLUMNS) -> Tally:
    """A tally of nothing, in NumPy arrays."""
    zeros = np.zeros((num_ranks, 2, num_columns), np.float32)
    return Tally(zeros, zeros.copy(), np.zeros(num_ranks, np.int32))


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


def totals_of(tally: Tally, names: Sequence[str]) -> Totals:
    """The sums in a tally whose arrays are on the host, by the names of its columns."""
    table = np.asarray(tally.sums, np.float64) - np.asarray(tally.errors, np.float64)
    return Totals(
        {name: table[:, 0, column] for column, name in enumerate(names)},
        {name: table[:, 1, column] for column, name in enumerate(names)},
        np.asarray(tally.num_rows, np.int64),
    )
