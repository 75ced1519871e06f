"""When a run is to be saved: by its steps, its epochs and the clock."""

import time

import jax
import numpy as np

from fuelflow.step.checks import checked_count, checked_positive

# Clocks differ, so processes go by that of the first, and ask it this often.
_CALLS_BETWEEN_LOOKS = 32


class Cadence:
    """When a run is to be saved.

    Args:
        every_epochs: Epochs between saves; None for not by epochs.
        every_steps: Steps between saves; None for not by steps.
        every_secs: Seconds between saves; None for not by the clock.

    Raises:
        TypeError: If one is no number.
        ValueError: If a count is below 1, or the seconds are not positive.
    """

    def __init__(
        self,
        every_epochs: int | None,
        every_steps: int | None,
        every_secs: float | None,
    ) -> None:
        if every_epochs is not None:
            checked_count("every_epochs", every_epochs, least=1)
        if every_steps is not None:
            checked_count("every_steps", every_steps, least=1)
        if every_secs is not None:
            checked_positive("every_secs", every_secs)
        self._every_epochs = every_epochs
        self._every_steps = every_steps
        self._every_secs = every_secs
        self._num_calls = 0
        self._step = 0
        self._saved_step = 0
        self._saved_at = time.monotonic()

    def restart(self, step: int) -> None:
        """Counts from a step that is on disk."""
        self._step = self._saved_step = step
        self._saved_at = time.monotonic()

    def saved(self) -> None:
        """Counts from the step that was asked about last."""
        self.restart(self._step)

    def reason(self, step: int, num_epochs: int | None) -> str | None:
        """The setting by which a save is due, or None.

        Args:
            step: Steps dispatched so far.
            num_epochs: Epochs done, if one has just ended.
        """
        self._step = step
        if (
            num_epochs is not None
            and self._every_epochs is not None
            and num_epochs % self._every_epochs == 0
        ):
            return "every_epochs"
        every = self._every_steps
        if every is not None and step // every > self._saved_step // every:
            return "every_steps"
        return "every_secs" if self._is_time() else None

    def _is_time(self) -> bool:
        if self._every_secs is None:
            return False
        is_time = time.monotonic() - self._saved_at >= self._every_secs
        if jax.process_count() == 1:
            return is_time
        self._num_calls += 1
        if self._num_calls % _CALLS_BETWEEN_LOOKS:
            return False
        from jax.experimental import multihost_utils

        answers = multihost_utils.process_allgather(np.asarray(is_time, np.int32))
        return bool(np.ravel(answers)[0])
