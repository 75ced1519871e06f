"""Which checkpoints stay: the newest, and the best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fuelflow.step.checks import checked_count


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay.

    Attributes:
        keep: How many of the newest; None for all.
        best: The metric by which others stay besides.
        higher_is_better: Whether a larger value of it is better.
        keep_best: How many of the best.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a count is below 1, or ``best`` and ``higher_is_better`` are not
            given together.
    """

    keep: int | None = 3
    best: str | None = None
    higher_is_better: bool | None = None
    keep_best: int = 1

    def __post_init__(self) -> None:
        if self.keep is not None:
            checked_count("keep", self.keep, least=1)
        checked_count("keep_best", self.keep_best, least=1)
        if self.best is not None and not isinstance(self.best, str):
            raise TypeError(
                '`best` must be the name of a metric, such as "eval.loss", got a '
                f"{type(self.best).__name__}"
            )
        if (self.best is None) != (self.higher_is_better is None):
            raise ValueError(
                "`best` and `higher_is_better` must be given together, as in "
                'best="eval.accuracy", higher_is_better=True, got '
                f"best={self.best!r}, higher_is_better={self.higher_is_better!r}"
            )

    def require_metric(self, metrics: Mapping[str, float]) -> None:
        """Refuses metrics that lack the one to go by; none at all are fine.

        Raises:
            ValueError: With the names there are.
        """
        if self.best is not None and metrics and self.best not in metrics:
            listed = ", ".join(f"`{name}`" for name in metrics)
            raise ValueError(f"`best` must be one of {listed}, got {self.best!r}")

    def superfluous(self, saves: Sequence["Save"]) -> list[int]:
        """The serials of those that need not stay.

        Of one step the later save stands for all. A metric that is nan is never best.
        """
        latest = {save.step: save for save in sorted(saves, key=lambda s: s.serial)}
        distinct = sorted(latest.values(), key=lambda save: save.serial)
        kept = distinct if self.keep is None else distinct[-self.keep :]
        kept = {save.serial for save in [*kept, *self.best_of(distinct)]}
        return [save.serial for save in saves if save.serial not in kept]

    def best_of(self, saves: Sequence["Save"]) -> list["Save"]:
        """The best, the very best first; of equal ones the earlier."""
        if self.best is None:
            return []
        sign = -1 if self.higher_is_better else 1
        ranked = sorted(
            (sign * save.metrics[self.best], save.serial, save)
            for save in saves
            if not math.isnan(save.metrics.get(self.best, math.nan))
        )
        return [save for _, _, save in ranked[: self.keep_best]]


@dataclass(frozen=True)
class Save:
    """What retention asks of a checkpoint."""

    serial: int
    step: int
    metrics: Mapping[str, float]
