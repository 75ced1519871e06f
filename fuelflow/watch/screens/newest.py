"""The metrics of a run's newest epoch."""

from typing import Any

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.watch.record.story import Story


class NewestMetrics:
    """Reads them from their record once, however often they are asked for."""

    def __init__(self) -> None:
        self._record: Any = None
        self._metrics: EpochMetrics | None = None

    def of(self, story: Story) -> EpochMetrics | None:
        """The metrics; None before the first epoch, and for passes."""
        last = next((e for e in reversed(story.epochs) if e["kind"] == "epoch"), None)
        if last is not self._record:
            self._record = last
            self._metrics = EpochMetrics.from_dict(last["metrics"]) if last else None
        return self._metrics
