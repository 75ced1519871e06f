"""Calling the user's loss: its arguments, its result, and its mistakes."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import jax
import jax.numpy as jnp

from fuelflow._errors import MissingFieldError
from fuelflow._types import Array, Batch, LossFunction
from fuelflow.step.forward import Forward
from fuelflow.step.weighted import Mean, is_maskable, read_form
from fuelflow.step.witness import PassRows


class LossReading(NamedTuple):
    """What one call of a loss function said, as weighted means.

    ``is_maskable`` is true if every value can be told apart by row, so that rows of
    weight 0 change none of them. ``rows`` are those the pass went through, and
    ``num_counted`` how many of them have a weight. ``fetched`` are arrays that ride
    along; ``beside`` are others that the pass changed, after and before it, which go
    the way of the state.
    """

    loss: Mean
    metrics: dict[str, Mean]
    is_maskable: bool
    rows: int = 0
    num_counted: Any = 0
    fetched: Any = ()
    beside: tuple[Any, Any] = ((), ())


class LossReader(Protocol):
    """What the engine asks for the loss of one forward pass."""

    @property
    def sees_all_rows(self) -> bool:
        """Whether it is written for a whole batch: no rank may run it on its rows."""
        ...

    def read(
        self,
        forward: Forward,
        batch: Batch,
        key: jax.Array,
        row_weight: Array | None = None,
    ) -> LossReading:
        """The loss and metrics of a batch, inside a trace."""
        ...


@dataclass(frozen=True)
class Loss:
    """A user's loss function, and how it takes a key."""

    function: LossFunction
    key_style: Literal["positional", "keyword", "none"]

    sees_all_rows = False

    def read(
        self,
        forward: Forward,
        batch: Batch,
        key: jax.Array,
        row_weight: Array | None = None,
    ) -> LossReading:
        """Calls the function and reads its result.

        Args:
            forward: The model, bound for this pass.
            batch: Arrays that share their leading axis.
            key: The key of this pass, for a function that takes one.
            row_weight: Weight of each row ``[batch]``, or None for 1 each.

        Raises:
            MissingFieldError: If the function asks for a field that the batch lacks.
            TypeError: If a value has the wrong kind.
            ValueError: If a value has the wrong shape.
        """
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        loss, metrics = _split_result(self._call(forward.model, batch, key))
        forms = [loss, *metrics.values()]
        means = {
            name: read_form(
                form, f"the metric `{name}`", num_rows, row_weight, is_loss=False
            )
            for name, form in metrics.items()
        }
        return LossReading(
            read_form(loss, "the loss", num_rows, row_weight),
            means,
            all(is_maskable(form, num_rows) for form in forms),
            num_rows,
            num_rows if row_weight is None else jnp.count_nonzero(row_weight),
        )

    def _call(self, model: Any, batch: Batch, key: jax.Array) -> Any:
        positional = (key,) if self.key_style == "positional" else ()
        keywords = {"key": key} if self.key_style == "keyword" else {}
        try:
            return self.function(model, batch, *positional, **keywords)
        except KeyError as error:
            name = error.args[0] if error.args else None
            if isinstance(batch, dict) and isinstance(name, str) and name not in batch:
                # Another dict of the user's may lack it too: asked once more, the batch
                # speaks up if it is the one.
                self.function(model, _Fields(batch), *positional, **keywords)
            raise


def rows_of_pass(loss: LossReader, batch: Batch, row_weight: Array | None) -> PassRows:
    """The rows that a pass of a loss goes through."""
    if loss.sees_all_rows:  # it was written line by line, and minds no rows
        return PassRows(None)
    return PassRows(jax.tree.leaves(batch)[0].shape[0], row_weight)


def with_probes(metrics: dict[str, Mean], probes: dict[str, Mean]) -> dict[str, Mean]:
    """Metrics that a loss returned, and what was recorded on the way.

    Raises:
        ValueError: If two have one name.
    """
    for name in probes:
        if name in metrics:
            raise ValueError(
                f"a probe must not be named `{name}`, as a metric is that the loss "
                "returns"
            )
    return {**metrics, **probes}


def resolve_loss(function: Callable[..., Any], argument: str) -> Loss:
    """A loss function with what its signature says.

    A function takes a key by keyword if it has a parameter ``key`` without a value of
    its own, and by position if it has three required positional parameters.

    Raises:
        TypeError: If it is not callable as ``(model, batch)`` or
            ``(model, batch, key)``.
    """
    if not callable(function):
        raise TypeError(
            f"`{argument}` must be a function (model, batch) or (model, batch, key), "
            f"got a {type(function).__name__}"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in callables have no signature
        return Loss(function, "none")
    style = _key_style(signature)
    try:
        signature.bind(
            *range(3 if style == "positional" else 2),
            **({"key": None} if style == "keyword" else {}),
        )
    except TypeError as error:
        raise TypeError(
            f"`{argument}` must be callable as (model, batch) or (model, batch, key), "
            f"got the parameters ({', '.join(signature.parameters)})"
        ) from error
    return Loss(function, style)


def _key_style(
    signature: inspect.Signature,
) -> Literal["positional", "keyword", "none"]:
    parameters = signature.parameters.values()
    named = signature.parameters.get("key")
    if named is not None and named.kind is not named.POSITIONAL_ONLY:
        has_own = named.default is not named.empty and named.default is not None
        return "none" if has_own else "keyword"
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in kinds and p.default is p.empty]
    return "positional" if len(required) == 3 else "none"


class _Fields(dict[str, Any]):
    """A batch that answers for itself when it is asked for a field it lacks."""

    def __missing__(self, name: str) -> NoReturn:
        raise MissingFieldError(name, [str(field) for field in self])


def _split_result(result: Any) -> tuple[Any, dict[str, Any]]:
    if not isinstance(result, tuple):
        return result, {}
    if len(result) != 2 or not isinstance(result[1], dict):
        kinds = ", ".join(type(item).__name__ for item in result)
        raise TypeError(
            "a loss function must return a loss, or a loss and a dict of metrics, "
            f"got a tuple of ({kinds})"
        )
    loss, metrics = result
    for name in metrics:
        if not isinstance(name, str):
            raise TypeError(f"a metric's name must be a string, got {name!r}")
        if name == "loss":
            raise ValueError("a metric must not be named `loss`, the name of the loss")
        if not name or name.startswith("eval."):
            raise ValueError(
                "a metric's name must not be empty, nor begin with `eval.`, as an "
                f"evaluation's do, got {name!r}"
            )
    return loss, metrics
