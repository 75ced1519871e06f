"""What a loop looks at of each parameter, every so many steps, inside its program."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fuelflow._types import Array, Grads, Params
from fuelflow.model.names import select_names
from fuelflow.step.checks import checked_count
from fuelflow.step.clipping import square_sum
from fuelflow.step.weighted import Mean

Patterns = str | Iterable[str] | None
"""Over parameter names, as of ``trainable``; None for no parameter."""

_TRAINED_ONLY = ("grad_norm", "update_ratio", "grad_histogram", "update_histogram")
_HISTOGRAMS = ("grad_histogram", "param_histogram", "update_histogram")


@dataclass(frozen=True, kw_only=True)
class Observe:
    """What `TrainingLoop` looks at of each parameter, and how often.

    Each option takes patterns over parameter names, as ``trainable`` does: ``"*"`` for
    all, ``"encoder"`` for those below it. The numbers are computed inside the step, and
    on a CPU only in the steps that are observed; training goes on bit for bit as it
    would without.

    Norms and ratios stand among the metrics of a step under the option and the
    parameter, ``grad_norm.encoder.kernel``: NaN where a step was not observed, and a
    mean over the observed steps in `EpochMetrics`. Histograms are in
    `StepOutcome.histograms` under names alike.

    Args:
        grad_norm: The L2 norm of the gradient, before clipping.
        update_ratio: The norm of what the step added to the parameter, by the norm of
            the parameter before it. Rounding is in it: an update too small for the
            parameter's dtype counts as none. NaN, with weight 0, for a parameter that
            is all zeros and for a step that was left out.
        grad_histogram: The values of the gradient, before clipping.
        param_histogram: The values of the parameter after the step; frozen ones too.
        update_histogram: The values of what the step added to the parameter.
        every_steps: Steps from one that is observed to the next, by ``global_step``.
        num_bins: Bins of a histogram.

    Raises:
        TypeError: If a pattern is no string, or a count no integer.
        ValueError: If nothing is to be observed, or a count is below 1. When a loop is
            given a model: if a pattern selects none of its trained parameters.

    Example:
        >>> import fuelflow as ff, jax.numpy as jnp, numpy as np, optax
        >>> loop = ff.TrainingLoop(
        ...     lambda params, batch: params["w"] * batch["x"], optax.sgd,
        ...     schedule=0.5, observe=ff.Observe(grad_norm="*", update_ratio="*"),
        ... )
        >>> state = loop.init({"w": jnp.float32(4.0)})
        >>> state, outcome = loop.step(state, {"x": np.float32([1, 3])})
        >>> outcome.metrics
        {'grad_norm.w': 2.0, 'update_ratio.w': 0.25}
    """

    grad_norm: Patterns = None
    update_ratio: Patterns = None
    grad_histogram: Patterns = None
    param_histogram: Patterns = None
    update_histogram: Patterns = None
    every_steps: int = 1
    num_bins: int = 64

    def __post_init__(self) -> None:
        for name in _PATTERNS:
            patterns = getattr(self, name)
            if patterns is not None and not isinstance(patterns, str):
                object.__setattr__(self, name, _listed(name, patterns))
        if all(getattr(self, name) is None for name in _PATTERNS):
            listed = ", ".join(f"`{name}`" for name in _PATTERNS)
            raise ValueError(
                f"`observe` must be given patterns for at least one of {listed}"
            )
        for name in _COUNTS:
            count = checked_count(f"observe.{name}", getattr(self, name), least=1)
            object.__setattr__(self, name, count)


_COUNTS = ("every_steps", "num_bins")
_PATTERNS = tuple(each.name for each in fields(Observe) if each.name not in _COUNTS)


def _listed(name: str, patterns: Any) -> tuple[str, ...]:
    try:
        return tuple(patterns)
    except TypeError as error:
        raise TypeError(
            f"`observe.{name}` must be a pattern over parameter names or several, "
            f"got a {type(patterns).__name__}"
        ) from error


class Histogram(NamedTuple):
    """How often values fall into bins of equal width.

    From a run of steps, each field has one entry for each step that was observed.

    Attributes:
        step: The ``global_step`` after which this is how things were.
        low: The smallest finite value; NaN if there was none.
        high: The largest.
        counts: Values in each bin from ``low`` to ``high``, int32 ``[num_bins]``. Those
            that are not finite are in none.
    """

    step: Any
    low: Any
    high: Any
    counts: np.ndarray

    @property
    def edges(self) -> np.ndarray:
        """Where bins begin and end, ``[num_bins + 1]``."""
        return np.linspace(self.low, self.high, self.counts.shape[-1] + 1, axis=-1)


class Looks(NamedTuple):
    """What was seen of one update.

    ``ratios`` are update ratios, NaN where there is none, and ``words`` histograms as
    they go to the host.
    """

    ratios: Array
    words: Array


@dataclass(frozen=True)
class Observing:
    """`Observe` with patterns that have become names.

    Attributes:
        selected: Names of parameters by option, in the model's order.
        every_steps: Steps from one that is observed to the next.
        num_bins: Bins of a histogram.
    """

    selected: Mapping[str, tuple[str, ...]]
    every_steps: int
    num_bins: int

    @cached_property
    def scalar_names(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return self._names("grad_norm", "update_ratio")

    @cached_property
    def histogram_names(self) -> tuple[str, ...]:
        """The names of the histograms."""
        return self._names(*_HISTOGRAMS)

    def _names(self, *options: str) -> tuple[str, ...]:
        return tuple(
            f"{option}.{name}" for option in options for name in self.selected[option]
        )

    @property
    def needs_update(self) -> bool:
        """Whether more is looked at than norms, which every step has."""
        return bool(self.selected["update_ratio"] or self.histogram_names)

    @property
    def compared_names(self) -> tuple[str, ...]:
        """The parameters whose values before an update are looked at."""
        both = (*self.selected["update_ratio"], *self.selected["update_histogram"])
        return tuple(dict.fromkeys(both))

    def is_due(self, step: Array) -> Array:
        """Whether the update after ``step`` others is observed."""
        return (step + 1) % self.every_steps == 0

    def look(self, before: Params, after: Params, grads: Grads) -> Looks:
        """What there is to see of an update."""
        # Whatever is computed here, the update itself is computed as it would be.
        before, after, grads = jax.lax.optimization_barrier((before, after, grads))

        def added(name: str) -> Array:
            return _wide(after[name]) - _wide(before[name])

        ratios = [
            _norm(added(name)) / _nan_for_0(_norm(before[name]))
            for name in self.selected["update_ratio"]
        ]
        tables = [
            *(_words_of(grads[name], self.num_bins) for name in self._of("grad")),
            *(_words_of(after[name], self.num_bins) for name in self._of("param")),
            *(_words_of(added(name), self.num_bins) for name in self._of("update")),
        ]
        return Looks(
            jnp.stack(ratios) if ratios else jnp.zeros(0, jnp.float32),
            jnp.concatenate(tables) if tables else jnp.zeros(0, jnp.uint32),
        )

    def _of(self, what: str) -> tuple[str, ...]:
        return self.selected[what + "_histogram"]

    def nothing(self) -> Looks:
        """What there is to see where nobody looks."""
        num_words = len(self.histogram_names) * (2 + self.num_bins)
        ratios = jnp.full(len(self.selected["update_ratio"]), jnp.nan, jnp.float32)
        return Looks(ratios, jnp.zeros(num_words, jnp.uint32))

    def scalars(self, norms: Mapping[str, Array], looks: Looks, is_due: Array) -> Mean:
        """The metrics ``[n]``, each with its weight: 0 where it was not observed."""
        own = [norms[name] for name in self.selected["grad_norm"]]
        own = jnp.stack(own) if own else jnp.zeros(0, jnp.float32)
        values = jnp.concatenate([own, looks.ratios])
        is_seen = jnp.concatenate([jnp.ones(own.shape, bool), ~jnp.isnan(looks.ratios)])
        is_seen &= is_due
        return Mean(jnp.where(is_seen, values, 0), is_seen.astype(jnp.float32))

    def aside(self, step: Array, looks: Looks, is_seen: Array) -> Array | None:
        """Histograms as they wait for a reader; None if there are none to be."""
        if not self.histogram_names:
            return None
        head = jnp.stack([is_seen.astype(jnp.uint32), (step + 1).astype(jnp.uint32)])
        return jnp.concatenate([head, looks.words])


def resolve(
    observe: Observe | None, names: tuple[str, ...], trained: tuple[str, ...]
) -> Observing | None:
    """What is observed of a model with such names.

    Raises:
        ValueError: If a pattern selects nothing.
    """
    if observe is None:
        return None

    def select(option: str) -> tuple[str, ...]:
        patterns = getattr(observe, option)
        if patterns is None:
            return ()
        among = trained if option in _TRAINED_ONLY else names
        selected = select_names(patterns, among, f"observe.{option}")
        return tuple(name for name in among if name in selected)

    selected = {option: select(option) for option in _PATTERNS}
    return Observing(selected, observe.every_steps, observe.num_bins)


def read_histograms(
    words: np.ndarray, names: tuple[str, ...], *, is_many: bool
) -> dict[str, Histogram]:
    """The histograms in words ``[num_steps, num_words]``, of the steps that have any.

    Args:
        words: As `Observing.aside` left them.
        names: Their names.
        is_many: Whether fields have an entry for each step; of a single step not.
    """
    words = words[words[:, 0] == 1]
    if not is_many and not len(words):
        return {}
    steps = words[:, 1].astype(np.int64)
    num_words = (words.shape[1] - 2) // len(names)
    table = words[:, 2:].reshape(len(words), len(names), num_words)
    ends = np.ascontiguousarray(table[..., :2]).view(np.float32)
    counts = table[..., 2:].astype(np.int32)
    if is_many:
        return {
            name: Histogram(steps, ends[:, i, 0], ends[:, i, 1], counts[:, i])
            for i, name in enumerate(names)
        }
    return {
        name: Histogram(
            int(steps[0]), float(ends[0, i, 0]), float(ends[0, i, 1]), counts[0, i]
        )
        for i, name in enumerate(names)
    }


def _words_of(values: Array, num_bins: int) -> Array:
    """A histogram as words: both ends, then the counts."""
    values = _wide(values).astype(jnp.float32).ravel()
    is_finite = jnp.isfinite(values)
    low = jnp.min(jnp.where(is_finite, values, jnp.inf))
    high = jnp.max(jnp.where(is_finite, values, -jnp.inf))
    # Halved, so that the width of no range overflows.
    width = high / 2 - low / 2
    place = (values / 2 - low / 2) / jnp.where(width > 0, width, 1) * num_bins
    bins = jnp.clip(jnp.floor(place), 0, num_bins - 1).astype(jnp.int32)
    bins = jnp.where(is_finite, bins, num_bins)
    counts = jnp.zeros(num_bins + 1, jnp.uint32)
    counts = counts.at[bins].add(1, mode="promise_in_bounds")[:num_bins]
    ends = jnp.where(jnp.any(is_finite), jnp.stack([low, high]), jnp.nan)
    return jnp.concatenate([jax.lax.bitcast_convert_type(ends, jnp.uint32), counts])


def _norm(values: Array) -> Array:
    return jnp.sqrt(square_sum(values)).astype(jnp.float32)


def _nan_for_0(norm: Array) -> Array:
    return jnp.where(norm == 0, jnp.nan, norm)


def _wide(values: Array) -> Array:
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))
