"""What a graph's programs are made of: calls of its model, and the loss they end in."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Arguments(NamedTuple):
    """What a graph's program is given in place of a batch."""

    leaves: tuple[Any, ...]
    others: tuple[Pass, ...]


@dataclass(frozen=True, eq=False)
class ModelCall:
    """How calls of one model, in one mode, are told apart and their results found.

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

    @property
    def key(self) -> Hashable:
        """What tells it from calls of other models: itself, which is so kept alive."""
        return self

    def trace(
        self,
        structs: Sequence[jax.ShapeDtypeStruct],
        results: Callable[..., list[Any]],
    ) -> tuple[list[Any], bool]:
        """The shapes of the results of a call, and whether later calls depend on it.

        They do if the call changes variables, or its results depend on its key.
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
        return shapes, bool(moved) or is_used(jaxpr, jaxpr.invars[-1])


def is_used(jaxpr: Any, variable: Any) -> bool:
    """Whether a result of a jaxpr depends on one of its inputs."""
    needed = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    for equation in reversed(jaxpr.eqns):
        if needed & set(equation.outvars) or equation.effects:
            needed |= {v for v in equation.invars if not hasattr(v, "val")}
    return variable in needed


class Form(NamedTuple):
    """A loss or metric as it was written: a value, or a value and its weight."""

    value: Ref
    weight: Ref | None

    @classmethod
    def of(cls, written: Any, what: str) -> "Form":
        """The form of what was given as a loss or metric.

        Raises:
            TypeError: If it is no lazy array, nor `Weighted` around one.
        """
        value, weight = written, None
        if isinstance(written, Weighted):
            value, weight = written.value, written.weight
            if not isinstance(weight, Ref):
                weight = _as_ref(weight)
        if not isinstance(value, Ref):
            raise TypeError(
                f"{what} must be a lazy array made from `graph(...)`, or ff.Weighted "
                f"of one, got a {type(value).__name__}"
            )
        return cls(value, weight)

    def refs(self) -> list[Ref]:
        """The lazy arrays in it."""
        return [self.value] if self.weight is None else [self.value, self.weight]


def forms_of(loss: Any, metrics: Mapping[str, Any] | None = None) -> dict[str, Form]:
    """The forms of a loss, first, and of metrics by name.

    Raises:
        TypeError: If one is not lazy, or a name is no string.
        ValueError: If a metric has the name of the loss.
    """
    forms = {"the loss": Form.of(loss, "the loss")}
    for name, metric in (metrics or {}).items():
        _check_metric_name(name)
        forms[name] = Form.of(metric, f"the metric `{name}`")
    return forms


def _check_metric_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"a metric's name must be a string, got {name!r}")
    if name in ("loss", "the loss"):
        raise ValueError(f"a metric must not be named `{name}`, the name of the loss")


def _as_ref(array: Any) -> Ref:
    from fuelflow.graph.array import call

    return call(jnp.asarray, (array,), {})


@dataclass(frozen=True)
class RecordedLoss:
    """A loss that was written line by line, as the engine reads it.

    Attributes:
        recipe: How to run it: loss, metrics and fetched values, in this order.
        weights: Whether the loss and each metric has a weight.
        metrics: Names of the metrics.
        own: Which of the sets of parameters is the one that is stepped.
        others: The models of the other sets, in order.
    """

    recipe: Recipe
    weights: tuple[bool, ...]
    metrics: tuple[str, ...]
    own: int
    others: tuple[Definition, ...]

    def read(
        self,
        forward: Forward,
        batch: Arguments,
        key: jax.Array,
        row_weight: Array | None = None,
    ) -> LossReading:
        """Runs what was recorded, and reads the loss and metrics in it."""
        del key, row_weight
        forwards = [
            forward_of(definition, arrays)
            for definition, arrays in zip(self.others, batch.others, strict=True)
        ]
        passes = [*forwards[: self.own], forward, *forwards[self.own :]]
        found = self.recipe.run(batch.leaves, passes)
        forms = []
        for has_weight in self.weights:
            value = found.pop(0)
            forms.append(Weighted(value, found.pop(0)) if has_weight else value)
        loss, *metrics = forms
        changed = [other.bound.harvest()[0] for other in forwards]
        return LossReading(
            _read(loss, "the loss"),
            {
                name: _read(metric, f"the metric `{name}`", is_loss=False)
                for name, metric in zip(self.metrics, metrics, strict=True)
            },
            False,
            found,
            (changed, [other.variables for other in batch.others]),
        )


def _read(form: Any, what: str, *, is_loss: bool = True) -> Any:
    value = form.value if isinstance(form, Weighted) else form
    num_rows = jnp.shape(value)[0] if jnp.ndim(value) else 1
    return read_form(form, what, num_rows, None, is_loss=is_loss)
