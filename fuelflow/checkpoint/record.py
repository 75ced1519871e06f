"""What a run knows besides its arrays, as JSON has it."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.metrics.history import History
from fuelflow.metrics.plain import from_plain, require_names, to_plain

_NAMES = ("epoch", "position", "history", "metrics", "clocks", "unevaluated")
_BYTES = "bytes, as base64"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Where a run is, besides the arrays of its state.

    Attributes:
        epoch: Epochs that are done.
        position: Where the data is in its epoch: `DataLoader.state`, or the
            ``get_state`` of another iterator; any value that JSON has, or bytes.
        history: The metrics of the epochs that are done.
        metrics: By name, what the parameters were measured to be worth; empty inside of
            an epoch. `Checkpointer` looks here for the best.
        clocks: Seconds, or whatever else the run adds up, by name.
        unevaluated: The metrics of the next epoch, if all its steps are taken and its
            evaluation is not done.
    """

    epoch: int = 0
    position: Any = None
    history: History = field(default_factory=History)
    metrics: Mapping[str, float] = field(default_factory=dict)
    clocks: Mapping[str, float] = field(default_factory=dict)
    unevaluated: EpochMetrics | None = None

    def to_dict(self) -> dict[str, Any]:
        """All of it, in types that any JSON has.

        Raises:
            TypeError: If the position holds something that JSON has not.
        """
        return {
            "epoch": int(self.epoch),
            "position": _encoded(self.position),
            "history": self.history.to_dict(),
            "metrics": to_plain(self.metrics),
            "clocks": to_plain(self.clocks),
            "unevaluated": self.unevaluated and self.unevaluated.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunRecord":
        """The record that `to_dict` was called on, also by way of JSON.

        Raises:
            TypeError: If it is no mapping.
            ValueError: If names are missing or unknown.
        """
        if isinstance(values, Mapping):  # those of earlier versions have no such
            values = {"unevaluated": None, **values}
        require_names(cls.__name__, values, _NAMES)
        unevaluated = values["unevaluated"]
        return cls(
            epoch=values["epoch"],
            position=_decoded(values["position"]),
            history=History.from_dict(values["history"]),
            metrics=from_plain("metrics", values["metrics"]),
            clocks=from_plain("clocks", values["clocks"]),
            unevaluated=unevaluated and EpochMetrics.from_dict(unevaluated),
        )


def _encoded(position: Any) -> Any:
    try:
        text = json.dumps(position, allow_nan=False, default=_as_json)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "`position` must hold what JSON has, or bytes, so that another process can "
            f"go on from it: {error}"
        ) from error
    return json.loads(text)


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it has a {type(value).__module__}.{type(value).__name__}")


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        return {name: _decoded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    return value
