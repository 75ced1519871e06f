"""What a graph's programs are made of: calls of its model, and the loss they end in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fuelflow._types import Array, Params, Variables
from fuelflow.graph.expression import Ref
from fuelflow.graph.realize import Pass, forward_of
from fuelflow.graph.structure import Recipe
from fuelflow.model.definition import Definition
from fuelflow.step.forward import Forward
from fuelflow.step.loss import LossReading
from fuelflow.step.weighted import Weighted, read_form

Arguments = tuple[tuple[Any, ...], tuple[Pass, ...]]
"""What a graph's program is given in place of a batch: leaves, and others' passes."""


@dataclass(frozen=True, eq=False)
class ModelCall:
    """How the results of calls of one model, in one mode, are found.

    It also tells such calls from those of other models: by being itself, so that what
    is remembered of them keeps it alive.

    Attributes:
        definition: The model.
        params: Shapes and dtypes of its parameters.
        variables: Those of its variables.
        training: The mode.
    """

    definition: Definition
    params: Params
    variables: Variables
    training: bool

    def trace(
        self,
        structs: Sequence[jax.ShapeDtypeStruct],
        results: Callable[..., list[Any]],
    ) -> tuple[list[Any], bool]:
        """The shapes of the results of a call, and whether later calls depend on it.

        They do if the call is in training mode and changes variables, or its results
        depend on its key.
        """
        moved: list[str] = []

        def traced(
            params: Params, variables: Variables, values: Any, key: jax.Array
        ) -> list[Any]:
            forward = Forward(
                self.definition, params, variables, key, training=self.training
            )
            found = results(values, forward.model)
            if self.training:
                after, _ = forward.bound.harvest()
                moved.extend(n for n, x in after.items() if x is not variables[n])
            return found

        arguments = (self.params, self.variables, structs, jax.random.key(0))
        made = jax.make_jaxpr(traced, return_shape=True)(*arguments)
        program, shapes = made
        jaxpr: Any = program.jaxpr
        depends = self.training and is_used(jaxpr, jaxpr.invars[-1])
        return shapes, bool(moved) or depends


def is_used(jaxpr: Any, variable: Any) -> bool:
    """Whether a result of a jaxpr depends on one of its inputs."""
    needed = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    for equation in reversed(jaxpr.eqns):
        if needed & set(equation.outvars) or equation.effects:
            needed |= {v for v in equation.invars if not hasattr(v, "val")}
    return variable in needed


Kind = tuple[tuple[bool, ...], tuple[str, ...]]
"""Whether the loss and each metric has a weight, and the names of the metrics."""


class Asked:
    """A loss and metrics as they were written.

    Attributes:
        refs: Their values, the loss first, each followed by its weight if it has one.
        kind: What else tells them apart.
    """

    __slots__ = ("kind", "refs")

    def __init__(self, refs: tuple[Ref, ...], kind: Kind) -> None:
        self.refs = refs
        self.kind = kind

    @property
    def loss(self) -> Ref:
        """The value of the loss."""
        return self.refs[0]

    @property
    def is_plain(self) -> bool:
        """Whether the loss is a scalar without a weight, which is its own mean."""
        return not self.refs[0]._type.shape and not self.kind[0][0]

    def values(self) -> list[Ref]:
        """The values without the weights."""
        refs = iter(self.refs)
        found = []
        for has_weight in self.kind[0]:
            found.append(next(refs))
            if has_weight:
                next(refs)
        return found


_LOSS_ALONE: Kind = (False,), ()


def asked_for(loss: Any, metrics: Mapping[str, Any] | None = None) -> Asked:
    """What was given as a loss, and as metrics by name.

    Raises:
        TypeError: If one is not lazy, or a name is no string.
        ValueError: If a metric has the name of the loss.
    """
    if isinstance(loss, Ref) and not metrics:
        return Asked((loss,), _LOSS_ALONE)
    metrics = metrics or {}
    parts = [_parts_of(loss, "the loss")]
    for name, metric in metrics.items():
        _check_metric_name(name)
        parts.append(_parts_of(metric, f"the metric `{name}`"))
    weights = tuple([len(part) > 1 for part in parts])
    return Asked(sum(parts, ()), (weights, tuple(metrics)))


def _parts_of(written: Any, what: str) -> tuple[Ref, ...]:
    """A loss or metric: its value, and its weight if it has one."""
    is_weighted = isinstance(written, Weighted)
    value = written.value if is_weighted else written
    if not isinstance(value, Ref):
        raise TypeError(
            f"{what} must be a lazy array made from `graph(...)`, or ff.Weighted "
            f"of one, got a {type(value).__name__}"
        )
    if not is_weighted:
        return (value,)
    weight = written.weight
    return value, weight if isinstance(weight, Ref) else _as_ref(weight)


def _check_metric_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a metric's name must be a string, got {name!r}")
    if name in ("loss", "the loss"):
        raise ValueError(f"a metric must not be named `{name}`, the name of the loss")


def _as_ref(array: Any) -> Ref:
    from fuelflow.graph.array import call

    return call(jnp.asarray, jnp.asarray, (array,), {})


@dataclass(frozen=True)
class RecordedLoss:
    """A loss that was written line by line, as the engine reads it.

    Attributes:
        recipe: How to run it: loss, metrics and fetched values, in this order.
        kind: Which of them has a weight, and the names of the metrics.
        own: Which of the sets of parameters is the one that is stepped.
        others: The models of the other sets, in order.
    """

    recipe: Recipe
    kind: Kind
    own: int
    others: tuple[Definition, ...]

    sees_all_rows = True

    def read(
        self,
        forward: Forward,
        batch: Arguments,
        key: jax.Array,
        row_weight: Array | None = None,
    ) -> LossReading:
        """Runs what was recorded, and reads the loss and metrics in it."""
        del key, row_weight
        leaves, passes = batch
        weights, names = self.kind
        forwards = [
            forward_of(definition, arrays)
            for definition, arrays in zip(self.others, passes, strict=True)
        ]
        every = [*forwards[: self.own], forward, *forwards[self.own :]]
        found = self.recipe.run(leaves, every)
        forms = []
        for has_weight in weights:
            value = found.pop(0)
            forms.append(Weighted(value, found.pop(0)) if has_weight else value)
        loss, *metrics = forms
        changed = [other.bound.harvest()[0] for other in forwards]
        return LossReading(
            _read(loss, "the loss"),
            {
                name: _read(metric, f"the metric `{name}`", is_loss=False)
                for name, metric in zip(names, metrics, strict=True)
            },
            is_maskable=False,
            fetched=found,
            beside=(changed, [other.variables for other in passes]),
        )


def _read(form: Any, what: str, *, is_loss: bool = True) -> Any:
    value = form.value if isinstance(form, Weighted) else form
    num_rows = jnp.shape(value)[0] if jnp.ndim(value) else 1
    return read_form(form, what, num_rows, None, is_loss=is_loss)
