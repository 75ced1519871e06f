"""The programs of one loop for one model, and the states they take."""

from collections.abc import Mapping
from functools import partial

import jax
import numpy as np

from fuelflow._types import PyTree
from fuelflow.devices.placement import SingleDevice
from fuelflow.step.batch import Batch, Rows
from fuelflow.step.engine import Engine, Fixed, Moving, Still
from fuelflow.step.program import CompileLog, Program
from fuelflow.step.spec import StateSpec, check_batch
from fuelflow.step.state import TrainState


class Programs:
    """An engine's functions, compiled as they are needed.

    Args:
        engine: The pure functions.
        spec: The states they are compiled for.
        placement: Where those states live.
        log: Where compilations are accounted for.
    """

    def __init__(
        self, engine: Engine, spec: StateSpec, placement: SingleDevice, log: CompileLog
    ) -> None:
        self.engine = engine
        self.spec = spec
        self.placement = placement
        self.log = log

        program = partial(Program, log=log, fixed_table=spec.table)
        check = partial(check_batch, device=placement.device)
        check_parts = partial(check, num_microbatches=engine.rules.accumulate_steps)
        self.step = program("step", engine.step, check_batch=check_parts, donate=(0,))
        self.run = program("run", engine.run, check_batch=check_parts, donate=(0,))
        # Over rows that are on the device, which a loader has checked.
        self.stretch = program(
            "run on resident data", engine.run, check_batch=_accept, donate=(0,)
        )
        self.grads = program("grads", engine.grads, check_batch=check_parts)
        self.evaluate = program("evaluate", engine.evaluate, check_batch=check)
        self._is_maskable: dict[str, bool] = {}

    def rows_of(self, batch: Batch, state: TrainState) -> Rows:
        """A loader's batch as `step` takes it.

        One that was filled up stays so if the loss can tell its rows apart, and the
        model keeps no statistics of them, as BatchNorm does; if not, it runs at its own
        shape.
        """
        if batch.is_filled_up and not self._masks_step(batch, state):
            return batch.true_rows()
        return batch.rows()

    def _masks_step(self, batch: Batch, state: TrainState) -> bool:
        known = self._is_maskable.get("step")
        if known is None:
            rows = batch.rows()
            self.step.check(rows)
            arguments = (moving_part(state), fixed_part(state), rows)
            _, packed, _ = jax.eval_shape(self.engine.step, *arguments)
            known = self._is_maskable["step"] = packed.layout.is_maskable
        return known

    def masks_evaluation(self, batch: Batch, state: TrainState) -> bool:
        """Whether an evaluation can leave out rows that fill a batch up."""
        known = self._is_maskable.get("evaluate")
        if known is None:
            rows = batch.rows()._replace(weight=None)
            self.evaluate.check(rows)
            weight, index = np.ones(batch.num_held, np.float32), np.int32(0)
            arguments = (still_part(state), rows, weight, index)
            packed = jax.eval_shape(self.engine.evaluate, *arguments)
            known = self._is_maskable["evaluate"] = packed.layout.is_maskable
        return known


def _accept(batch: Batch) -> None:
    """Refuses nothing."""


def moving_part(state: TrainState) -> Moving:
    """The part of a state that a step replaces."""
    return Moving(
        state.params, state.variables, state.opt_state, state.step, state.num_skipped
    )


def fixed_part(state: TrainState) -> Fixed:
    """The part of a state that a step reads."""
    return Fixed(state.lr, state.lr_scale, state.key)


def still_part(state: TrainState) -> Still:
    """The part of a state that an evaluation reads."""
    return Still(state.params, state.variables, state.key)


def arrays_of(state: TrainState) -> Mapping[str, PyTree]:
    """A state's arrays by field, without what the last step left to look at."""
    return {**moving_part(state)._asdict(), **fixed_part(state)._asdict()}
