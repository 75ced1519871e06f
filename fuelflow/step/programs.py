"""The programs of one loop for one model, and the states they take."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from fuelflow._types import PyTree
from fuelflow.devices.placement import Placement
from fuelflow.step.batch import Batch, Pick, Rows
from fuelflow.step.engine import Engine, Fixed, Moving, Still
from fuelflow.step.packing import Layout
from fuelflow.step.program import CompileLog, Program
from fuelflow.step.spec import StateSpec, check_batch, num_rows, require_rows_for_all
from fuelflow.step.stacking import stack
from fuelflow.step.state import TrainState
from fuelflow.step.tally import NUM_COLUMNS, Tally, zero_tally


@dataclass(frozen=True)
class StepPrograms:
    """A step, and many in one dispatch.

    Attributes:
        step: Over one batch.
        run: Over each of stacked batches.
        stretch: Over batches of rows that are on the device, which a loader has
            checked.
    """

    step: Program
    run: Program
    stretch: Program


class Programs:
    """An engine's functions, compiled as they are needed.

    Args:
        engine: The pure functions.
        spec: The states they are compiled for.
        placement: Where those states live.
        log: Where compilations are accounted for.
    """

    def __init__(
        self, engine: Engine, spec: StateSpec, placement: Placement, log: CompileLog
    ) -> None:
        self.engine = engine
        self.spec = spec
        self.placement = placement
        self.log = log

        program = partial(
            Program, log=log, fixed_table=spec.table, settled=placement.settled
        )
        check = partial(check_batch, placement=placement)
        check_parts = partial(
            check,
            num_ranks=placement.ranks.count,
            num_microbatches=engine.rules.accumulate_steps,
        )

        def make_steps(suffix: str) -> StepPrograms:
            return StepPrograms(
                program(
                    "step" + suffix, engine.step, check_batch=check_parts, donate=(0,)
                ),
                program(
                    "run" + suffix, engine.run, check_batch=check_parts, donate=(0,)
                ),
                program(
                    "run on resident data" + suffix,
                    engine.run,
                    check_batch=_accept,
                    donate=(0,),
                ),
            )

        self._plain = make_steps("")
        self._summing = make_steps(", with sums")
        self.grads = program("grads", engine.grads, check_batch=check_parts)
        # Whoever calls it looks at each rank's result as it comes.
        self.rank_pass = program(
            "pass of each rank", engine.rank_pass, check_batch=_accept, settled=None
        )
        self.evaluate = program("evaluate", engine.evaluate, check_batch=check)
        self._num_columns = NUM_COLUMNS
        self.secs_tracing = 0.0  # besides what the log has
        self._is_maskable: dict[str, bool] = {}

    def steps(self, state: TrainState) -> StepPrograms:
        """The programs for states like this one, which keep account or do not."""
        return self._plain if state.sums is None else self._summing

    def placed(self, batch: PyTree) -> PyTree:
        """A batch's arrays where the programs take them.

        Raises:
            TypeError: If it is no batch.
            ValueError: If the ranks do not divide its rows.
        """
        try:
            return self.placement.rows(batch)
        except (TypeError, ValueError):
            self.grads.check(batch)
            raise

    def placed_stack(self, batches: list[PyTree]) -> PyTree:
        """Batches of one shape, stacked where the programs take them.

        Raises:
            TypeError: As `placed`.
            ValueError: As `placed`.
        """
        try:
            return self.placement.rows(stack(batches), axis=1)
        except (TypeError, ValueError):
            self.grads.check(batches[0])
            raise

    def rows_of(self, batch: Batch, state: TrainState) -> Rows:
        """A loader's batch as `step` takes it.

        One that was filled up stays so if the loss can tell its rows apart, and the
        model keeps no statistics of them, as BatchNorm does; if not, it runs at its own
        shape.
        """
        if batch.is_filled_up and not self._masks_rows(batch.rows(), state):
            require_rows_for_all(batch.size, self.placement.ranks.count)
            return batch.true_rows()
        return batch.rows()

    def require_tail(self, state: TrainState, batch: PyTree, num_rows: int) -> None:
        """Refuses a last batch that the ranks will not be able to take.

        Args:
            state: The state.
            batch: Another batch, as a program takes it.
            num_rows: True rows of the last one.

        Raises:
            ValueError: If the ranks do not divide them, and it cannot be filled up.
        """
        num_ranks = self.placement.ranks.count
        if num_rows % num_ranks and not self._masks_rows(batch, state):
            require_rows_for_all(num_rows, num_ranks)

    def _masks_rows(self, rows: PyTree, state: TrainState) -> bool:
        known = self._is_maskable.get("step")
        if known is None:
            if not isinstance(rows, Pick):
                self._plain.step.check(rows)
            known = self._is_maskable["step"] = self._layout(state, rows).is_maskable
        return known

    def zero_sums(self, num_columns: int = 0) -> Tally:
        """An account of nothing yet.

        Args:
            num_columns: How many are needed, here and in all that follow.
        """
        self._num_columns = max(self._num_columns, num_columns)
        zeros = zero_tally(self.placement.ranks.count, self._num_columns)
        return self.placement.rows(zeros)

    def _layout(self, state: TrainState, batch: PyTree) -> Layout:
        """How the outcome of a step over a batch is laid out, without compiling."""
        moving = moving_part(state)._replace(sums=None)
        arguments = (moving, fixed_part(state), batch)
        start = time.perf_counter()
        _, packed, _ = jax.eval_shape(self.engine.step, *arguments)
        self.secs_tracing += time.perf_counter() - start
        return packed.layout

    def masks_evaluation(self, batch: PyTree, state: TrainState) -> bool:
        """Whether an evaluation can leave out rows that fill such a batch up."""
        known = self._is_maskable.get("evaluate")
        if known is None:
            self.evaluate.check(batch)
            weight, index = np.ones(num_rows(batch), np.float32), np.int32(0)
            arguments = (still_part(state), batch, weight, index)
            packed = jax.eval_shape(self.engine.evaluate, *arguments)
            known = self._is_maskable["evaluate"] = packed.layout.is_maskable
        return known


def _accept(batch: Batch) -> None:
    """Refuses nothing."""


def moving_part(state: TrainState) -> Moving:
    """The part of a state that a step replaces."""
    return Moving(
        state.params,
        state.variables,
        state.opt_state,
        state.step,
        state.num_skipped,
        state.sums,
    )


def fixed_part(state: TrainState) -> Fixed:
    """The part of a state that a step reads."""
    return Fixed(state.lr, state.lr_scale, state.key, state.num_seen)


def still_part(state: TrainState) -> Still:
    """The part of a state that an evaluation reads."""
    return Still(state.params, state.variables, state.key)


def arrays_of(state: TrainState) -> Mapping[str, PyTree]:
    """A state's arrays by field, without what the last step left to look at."""
    arrays = {**moving_part(state)._asdict(), **fixed_part(state)._asdict()}
    del arrays["sums"], arrays["num_seen"]
    return arrays
