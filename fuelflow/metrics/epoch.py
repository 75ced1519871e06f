"""What one epoch did, on all ranks together and on each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral, Real
from typing import Any, TypeVar

from fuelflow.metrics.bottleneck import (
    Bottleneck,
    RankTimes,
    find_bottleneck,
    split_times,
)
from fuelflow.metrics.plain import from_plain, require_names, to_plain
from fuelflow.metrics.report import epoch_html, epoch_line

T = TypeVar("T")
_EVAL = "eval."


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochMetrics:
    """What one epoch did: values on the host, with one entry per rank where it says so.

    Prints as one line and shows as a table in a notebook. `value` reads one by name,
    `bottleneck` says what held the epoch back, `to_dict` and `from_dict` write and read
    it. Two are equal if all fields are, and NaN equals NaN in them.

    Times are what the host sees, and it cannot look into a device. A step is one
    program on all devices, which wait for each other inside it, in collectives: so its
    outputs get ready on all ranks at about the same time, and a rank that waits for
    another seems at work. A rank that is late because its *process* was (its data, its
    Python) shows as idle. That one device is slower than the others shows in
    ``per_rank_pass_ms`` alone. Clocks of different processes are never compared.

    Attributes:
        epoch: The number of the epoch, from 0.
        scalars: The weighted mean of each metric that the loss function returned, over
            all rows of all ranks that have it. The sums behind it are added in float32
            on the devices and across ranks in float64. A metric whose weights were all
            0 is absent.
        per_rank: The same for each rank's own rows, one dict per rank.
        avg_loss: The weighted mean loss over all ranks, each batch's loss taken before
            its update; NaN if nothing ran.
        per_rank_loss: The same for each rank's own rows. None for a rank without rows:
            absent, not zero.
        per_rank_samples: The true rows that each rank was given, padding not counted;
            rows of skipped steps are, though no mean has them.
        epoch_ms: From the epoch's start to its last step done on the last rank, by the
            clock of each process, and of those the longest. The process's own compile
            time is taken off; what it waited while *another* process compiled is not,
            since it looks like a step. Evaluation and callbacks are not in it.
        per_rank_share_complete_ms: From the epoch's start until the rank's own part of
            the last step's outputs was seen ready, compile time taken off; what the
            rank then waited for others is not in it. Between the devices of one process
            it differs by little more than the order in which they are looked at.
        per_rank_throughput: ``samples / share_complete_ms``, samples per *millisecond*.
            0 for a rank without rows, and where no time was measured.
        per_rank_batch_share: The fraction of all samples that the rank was given. They
            sum to 1; all are 0 if there were no samples.
        per_rank_compute_only_ms: How long the rank's device had a step to do: from a
            step's dispatch, or the end of the one before if that is later, until its
            outputs were seen ready, summed over the steps. Waiting for other ranks
            inside the step is in it, and so is what the device was slowed by others'
            work; the time between steps is not.
        per_rank_data_starve_ms: How long the rank's process waited for its next batch,
            the same for all ranks of a process. Steps dispatched before go on in the
            meantime, so it can overlap with ``compute_only_ms`` and cost nothing.
        per_rank_pass_ms: How long forward and backward over one batch take on the
            rank's own rows, without waiting for the others: the shortest of the last
            few, each run once before an epoch and thrown away. 0 where that was not
            measured, as with one rank. A model that itself has ranks exchange
            something, as a shared BatchNorm does, makes them wait here too. On devices
            that share their processor, as CPU devices do, ranks slow each other down.
        device_indices: The index of each rank's device, as JAX numbers them.
        process_indices: The process that each rank belongs to.
        compile_ms: Tracing and compiling during the epoch, of the process that took
            longest.
        evaluation: The weighted mean loss and metrics over the evaluation data, after
            this epoch; empty if there was no evaluation.
        eval_ms: How long that evaluation took, of the process that took longest, its
            compile time not in it.
        callback_ms: How long the training thread spent in the user's callbacks since
            the epoch before had ended, of the process that took longest. It is what
            callbacks delayed this epoch's start by; those that are told of this epoch
            count for the next.
        num_steps: The steps of the epoch, skipped ones among them.
        num_skipped: Those of them that were left out because they were not finite.
        global_step: The updates of the whole run, after the epoch.
        lr: The rate of the epoch's last step; None if the optimizer keeps its own, or
            no step ran.

    Raises:
        TypeError: If a field holds something else than the numbers it is for.
        ValueError: If a count or time is negative, there is no rank, or fields differ
            in how many ranks they have.
    """

    epoch: int
    scalars: Mapping[str, float]
    per_rank: Sequence[Mapping[str, float]]
    avg_loss: float
    per_rank_loss: Sequence[float | None]
    per_rank_samples: Sequence[int]
    epoch_ms: float
    per_rank_share_complete_ms: Sequence[float]
    per_rank_throughput: Sequence[float]
    per_rank_batch_share: Sequence[float]
    per_rank_compute_only_ms: Sequence[float]
    per_rank_data_starve_ms: Sequence[float]
    per_rank_pass_ms: Sequence[float]
    device_indices: Sequence[int]
    process_indices: Sequence[int]
    compile_ms: float
    evaluation: Mapping[str, float] = field(default_factory=dict)
    eval_ms: float = 0.0
    callback_ms: float = 0.0
    num_steps: int
    num_skipped: int = 0
    global_step: int
    lr: float | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, _kept(getattr(self, each.name)))
        for name in _FIELDS:
            _check(name, getattr(self, name))
        lengths = {name: len(getattr(self, name)) for name in _PER_RANK}
        if len(set(lengths.values())) > 1 or 0 in lengths.values():
            listed = ", ".join(f"`{name}` {num}" for name, num in lengths.items())
            raise ValueError(
                "fields per rank must have one entry for each of at least one rank, "
                f"got {listed}"
            )

    @property
    def num_ranks(self) -> int:
        """How many ranks there were."""
        return len(self.device_indices)

    @property
    def num_samples(self) -> int:
        """The true rows of all ranks."""
        return sum(self.per_rank_samples)

    @property
    def samples_per_sec(self) -> float:
        """The true rows of all ranks by the wall clock; 0 if no time passed."""
        return 1e3 * self.num_samples / self.epoch_ms if self.epoch_ms > 0 else 0.0

    @property
    def rank_times(self) -> list[RankTimes]:
        """How each rank spent its share of the epoch, in ms."""
        return split_times(self)

    @cached_property
    def bottleneck(self) -> Bottleneck:
        """What held the epoch back, and for how much of it, from the fields alone.

        The formulas are in `fuelflow.metrics.bottleneck.find_bottleneck`.
        """
        return find_bottleneck(self)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that `value` takes."""
        return tuple(self._values())

    def value(self, name: str) -> float:
        """One of the epoch's means, by name.

        Args:
            name: ``"loss"`` for ``avg_loss``, the name of one of the ``scalars``, or
                ``"eval."`` and a name for one of the ``evaluation``.

        Returns:
            The mean over all ranks.

        Raises:
            ValueError: If there is none of that name; it lists the names there are.
        """
        values = self._values()
        if name not in values:
            raise unknown_name(name, self.names)
        return values[name]

    def _values(self) -> dict[str, float]:
        values = {"loss": self.avg_loss, **self.scalars}
        for name, mean in self.evaluation.items():
            # A metric that the user named like one of these is still the user's.
            values.setdefault(_EVAL + name, mean)
        return values

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, in types that any JSON has.

        NaN and infinities, which JSON lacks, become the strings ``"NaN"``,
        ``"Infinity"`` and ``"-Infinity"``; None, for what is absent, stays None.
        """
        return {name: to_plain(getattr(self, name)) for name in _FIELDS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EpochMetrics":
        """The metrics that `to_dict` was called on, to the last bit.

        Args:
            values: What `to_dict` returned, also by way of JSON.

        Raises:
            TypeError: If it is no mapping.
            ValueError: If fields are missing or unknown, or hold no numbers.
        """
        require_names(cls.__name__, values, _FIELDS)
        return cls(**{name: from_plain(name, values[name]) for name in _FIELDS})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EpochMetrics):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.epoch, self.global_step))

    def __str__(self) -> str:
        return epoch_line(self)

    def __repr__(self) -> str:
        return f"EpochMetrics({self})"

    def _repr_html_(self) -> str:
        return epoch_html(self)


def _check(name: str, value: Any) -> None:
    """Refuses what a field is not for, by name.

    Raises:
        TypeError: If it is of another kind.
        ValueError: If it is negative, and a count, an index or a time.
    """
    if name in _BY_NAME:
        if not isinstance(value, Mapping):
            raise _wrong_kind(name, "map names to numbers", value)
        for key, part in value.items():
            if not isinstance(key, str):
                raise _wrong_kind(name, "map names to numbers", key)
            _check_number(f"{name}[{key!r}]", part)
    elif name in _PER_RANK:
        if not isinstance(value, tuple):
            raise _wrong_kind(name, "have an entry for each rank", value)
        for rank, part in enumerate(value):
            if name == "per_rank":
                _check("scalars", part)
            elif part is not None or name != "per_rank_loss":
                _check_entry(f"{name}[{rank}]", name, part)
    elif value is not None or name != "lr":
        _check_entry(name, name, value)


def _check_entry(label: str, name: str, value: Any) -> None:
    is_count = name in _COUNTS
    _check_number(label, value, kind=Integral if is_count else Real)
    if (is_count or name.endswith(_AT_LEAST_0)) and value < 0:
        raise ValueError(f"`{label}` must be at least 0, got {value}")


def _check_number(label: str, value: Any, kind: type = Real) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        rule = "be an integer" if kind is Integral else "be a number"
        raise _wrong_kind(label, rule, value)


def _wrong_kind(label: str, rule: str, value: Any) -> TypeError:
    return TypeError(
        f"`{label}` must {rule}, got {value!r} of type {type(value).__name__}"
    )


_FIELDS = tuple(each.name for each in fields(EpochMetrics))
_BY_NAME = ("scalars", "evaluation")
_COUNTS = (
    *("epoch", "num_steps", "num_skipped", "global_step", "per_rank_samples"),
    *("device_indices", "process_indices"),
)
_AT_LEAST_0 = ("_ms", "_throughput", "_share")
_PER_RANK = (
    *(name for name in _FIELDS if name.startswith("per_rank")),
    *("device_indices", "process_indices"),
)


def unknown_name(name: object, names: Sequence[str]) -> ValueError:
    """The error of a name that no metric has."""
    listed = ", ".join(f"`{known}`" for known in names)
    return ValueError(f"`name` must be one of {listed}, got {name!r}")


def _kept(value: T) -> T | Mapping[str, Any] | tuple[Any, ...]:
    """A value of its own: what the caller does with theirs later changes no metrics."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_kept(part) for part in value)
    return value
