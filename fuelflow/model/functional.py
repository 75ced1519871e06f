"""The one way from a user's model to its functional form, and back."""

from typing import Any

import jax

from fuelflow.model.definition import FunctionalModel
from fuelflow.model.linen import Linen, make_functional_linen
from fuelflow.model.nnx import (
    holds_nnx_module,
    is_nnx_module,
    make_functional_nnx,
)
from fuelflow.model.pytree import make_functional_pytree


def make_functional(model: Any) -> FunctionalModel:
    """A model of any kind taken apart into a static definition and arrays by name.

    Args:
        model: An `nnx.Module`, a `Linen`, or a pytree with floating leaves.

    Raises:
        TypeError: If it is a class, a bare linen module, a container of nnx modules, or
            has complex parameters.
        ValueError: If it has no floating parameter, or two of one name.
    """
    if isinstance(model, type):
        raise TypeError(
            f"`model` must be an instance, got the class {model.__name__} itself"
        )
    if isinstance(model, Linen):
        return make_functional_linen(model)
    if is_nnx_module(model):
        return make_functional_nnx(model)
    if holds_nnx_module(model):
        raise TypeError(
            f"a {type(model).__name__} that holds nnx modules must be a module itself: "
            "make them attributes of one nnx.Module, such as nnx.List or nnx.Dict"
        )
    if not jax.tree.leaves(model):
        raise ValueError(
            f"a model of type {type(model).__name__} has no floating parameters to "
            "train"
        )
    if _is_linen_module(model):
        raise TypeError(
            "a linen module keeps its variables outside: pass "
            "ff.Linen(module, module.init(key, inputs))"
        )
    return make_functional_pytree(model)


def _is_linen_module(model: Any) -> bool:
    return any(
        cls.__module__ == "flax.linen.module" and cls.__name__ == "Module"
        for cls in type(model).__mro__
    )
