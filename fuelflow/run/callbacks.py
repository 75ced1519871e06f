"""The user's own functions, called as a run goes on, which must not stop it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.metrics.history import History
from fuelflow.run.account import Stopwatch
from fuelflow.step.state import TrainState

logger = logging.getLogger("fuelflow")


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """What a run calls. An error in one is logged, and nothing more comes of it.

    Attributes:
        metrics_fn: Told of each epoch.
        epoch_fn: Asked before each epoch, and may change the state.
        stop_when: Asked after each epoch whether it was the last.
        time: How long they take.

    Raises:
        TypeError: If one is given that is no function.
    """

    metrics_fn: Callable[[EpochMetrics], Any] | None
    epoch_fn: Callable[[int, TrainState], TrainState | None] | None
    stop_when: Callable[[History], Any] | None
    time: Stopwatch = field(default_factory=Stopwatch)

    def __post_init__(self) -> None:
        for name in ("metrics_fn", "epoch_fn", "stop_when"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise TypeError(
                    f"`{name}` must be a function, got a {type(function).__name__}"
                )

    def before(self, epoch: int, state: TrainState) -> TrainState:
        """The state that an epoch begins with."""
        if self.epoch_fn is not None:
            with self._guarded(f"`epoch_fn` failed before epoch {epoch}"):
                changed = self.epoch_fn(epoch, state)
                if changed is not None and not isinstance(changed, TrainState):
                    raise TypeError(
                        "`epoch_fn` must return a TrainState or None, got a "
                        f"{type(changed).__name__}"
                    )
                return state if changed is None else changed
        return state

    def after(self, metrics: EpochMetrics, history: History) -> bool:
        """Tells of an epoch; whether it was the last."""
        if self.metrics_fn is not None:
            with self._guarded(f"`metrics_fn` failed after epoch {metrics.epoch}"):
                self.metrics_fn(metrics)
        if self.stop_when is not None:
            with self._guarded(f"`stop_when` failed after epoch {metrics.epoch}"):
                return bool(self.stop_when(History(history)))
        return False

    @contextmanager
    def _guarded(self, failure: str) -> Iterator[None]:
        with self.time:
            try:
                yield
            except Exception:
                logger.exception("%s, and training goes on", failure)
