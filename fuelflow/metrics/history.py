"""The epochs of a run, in order."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from fuelflow.metrics.epoch import EpochMetrics, unknown_name
from fuelflow.metrics.plain import require_names
from fuelflow.metrics.report import lost_text, speed_text
from fuelflow.metrics.table import table_html
from fuelflow.metrics.trend import Trend
from fuelflow.metrics.wording import number_text, secs_text

_MOST_EPOCHS = 20


class History(Sequence[EpochMetrics]):
    """The metrics of a run's epochs, oldest first.

    Positions are those of a list: ``history[-1]`` is the last epoch, and a slice is a
    `History` too. It only grows at its end, by `append`, which a `Trainer` does; it may
    be read from another thread meanwhile.

    Args:
        epochs: Metrics to begin with, their epochs increasing.

    Raises:
        TypeError: If something else is among them.
        ValueError: If their epochs do not increase.
    """

    def __init__(self, epochs: Iterable[EpochMetrics] = ()) -> None:
        self._epochs: list[EpochMetrics] = []
        for metrics in epochs:
            self.append(metrics)

    def append(self, metrics: EpochMetrics) -> None:
        """Adds a later epoch.

        Args:
            metrics: Its metrics.

        Raises:
            TypeError: If they are none.
            ValueError: If the epoch does not come after the last one here.
        """
        if not isinstance(metrics, EpochMetrics):
            raise TypeError(
                f"a history holds `EpochMetrics`, got a {type(metrics).__name__}"
            )
        if self._epochs and metrics.epoch <= self._epochs[-1].epoch:
            raise ValueError(
                "the epochs of a history must increase, got epoch "
                f"{metrics.epoch} after epoch {self._epochs[-1].epoch}; "
                "`history[:n]` is a history of the first n epochs"
            )
        self._epochs.append(metrics)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that `values` and `trend` take, in the order first met."""
        found = dict.fromkeys(name for each in self._epochs for name in each.names)
        return tuple(found)

    def values(self, name: str) -> tuple[float | None, ...]:
        """One metric over all epochs.

        Args:
            name: As in `EpochMetrics.value`: ``"loss"``, ``"accuracy"``,
                ``"eval.loss"``.

        Returns:
            One value per epoch; None where an epoch has none of that name, as where it
            was not evaluated. NaN is a value.

        Raises:
            ValueError: If no epoch has the name; it lists the names there are. In an
                empty history every name has no values.
        """
        epochs = tuple(self._epochs)
        values = tuple(
            metrics.value(name) if name in metrics.names else None for metrics in epochs
        )
        if epochs and all(value is None for value in values):
            raise unknown_name(name, self.names)
        return values

    def trend(self, name: str, *, higher_is_better: bool = False) -> Trend:
        """How one metric develops, over the epochs that have it.

        Args:
            name: As in `values`.
            higher_is_better: Whether improving means rising, as for an accuracy.

        Returns:
            The trend of its values so far; slopes are per epoch, also where epochs
            between them have no value.

        Raises:
            ValueError: If no epoch has the name; it lists the names there are.
        """
        values = self.values(name)
        pairs = [
            (metrics.epoch, value)
            for metrics, value in zip(self._epochs, values, strict=False)
            if value is not None
        ]
        return Trend(
            [value for _, value in pairs],
            epochs=[epoch for epoch, _ in pairs],
            higher_is_better=higher_is_better,
        )

    def to_dict(self) -> dict[str, Any]:
        """All epochs, in types that any JSON has; see `EpochMetrics.to_dict`."""
        return {"epochs": [metrics.to_dict() for metrics in self._epochs]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "History":
        """The history that `to_dict` was called on.

        Args:
            values: What `to_dict` returned, also by way of JSON.

        Raises:
            TypeError: If it is no mapping.
            ValueError: If fields are missing or unknown, or epochs do not increase.
        """
        require_names(cls.__name__, values, ("epochs",))
        return cls(EpochMetrics.from_dict(each) for each in values["epochs"])

    @overload
    def __getitem__(self, index: int) -> EpochMetrics: ...

    @overload
    def __getitem__(self, index: slice) -> "History": ...

    def __getitem__(self, index: int | slice) -> "EpochMetrics | History":
        if isinstance(index, slice):
            return History(self._epochs[index])
        return self._epochs[index]

    def __len__(self) -> int:
        return len(self._epochs)

    def __iter__(self) -> Iterator[EpochMetrics]:
        return iter(self._epochs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return self._epochs == other._epochs

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # it grows

    def __str__(self) -> str:
        return "\n".join(map(str, self._epochs)) or "no epochs"

    def __repr__(self) -> str:
        return f"History({len(self)} epochs)"

    def _repr_html_(self) -> str:
        names = self.names
        hidden = max(0, len(self) - _MOST_EPOCHS)
        rows = [
            [
                str(metrics.epoch),
                *map(number_text, _values_of(metrics, names)),
                number_text(metrics.lr),
                speed_text(metrics),
                secs_text(metrics.epoch_ms),
                lost_text(metrics),
            ]
            for metrics in self._epochs[hidden:]
        ]
        headings = ["epoch", *names, "lr", "samples/s", "time", ""]
        notes = [f"{hidden} earlier epochs are not shown"] * bool(hidden)
        return table_html(f"{len(self)} epochs", headings, rows, notes)


def _values_of(metrics: EpochMetrics, names: Sequence[str]) -> list[float | None]:
    return [metrics.value(name) if name in metrics.names else None for name in names]
