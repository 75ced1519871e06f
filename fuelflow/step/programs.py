"""The programs of one loop for one model, and the states they take."""

from collections.abc import Mapping
from functools import partial

from fuelflow._types import PyTree
from fuelflow.devices.placement import SingleDevice
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

        program = partial(Program, log=log, fixed_table=spec.table)
        check = partial(check_batch, device=placement.device)
        check_parts = partial(check, num_microbatches=engine.rules.accumulate_steps)
        self.step = program("step", engine.step, check_batch=check_parts, donate=True)
        self.run = program("run", engine.run, check_batch=check_parts, donate=True)
        self.grads = program("grads", engine.grads, check_batch=check_parts)
        self.evaluate = program("evaluate", engine.evaluate, check_batch=check)


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
