"""The rules of a step: a loop's arguments, checked and resolved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fuelflow._types import Schedule
from fuelflow.step.checks import checked_count, checked_positive
from fuelflow.step.loss import LossReader
from fuelflow.step.observe import Observe
from fuelflow.step.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """What a step does, whatever the model.

    Attributes:
        loss: The loss of a training step.
        eval_loss: The loss of an evaluation.
        optimizer: The optimizer.
        schedule: Step to learning rate, or None for the state's own.
        max_grad_norm: Largest global norm, or None.
        max_grad_value: Largest absolute entry, or None.
        accumulate_steps: Microbatches per batch.
        trainable: Patterns of the parameters to train.
        lr_groups: Pattern to factor on the rate.
        observe: What is looked at of each parameter, or None.
        keeps_bad_updates: Whether an update that is not finite is applied all the same.
        stops_at_bad: Whether after one that is not finite no other is applied either,
            until the host has seen it.

    Raises:
        TypeError: If a limit is no number, or a count no integer.
        ValueError: If a limit is not positive, a count is below 1, or there is a
            schedule for an optimizer with a rate of its own.
    """

    loss: LossReader
    eval_loss: LossReader
    optimizer: Optimizer
    schedule: Schedule | None
    max_grad_norm: float | None
    max_grad_value: float | None
    accumulate_steps: int
    trainable: str | tuple[str, ...]
    lr_groups: Mapping[str, float] | None
    observe: Observe | None
    keeps_bad_updates: bool
    stops_at_bad: bool

    def __post_init__(self) -> None:
        if self.schedule is not None:
            self.require_given_rate("a `schedule`")
        for name in ("max_grad_norm", "max_grad_value"):
            limit = getattr(self, name)
            if limit is not None:
                # A Python number: a NumPy one would widen the gradients it clips.
                object.__setattr__(self, name, checked_positive(name, limit))
        if self.lr_groups is not None:
            object.__setattr__(self, "lr_groups", _copied(self.lr_groups))
        if self.observe is not None and not isinstance(self.observe, Observe):
            raise TypeError(
                '`observe` must be an ff.Observe, such as ff.Observe(grad_norm="*"), '
                f"got a {type(self.observe).__name__}"
            )
        checked_count("accumulate_steps", self.accumulate_steps, least=1)

    @property
    def needs_lr(self) -> bool:
        """Whether the rate comes from `TrainingLoop.set_lr` alone."""
        return self.schedule is None and not self.optimizer.has_own_rate

    def require_given_rate(self, what: str) -> None:
        """Refuses what cannot act on an optimizer with a rate of its own.

        Raises:
            ValueError: If the optimizer is a ready transformation.
        """
        if self.optimizer.has_own_rate:
            raise ValueError(
                f"{what} needs an optimizer that is given its rate, but a ready optax "
                "transformation keeps its own: pass the factory, `optax.adamw` in "
                "place of `optax.adamw(1e-3)`, or `functools.partial(optax.adamw, "
                "weight_decay=0.01)` for further arguments"
            )


def _copied(groups: Any) -> dict[str, float]:
    if not isinstance(groups, Mapping):
        raise TypeError(
            "`lr_groups` must map patterns to factors of the rate, "
            f"got a {type(groups).__name__}"
        )
    return dict(groups)
