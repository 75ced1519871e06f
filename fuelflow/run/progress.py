"""How far an epoch is, and what its metrics are called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.step.outcome import StepOutcome


@dataclass
class Progress:
    """What an epoch has had so far, also before an interruption.

    Attributes:
        num_steps: Steps.
        num_skipped: Skipped steps of the whole run before it.
        secs: How long they took, compiling apart.
        secs_waiting: How long they waited for data.
        secs_compiling: How long they compiled.
    """

    num_steps: int = 0
    num_skipped: int = 0
    secs: float = 0.0
    secs_waiting: float = 0.0
    secs_compiling: float = 0.0

    @classmethod
    def of(cls, clocks: Mapping[str, float]) -> "Progress":
        """What was saved as clocks, with counts as integers again; none is a start."""
        return cls(**_counted(clocks))


def means_of(latest: Sequence[EpochMetrics]) -> dict[str, float]:
    """What the latest epoch was measured to be worth, by name, if there is one."""
    return {name: each.value(name) for each in latest for name in each.names}


def require_same(one: StepOutcome, other: StepOutcome) -> None:
    """Refuses steps of one epoch that differ in their metrics.

    Raises:
        ValueError: With the names of both.
    """
    if one.layout is not other.layout and one.metric_names != other.metric_names:
        raise ValueError(
            "a loss must return the same metrics for every batch of an epoch, got "
            f"{other.metric_names} after {one.metric_names}"
        )


def require_best(best: str | None, outcome: StepOutcome) -> None:
    """Refuses checkpoints by a metric that no step has, as soon as that is known.

    Raises:
        ValueError: With the names there are.
    """
    names = ["loss", *outcome.metric_names]
    if best is None or best.startswith("eval.") or best in names:
        return
    listed = ", ".join(f"`{name}`" for name in names)
    raise ValueError(
        f"`best` must be one of {listed}, or of the evaluation, such as `eval.loss`, "
        f"got {best!r}"
    )


def _counted(clocks: Mapping[str, float]) -> dict[str, Any]:
    """Clocks as they were saved, with counts as integers again."""
    return {
        name: int(value) if name.startswith("num_") else value
        for name, value in clocks.items()
    }
