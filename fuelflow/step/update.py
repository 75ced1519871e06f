"""What the optimizer makes of gradients, and what there is to see of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import optax

from fuelflow._types import Array, Grads, Params, Scalar
from fuelflow.model.names import named_leaves
from fuelflow.step.clipping import clip_by_global_norm, clip_by_value
from fuelflow.step.gradients import Harvest
from fuelflow.step.observe import Looks, Observing
from fuelflow.step.optimizer import scale_updates
from fuelflow.step.parts import Moving
from fuelflow.step.rules import StepRules
from fuelflow.step.spec import changes_between, leaf_text


@dataclass(frozen=True)
class Update:
    """The update of a step, or none for a step that was bad.

    Attributes:
        rules: What a step does.
        trained_names: The parameters to update.
        multipliers: Factor on a parameter's rate, where it is not 1.
        can_branch: Whether the device takes a branch without asking the host.
        observing: What is looked at of each parameter, if anything.
    """

    rules: StepRules
    trained_names: tuple[str, ...]
    multipliers: Mapping[str, float]
    can_branch: bool
    observing: Observing | None

    def __call__(
        self,
        moving: Moving,
        found: Harvest,
        rate: Scalar,
        norm: Scalar,
        is_finite: Array,
    ) -> tuple[Moving, Looks | None]:
        """What the optimizer makes of a harvest, or what was there before a bad one.

        Where the update itself is observed, what there is to see of it comes along.
        """
        trained = self._trained(moving.params)

        def apply(trained: Params) -> Moving:
            updates, opt_state = self.rules.optimizer.update(
                self._clip(found.grads, norm),
                moving.opt_state,
                trained,
                rate,
                found.loss.mean,
            )
            updates = scale_updates(updates, self.multipliers)
            params = cast(Params, optax.apply_updates(trained, updates))
            step = moving.step + 1
            return moving._replace(
                params=params,
                variables=found.variables,
                opt_state=opt_state,
                step=step,
            )

        def keep() -> Moving:
            num_skipped = moving.num_skipped + 1
            return moving._replace(params=trained, num_skipped=num_skipped)

        _require_same(keep(), jax.eval_shape(apply, trained))
        after, looks = self._taken(moving, found.grads, apply, keep, is_finite)
        return after._replace(params={**moving.params, **after.params}), looks

    def _taken(
        self,
        moving: Moving,
        grads: Grads,
        apply: Callable[[Params], Moving],
        keep: Callable[[], Moving],
        is_finite: Array,
    ) -> tuple[Moving, Looks | None]:
        """The one of two ways on that is taken, and what there is to see of it."""
        trained, observing = self._trained(moving.params), self.observing
        if observing is None or not observing.needs_update:
            if self.rules.keeps_bad_updates:
                return apply(trained), None
            if self.can_branch:
                return jax.lax.cond(is_finite, lambda: apply(trained), keep), None
            select = partial(jnp.where, is_finite)
            return jax.tree.map(select, apply(trained), keep()), None
        is_due, nothing = observing.is_due(moving.step), observing.nothing()

        def look(before: Params, after: Moving) -> Looks:
            return observing.look(before, {**moving.params, **after.params}, grads)

        def apply_and_look() -> tuple[Moving, Looks]:
            # A copy, which the compiler cannot know to be one, made before the update:
            # so that can be written where it is read from, and in the other ways too.
            before = {
                name: jnp.where(is_due, trained[name], 0)
                for name in observing.compared_names
            }
            given, before = jax.lax.optimization_barrier((trained, before))
            after = apply(given)
            return after, look(before, after)

        if self.can_branch and not self.rules.keeps_bad_updates:
            # Three ways, so that the one that nobody looks at costs nothing more.
            ways = (lambda: (keep(), nothing), lambda: (apply(trained), nothing))
            way = jnp.where(is_finite, 1 + is_due.astype(jnp.int32), 0)
            return jax.lax.switch(way, (*ways, apply_and_look))
        after = apply(trained)
        if self.can_branch:
            looks = jax.lax.cond(
                is_due, lambda: look(moving.params, after), lambda: nothing
            )
            return after, looks
        is_seen = is_due
        looks = look(moving.params, after)
        if not self.rules.keeps_bad_updates:
            after = jax.tree.map(partial(jnp.where, is_finite), after, keep())
            is_seen &= is_finite
        return after, jax.tree.map(partial(jnp.where, is_seen), looks, nothing)

    def _clip(self, grads: Grads, norm: Scalar) -> Grads:
        if self.rules.max_grad_norm is not None:
            grads = clip_by_global_norm(grads, norm, self.rules.max_grad_norm)
        if self.rules.max_grad_value is not None:
            grads = clip_by_value(grads, self.rules.max_grad_value)
        return grads

    def _trained(self, params: Params) -> Params:
        return {name: params[name] for name in self.trained_names}


def _require_same(before: Moving, after: Moving) -> None:
    """Refuses an optimizer that changes the shape or dtype of what it keeps.

    Raises:
        TypeError: With the names, old → new.
    """
    old, new = (
        {name: leaf_text(leaf) for name, leaf in named_leaves(moving).items()}
        for moving in (before._asdict(), after._asdict())
    )
    changes = changes_between(old, new)
    if changes:
        raise TypeError(
            "the optimizer must keep the shapes and dtypes of its state, but a step "
            "would change " + "; ".join(changes)
        )
