"""Modules of `flax.nnx`, which carry their arrays inside themselves."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.tree_util import (
    GetAttrKey,
    KeyPath,
    tree_flatten_with_path,
    tree_structure,
    tree_unflatten,
)

from fuelflow._types import Params, Variables
from fuelflow.model.definition import (
    FunctionalModel,
    as_array,
    is_floating,
    require_params,
    require_same_variables,
)
from fuelflow.model.names import (
    named_leaves,
    path_name,
    require_distinct,
    unboxed_name,
)


def is_nnx_module(model: Any) -> bool:
    """Whether a model is an `nnx.Module`, without importing flax to find out."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def holds_nnx_module(tree: Any) -> bool:
    """Whether an `nnx.Module` stands anywhere in a tree."""
    return any(map(is_nnx_module, jax.tree.leaves(tree, is_leaf=is_nnx_module)))


@dataclass(frozen=True)
class NNXDefinition:
    """A module's graph, and the names of its arrays in the graph's order."""

    # A module may hold dicts of settings, which have no hash; the names serve.
    graphdef: Any = field(hash=False)
    treedef: Any = field(hash=False)
    names: tuple[str, ...]
    param_names: tuple[str, ...]
    variable_paths: frozenset[str]

    def bind(
        self, params: Params, variables: Variables, *, key: jax.Array, training: bool
    ) -> "BoundNNX":
        """The module around the given arrays; in eval mode unless ``training``.

        In training each layer keeps the mode it has in the module passed in. The key is
        unused: a module draws from its own `nnx.Rngs`, whose counters are variables.
        """
        del key
        from flax import nnx

        module = self.build(params, variables)
        if not training:
            module.eval()
        known = frozenset(
            id(node)
            for _, node in nnx.iter_graph(module)
            if isinstance(node, nnx.Variable)
        )
        return BoundNNX(self, module, params, variables, known)

    def build(self, params: Params, variables: Variables) -> Any:
        """The module around the given arrays."""
        from flax import nnx

        arrays = {**params, **variables}
        state = tree_unflatten(self.treedef, [arrays[name] for name in self.names])
        # Without a copy, Variables of an outer trace level would be reused, and the
        # first change of one raises.
        return nnx.merge(self.graphdef, state, copy=True)


@dataclass(frozen=True)
class BoundNNX:
    """A module inside a trace, and the arrays it was made of."""

    definition: NNXDefinition
    model: Any
    params: Params
    variables: Variables
    known: frozenset[int]

    def harvest(self) -> tuple[Variables, Variables]:
        """The module's variables after the pass, and what it sowed."""
        from flax import nnx

        # A tied variable has a second path, by which it is not known.
        paths = self.definition.variable_paths
        popped = nnx.pop(
            self.model,
            lambda path, node: (
                _dotted(path) not in paths and id(node) not in self.known
            ),
        )
        graphdef, state = nnx.split(self.model)
        after = named_leaves(state, unboxed_name)
        require_same_variables({**self.params, **self.variables}, after)
        self._require_untouched(after, graphdef)
        kept = {name: after[name] for name in self.variables}
        return kept, named_leaves(popped, unboxed_name)

    def _require_untouched(self, after: Variables, graphdef: Any) -> None:
        for name, param in self.params.items():
            if after[name] is not param:
                raise ValueError(
                    f"the forward pass assigns to parameter `{name}`, which only the "
                    "optimizer may change: make it a variable of another type than "
                    "nnx.Param; or, if an nnx.jit or nnx.remat inside of the model "
                    "writes it back as it was, give that `graph_updates=False`"
                )
        for name in after:
            if name not in self.params and name not in self.variables:
                raise ValueError(
                    f"the forward pass added the array `{name}` to the "
                    f"{type(self.model).__name__}, which a compiled step would lose: "
                    "put it there before training"
                )
        if _structure(graphdef) != _structure(self.definition.graphdef):
            raise ValueError(
                "the forward pass changed a static attribute or the structure of the "
                f"{type(self.model).__name__}, which a compiled step would lose: hold "
                "what changes in an nnx.Variable"
            )


def make_functional_nnx(model: Any) -> FunctionalModel:
    """A module taken apart: floating `nnx.Param` arrays, and all its other variables.

    A variable that stands in several places of the module is one, under its first name.
    Every `nnx.Intermediate` is left out, as a pass sows it again. The module is not
    changed.

    Raises:
        TypeError: If a parameter is complex, or a variable holds no array or number.
        ValueError: If there is no floating parameter, or two have one name.
    """
    from flax import nnx

    graphdef, state = nnx.split(model)
    if any(isinstance(leaf, nnx.Intermediate) for _, leaf in nnx.to_flat_state(state)):
        clean = nnx.merge(graphdef, state, copy=True)
        nnx.pop(clean, nnx.Intermediate)
        graphdef, state = nnx.split(clean)
    flat = {_dotted(path): leaf for path, leaf in nnx.to_flat_state(state)}
    trainable = {path for path, leaf in flat.items() if isinstance(leaf, nnx.Param)}
    params: Params = {}
    variables: Variables = {}
    names: list[str] = []
    for path, value in tree_flatten_with_path(state)[0]:
        name = unboxed_name(path)
        leaf = as_array(name, value)
        is_param = _variable_path(path) in trainable and is_floating(name, leaf)
        (params if is_param else variables)[name] = leaf
        names.append(name)
    require_distinct(names)
    require_params(
        params, f"the module {type(model).__name__}", "no nnx.Param holds any"
    )
    definition = NNXDefinition(
        graphdef, tree_structure(state), tuple(names), tuple(params), frozenset(flat)
    )
    return FunctionalModel(definition, params, variables)


def write_into(module: Any, params: Params, variables: Variables) -> None:
    """Sets the arrays of a module to the given ones, by name.

    Intermediates that it holds stay as they are.

    Raises:
        TypeError: If ``module`` is no `nnx.Module`.
        ValueError: If its names or shapes differ.
    """
    if not is_nnx_module(module):
        raise TypeError(f"`into` must be an nnx.Module, got a {type(module).__name__}")
    from flax import nnx

    arrays = {**params, **variables}
    state = nnx.state(module, nnx.Not(nnx.Intermediate))
    there = named_leaves(state, unboxed_name)
    for name in {**arrays, **there}:
        trained, found = (_shape_text(name, leaves) for leaves in (arrays, there))
        if trained != found:
            raise ValueError(
                "`into` must be the module that was trained, "
                f"but its `{name}` is {found} and the state's is {trained}"
            )
    leaves = [arrays[name] for name in there]
    nnx.update(module, tree_unflatten(tree_structure(state), leaves))


def _shape_text(name: str, leaves: Mapping[str, Any]) -> str:
    return str(list(np.shape(leaves[name]))) if name in leaves else "absent"


def _structure(graphdef: Any) -> Any:
    """What two graphs that hold the same have in common.

    Flax 0.12.1 keeps the names of popped variables in ``_pytree__nodes``, which tells
    data from static attributes; each attribute's own kind says so as well.
    """
    attributes = [pair for pair in graphdef.attributes if pair[0] != "_pytree__nodes"]
    return graphdef.nodes, attributes


def _variable_path(path: KeyPath) -> str:
    """The name of the Variable that holds an array."""
    value = GetAttrKey("value")
    return path_name(path[: path.index(value)] if value in path else path)


def _dotted(path: Any) -> str:
    return ".".join(str(part) for part in path)
