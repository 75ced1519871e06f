"""One forward pass: a model put together inside a trace."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from fuelflow._types import Params, Variables
from fuelflow.model.definition import Bound, Definition


@dataclass(frozen=True)
class Forward:
    """A model around the arrays of one pass.

    Attributes:
        definition: The model.
        params: Its parameters, traced.
        variables: Its variables before the pass.
        key: The key of the pass.
        training: Whether it is a training step.
    """

    definition: Definition
    params: Params
    variables: Variables
    key: jax.Array
    training: bool

    @cached_property
    def bound(self) -> Bound:
        """The model of this pass, which its calls may change."""
        return self._bind(training=self.training)

    @cached_property
    def at_rest(self) -> Bound:
        """The same parameters in eval mode."""
        return self._bind(training=False) if self.training else self.bound

    @property
    def model(self) -> Any:
        """The user's kind of object."""
        return self.bound.model

    def _bind(self, *, training: bool) -> Bound:
        return self.definition.bind(
            self.params, self.variables, key=self.key, training=training
        )
