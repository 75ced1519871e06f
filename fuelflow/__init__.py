"""fuelflow trains JAX and Flax models: one compiled step, and what belongs around it.

Your model, your loss and your ``for`` loop stay yours. See `TrainingLoop`.
"""

from typing import TYPE_CHECKING

from fuelflow._errors import (
    DamagedCheckpointError,
    DisagreementError,
    FuelflowError,
    InitializeError,
    MissingFieldError,
    NonFiniteError,
    NotWrappedError,
    PositionError,
    RecompileError,
    RowError,
    SaveError,
    StaleGraphError,
    StateMismatchError,
    UnwiredInputError,
    UsedStateError,
)
from fuelflow._rooms import find_public as __getattr__
from fuelflow._rooms import list_public as __dir__
from fuelflow.devices.ranks import mesh
from fuelflow.model.linen import BoundLinen, Linen
from fuelflow.step import schedules
from fuelflow.step.batch import Batch
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.observe import Histogram, Observe
from fuelflow.step.outcome import Evaluation, StepOutcome
from fuelflow.step.plan import ParamPlan, StepPlan
from fuelflow.step.program import CompileRecord
from fuelflow.step.state import TrainState
from fuelflow.step.weighted import Weighted

if TYPE_CHECKING:
    from fuelflow import testing
    from fuelflow.checkpoint.checkpointer import Checkpointer
    from fuelflow.checkpoint.fit import RestoreReport
    from fuelflow.checkpoint.params import load_params, save_params
    from fuelflow.checkpoint.record import RunRecord
    from fuelflow.checkpoint.restoring import Restored
    from fuelflow.data.epoch import Epoch
    from fuelflow.data.loader import DataLoader
    from fuelflow.data.samplers import (
        Sampler,
        SequentialSampler,
        ShuffledSampler,
        WeightedSampler,
    )
    from fuelflow.devices.processes import initialize
    from fuelflow.graph.array import Lazy
    from fuelflow.graph.graph import Graph
    from fuelflow.graph.realize import realize
    from fuelflow.graph.wrap import lazy
    from fuelflow.metrics.bottleneck import Bottleneck
    from fuelflow.metrics.epoch import EpochMetrics
    from fuelflow.metrics.history import History
    from fuelflow.metrics.trend import Trend
    from fuelflow.run.handle import TrainedState, TrainHandle
    from fuelflow.run.trainer import Trainer
    from fuelflow.step.probe import probe
    from fuelflow.watch import sinks
    from fuelflow.watch.monitor import Monitor

__all__ = [
    "Batch",
    "Bottleneck",
    "BoundLinen",
    "Checkpointer",
    "CompileRecord",
    "DamagedCheckpointError",
    "DataLoader",
    "DisagreementError",
    "Epoch",
    "EpochMetrics",
    "Evaluation",
    "FuelflowError",
    "Graph",
    "Histogram",
    "History",
    "InitializeError",
    "Lazy",
    "Linen",
    "MissingFieldError",
    "Monitor",
    "NonFiniteError",
    "NotWrappedError",
    "Observe",
    "ParamPlan",
    "PositionError",
    "RecompileError",
    "RestoreReport",
    "Restored",
    "RowError",
    "RunRecord",
    "Sampler",
    "SaveError",
    "SequentialSampler",
    "ShuffledSampler",
    "StaleGraphError",
    "StateMismatchError",
    "StepOutcome",
    "StepPlan",
    "TrainHandle",
    "TrainState",
    "TrainedState",
    "Trainer",
    "TrainingLoop",
    "Trend",
    "UnwiredInputError",
    "UsedStateError",
    "Weighted",
    "WeightedSampler",
    "initialize",
    "lazy",
    "load_params",
    "mesh",
    "probe",
    "realize",
    "save_params",
    "schedules",
    "sinks",
    "testing",
]
