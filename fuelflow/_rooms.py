"""Rooms of the house that are opened on first use, so that importing it stays quick."""

import importlib
import sys
from typing import Any

_MODULES = {
    "Bottleneck": "fuelflow.metrics.bottleneck",
    "Checkpointer": "fuelflow.checkpoint.checkpointer",
    "DataLoader": "fuelflow.data.loader",
    "Epoch": "fuelflow.data.epoch",
    "EpochMetrics": "fuelflow.metrics.epoch",
    "Graph": "fuelflow.graph.graph",
    "History": "fuelflow.metrics.history",
    "Lazy": "fuelflow.graph.array",
    "Monitor": "fuelflow.watch.monitor",
    "RestoreReport": "fuelflow.checkpoint.fit",
    "Restored": "fuelflow.checkpoint.restoring",
    "RunRecord": "fuelflow.checkpoint.record",
    "Sampler": "fuelflow.data.samplers",
    "SequentialSampler": "fuelflow.data.samplers",
    "ShuffledSampler": "fuelflow.data.samplers",
    "TrainHandle": "fuelflow.run.handle",
    "TrainedState": "fuelflow.run.handle",
    "Trainer": "fuelflow.run.trainer",
    "Trend": "fuelflow.metrics.trend",
    "WeightedSampler": "fuelflow.data.samplers",
    "initialize": "fuelflow.devices.processes",
    "lazy": "fuelflow.graph.wrap",
    "load_params": "fuelflow.checkpoint.params",
    "probe": "fuelflow.step.probe",
    "realize": "fuelflow.graph.realize",
    "save_params": "fuelflow.checkpoint.params",
}


_WHOLE_MODULES = {"sinks": "fuelflow.watch.sinks", "testing": "fuelflow.testing"}


def find_public(name: str) -> Any:
    """A public name of a room that may not be open yet.

    Raises:
        AttributeError: If there is no such name.
    """
    if name in _WHOLE_MODULES:
        return importlib.import_module(_WHOLE_MODULES[name])
    if name not in _MODULES:
        raise AttributeError(f"module `fuelflow` has no attribute `{name}`")
    return getattr(importlib.import_module(_MODULES[name]), name)


def list_public() -> list[str]:
    """The public names, those of rooms that are not open yet among them."""
    door = sys.modules["fuelflow"]
    return sorted({*vars(door), *door.__all__})
