"""fuelflow trains JAX and Flax models: one compiled step, and what belongs around it.

Your model, your loss and your ``for`` loop stay yours. See `TrainingLoop`.
"""

from fuelflow._errors import (
    FuelflowError,
    MissingFieldError,
    NonFiniteError,
    NotWrappedError,
    PositionError,
    RecompileError,
    RowError,
    StaleGraphError,
    StateMismatchError,
    UnwiredInputError,
    UsedStateError,
)
from fuelflow.data.epoch import Epoch
from fuelflow.data.loader import DataLoader
from fuelflow.data.samplers import (
    Sampler,
    SequentialSampler,
    ShuffledSampler,
    WeightedSampler,
)
from fuelflow.lazy.array import Lazy
from fuelflow.lazy.graph import Graph
from fuelflow.lazy.realize import realize
from fuelflow.lazy.wrap import lazy
from fuelflow.model.linen import BoundLinen, Linen
from fuelflow.step import schedules
from fuelflow.step.batch import Batch
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.outcome import Evaluation, StepOutcome
from fuelflow.step.plan import ParamPlan, StepPlan
from fuelflow.step.program import CompileRecord
from fuelflow.step.state import TrainState
from fuelflow.step.weighted import Weighted

__all__ = [
    "Batch",
    "BoundLinen",
    "CompileRecord",
    "DataLoader",
    "Epoch",
    "Evaluation",
    "FuelflowError",
    "Graph",
    "Lazy",
    "Linen",
    "MissingFieldError",
    "NonFiniteError",
    "NotWrappedError",
    "ParamPlan",
    "PositionError",
    "RecompileError",
    "RowError",
    "Sampler",
    "SequentialSampler",
    "ShuffledSampler",
    "StaleGraphError",
    "StateMismatchError",
    "StepOutcome",
    "StepPlan",
    "TrainState",
    "TrainingLoop",
    "UnwiredInputError",
    "UsedStateError",
    "Weighted",
    "WeightedSampler",
    "lazy",
    "realize",
    "schedules",
]
