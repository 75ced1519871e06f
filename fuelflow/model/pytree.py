"""Models that are plain pytrees: dicts, tuples, dataclasses, Equinox modules."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.tree_util import (
    DictKey,
    GetAttrKey,
    KeyPath,
    SequenceKey,
    tree_flatten_with_path,
    tree_unflatten,
)

from fuelflow._types import Params, Variables
from fuelflow.model.definition import (
    FunctionalModel,
    as_array,
    is_array,
    is_floating,
    require_params,
)
from fuelflow.model.names import path_name, require_distinct


@dataclass(frozen=True)
class PytreeDefinition:
    """A tree's structure, the names of its arrays, and its other leaves."""

    treedef: Any = field(hash=False)
    names: tuple[str, ...]
    param_names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...] = field(hash=False)

    def bind(
        self, params: Params, variables: Variables, *, key: jax.Array, training: bool
    ) -> "BoundPytree":
        """The tree with the given arrays as leaves, whether or not in training."""
        del key, training
        return BoundPytree(self.build(params, variables), variables)

    def build(self, params: Params, variables: Variables) -> Any:
        """The tree with the given arrays and its own constants as leaves."""
        leaves = {**dict(self.constants), **params, **variables}
        return tree_unflatten(self.treedef, [leaves[name] for name in self.names])


@dataclass(frozen=True)
class BoundPytree:
    """A pytree model in a trace. It has no way to change its variables."""

    model: Any
    variables: Variables

    def harvest(self) -> tuple[Variables, Variables]:
        """The variables as they came, and none created."""
        return self.variables, {}


def make_functional_pytree(model: Any) -> FunctionalModel:
    """A pytree taken apart into floating arrays, other arrays, and constants.

    Floating arrays are the parameters. A Python float is one too if only dicts, lists
    and tuples (named ones too) lie above it; as an attribute of an object it is a
    setting, such as the rate of an Equinox dropout. Other arrays are carried unchanged;
    other leaves are constants of the compiled program. An array object that stands in
    two places is two parameters, as for `jax.grad`.

    Raises:
        TypeError: If a parameter is complex, or an array is not numeric.
        ValueError: If there is no floating leaf, or two leaves have one name.
    """
    paths, treedef = tree_flatten_with_path(model)
    names = [path_name(path) or "param" for path, _ in paths]
    require_distinct(names)
    params: Params = {}
    variables: Variables = {}
    constants: list[tuple[str, Any]] = []
    for name, (path, leaf) in zip(names, paths, strict=True):
        if isinstance(leaf, np.ndarray) and not is_array(leaf):
            raise TypeError(
                f"model leaf `{name}` is an array of dtype {leaf.dtype}, which no "
                "program can hold: keep it outside of the model"
            )
        if _is_setting(model, path, leaf):
            constants.append((name, leaf))
            continue
        array = as_array(name, leaf)
        (params if is_floating(name, array) else variables)[name] = array
    require_params(
        params,
        f"a model of type {type(model).__name__}",
        "pass an nnx.Module, ff.Linen(module, variables), or a tree of floating arrays",
    )
    definition = PytreeDefinition(
        treedef, tuple(names), tuple(params), tuple(constants)
    )
    return FunctionalModel(definition, params, variables)


def _is_setting(model: Any, path: KeyPath, leaf: Any) -> bool:
    """Whether a leaf is a constant of the program, and no array."""
    # NumPy's float64 is a Python float as well.
    if isinstance(leaf, float | complex):
        return not _is_in_containers(model, path)
    return not is_array(leaf)


def _is_in_containers(model: Any, path: KeyPath) -> bool:
    node = model
    for key in path:
        if not isinstance(node, Mapping | list | tuple):
            return False
        match key:
            case DictKey():
                node = node[key.key]
            case SequenceKey():
                node = node[key.idx]
            case GetAttrKey():  # of a named tuple
                node = getattr(node, key.name)
            case _:
                return False
    return True
