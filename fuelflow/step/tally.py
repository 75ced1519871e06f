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

    One array, since each that a step takes over costs it time. Every sum is a float32
    and the error it has so far: together they hold some 48 bits, so that no number of
    steps wears a count of tokens or a mean away.

    Attributes:
        table: float32 ``[num_ranks, 4, 1 + num_columns]``: the sums of value times
            weight, the sums of weights, and what is to be taken from each of the two.
            The first column has the rows that counted for values; the others are the
            loss, the metrics, and unused.
    """

    table: Any

    @classmethod
    def of(cls, sums: np.ndarray, errors: np.ndarray, num_rows: np.ndarray) -> "Tally":
        """A tally in NumPy, of its parts.

        Args:
            sums: Of value times weight and of weight, ``[num_ranks, 2, num_columns]``.
            errors: What is to be taken from them, of the same shape.
            num_rows: Rows that counted ``[num_ranks]``.
        """
        num_ranks, _, num_columns = sums.shape
        table = np.zeros((num_ranks, 4, 1 + num_columns), np.float32)
        table[:, :2, 1:] = sums
        table[:, 2:, 1:] = errors
        table[:, 0, 0] = num_rows
        table[:, 2, 0] = table[:, 0, 0].astype(np.float64) - num_rows
        return cls(table)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.table.shape[0]

    @property
    def sums(self) -> np.ndarray:
        """Sums of value times weight and of weight, of a tally on the host."""
        return np.asarray(self.table)[:, :2, 1:]

    @property
    def errors(self) -> np.ndarray:
        """What is to be taken from the sums, of a tally on the host."""
        return np.asarray(self.table)[:, 2:, 1:]

    @property
    def num_rows(self) -> np.ndarray:
        """Rows that counted, int64 ``[num_ranks]``, of a tally on the host."""
        table = np.asarray(self.table).astype(np.float64)
        return np.rint(table[:, 0, 0] - table[:, 2, 0]).astype(np.int64)

    def plus(
        self,
        means: Sequence[Mean],
        num_rows: Array,
        is_good: Array | None = None,
        observed: Mean | None = None,
    ) -> "Tally":
        """The tally with one step added, inside a trace.

        Args:
            means: Of the loss and each metric, each ``[num_ranks]``.
            num_rows: Rows that counted, int32 ``[num_ranks]``.
            is_good: Whether the means are added too, bool ``[]``; None if so.
            observed: Further means ``[num_observed]``, of which each rank gets a share
                by its rows.

        Raises:
            NarrowTallyError: If there are more means than columns.

        References:
            D. E. Knuth, The Art of Computer Programming, volume 2, section 4.2.2,
            theorem B: the error of a sum of two floats.
        """
        num_means = len(means) + (0 if observed is None else observed.mean.shape[0])
        num_unused = self.table.shape[-1] - 1 - num_means
        if num_unused < 0:
            raise NarrowTallyError(num_means)
        values = jnp.stack([mean.mean * mean.weight for mean in means], axis=-1)
        weights = jnp.stack([mean.weight for mean in means], axis=-1)
        if observed is not None:
            share = (num_rows / jnp.maximum(jnp.sum(num_rows), 1))[:, None]
            weight = share * observed.weight
            values = jnp.concatenate([values, weight * observed.mean], axis=-1)
            weights = jnp.concatenate([weights, weight], axis=-1)
        new = jnp.stack([values, weights], axis=1).astype(self.table.dtype)
        if is_good is not None:
            new = jnp.where(is_good, new, 0)
        rows = jnp.stack([num_rows, jnp.zeros_like(num_rows)], axis=1)[..., None]
        new = jnp.concatenate([rows.astype(new.dtype), new], axis=2)
        new = jnp.pad(new, ((0, 0), (0, 0), (0, num_unused)))
        before, errors = jnp.split(self.table, 2, axis=1)
        # Without the barrier a compiler that knows algebra would find no error.
        sums = jax.lax.optimization_barrier(before + new)
        part = sums - before
        lost = (before - (sums - part)) + (new - part)
        return Tally(jnp.concatenate([sums, errors - lost], axis=1))


def zero_tally(num_ranks: int, num_columns: int = NUM_COLUMNS) -> Tally:
    """A tally of nothing, in NumPy."""
    return Tally(np.zeros((num_ranks, 4, 1 + num_columns), np.float32))


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
    sums = tally.sums.astype(np.float64)
    # Of a sum that is infinite the error is none.
    errors = np.where(np.isfinite(sums), tally.errors, 0)
    table = sums - errors
    return Totals(
        {name: table[:, 0, column] for column, name in enumerate(names)},
        {name: table[:, 1, column] for column, name in enumerate(names)},
        tally.num_rows,
    )
