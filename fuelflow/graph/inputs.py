"""The inputs of a model by name, and which field of the data goes into which."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fuelflow._errors import UnwiredInputError
from fuelflow.model.functional import make_functional
from fuelflow.model.linen import Linen

MODE_INPUTS = {
    **dict.fromkeys(("train", "training", "is_training"), True),
    **dict.fromkeys(("deterministic", "inference"), False),
}
"""Inputs that say whether the model trains, and what they are when it does."""


UNNAMED = "*"
"""The input of a model that takes any number of them, by position."""


class Inputs:
    """The inputs of a model's call.

    Attributes:
        names: The inputs, in order, without those that tell the mode.
        required: Those that have no default.
        mode: The inputs that tell the mode.
        takes_any: Whether it takes inputs by position that have no names.
    """

    def __init__(
        self,
        names: Sequence[str],
        required: Sequence[str],
        mode: Sequence[str] = (),
        *,
        takes_any: bool = False,
    ) -> None:
        self.names = tuple(names)
        self.required = tuple(required)
        self.mode = tuple(mode)
        self.takes_any = takes_any

    def mode_arguments(
        self, given: Mapping[str, Any], *, training: bool
    ) -> dict[str, Any]:
        """What tells the model its mode, unless it was told."""
        return {
            name: MODE_INPUTS[name] == training
            for name in self.mode
            if name not in given
        }

    def wire(self, entry: str, fields: Sequence[str]) -> dict[str, str]:
        """Input to field, by name.

        Args:
            entry: The field for the model's first input.
            fields: The fields of the data.

        Raises:
            UnwiredInputError: If the entry, or an input without default, is no field.
        """
        if entry not in fields:
            raise UnwiredInputError(entry, "the entry", self.names, fields)
        if not self.names and not self.takes_any:
            raise UnwiredInputError(
                entry, "the model takes no input, so the entry", self.names, fields
            )
        first, *others = [UNNAMED, *self.names] if self.takes_any else self.names
        if entry in others:
            first, others = entry, [n for n in self.names if n != entry]
        wiring = {first: entry}
        for name in others:
            if name in fields:
                wiring[name] = name
            elif name in self.required:
                raise UnwiredInputError(name, "the input", self.names, fields)
        return wiring


def inputs_of(function: Any, *, skip: int) -> Inputs:
    """The inputs that a call's signature names.

    Args:
        function: What is called.
        skip: Leading parameters that are no inputs.
    """
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in parameters if p.kind not in kinds]
    mode = [p.name for p in named if p.name in MODE_INPUTS]
    inputs = [p for p in named if p.name not in MODE_INPUTS]
    return Inputs(
        [p.name for p in inputs],
        [p.name for p in inputs if p.default is p.empty],
        mode,
        takes_any=any(p.kind is p.VAR_POSITIONAL for p in parameters)
        and all(p.kind is p.KEYWORD_ONLY for p in inputs),
    )


def inputs_of_model(
    model: Any, apply: Callable[..., Any] | None, names: Iterable[str] | None
) -> Inputs:
    """The inputs of a model, by its signature or as given.

    Args:
        model: The model.
        apply: ``(model, *inputs)`` to the outputs, if it is not called itself.
        names: The inputs, if they are not those of the signature.

    Raises:
        TypeError: If the model is none, or not callable and there is no ``apply``.
    """
    if apply is None and not isinstance(model, Linen) and not callable(model):
        make_functional(model)  # a model of the wrong kind is refused as such
        raise TypeError(
            f"a {type(model).__name__} is not callable: say how it is applied, "
            "`ff.Graph(params, apply=lambda params, x: ...)`"
        )
    if apply is not None:
        found = inputs_of(apply, skip=1)
    elif isinstance(model, Linen):
        found = inputs_of(type(model.module).__call__, skip=1)
    else:
        found = inputs_of(model, skip=0)
    if names is None:
        return found
    given = tuple(names)
    return Inputs(given, given, found.mode)
