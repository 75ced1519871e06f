"""The user's transforms of whole batches, on the host or compiled."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fuelflow.data.fields import checked_names
from fuelflow.step.batch import Transform
from fuelflow.step.spec import require_array


def takes_random(owner: str, function: Callable[..., Any], name: str) -> str:
    """How a transform takes its source of randomness.

    Args:
        owner: The argument that the function was given as.
        function: Takes fields, or fields and what is random.
        name: The name of that parameter, if it is not the second required one.

    Returns:
        ``"keyword"``, ``"positional"`` or ``"none"``.

    Raises:
        TypeError: If it cannot be called with one or two arguments.
    """
    if not callable(function):
        raise TypeError(
            f"`{owner}` must be a function of fields, got a {type(function).__name__}"
        )
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some functions written in C do not say
        return "none"
    required = [p for p in parameters.values() if _is_required(p)]
    named = parameters.get(name)
    if named is not None and named.kind is not inspect.Parameter.POSITIONAL_ONLY:
        style, num_expected = "keyword", 1 + (named in required)
    else:
        style = "positional" if len(required) == 2 else "none"
        num_expected = len(required) if required else 1
    if len(required) > min(num_expected, 2) or not parameters:
        raise TypeError(
            f"`{owner}` must take (fields) or (fields, {name}), got a function of "
            f"({', '.join(parameters)})"
        )
    return style


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty and parameter.kind not in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )


@dataclass(frozen=True)
class HostTransform:
    """A transform of NumPy arrays, called by the threads that make batches.

    Attributes:
        function: Fields, or fields and a generator, to fields.
        style: How it takes the generator.
    """

    function: Callable[..., Any]
    style: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "HostTransform":
        """The transform of a user's function."""
        return cls(function, takes_random("transform", function, "rng"))

    def __call__(
        self,
        fields: dict[str, np.ndarray],
        make_rng: Callable[[int], np.random.Generator],
        number: int,
    ) -> dict[str, Any]:
        """The transformed fields, checked.

        Args:
            fields: True rows, ``[rows, ...]``.
            make_rng: The generator of a batch of this epoch.
            number: The batch's number in the epoch.

        Raises:
            TypeError: If the result is no mapping from names to numeric arrays.
            ValueError: If it has no fields, or another number of rows.
        """
        num_rows = len(next(iter(fields.values())))
        try:
            made = self._call(fields, make_rng, number)
        except BaseException as error:
            error.add_note(f"in `transform`, on batch {number}")
            raise
        return checked_fields("transform", made, num_rows)

    def _call(
        self,
        fields: dict[str, np.ndarray],
        make_rng: Callable[[int], np.random.Generator],
        number: int,
    ) -> Any:
        if self.style == "none":
            return self.function(fields)
        if self.style == "keyword":
            return self.function(fields, rng=make_rng(number))
        return self.function(fields, make_rng(number))


def make_device_transform(function: Callable[..., Any]) -> Transform:
    """The compiled transform of a user's function, whose result is checked."""
    style = takes_random("device_transform", function, "key")
    return Transform(partial(_call_on_device, function, style), style != "none")


def _call_on_device(
    function: Callable[..., Any], style: str, fields: dict[str, Any], *key: Any
) -> dict[str, Any]:
    num_rows = next(iter(fields.values())).shape[0]
    if style == "keyword":
        made = function(fields, key=key[0])
    else:
        made = function(fields, *key)
    return checked_fields("device_transform", made, num_rows)


def checked_fields(owner: str, made: Any, num_rows: int) -> dict[str, Any]:
    """What a transform made, refused by name if it is no batch of as many rows.

    Raises:
        TypeError: If it is no mapping from names to numeric arrays.
        ValueError: If it has no fields, or another number of rows.
    """
    if not isinstance(made, Mapping):
        raise TypeError(
            f"`{owner}` must return a mapping of fields, got a {type(made).__name__}"
        )
    checked_names(made, f"the result of `{owner}`")
    for name, values in made.items():
        require_array(name, values)
        if np.shape(values)[:1] != (num_rows,):
            raise ValueError(
                f"`{owner}` must keep the {num_rows} rows of a batch, got shape "
                f"{np.shape(values)} in the field `{name}`: choose rows with a "
                "sampler, and count them with a field of weights"
            )
    return dict(made)
