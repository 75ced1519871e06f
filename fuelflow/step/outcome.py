"""What a step said, read when asked and not before."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from fuelflow._errors import NonFiniteError
from fuelflow._types import Array
from fuelflow.step.observe import Histogram, read_histograms
from fuelflow.step.packing import Layout

if TYPE_CHECKING:
    from fuelflow.step.flight import Flight

METRIC = "metric "
WEIGHT = "weight "
SQUARES = "squares of gradients"
OBSERVED = "observed"
_VECTORS = (SQUARES, OBSERVED)


class StepOutcome:
    """A promise of what one step said, or, from `TrainingLoop.run`, many.

    Reading a field waits for the step, once, with one transfer for all fields. From
    `step` each field is a Python number, from `run` an array with one entry per step.
    With ``nonfinite="raise"``, reading a field of a step that was not finite raises;
    `finite` itself, `is_ready` and `repr` never do.
    """

    __slots__ = (
        *("_asides", "_error", "_flight", "_layout", "_parts", "_uneven", "_values"),
        *("_words", "__weakref__"),
    )

    def __init__(
        self,
        words: Array | None,
        layout: Layout,
        flight: "Flight | None" = None,
        aside: Array | None = None,
    ) -> None:
        self._asides: Sequence[Array] = () if aside is None else (aside,)
        self._words = words
        self._layout = layout
        self._flight = flight
        self._parts: Sequence[StepOutcome] = ()
        self._values: dict[str, Any] | None = None
        self._error: NonFiniteError | None = None
        self._uneven: Layout | None = None

    @classmethod
    def stacked(
        cls, parts: Sequence["StepOutcome"], error: NonFiniteError | None = None
    ) -> "StepOutcome":
        """One outcome over the steps of several, which share what they wait for.

        Args:
            parts: The outcomes, in order.
            error: What was seen of an earlier step, and is still to be raised.
        """
        whole = cls(None, parts[0]._layout, parts[0]._flight)
        whole._parts = parts
        whole._asides = [aside for part in parts for aside in part._asides]
        whole._error = error
        whole._uneven = next(
            (
                part._layout
                for part in parts
                if part._layout.fields != whole._layout.fields
            ),
            None,
        )
        return whole

    @property
    def loss(self) -> Any:
        """The weighted mean loss, before the update."""
        return self._read("loss")

    @property
    def grad_norm(self) -> Any:
        """The global L2 norm of the gradient, before clipping."""
        return self._read("grad_norm")

    @property
    def lr(self) -> Any:
        """The learning rate used; None if the optimizer keeps its rate to itself."""
        return self._read("lr") if "lr" in self._layout.names else None

    @property
    def global_step(self) -> Any:
        """The number of the step, from 1."""
        return self._read("global_step")

    @property
    def num_skipped(self) -> Any:
        """Steps of the run left out so far because they were not finite."""
        return self._read("num_skipped")

    @property
    def metrics(self) -> dict[str, Any]:
        """The weighted mean of each metric, by name.

        Raises:
            ValueError: If the steps of a run do not have the same metrics.
        """
        if self._uneven is not None:
            raise ValueError(
                "a loss must return the same metrics for every batch of a run, got "
                f"{metrics_in(self._layout)} and {metrics_in(self._uneven)}"
            )
        own = metrics_in(self._layout)
        metrics = {name: self._read(METRIC + name) for name in own}
        if self._layout.observed:
            columns = _columns(self._read(OBSERVED))
            metrics |= zip(self._layout.observed, columns, strict=True)
        return metrics

    @property
    def histograms(self) -> dict[str, Histogram]:
        """What `Observe` asks for of each parameter, by name, brought in one transfer.

        Empty if the step was not observed. From a run, each field has one entry for
        each step that was.
        """
        self._read("finite")
        names = self._layout.histograms
        if not names or not self._asides:
            return {}
        is_many = np.ndim(self.realize()["loss"]) > 0
        words = [np.atleast_2d(np.asarray(aside)) for aside in self._asides]
        return read_histograms(np.concatenate(words), names, is_many=is_many)

    @property
    def finite(self) -> Any:
        """Whether loss and gradient norm were finite."""
        return self.realize()["finite"] != 0

    @property
    def layout(self) -> Layout:
        """How what it says is laid out; the same object from one program."""
        return self._layout

    @property
    def output(self) -> Array:
        """What is on the devices, of an outcome that was not read yet."""
        assert self._words is not None
        return self._words

    @property
    def aside(self) -> Array | None:
        """The histograms that are on the devices, of one dispatch; None if none."""
        return self._asides[0] if self._asides else None

    @property
    def num_steps(self) -> int:
        """Of how many steps it is, without waiting."""
        if self._parts:
            return sum(part.num_steps for part in self._parts)
        if self._words is not None:
            return self._words.shape[0] if self._words.ndim > 1 else 1
        return np.size(self.realize()["finite"])

    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        if self._values is not None:
            return True
        return all(part.is_ready() for part in self._parts) and (
            self._words is None or _is_ready(self._words)
        )

    def realize(self) -> dict[str, Any]:
        """Waits for the step; all its numbers by name, never raising for a bad one."""
        values = self._load()
        if self._error is None and not _is_all(values["finite"]):
            found = None if self._flight is None else self._flight.find()
            self._error = found or self._own_error()
        return values

    def _load(self) -> dict[str, Any]:
        if self._values is None:
            self._values = self._fetch()
            self._words, self._parts = None, ()
        return self._values

    def _fetch(self) -> dict[str, Any]:
        if self._words is not None:
            words = np.asarray(self._words)
            layout = self._layout
            return (layout.unpack_one if words.ndim == 1 else layout.unpack_many)(words)
        parts = [part._load() for part in self._parts]
        return {
            name: np.concatenate([np.atleast_1d(part[name]) for part in parts])
            for name in self._layout.names
            if name not in _VECTORS and all(name in part for part in parts)
        } | {
            name: np.concatenate([np.atleast_2d(part[name]) for part in parts])
            for name in _VECTORS
            if name in self._layout.names
        }

    def last_skipped(self) -> int:
        """The count of skipped steps after this one, waiting for it."""
        count = self._load()["num_skipped"]
        return count if isinstance(count, int) else int(count[-1])

    def detached(self, *, with_histograms: bool = True) -> "StepOutcome":
        """The same outcome, not tied to a run: reading it never raises.

        Args:
            with_histograms: Whether it has the histograms, and holds their arrays.
        """
        alone = StepOutcome(self._words, self._layout)
        alone._values, alone._uneven = self._values, self._uneven
        alone._asides = self._asides if with_histograms else ()
        alone._parts = [
            part.detached(with_histograms=with_histograms) for part in self._parts
        ]
        return alone

    def unread(self) -> list[Array]:
        """What reading it would bring from the devices; nothing if it was read."""
        if self._words is not None:
            return [self._words]
        return [words for part in self._parts for words in part.unread()]

    def rows(self) -> Iterator[dict[str, Any]]:
        """The numbers of each step, waiting for the last."""
        values = self._load()
        if np.ndim(values["loss"]) == 0:
            yield values
            return
        for index in range(len(values["loss"])):
            yield {name: value[index] for name, value in values.items()}

    def _own_error(self) -> NonFiniteError | None:
        found = self.first_bad()
        return None if found is None else found[0]

    def first_bad(self) -> tuple[NonFiniteError, int | None] | None:
        """The error of the first step that was not finite, and which of several."""
        if self._flight is None or _is_all(self._load()["finite"]):
            return None
        for index, row in enumerate(self.rows()):
            if not row["finite"]:
                bad = np.flatnonzero(~np.isfinite(row[SQUARES]))
                names = [self._layout.params[number] for number in bad]
                error = NonFiniteError(
                    int(row["global_step"]),
                    float(row["loss"]),
                    float(row["grad_norm"]),
                    lr=float(row["lr"]) if "lr" in row else None,
                    names=names[:8],
                    num_names=len(names),
                    num_skipped=self.last_skipped(),
                )
                return error, None if np.ndim(self._load()["loss"]) == 0 else index
        return None

    def _read(self, name: str) -> Any:
        values = self._values
        if values is None:
            values = self.realize()
        if self._error is not None:
            self._raise(self._error)
        return values[name]

    def _raise(self, error: NonFiniteError) -> NoReturn:
        assert self._flight is not None
        self._flight.raise_once(error)

    @property
    def metric_names(self) -> list[str]:
        """The names of the metrics; none if the steps of a run differ in them."""
        if self._uneven is not None:
            return []
        return [*metrics_in(self._layout), *self._layout.observed]

    def __str__(self) -> str:
        self._read("finite")
        return repr(self)

    def __repr__(self) -> str:
        values = self.realize()
        names = ["global_step", "loss", "grad_norm"]
        names += ["lr"] * ("lr" in self._layout.names)
        if self._uneven is None:
            names += [METRIC + name for name in metrics_in(self._layout)]
        parts = [
            f"{name.removeprefix(METRIC)}={_shown(values[name])}" for name in names
        ]
        if not _is_all(values["finite"]):
            parts.append("finite=False")
        return f"StepOutcome({', '.join(parts)})"


class Evaluation(Mapping[str, float]):
    """A promise of weighted means over a data set: ``loss`` and each metric by name.

    Reading waits, once. ``weight`` is the number of examples (or tokens) the loss
    stands for.
    """

    def __init__(
        self, records: Sequence[Array], layout: Layout, flight: "Flight"
    ) -> None:
        self._records = records
        self._layout = layout
        self._flight = flight
        self._num_dispatched = flight.num_dispatched
        self._means: dict[str, float] | None = None
        self._weight = 0.0

    @property
    def weight(self) -> float:
        """The total weight of the loss."""
        self._realize()
        return self._weight

    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        if self._means is not None:
            return True
        return all(map(_is_ready, self._records))

    def _realize(self) -> dict[str, float]:
        if self._means is None:
            self._flight.land(self._num_dispatched)
            table = self._layout.unpack_many(np.stack(self._records))
            names = [n for n in self._layout.names if not n.startswith(WEIGHT)]
            self._means = {
                name.removeprefix(METRIC): _mean(table[name], table[WEIGHT + name])
                for name in names
            }
            self._weight = float(table[WEIGHT + "loss"].sum(dtype=np.float64))
            self._records = ()
        return self._means

    def __getitem__(self, name: str) -> float:
        return self._realize()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._realize())

    def __len__(self) -> int:
        return len(self._realize())

    def __repr__(self) -> str:
        means = ", ".join(f"{name}={value:.6g}" for name, value in self.items())
        return f"Evaluation({means}, weight={self.weight:g})"


def _columns(values: Any) -> Sequence[Any]:
    """The numbers of one step, or the columns of those of many."""
    return values if isinstance(values, tuple) else values.T


def _is_ready(array: Array) -> bool:
    # jax.Array has the method; its abstract class does not declare it.
    return cast(Any, array).is_ready()


def metrics_in(layout: Layout) -> list[str]:
    """The names of the metrics that a layout has."""
    names = (name for name in layout.names if name.startswith(METRIC))
    return [name.removeprefix(METRIC) for name in names]


def _is_all(flags: int | np.ndarray) -> bool:
    return bool(flags) if isinstance(flags, int) else bool(flags.all())


def _mean(means: np.ndarray, weights: np.ndarray) -> float:
    """The weighted mean of means, in float64; NaN if there is no weight."""
    wide = weights.astype(np.float64)
    total = wide.sum()
    if total == 0:
        return float("nan")
    return float(np.where(wide == 0, 0.0, means * wide).sum() / total)


def _shown(value: Any) -> str:
    if np.ndim(value) == 0:
        is_float = isinstance(value, float | np.floating)
        return f"{value:.6g}" if is_float else str(value)
    return f"[{_shown(value[0])} … {_shown(value[-1])}]"
