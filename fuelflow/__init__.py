"""fuelflow trains JAX and Flax models: one compiled step, and what belongs around it.

Your model, your loss and your ``for`` loop stay yours. See `TrainingLoop`.
"""

from fuelflow._errors import (
    FuelflowError,
    MissingFieldError,
    NonFiniteError,
    RecompileError,
    StateMismatchError,
    UsedStateError,
)
from fuelflow.model.linen import BoundLinen, Linen
from fuelflow.step import schedules
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.outcome import Evaluation, StepOutcome
from fuelflow.step.plan import ParamPlan, StepPlan
from fuelflow.step.program import CompileRecord
from fuelflow.step.state import TrainState
from fuelflow.step.weighted import Weighted

__all__ = [
    "BoundLinen",
    "CompileRecord",
    "Evaluation",
    "FuelflowError",
    "Linen",
    "MissingFieldError",
    "NonFiniteError",
    "ParamPlan",
    "RecompileError",
    "StateMismatchError",
    "StepOutcome",
    "StepPlan",
    "TrainState",
    "TrainingLoop",
    "UsedStateError",
    "Weighted",
    "schedules",
]
