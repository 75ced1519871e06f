"""Samplers: which rows an epoch has, and in which order."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fuelflow.step.checks import checked_count

Indices = np.ndarray[tuple[int], np.dtype[np.integer[Any]]]


@runtime_checkable
class Sampler(Protocol):
    """Which rows an epoch has, and in which order.

    The rows must depend on the arguments alone: that is what makes runs repeat, and
    lets one go on in the middle of an epoch.
    """

    def num_samples(self, num_rows: int) -> int:
        """How many samples an epoch has.

        Args:
            num_rows: Rows of the data set.

        Raises:
            ValueError: If the sampler does not fit so many rows.
        """
        ...

    def indices(self, num_rows: int, rng: np.random.Generator) -> np.ndarray:
        """The row of each sample, ``[num_samples]``, from 0 to ``num_rows - 1``.

        Args:
            num_rows: Rows of the data set.
            rng: Made anew for each epoch from the loader's seed and the epoch.
        """
        ...


class ShuffledSampler:
    """Every row once, in an order that is new for each epoch.

    Example:
        >>> rows = ShuffledSampler().indices(4, np.random.default_rng(0))
        >>> sorted(rows.tolist())
        [0, 1, 2, 3]
    """

    def num_samples(self, num_rows: int) -> int:
        """All rows."""
        return num_rows

    def indices(self, num_rows: int, rng: np.random.Generator) -> Indices:
        """A permutation of the rows."""
        return rng.permutation(num_rows)

    def __repr__(self) -> str:
        return "ShuffledSampler()"


class SequentialSampler:
    """Every row once, as the source has them."""

    def num_samples(self, num_rows: int) -> int:
        """All rows."""
        return num_rows

    def indices(self, num_rows: int, rng: np.random.Generator) -> Indices:
        """The rows from first to last."""
        del rng
        return np.arange(num_rows)

    def __repr__(self) -> str:
        return "SequentialSampler()"


class WeightedSampler:
    """Rows drawn by weight: row ``i`` comes with probability ``weights[i] / sum``.

    Args:
        weights: One finite weight for each row, not negative and not all 0.
        num_samples: Samples of an epoch; None for as many as there are rows.
        replacement: Whether a row may be drawn again in the same epoch.

    Raises:
        TypeError: If ``num_samples`` is no integer.
        ValueError: If ``weights`` are not such weights, or fewer than ``num_samples``
            are positive and no row may be drawn again.

    Example:
        >>> sampler = WeightedSampler([0.0, 1.0, 0.0], num_samples=2)
        >>> sampler.indices(3, np.random.default_rng(0)).tolist()
        [1, 1]
    """

    def __init__(
        self,
        weights: Sequence[float] | np.ndarray,
        num_samples: int | None = None,
        *,
        replacement: bool = True,
    ) -> None:
        self._weights = _checked_weights(weights)
        if num_samples is not None:
            num_samples = checked_count("num_samples", num_samples, least=1)
        self._num_samples = num_samples
        self._replacement = replacement
        num_positive = int(np.count_nonzero(self._weights))
        if not replacement and self.num_samples(len(self._weights)) > num_positive:
            raise ValueError(
                "`num_samples` without replacement must be at most the number of "
                f"positive weights, {num_positive}, got "
                f"{self.num_samples(len(self._weights))}"
            )

    def num_samples(self, num_rows: int) -> int:
        """The number asked for, or that of the rows."""
        if num_rows != len(self._weights):
            raise ValueError(
                "`weights` must have one weight for each of the "
                f"{num_rows} rows, got {len(self._weights)}"
            )
        return num_rows if self._num_samples is None else self._num_samples

    def indices(self, num_rows: int, rng: np.random.Generator) -> Indices:
        """Rows drawn by weight."""
        return rng.choice(
            num_rows,
            self.num_samples(num_rows),
            replace=self._replacement,
            p=self._weights,
        )

    def __repr__(self) -> str:
        return (
            f"WeightedSampler(<{len(self._weights)} weights>, {self._num_samples}, "
            f"replacement={self._replacement})"
        )


def _checked_weights(weights: Any) -> np.ndarray:
    values = np.asarray(weights, np.float64)
    if values.ndim != 1:
        raise ValueError(
            f"`weights` must be one weight for each row, got shape {values.shape}"
        )
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        raise ValueError(
            "`weights` must be finite and not negative, got "
            f"{values[wrong[0]]} for row {wrong[0]}"
        )
    if not values.sum() > 0:
        raise ValueError("`weights` must not all be 0")
    return values / values.sum()


def draw(sampler: Sampler, num_rows: int, rng: np.random.Generator) -> Indices:
    """A sampler's rows for one epoch, checked.

    Raises:
        TypeError: If they are not integers.
        ValueError: If their number is not as promised, or one is out of range.
    """
    name = type(sampler).__name__
    rows = np.asarray(sampler.indices(num_rows, rng))
    if rows.dtype.kind not in "iu":
        raise TypeError(
            f"`{name}.indices` must be integers, got dtype {rows.dtype}: a mask is "
            "turned into indices by numpy.flatnonzero"
        )
    expected = sampler.num_samples(num_rows)
    if rows.shape != (expected,):
        raise ValueError(
            f"`{name}.indices` must have shape ({expected},), as its `num_samples` "
            f"promises, got {rows.shape}"
        )
    if rows.min() < 0 or rows.max() >= num_rows:
        wrong = np.flatnonzero((rows < 0) | (rows >= num_rows))
        first = ", ".join(f"{rows[i]} at {i}" for i in wrong[:3])
        raise ValueError(
            f"`{name}.indices` must be from 0 to {num_rows - 1}, got {len(wrong)} "
            f"out of range: {first}"
        )
    return rows.astype(np.intp, copy=False)
