"""Linen modules, which keep their variables outside of themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.tree_util import tree_structure, tree_unflatten

from fuelflow._types import Params, Variables
from fuelflow.model.definition import (
    FunctionalModel,
    as_array,
    is_floating,
    require_params,
    require_same_variables,
)
from fuelflow.model.names import named_leaves, require_distinct, unboxed_name


@dataclass(frozen=True)
class Linen:
    """A linen module together with its variables: a model fuelflow can train.

    The parameters are the floating leaves of the ``params`` collection. Every other
    collection is carried, and mutable in training. Tuples are taken to be filled by
    ``sow``: they start each step empty, and what a step sowed is in ``state.sown``.
    Hold a pair that is to be carried in a dict.

    Args:
        module: A `flax.linen.Module`.
        variables: What ``module.init`` returned: ``{"params": ..., ...}``.
        mutable: Further collections that the forward pass may fill, such as
            ``("intermediates",)``.
        rngs: The names of the random streams, each given a fresh key in each call.

    Raises:
        TypeError: If ``variables`` is no mapping, or ``module`` has no ``apply``.
        ValueError: If ``variables`` has no ``params``.
    """

    module: Any
    variables: Mapping[str, Any]
    mutable: tuple[str, ...] = ()
    rngs: tuple[str, ...] = ("dropout",)

    def __post_init__(self) -> None:
        if isinstance(self.module, type):
            raise TypeError(
                "`module` must be an instance, "
                f"got the class {self.module.__name__} itself"
            )
        if not callable(getattr(self.module, "apply", None)):
            raise TypeError(
                "`module` must be a flax.linen.Module, "
                f"got a {type(self.module).__name__}"
            )
        if not isinstance(self.variables, Mapping):
            raise TypeError(
                "`variables` must be the mapping that module.init returned, "
                f"got a {type(self.variables).__name__}"
            )
        if "params" not in self.variables:
            found = ", ".join(f"`{name}`" for name in self.variables) or "none"
            raise ValueError(
                f"`variables` must have a collection `params`, got {found}: "
                "pass all that module.init returned, not variables['params']"
            )
        for argument in ("mutable", "rngs"):
            names = getattr(self, argument)
            if isinstance(names, str):
                raise TypeError(
                    f"`{argument}` must be a tuple of names, got the string {names!r}"
                )
            object.__setattr__(self, argument, tuple(names))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module applied to its variables, for use after training."""
        return self.module.apply(self.variables, *args, **kwargs)


class BoundLinen:
    """A linen module inside a step: call it like the module, with no variables.

    Attributes:
        training: Whether this is a training step, and not an evaluation.
        module: The linen module.
    """

    def __init__(
        self,
        definition: "LinenDefinition",
        variables: dict[str, Any],
        *,
        key: jax.Array,
        training: bool,
    ) -> None:
        self.module = definition.module
        self.training = training
        self._definition = definition
        self._variables = variables
        self._key = key
        self._num_calls = 0

    @property
    def variables(self) -> dict[str, Any]:
        """All collections, as the calls so far left them."""
        return dict(self._variables)

    @property
    def params(self) -> Any:
        """The ``params`` collection."""
        return self._variables["params"]

    def __call__(
        self, *args: Any, rngs: dict[str, jax.Array] | None = None, **kwargs: Any
    ) -> Any:
        """The module's output.

        Args:
            *args: Passed to the module.
            rngs: Keys by stream, in place of the ones derived from the step's key.
            **kwargs: Passed to the module; ``method`` selects another method.

        Raises:
            TypeError: If ``mutable`` is given, which is for the whole run to decide.
        """
        if "mutable" in kwargs:
            raise TypeError(
                "`mutable` must be given once, as ff.Linen(module, variables, "
                "mutable=...): the call returns the output alone, and all collections "
                "are in `variables`"
            )
        mutable = self._definition.mutable_in(training=self.training)
        result = self.module.apply(
            self._variables,
            *args,
            rngs=self._fresh_rngs() if rngs is None else rngs,
            mutable=list(mutable) if mutable else False,
            **kwargs,
        )
        if not mutable:
            return result
        output, changed = result
        self._variables = {**self._variables, **changed}
        return output

    def _fresh_rngs(self) -> dict[str, jax.Array]:
        key = jax.random.fold_in(self._key, self._num_calls)
        self._num_calls += 1
        # Linen lets a stream without a key of its own draw from `params`.
        names = ("params", *self._definition.rngs)
        return dict(zip(names, jax.random.split(key, len(names)), strict=True))


@dataclass(frozen=True)
class _BoundLinenPass:
    model: BoundLinen
    before: Variables

    def harvest(self) -> tuple[Variables, Variables]:
        collections = {k: v for k, v in self.model.variables.items() if k != "params"}
        after = named_leaves(collections, unboxed_name)
        # Floating leaves only came apart from the rest inside `params`.
        fixed = {n: v for n, v in self.before.items() if n.startswith("params.")}
        after = {**fixed, **after}
        require_same_variables(self.before, after)
        kept = {name: after[name] for name in self.before}
        return kept, {name: v for name, v in after.items() if name not in self.before}


@dataclass(frozen=True)
class LinenDefinition:
    """A linen module, the structure of its variables, and which may change."""

    # A module may hold lists, which have no hash; the names serve.
    module: Any = field(hash=False)
    treedef: Any = field(hash=False)
    param_names: tuple[str, ...]
    leaf_names: tuple[str, ...]
    carried: tuple[str, ...]
    extra: tuple[str, ...]
    rngs: tuple[str, ...]

    def mutable_in(self, *, training: bool) -> tuple[str, ...]:
        """The collections a call may change: in evaluation only those asked for."""
        return self.carried + self.extra if training else self.extra

    def bind(
        self, params: Params, variables: Variables, *, key: jax.Array, training: bool
    ) -> _BoundLinenPass:
        """The module with its variables, ready for calls."""
        tree = self._join(params, variables)
        return _BoundLinenPass(
            BoundLinen(self, dict(tree), key=key, training=training), variables
        )

    def build(self, params: Params, variables: Variables) -> Linen:
        """The module with the given arrays as its variables."""
        return Linen(self.module, self._join(params, variables), self.extra, self.rngs)

    def _join(self, params: Params, variables: Variables) -> Any:
        arrays = {**params, **variables}
        return tree_unflatten(self.treedef, [arrays[name] for name in self.leaf_names])


def make_functional_linen(model: Linen) -> FunctionalModel:
    """A linen model taken apart.

    Parameter names leave out the collection: ``Dense_0.kernel``. Variables start with
    theirs: ``batch_stats.BatchNorm_0.mean``.

    Raises:
        TypeError: If a parameter is complex.
        ValueError: If there is no floating parameter, or two have one name.
    """
    collections = {
        name: tree if name == "params" else _emptied(tree)
        for name, tree in model.variables.items()
    }
    params: Params = {}
    variables: Variables = {}
    names: list[str] = []
    for path, value in named_leaves(collections, unboxed_name).items():
        leaf = as_array(path, value)
        collection, _, rest = path.partition(".")
        if collection == "params" and is_floating(rest, leaf):
            params[rest] = leaf
            names.append(rest)
        else:
            variables[path] = leaf
            names.append(path)
    require_distinct(names)
    require_params(params, "the linen model", "its collection `params` is empty")
    definition = LinenDefinition(
        module=model.module,
        treedef=tree_structure(collections),
        param_names=tuple(params),
        leaf_names=tuple(names),
        carried=tuple(name for name in collections if name != "params"),
        extra=tuple(name for name in model.mutable if name not in collections),
        rngs=model.rngs,
    )
    return FunctionalModel(definition, params, variables)


def _emptied(tree: Any) -> Any:
    """A collection in which the tuples that ``sow`` appends to are empty."""
    if isinstance(tree, Mapping):
        return {name: _emptied(value) for name, value in tree.items()}
    return () if type(tree) is tuple else tree
