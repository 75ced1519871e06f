"""One rank's record of an epoch, and the metrics of all of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.step.checks import checked_number

LOSS = "loss"
Sums = Mapping[str, tuple[float, float]]
"""A weighted sum and its weight, by name."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank saw of an epoch. `EpochMetrics` says how each part is measured.

    Attributes:
        device_index: The index of its device.
        process_index: The process it belongs to.
        samples: The true rows it was given.
        sums: The weighted sum and the weight of the loss, under ``"loss"``, and of each
            metric. A name without weight is as good as absent.
        epoch_ms: Its process's epoch, compile time taken off.
        compile_ms: Its process's compile time during the epoch.
        share_complete_ms: Until its last step was done, compile time taken off.
        compute_only_ms: How long its device had a step to do.
        data_starve_ms: How long its process waited for batches.
        pass_ms: A pass over a batch on its own rows alone; 0 if not measured.
        eval_ms: How long its process evaluated after the epoch.
        callback_ms: How long its process was in callbacks before the epoch.

    Raises:
        TypeError: If a field is not a number.
        ValueError: If a count, a weight or a time is negative or not finite, or a rank
            without samples has weight.
    """

    device_index: int
    process_index: int
    samples: int
    sums: Sums = field(default_factory=dict)
    epoch_ms: float
    compile_ms: float = 0.0
    share_complete_ms: float
    compute_only_ms: float
    data_starve_ms: float
    pass_ms: float = 0.0
    eval_ms: float = 0.0
    callback_ms: float = 0.0

    def __post_init__(self) -> None:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        sums = values.pop("sums")
        for name, value in values.items():
            checked = _checked_amount if name.endswith("_ms") else _checked_index
            object.__setattr__(self, name, checked(name, value))
        pairs = {name: _checked_sum(name, pair) for name, pair in sums.items()}
        object.__setattr__(self, "sums", pairs)
        weighty = [name for name, (_, weight) in pairs.items() if weight > 0]
        if self.samples == 0 and weighty:
            raise ValueError(
                f"`sums` must have no weight on device {self.device_index}, which had "
                f"no samples, got {pairs[weighty[0]][1]} for `{weighty[0]}`"
            )


def reduce_ranks(
    records: Sequence[RankRecord],
    *,
    epoch: int,
    num_steps: int,
    global_step: int,
    num_skipped: int = 0,
    lr: float | None = None,
    evaluation: Mapping[str, float] | None = None,
) -> EpochMetrics:
    """The metrics of an epoch from the records of all its ranks.

    Means are ``sum(sums) / sum(weights)`` over the ranks that have weight for a name,
    added in float64, so that they equal the mean over all rows however those were
    divided among the ranks. Times of the whole epoch are the longest of any rank's.

    Args:
        records: One for each rank, in the order of their ranks.
        epoch: The number of the epoch, from 0.
        num_steps: Its steps, skipped ones among them.
        global_step: The updates of the whole run, after it.
        num_skipped: Steps of it left out as not finite.
        lr: The rate of its last step, if known.
        evaluation: Means over the evaluation data, if there was any.

    Returns:
        The metrics. A name that no rank has weight for is absent, but the loss, which
        is NaN then.

    Raises:
        ValueError: If there is no record, or two are of one device.

    Example:
        >>> def record(device, samples, loss):
        ...     return RankRecord(
        ...         device_index=device, process_index=0, samples=samples,
        ...         sums={"loss": (loss * samples, samples)},
        ...         epoch_ms=1000, share_complete_ms=1000, compute_only_ms=950,
        ...         data_starve_ms=0,
        ...     )
        >>> metrics = reduce_ranks(
        ...     [record(0, 60, 0.5), record(1, 40, 0.7)],
        ...     epoch=0, num_steps=10, global_step=10,
        ... )
        >>> print(metrics)
        epoch 0: loss 0.58; 100 samples/s, 1 s, 2 ranks
        >>> print(metrics.bottleneck)
        compute: the devices were at work for 95 % of the epoch
    """
    _require_devices(records)
    means = _means([record.sums for record in records])
    return EpochMetrics(
        epoch=epoch,
        scalars=_without_loss(means),
        avg_loss=means.get(LOSS, math.nan),
        evaluation=evaluation or {},
        num_steps=num_steps,
        num_skipped=num_skipped,
        global_step=global_step,
        lr=lr,
        **_fields_of_ranks(records),
    )


def _fields_of_ranks(records: Sequence[RankRecord]) -> dict[str, Any]:
    """The fields with one entry per rank, and the longest times."""
    each = {
        part.name: [getattr(record, part.name) for record in records]
        for part in fields(RankRecord)
    }
    means = [_means([sums]) for sums in each["sums"]]
    num_samples = [sum(each["samples"])] * len(records)
    longest = ("epoch_ms", "compile_ms", "eval_ms", "callback_ms")
    return {
        "per_rank": [_without_loss(own) for own in means],
        "per_rank_loss": [own.get(LOSS) for own in means],
        "per_rank_samples": each["samples"],
        "per_rank_share_complete_ms": each["share_complete_ms"],
        "per_rank_throughput": _ratios(each["samples"], each["share_complete_ms"]),
        "per_rank_batch_share": _ratios(each["samples"], num_samples),
        "per_rank_compute_only_ms": each["compute_only_ms"],
        "per_rank_data_starve_ms": each["data_starve_ms"],
        "per_rank_pass_ms": each["pass_ms"],
        "device_indices": each["device_index"],
        "process_indices": each["process_index"],
        **{name: max(each[name]) for name in longest},
    }


def _means(parts: Sequence[Sums]) -> dict[str, float]:
    """The weighted mean of each name that has weight, in the order first met."""
    means = {}
    for name in dict.fromkeys(name for sums in parts for name in sums):
        pairs = [sums[name] for sums in parts if name in sums and sums[name][1] > 0]
        if pairs:
            means[name] = sum(s for s, _ in pairs) / sum(weight for _, weight in pairs)
    return means


def _without_loss(means: Mapping[str, float]) -> dict[str, float]:
    return {name: mean for name, mean in means.items() if name != LOSS}


def _ratios(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    return [
        part / whole if whole > 0 else 0.0
        for part, whole in zip(parts, wholes, strict=True)
    ]


def _require_devices(records: Sequence[RankRecord]) -> None:
    if not records:
        raise ValueError("`records` must have one for each rank, got none")
    devices = [record.device_index for record in records]
    twice = sorted({device for device in devices if devices.count(device) > 1})
    if twice:
        raise ValueError(
            f"`records` must each be of another device, got two of device {twice[0]}"
        )


def _checked_amount(name: str, value: object) -> float:
    number = checked_number(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"`{name}` must be finite and at least 0, got {value}")
    return number


def _checked_index(name: str, value: object) -> int:
    # No int32: an epoch may have more rows.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"`{name}` must be an integer, got {value!r} of type {type(value).__name__}"
        )
    if value < 0:
        raise ValueError(f"`{name}` must be at least 0, got {value}")
    return int(value)


def _checked_sum(name: str, pair: object) -> tuple[float, float]:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise TypeError(
            f"`sums` must have a weighted sum and its weight for each name, got "
            f"{pair!r} for `{name}`"
        )
    total, weight = pair
    return (
        checked_number(f"sum of {name}", total),
        _checked_amount(f"weight of {name}", weight),
    )
