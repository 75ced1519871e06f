"""What ranks did over many epochs, as few numbers as a screen can show."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fuelflow.watch.pages.columns import rounded

# A heat map is some hundreds of pixels wide and high.
MAX_EPOCHS = 128
MAX_RANKS = 256
_WORDS = ("NaN", "Infinity", "-Infinity")
_DIGITS = 4


class RankBins:
    """Values of each rank by epoch; many epochs and many ranks share a cell.

    Of the values that share a cell the one is kept that is farthest from the median of
    its epoch: a rank that lags once is not averaged away.
    """

    def __init__(self) -> None:
        self._bins: list[_Bin] = []
        self._width = 1

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Takes what `EpochMetrics.to_dict` returned."""
        new = _Bin(metrics)
        if self._bins and self._bins[-1].fits(new):
            if self._bins[-1].num_epochs < self._width:
                self._bins[-1].merge(new)
                return
        elif self._bins:  # another number of ranks: earlier ones fit no common picture
            self._bins.clear()
            self._width = 1
        self._bins.append(new)
        if len(self._bins) >= 2 * MAX_EPOCHS:
            self._width *= 2
            for one, other in zip(self._bins[::2], self._bins[1::2], strict=False):
                one.merge(other)
            self._bins = self._bins[::2]

    def drop_from(self, epoch: int) -> None:
        """Forgets epochs from this one on, and those that share a cell with it."""
        self._bins = [each for each in self._bins if each.last < epoch]

    def to_dict(self) -> dict[str, Any]:
        """The cells by measure, a list of ranks for every stretch of epochs."""
        if not self._bins:
            return {"num_ranks": 0, "first": [], "last": [], "bad": [], "measures": {}}
        return {
            "num_ranks": self._bins[0].num_ranks,
            "first": [each.first for each in self._bins],
            "last": [each.last for each in self._bins],
            "bad": [each.bad for each in self._bins],
            "measures": {
                name: [_plain(each.values[name]) for each in self._bins]
                for name in self._bins[0].values
            },
        }


class _Bin:
    """The cells of one stretch of epochs, by measure an array over groups of ranks."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self.first = self.last = metrics["epoch"]
        self.num_epochs = 1
        self.num_ranks = len(metrics["device_indices"])
        epoch_ms = float(metrics["epoch_ms"]) or math.nan
        losses = metrics["per_rank_loss"]
        self.bad = {
            str(rank): loss for rank, loss in enumerate(losses) if loss in _WORDS
        }
        values = {
            "throughput": 1e3 * _array(metrics["per_rank_throughput"]),
            "share": _array(metrics["per_rank_batch_share"]),
            "starve": _array(metrics["per_rank_data_starve_ms"]) / epoch_ms,
            "compute": _array(metrics["per_rank_compute_only_ms"]) / epoch_ms,
            "loss": _array(losses),
            "pass_ms": _array(metrics["per_rank_pass_ms"]),
        }
        size = math.ceil(self.num_ranks / MAX_RANKS)
        self.values = {name: _grouped(each, size) for name, each in values.items()}

    def fits(self, other: "_Bin") -> bool:
        return self.num_ranks == other.num_ranks

    def merge(self, other: "_Bin") -> None:
        self.first = min(self.first, other.first)
        self.last = max(self.last, other.last)
        self.num_epochs += other.num_epochs
        self.bad = {**self.bad, **other.bad}
        self.values = {
            name: _most_unusual(np.stack([own, other.values[name]]), axis=0)
            for name, own in self.values.items()
        }


def _array(values: Sequence[Any]) -> np.ndarray:
    """Numbers, with NaN for what is absent or no finite number."""
    return np.array(
        [each if isinstance(each, int | float) else math.nan for each in values],
        dtype=np.float64,
    )


def _grouped(values: np.ndarray, size: int) -> np.ndarray:
    if size == 1:
        return values
    padding = np.full(-len(values) % size, math.nan)
    groups = np.concatenate([values, padding]).reshape(-1, size)
    return _most_unusual(groups, axis=1, middle=_median(values))


def _most_unusual(values: np.ndarray, axis: int, middle: Any = None) -> np.ndarray:
    """Along an axis the value farthest from the middle, by default from each median."""
    if middle is None:
        middle = np.array([[_median(row)] for row in values])
    distance = np.nan_to_num(np.abs(values - middle), nan=-1.0)
    chosen = np.expand_dims(distance.argmax(axis=axis), axis)
    return np.take_along_axis(values, chosen, axis=axis).squeeze(axis)


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else math.nan


def _plain(values: np.ndarray) -> list[Any]:
    return [
        None if math.isnan(each) else rounded(each, _DIGITS) for each in values.tolist()
    ]
