"""Calling the user's loss: its arguments, its result, and its mistakes."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from fuelflow._errors import MissingFieldError
from fuelflow._types import Array, Batch, LossFunction
from fuelflow.step.weighted import Mean, Weighted, is_maskable, read_form


class LossReading(NamedTuple):
    """What one call of a loss function said, as weighted means.

    ``maskable`` is true if every value can be told apart by row, so that rows of weight
    0 change none of them.
    """

    loss: Mean
    metrics: dict[str, Mean]
    maskable: bool


@dataclass(frozen=True)
class Loss:
    """A user's loss function, and whether it takes a key."""

    function: LossFunction
    takes_key: bool

    def read(
        self, model: Any, batch: Batch, key: jax.Array, row_weight: Array | None = None
    ) -> LossReading:
        """Calls the function and reads its result.

        Args:
            model: The model, bound for this pass.
            batch: Arrays that share their leading axis.
            key: The key of this pass, for a function that takes one.
            row_weight: Weight of each row ``[batch]``, or None for 1 each.

        Raises:
            MissingFieldError: If the function asks for a field that the batch lacks.
            TypeError: If a value has the wrong kind.
            ValueError: If a value has the wrong shape.
        """
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        arguments = (model, batch, key) if self.takes_key else (model, batch)
        loss, metrics = _split_result(_call(self.function, arguments, batch))
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
        )


def resolve_loss(function: Callable[..., Any], argument: str) -> Loss:
    """A loss function with what its signature says.

    A function takes a key if it has three required positional parameters, or one named
    ``key``.

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
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-in callables have no signature
        return Loss(function, takes_key=False)
    required = [
        parameter
        for parameter in parameters.values()
        if parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    takes_key = len(required) == 3 or "key" in list(parameters)[2:]
    try:
        inspect.signature(function).bind(*range(3 if takes_key else 2))
    except TypeError as error:
        raise TypeError(
            f"`{argument}` must be callable as (model, batch) or (model, batch, key), "
            f"got the parameters ({', '.join(parameters)})"
        ) from error
    return Loss(function, takes_key)


def _call(function: LossFunction, arguments: tuple[Any, ...], batch: Batch) -> Any:
    try:
        return function(*arguments)
    except KeyError as error:
        name = error.args[0] if error.args else None
        if isinstance(batch, dict) and isinstance(name, str) and name not in batch:
            raise MissingFieldError(name, [str(field) for field in batch]) from error
        raise


def _split_result(result: Any) -> tuple[Any, dict[str, Any]]:
    if not isinstance(result, tuple) or isinstance(result, Weighted):
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
    return loss, metrics
