"""How a value develops over the epochs of a run."""

import math
from collections.abc import Sequence

import numpy as np

from fuelflow.step.checks import checked_count, checked_number, checked_positive


class Trend:
    """The values of one metric in order, and whether they still get better.

    A NaN among the values is a value: a window that holds one, or an infinity, has no
    slope and no variance, so `improving`, `stalled` and `converged` are false of it.
    So they are on fewer than ``n`` values. Epochs in which the metric was not measured
    are no values: leave them out, as `History.trend` does; ``epochs`` then tells how
    far apart the others are.

    Args:
        values: The values, oldest first.
        epochs: The epoch of each, increasing; by default they follow each other.
        higher_is_better: Whether `improving` means rising, as for an accuracy.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If there are not as many epochs as values, or they do not increase.

    Example:
        >>> trend = Trend([4.0, 2.0, 1.0, 1.0])
        >>> trend.latest, trend.mean, trend.slope(3), trend.improving(3)
        (1.0, 2.0, -0.5, True)
        >>> trend.stalled(2, tol=0.01), trend.converged(2, tol=0.01)
        (True, True)
    """

    def __init__(
        self,
        values: Sequence[float],
        *,
        epochs: Sequence[int] | None = None,
        higher_is_better: bool = False,
    ) -> None:
        self.values = tuple(checked_number("values", value) for value in values)
        self.epochs = tuple(range(len(values)) if epochs is None else epochs)
        self.higher_is_better = higher_is_better
        if len(self.epochs) != len(self.values):
            raise ValueError(
                f"`epochs` must be as many as the {len(self.values)} values, got "
                f"{len(self.epochs)}"
            )
        if any(a >= b for a, b in zip(self.epochs, self.epochs[1:], strict=False)):
            raise ValueError(f"`epochs` must increase, got {list(self.epochs)}")

    @property
    def latest(self) -> float:
        """The last value; NaN if there is none."""
        return self.values[-1] if self.values else math.nan

    @property
    def mean(self) -> float:
        """The mean of all values; NaN if there is none, or one of them is NaN."""
        if not self.values:
            return math.nan
        return _quiet_mean(np.array(self.values))

    def slope(self, n: int) -> float:
        """The change per epoch over the last ``n`` values, by least squares.

        Equals ``sum(dx * dy) / sum(dx**2)`` with ``dx`` the epochs and ``dy`` the
        values, both less their mean.

        Args:
            n: How many values, at least 2.

        Returns:
            The slope; NaN if there are fewer values or one of them is not finite.

        Raises:
            TypeError: If ``n`` is not an integer.
            ValueError: If ``n`` is less than 2.
        """
        values = self._last(n)
        if values is None:
            return math.nan
        away = np.array(self.epochs[-n:], np.float64)
        away -= away.mean()
        # One value that is not finite makes the mean so too, and distances from it NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            # Values lose their mean first, or a small slope would drown in it.
            return float(away @ (values - values.mean()) / (away @ away))

    def variance(self, n: int) -> float:
        """The population variance of the last ``n`` values: the mean squared distance.

        Args:
            n: How many values, at least 2.

        Returns:
            The variance; NaN if there are fewer values or one of them is not finite,
            infinite if it is larger than float64 holds.

        Raises:
            TypeError: If ``n`` is not an integer.
            ValueError: If ``n`` is less than 2.
        """
        values = self._last(n)
        if values is None:
            return math.nan
        with np.errstate(over="ignore", invalid="ignore"):
            return _quiet_mean((values - values.mean()) ** 2)

    def improving(self, n: int) -> bool:
        """Whether the slope over the last ``n`` values goes the better way.

        Args:
            n: How many values, at least 2.

        Returns:
            Whether it is negative, or positive if higher is better.

        Raises:
            TypeError: If ``n`` is not an integer.
            ValueError: If ``n`` is less than 2.
        """
        slope = self.slope(n)
        return slope > 0 if self.higher_is_better else slope < 0

    def stalled(self, n: int, tol: float) -> bool:
        """Whether the slope over the last ``n`` values is smaller than ``tol``.

        Args:
            n: How many values, at least 2.
            tol: The change per epoch that is none any more, positive.

        Returns:
            Whether ``abs(slope(n)) < tol``; a noisy value can be stalled.

        Raises:
            TypeError: If an argument is not a number.
            ValueError: If ``n`` is less than 2 or ``tol`` not positive.
        """
        return abs(self.slope(n)) < checked_positive("tol", tol)

    def converged(self, n: int, tol: float) -> bool:
        """Whether the variance of the last ``n`` values is smaller than ``tol``.

        Args:
            n: How many values, at least 2.
            tol: The variance that is none any more, positive, in the value's unit
                squared.

        Returns:
            Whether ``variance(n) < tol``; neither noise nor a slope is left then.

        Raises:
            TypeError: If an argument is not a number.
            ValueError: If ``n`` is less than 2 or ``tol`` not positive.
        """
        return self.variance(n) < checked_positive("tol", tol)

    def _last(self, n: int) -> np.ndarray | None:
        """The last n values, if there are so many."""
        checked_count("n", n, least=2)
        values = np.array(self.values[-n:], np.float64)
        return values if len(values) == n else None

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        text = f"Trend({len(self)} values"
        return f"{text}, latest {self.latest:.6g})" if self.values else f"{text})"


def _quiet_mean(values: np.ndarray) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(values.mean())
