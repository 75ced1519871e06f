"""How many steps go into a dispatch, by measurement."""

from fuelflow.metrics.epoch import EpochMetrics

FUSED = 16
# A longer step hides what its dispatch costs.
_LONGEST_STEP_MS = 1.0
_LEAST_GAIN = 0.9


class Tempo:
    """Tries out whole epochs: single steps first, then several in a dispatch.

    The second is tried where a step is short, and kept where it takes less than nine
    tenths of the time. The metrics are the same on all processes, and so is the choice.

    Args:
        given: The number of steps to stay with; None to find out.
        num_steps: Steps of an epoch, if known.
        num_epochs: Epochs to come.
    """

    def __init__(
        self, given: int | None, num_steps: int | None, num_epochs: int
    ) -> None:
        self.steps_per_call = given or 1
        is_worth_it = num_epochs > 2 and (num_steps is None or num_steps >= 4 * FUSED)
        self._is_open = given is None and is_worth_it
        self._single_ms: float | None = None

    def learn(self, metrics: EpochMetrics) -> None:
        """Takes the pace of an epoch into account."""
        if not self._is_open or not metrics.num_steps:
            return
        step_ms = metrics.epoch_ms / metrics.num_steps
        if self._single_ms is None:
            self._single_ms = step_ms
            self._is_open = step_ms < _LONGEST_STEP_MS
            self.steps_per_call = FUSED if self._is_open else 1
            return
        self._is_open = False
        if step_ms > _LEAST_GAIN * self._single_ms:
            self.steps_per_call = 1
