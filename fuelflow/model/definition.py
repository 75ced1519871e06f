"""A model taken apart: arrays by name on one side, everything else on the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fuelflow._types import Params, Variables


class Bound(Protocol):
    """A model put together for one forward pass inside a trace."""

    @property
    def model(self) -> Any:
        """The user's kind of object, which the loss receives."""
        ...

    def harvest(self) -> tuple[Variables, Variables]:
        """The variables after the pass: those that were there, and those it created.

        Raises:
            ValueError: If the pass changed what it must not: a parameter, a variable's
                shape or dtype, or a static attribute.
        """
        ...


class Definition(Protocol):
    """All of a model but its arrays: hashable, comparable, static under `jax.jit`."""

    @property
    def param_names(self) -> tuple[str, ...]:
        """The parameters' names in the model's own order."""
        ...

    def bind(
        self, params: Params, variables: Variables, *, key: jax.Array, training: bool
    ) -> Bound:
        """The model put together inside a trace, for one forward pass."""
        ...

    def build(self, params: Params, variables: Variables) -> Any:
        """The user's kind of model around the given arrays."""
        ...


@dataclass(frozen=True)
class FunctionalModel:
    """A definition with the arrays it was taken from."""

    definition: Definition
    params: Params
    variables: Variables


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array that can enter a compiled program."""
    if isinstance(leaf, jax.Array):
        return True
    # NumPy's own kind of bfloat16 and its like is V, as of records.
    return isinstance(leaf, np.ndarray | np.generic) and (
        leaf.dtype.kind == "b" or jnp.issubdtype(leaf.dtype, jnp.number)
    )


def as_array(name: str, leaf: Any) -> Any:
    """A leaf that is an array, or the array that a Python number stands for.

    Raises:
        TypeError: If it is neither.
    """
    if is_array(leaf):
        return leaf
    if isinstance(leaf, bool | int | float | complex):
        # With a dtype of its own it is not weakly typed, and stays as it is in a step.
        return jnp.asarray(leaf, jnp.result_type(type(leaf)))
    raise TypeError(
        f"`{name}` must be an array or a number, got a {type(leaf).__name__}"
    )


def is_floating(name: str, leaf: Any) -> bool:
    """Whether an array is a parameter by its dtype.

    Raises:
        TypeError: If it is complex, for which a gradient step has no single meaning.
    """
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise TypeError(
            f"parameter `{name}` is {leaf.dtype}, and only real floating parameters "
            "are trained: store its real and imaginary parts"
        )
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def require_params(params: Params, kind: str, remedy: str) -> None:
    """Refuses a model that has nothing to train.

    Raises:
        ValueError: If there is no parameter.
    """
    if not params:
        raise ValueError(f"{kind} has no floating parameters to train; {remedy}")


def require_same_variables(before: Variables, after: Variables) -> None:
    """Refuses variables that vanish, or change shape or dtype, in the forward pass.

    Raises:
        ValueError: With the names, and what they were and became.
    """
    gone = [name for name in before if name not in after]
    if gone:
        raise ValueError(f"the forward pass removed {_listed(gone)} from the model")
    for name, old in before.items():
        new = after[name]
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ValueError(
                f"the forward pass must keep the shape and dtype of `{name}`, but "
                f"turned {old.dtype}{list(old.shape)} into {new.dtype}{list(new.shape)}"
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
