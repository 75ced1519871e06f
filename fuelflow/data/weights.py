"""The weights of rows, which batches share: they are put on the device once."""

from functools import cached_property
from typing import Any

import numpy as np

from fuelflow.data.placement import Placement
from fuelflow.step.batch import Batch, weight_of_rows


class Weights:
    """The weights of an epoch's batches.

    Args:
        batch_size: Rows of a full batch.
        placement: Where weights go.
        has_weight: Whether batches have any: all do, so that one program takes all, or
            none does.
    """

    def __init__(
        self, batch_size: int, placement: Placement, *, has_weight: bool
    ) -> None:
        self._batch_size = batch_size
        self._placement = placement
        self._has_weight = has_weight
        self._stretches: dict[int, Any] = {}

    def batch(self, fields: dict[str, Any], size: int, held: int) -> Batch:
        """A batch of ``size`` true rows among ``held``."""
        if not self._has_weight:
            return Batch.held(fields)
        if size == held:
            return Batch.held(fields, self._ones)
        return Batch.held(fields, self._of_batch(size, held), size)

    def of_full_batches(self, num_steps: int) -> Any:
        """The weights ``[num_steps, batch]`` of full batches, if they have any."""
        if not self._has_weight:
            return None
        if num_steps not in self._stretches:
            ones = np.ones((num_steps, self._batch_size), np.float32)
            self._stretches[num_steps] = self._placement.whole(ones)
        return self._stretches[num_steps]

    @cached_property
    def _ones(self) -> Any:
        return self._of_batch(self._batch_size, self._batch_size)

    def _of_batch(self, size: int, held: int) -> Any:
        weight = weight_of_rows(size, held)
        own = self._placement.own_rows(held)
        return self._placement.rows([weight if own is None else weight[own]], [held])[0]
