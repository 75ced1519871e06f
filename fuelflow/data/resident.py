"""Rows that stay on the device, where each batch is picked by a compiled program."""

from typing import Any

import jax
import numpy as np

from fuelflow.data.device import Cursor, Programs, pick_rows
from fuelflow.data.layout import Layout
from fuelflow.data.placement import Placement
from fuelflow.data.weights import Weights
from fuelflow.step.batch import Batch, Stretch, Transform


class ResidentBatches:
    """The batches of one epoch of rows that are on the device.

    Args:
        data: All rows of each field.
        order: The rows of all samples of the epoch.
        layout: How they are cut into batches.
        programs: What picks them.
        transform: What they apply, for stretches.
        key: Base of its keys.
        placement: Where the rows are.
    """

    state = None

    def __init__(
        self,
        data: dict[str, jax.Array],
        order: np.ndarray,
        layout: Layout,
        *,
        programs: Programs,
        transform: Transform | None,
        key: jax.Array,
        placement: Placement,
    ) -> None:
        self._data = data
        self._layout = layout
        self._programs = programs
        self._transform = transform
        self._key = key
        self._placement = placement
        self._weights = Weights(
            layout.batch_size, placement, has_weight=layout.has_weight
        )
        self._index = 0  # of the next batch
        start = (
            np.array(layout.start, np.int32),
            np.array(layout.first_number, np.int32),
        )
        self._order, self._cursor = placement.whole(
            (order.astype(np.int32), Cursor(*start))
        )

    def __next__(self) -> Batch:
        """The next batch, which the device is still to make."""
        layout = self._layout
        if self._index >= layout.num_batches:
            self.close()
            raise StopIteration
        first, stop = layout.bounds(self._index)
        size = stop - first
        held = size if layout.drop_last is False else layout.batch_size
        with self._placement.context():
            fields, self._cursor = self._programs.pick(
                self._data, self._order, self._cursor, self._key, size=size, held=held
            )
        self._index += 1
        return self._weights.batch(fields, size, held)

    def stretch(self, num_steps: int) -> Stretch | None:
        """The next full batches, None if there are fewer."""
        size = self._layout.batch_size
        if self._index + num_steps > self._layout.num_full:
            return None
        with self._placement.context():
            rows, numbers, self._cursor = pick_rows(
                self._order, self._cursor, num_steps=num_steps, size=size
            )
        self._index += num_steps
        weight = self._weights.of_full_batches(num_steps)
        return Stretch(self._data, rows, weight, self._key, numbers, self._transform)

    def close(self) -> None:
        """Lets go of the rows."""
        self._index = self._layout.num_batches
        self._data = {}
        self._order: Any = None
