"""The programs of one loop for one model, and the states they take."""

from collections.abc import Mapping
from functools import partial

import jax

from fuelflow._types import Batch, PyTree
from fuelflow.devices.placement import SingleDevice
from fuelflow.step.engine import Engine, Fixed, Moving, Still
from fuelflow.step.program import CompileLog, Executable, Program
from fuelflow.step.spec import StateSpec, check_batch, num_rows
from fuelflow.step.state import TrainState

_INT32 = jax.ShapeDtypeStruct((), "int32")


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

        program = partial(Program, log=log, fixed_table=spec.table)
        check = partial(check_batch, num_microbatches=engine.rules.accumulate_steps)
        self.step = program("step", engine.step, check_batch=check, donate=True)
        self.run = program("run", engine.run, check_batch=check, donate=True)
        self.grads = program("grads", engine.grads, check_batch=check)
        self.evaluate = program("evaluate", engine.evaluate, check_batch=check_batch)

    def make_step(
        self, program: Program, state: TrainState, batch: Batch
    ) -> Executable:
        """A new executable of ``step`` or ``grads``."""
        return program.make((moving_part(state), fixed_part(state), batch), batch)

    def make_run(self, state: TrainState, batch: Batch, num_steps: int) -> Executable:
        """A new executable of ``run`` for ``num_steps`` batches like the one given."""
        stacked = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (num_steps, *x.shape), jax.dtypes.canonicalize_dtype(x.dtype)
            ),
            batch,
        )
        arguments = (moving_part(state), fixed_part(state), stacked)
        return self.run.make(arguments, batch, num_steps=num_steps)

    def make_evaluate(self, state: TrainState, batch: Batch) -> Executable:
        """A new executable of ``evaluate``."""
        rows = jax.ShapeDtypeStruct((num_rows(batch),), "float32")
        arguments = (still_part(state), batch, rows, _INT32)
        return self.evaluate.make(arguments, batch)


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
