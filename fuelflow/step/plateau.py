"""A learning rate that falls when a metric stops improving, decided on the host."""

import math
from collections.abc import Mapping
from typing import Literal, SupportsFloat

from fuelflow.step.checks import (
    checked_choice,
    checked_count,
    checked_number,
    checked_rate,
)

# PyTorch's `eps`: a cut that would change the rate by less is not made.
_SMALLEST_CUT = 1e-8


class Plateau:
    r"""A learning rate, cut by a factor whenever a metric stops improving.

    A host object: it is told one metric after each evaluation and answers with the rate
    to use from then on, `state = loop.set_lr(state, plateau.update(metric))`. It is no
    schedule, since a schedule knows only the step; leave the loop's schedule out.

    A metric is an improvement if it lies beyond ``best * (1 ± threshold)`` (``"rel"``)
    or ``best ± threshold`` (``"abs"``), minus for ``"min"`` and plus for ``"max"``.
    After more than ``patience`` metrics in a row without one, the rate becomes
    ``max(rate * factor, min_rate)``, and none of the next ``cooldown`` metrics counts
    as bad. Cuts of 1e-8 or less are not made. All of it equals
    ``torch.optim.lr_scheduler.ReduceLROnPlateau``.

    A NaN metric is never an improvement and never the best: it counts as a bad one.

    Args:
        base: The rate to begin with.
        factor: What a cut multiplies the rate by, between 0 and 1, both excluded.
        patience: Metrics without improvement that are borne before a cut, at least 0.
        mode: ``"min"`` if smaller metrics are better, ``"max"`` if larger ones are.
        threshold: How far beyond the best a metric must lie, at least 0; below 1 where
            it is relative and smaller is better, since nothing could improve otherwise.
        threshold_mode: ``"rel"`` or ``"abs"``, as above.
        cooldown: Metrics after a cut that are not counted as bad, at least 0.
        min_rate: The rate below which no cut goes, at most ``base``.

    Raises:
        TypeError: If an argument is not a number, or a count not an integer.
        ValueError: If an argument is out of the range given above.

    References:
        `ReduceLROnPlateau <https://docs.pytorch.org/docs/stable/generated/
        torch.optim.lr_scheduler.ReduceLROnPlateau.html>`_.

    Example:
        >>> plateau = Plateau(0.1, factor=0.5, patience=1)
        >>> [plateau.update(loss) for loss in (1.0, 0.8, 0.9, 0.9, 0.7)]
        [0.1, 0.1, 0.1, 0.05, 0.05]
    """

    def __init__(
        self,
        base: float,
        *,
        factor: float = 0.1,
        patience: int = 10,
        mode: Literal["min", "max"] = "min",
        threshold: float = 1e-4,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_rate: float = 0.0,
    ) -> None:
        self._rate = checked_rate("base", base)
        self._factor = _checked_factor(factor)
        self._patience = checked_count("patience", patience, least=0)
        self._cooldown = checked_count("cooldown", cooldown, least=0)
        self._min_rate = checked_rate("min_rate", min_rate)
        if self._min_rate > self._rate:
            raise ValueError(
                f"`min_rate` must be at most the `base` of {base}, got {min_rate}"
            )
        checked_choice("mode", mode, ("min", "max"))
        checked_choice("threshold_mode", threshold_mode, ("rel", "abs"))
        threshold = checked_rate("threshold", threshold)
        self._is_relative = threshold_mode == "rel"
        self._sign = -1.0 if mode == "min" else 1.0
        if self._is_relative and mode == "min" and threshold >= 1:
            raise ValueError(
                "`threshold` must be less than 1 where it is relative and smaller is "
                f'better, got {threshold}; `threshold_mode="abs"` takes any'
            )
        self._margin = self._sign * threshold
        self._best = -self._sign * math.inf
        self._num_bad = 0
        self._cooldown_left = 0

    @property
    def rate(self) -> float:
        """The rate to use now."""
        return self._rate

    def update(self, metric: SupportsFloat) -> float:
        """The rate to use from now on, given the newest metric.

        Waits for the metric if it is still being computed on a device.

        Args:
            metric: A number, or an array of shape ``[]``.

        Returns:
            The rate, a Python float, also kept as ``rate``.

        Raises:
            TypeError: If the metric is not a number.

        Example:
            >>> plateau = Plateau(1.0, mode="max", patience=0)
            >>> plateau.update(0.6), plateau.update(float("nan"))
            (1.0, 0.1)
        """
        value = _checked_metric(metric)
        if self._is_improvement(value):
            self._best = value
            self._num_bad = 0
        else:
            self._num_bad += 1
        if self._cooldown_left > 0:
            self._cooldown_left -= 1
            self._num_bad = 0
        if self._num_bad > self._patience:
            self._cut()
        return self._rate

    def _is_improvement(self, value: float) -> bool:
        if self._is_relative:
            target = self._best * (1.0 + self._margin)
        else:
            target = self._best + self._margin
        # Every comparison with NaN is false, so a NaN never improves on anything.
        return value < target if self._sign < 0 else value > target

    def _cut(self) -> None:
        lower = max(self._rate * self._factor, self._min_rate)
        if self._rate - lower > _SMALLEST_CUT:
            self._rate = lower
        self._cooldown_left = self._cooldown
        self._num_bad = 0

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs beside the constructor's arguments.

        Returns:
            ``rate`` and ``best``, floats, and ``num_bad`` and ``cooldown_left``,
            integers. ``best`` is infinite before the first metric.

        Example:
            >>> Plateau(0.1).state_dict()
            {'rate': 0.1, 'best': inf, 'num_bad': 0, 'cooldown_left': 0}
        """
        return {
            "rate": self._rate,
            "best": self._best,
            "num_bad": self._num_bad,
            "cooldown_left": self._cooldown_left,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from where `state_dict` was taken, bit for bit.

        The constructor's arguments are not part of the state and stay as they are.

        Args:
            state: What `state_dict` returned.

        Raises:
            TypeError: If a value is of the wrong kind.
            ValueError: If a key is missing or unknown, or a value is out of range.
                Nothing is changed then.

        Example:
            >>> before, after = Plateau(0.1, patience=0), Plateau(0.1, patience=0)
            >>> _ = before.update(1.0), before.update(2.0)
            >>> after.load_state_dict(before.state_dict())
            >>> after.rate == before.rate
            True
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(
                f"a plateau's state must have the keys {', '.join(self.state_dict())}, "
                f"got {', '.join(state) or 'none'}"
            )
        rate = checked_rate("rate", state["rate"])
        best = checked_number("best", state["best"])
        num_bad = checked_count("num_bad", state["num_bad"], least=0)
        cooldown_left = checked_count("cooldown_left", state["cooldown_left"], least=0)
        self._rate, self._best = rate, best
        self._num_bad, self._cooldown_left = num_bad, cooldown_left


def _checked_factor(value: object) -> float:
    number = checked_number("factor", value)
    if not 0 < number < 1:
        raise ValueError(
            f"`factor` must be between 0 and 1, both excluded, got {value}"
        )
    return number


def _checked_metric(metric: object) -> float:
    if isinstance(metric, bool) or not isinstance(metric, SupportsFloat):
        raise TypeError(
            f"`metric` must be a number or an array of shape [], got {metric!r}"
        )
    shape = getattr(metric, "shape", ())
    if shape != ():
        raise TypeError(
            "`metric` must be a number or an array of shape [], got shape "
            f"{list(shape)}"
        )
    return float(metric)
