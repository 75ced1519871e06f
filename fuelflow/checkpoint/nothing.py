"""A checkpointer that keeps nothing, for runs that want none."""

from typing import final

from fuelflow.checkpoint.record import RunRecord
from fuelflow.step.state import TrainState


@final
class NoCheckpointer:
    """Is never due and keeps nothing: what a run without a `Checkpointer` has."""

    best = None
    missed = None

    def prepare(self) -> None:
        """Nothing."""

    def is_due(self, step: int, *, num_epochs: int | None = None) -> None:
        """None: never."""
        del step, num_epochs

    def save(
        self,
        state: TrainState,
        record: RunRecord | None = None,
        *,
        reason: str = "asked for",
    ) -> None:
        """Nothing."""
        del state, record, reason

    def wait(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
