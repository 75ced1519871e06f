"""The optimizer: an optax transformation, or a factory that is given the rate."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import optax

from fuelflow._types import Grads, Params, PyTree, Scalar
from fuelflow.model.names import select_names
from fuelflow.step.checks import checked_rate

Transformation = optax.GradientTransformation
Factory = Callable[..., optax.GradientTransformation]


@dataclass(frozen=True)
class Optimizer:
    """An optax transformation made anew, inside the step, at the rate of that step.

    Attributes:
        make: Gives the transformation for a learning rate, float32 ``[]``. A ready
            transformation ignores it.
        has_own_rate: Whether the rate is the transformation's own affair.
        name: How errors call it.
    """

    make: Factory
    has_own_rate: bool
    name: str

    def init(self, params: Params, rate: Scalar) -> PyTree:
        """The optimizer's state for the trained parameters."""
        return self.make(rate).init(params)

    def update(
        self,
        grads: Grads,
        opt_state: PyTree,
        params: Params,
        rate: Scalar,
        loss: Scalar,
    ) -> tuple[Grads, PyTree]:
        """The updates to add to the parameters, and the state after them."""
        transformation = optax.with_extra_args_support(self.make(rate))
        updates, opt_state = transformation.update(
            grads, opt_state, params, value=loss, grad=grads
        )
        return cast(Grads, updates), opt_state

    def own_rate(self, opt_state: PyTree) -> Scalar | None:
        """The rate that `optax.inject_hyperparams` keeps in the state, if it does."""
        found = optax.tree_utils.tree_get_all_with_path(opt_state, "learning_rate")
        # A scheduled rate has a state of the same name beside it.
        rates = [value for _, value in found if isinstance(value, jax.Array)]
        if len(rates) != 1 or rates[0].ndim:
            return None
        return rates[0].astype(jnp.float32)


def resolve_optimizer(optimizer: Transformation | Factory) -> Optimizer:
    """An optimizer from a factory of the learning rate, or a ready transformation.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(optimizer, Transformation):
        return Optimizer(_always(optimizer), has_own_rate=True, name="optimizer")
    if not callable(optimizer):
        raise TypeError(
            "`optimizer` must be an optax transformation or a factory of the learning "
            f"rate such as optax.adamw, got a {type(optimizer).__name__}"
        )
    name = getattr(optimizer, "__name__", "optimizer")
    _require_factory(optimizer, name)

    def make(rate: Scalar) -> Transformation:
        made = optimizer(rate)
        if not isinstance(made, Transformation):
            raise TypeError(
                f"the optimizer factory `{name}` must return an optax transformation, "
                f"got a {type(made).__name__}"
            )
        return made

    return Optimizer(make, has_own_rate=False, name=name)


def _require_factory(factory: Factory, name: str) -> None:
    """Refuses what optax has besides factories of a learning rate, such as `chain`."""
    if not str(getattr(factory, "__module__", "")).startswith("optax."):
        return
    first = next(iter(inspect.signature(factory).parameters), None)
    if first not in ("learning_rate", "args"):
        raise TypeError(
            f"`optimizer` must be a factory of the learning rate, but `{name}` takes "
            f"`{first}` first: call it, and pass the transformation it gives"
        )


def _always(ready: Transformation) -> Factory:
    def make(rate: Scalar) -> Transformation:
        del rate
        return ready

    return make


def rate_multipliers(
    groups: Mapping[str, float] | None,
    names: tuple[str, ...],
    trainable: frozenset[str],
) -> dict[str, float]:
    """The factor on the rate of each trained parameter that has one other than 1.

    Args:
        groups: Pattern to factor, each at least 0.
        names: All parameters.
        trainable: Those that are trained.

    Raises:
        TypeError: If a factor is no number.
        ValueError: If a factor is negative or not finite, a pattern selects no trained
            parameter, or two patterns select the same one.
    """
    if groups is None:
        return {}
    factors: dict[str, float] = {}
    owner: dict[str, str] = {}
    for pattern, factor in groups.items():
        checked = checked_rate(f"lr_groups[{pattern!r}]", factor)
        selected = select_names(pattern, names, "lr_groups")
        if not selected & trainable:
            raise ValueError(
                f"`lr_groups` pattern `{pattern}` selects only frozen parameters"
            )
        for name in sorted(selected & trainable):
            if name in owner:
                raise ValueError(
                    f"`lr_groups` must not overlap, but `{name}` is selected by both "
                    f"`{owner[name]}` and `{pattern}`"
                )
            owner[name] = pattern
            factors[name] = checked
    return factors


def scale_updates(updates: Grads, factors: Mapping[str, float]) -> Grads:
    """The updates with each parameter's factor applied.

    Scaling an update equals scaling the rate for every optimizer whose updates are
    proportional to it, as optax's are.
    """
    return {
        name: update * factors[name] if name in factors else update
        for name, update in updates.items()
    }


# A bound method is another one each time, and would be compiled as often.
@partial(jax.jit, static_argnums=0)
def _init(optimizer: Optimizer, params: Params, rate: Scalar) -> PyTree:
    return optimizer.init(params, rate)


def initial_state(optimizer: Optimizer, params: Params, rate: jax.Array) -> PyTree:
    """The optimizer's first state, by one small program.

    Raises:
        TypeError: If the factory needs the rate as a Python number, or keeps it.
    """
    try:
        state = _init(optimizer, params, rate)
    except jax.errors.ConcretizationTypeError as error:
        raise TypeError(
            f"the optimizer factory `{optimizer.name}` must accept a traced learning "
            "rate, but asks for its value; pass a ready transformation instead, which "
            "keeps its own rate"
        ) from error
    found = optax.tree_utils.tree_get_all_with_path(state, "learning_rate")
    if found and not optimizer.has_own_rate:
        raise TypeError(
            f"the optimizer factory `{optimizer.name}` must not keep its rate in its "
            "state, where no schedule reaches it: pass optax.adam in place of "
            "optax.inject_hyperparams(optax.adam), or a ready transformation"
        )
    return state
