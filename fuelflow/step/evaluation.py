"""Evaluation: the weighted means of a data set, whatever its batches' sizes."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuelflow._types import Array
from fuelflow._types import Batch as BatchTree
from fuelflow.step.batch import Batch, filled_up, weight_of_rows
from fuelflow.step.outcome import Evaluation
from fuelflow.step.packing import Layout, Packed
from fuelflow.step.programs import Programs, still_part
from fuelflow.step.spec import num_rows, require_rows_for_all
from fuelflow.step.stacking import at_least_one, iterator_of
from fuelflow.step.state import TrainState


def evaluate_batches(
    programs: Programs,
    state: TrainState,
    batches: Iterable[BatchTree],
    *,
    fill_up: bool,
    max_in_flight: int,
) -> Evaluation:
    """Dispatches the evaluation of every batch; the means are read later.

    A batch with fewer rows than an earlier one is filled up to its size with rows of
    weight 0, if every value the loss returns can be told apart by row. Otherwise it
    runs at its own shape.

    Raises:
        ValueError: If there is no batch, or batches have different metrics.
    """
    assert state.flight is not None
    records: list[Array] = []
    layout: Layout | None = None
    for index, batch in enumerate(at_least_one(iterator_of(batches))):
        filled, row_weight = _as_evaluated(programs, state, batch, fill_up=fill_up)
        require_rows_for_all(num_rows(filled), programs.placement.ranks.count)
        filled, row_weight = programs.placement.rows((filled, row_weight))
        packed: Packed = programs.evaluate(
            filled, still_part(state), filled, row_weight, np.int32(index)
        )
        layout = layout or packed.layout
        if packed.layout.fields != layout.fields:
            raise ValueError(
                "a loss must return the same metrics for every batch of an evaluation, "
                f"got {packed.layout.names} after {layout.names}"
            )
        records.append(packed.words)
        if len(records) >= max_in_flight:
            records[-max_in_flight].block_until_ready()
    assert layout is not None
    return Evaluation(records, layout, state.flight)


def _as_evaluated(
    programs: Programs, state: TrainState, batch: BatchTree, *, fill_up: bool
) -> tuple[BatchTree, Any]:
    """A batch at the size it runs at, and the weight of its rows."""
    own_weight = None
    if type(batch) is Batch:
        if fill_up and batch.is_filled_up:
            rows = batch.rows()
            fields = rows._replace(weight=None)
            if programs.masks_evaluation(fields, state):
                return fields, rows.weight
        rows = batch.true_rows()
        own_weight = rows.weight
        batch = rows._replace(weight=None)
    is_known = programs.evaluate.find(batch) is not None  # refuses a wrong batch
    may_fill = fill_up and not is_known
    filled, weight = _fill_up(programs, state, batch) if may_fill else _whole(batch)
    if own_weight is not None:
        # What lies on the devices of other processes cannot be looked at here.
        pad = jnp.pad if isinstance(own_weight, jax.Array) else np.pad
        weight = pad(own_weight, (0, num_rows(filled) - num_rows(batch)))
    return filled, weight


def _fill_up(
    programs: Programs, state: TrainState, batch: BatchTree
) -> tuple[BatchTree, np.ndarray]:
    """A batch at the size of a program there is, if one will do, and row weights.

    If none will, it has the next size that the ranks divide.
    """
    size = _find_larger(programs, batch)
    if size is None:
        num_ranks = programs.placement.ranks.count
        size = -(-num_rows(batch) // num_ranks) * num_ranks
        if size == num_rows(batch):
            return _whole(batch)
        if not programs.masks_evaluation(filled_up(batch, size), state):
            return _whole(batch)
    weight = weight_of_rows(num_rows(batch), size)
    return filled_up(batch, size), weight


def _whole(batch: BatchTree) -> tuple[BatchTree, np.ndarray]:
    """A batch as it is, every row counting."""
    return batch, np.ones(num_rows(batch), np.float32)


def _find_larger(programs: Programs, batch: BatchTree) -> int | None:
    """The size of a program for the same rows and more of them, that can mask some."""
    for executable in programs.evaluate.executables:
        compiled_for = executable.traced.args_info[0][1]
        is_maskable = executable.traced.out_info.layout.is_maskable
        size = num_rows(compiled_for)
        if is_maskable and size > num_rows(batch) and _rows_agree(compiled_for, batch):
            return size
    return None


def _rows_agree(one: BatchTree, other: BatchTree) -> bool:
    """Whether two batches differ in their number of rows alone."""

    def rows(batch: BatchTree) -> Any:
        leaves, treedef = jax.tree.flatten(batch)
        dtypes = [jax.dtypes.canonicalize_dtype(leaf.dtype) for leaf in leaves]
        return treedef, [leaf.shape[1:] for leaf in leaves], dtypes

    return rows(one) == rows(other)
