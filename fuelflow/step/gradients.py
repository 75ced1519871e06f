"""Loss and gradients of one batch, whole or by microbatches."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fuelflow._types import Array, Batch, Grads, Params, PyTree, Scalar, Variables
from fuelflow.model.definition import Definition
from fuelflow.step.batch import as_seen_by_loss
from fuelflow.step.forward import Forward
from fuelflow.step.loss import LossReader
from fuelflow.step.weighted import Mean


@jax.tree_util.register_static
@dataclass(frozen=True)
class Flag:
    """A truth known when a program is traced."""

    is_set: bool


class Harvest(NamedTuple):
    """What the backward pass over one batch gives."""

    loss: Mean
    metrics: dict[str, Mean]
    grads: Grads
    variables: Variables
    sown: Variables
    fetched: PyTree
    beside: tuple[PyTree, PyTree]
    is_maskable: Flag


@dataclass(frozen=True)
class Backward:
    """The backward pass of a loss through a model.

    Attributes:
        loss: The loss.
        definition: The model.
        frozen: The parameters that get no gradient.
    """

    loss: LossReader
    definition: Definition
    frozen: Params

    def __call__(
        self, trained: Params, variables: Variables, batch: Batch, key: jax.Array
    ) -> Harvest:
        """Loss, metrics and gradients by name of the trained parameters."""
        seen, row_weight = as_seen_by_loss(batch)

        def objective(trained: Params) -> tuple[Scalar, Harvest]:
            params = {**self.frozen, **trained}
            forward = Forward(self.definition, params, variables, key, training=True)
            reading = self.loss.read(forward, seen, key, row_weight)
            kept, sown = forward.bound.harvest()
            is_maskable = Flag(
                reading.is_maskable and not _sees_whole_batch(variables, kept)
            )
            found = Harvest(
                reading.loss,
                reading.metrics,
                {},
                kept,
                sown,
                reading.fetched,
                reading.beside,
                is_maskable,
            )
            return reading.loss.mean, found

        grads, found = jax.grad(objective, has_aux=True)(trained)
        return found._replace(grads=grads)

    def by_microbatch(
        self,
        trained: Params,
        variables: Variables,
        batch: Batch,
        key: jax.Array,
        num_microbatches: int,
    ) -> Harvest:
        """The same over consecutive microbatches, in the memory of one.

        Equals the whole batch's loss and gradient, also if the microbatches have
        unequal weights: each gradient counts by its weight, and the sum is divided by
        the total. Variables are carried from one microbatch to the next.
        """

        def accumulate(
            carry: tuple[Grads, Variables], inputs: tuple[Batch, jax.Array]
        ) -> tuple[tuple[Grads, Variables], Harvest]:
            sums, variables = carry
            one = self(trained, variables, *inputs)
            weighed = {
                name: total
                + one.grads[name].astype(total.dtype)
                * one.loss.weight.astype(total.dtype)
                for name, total in sums.items()
            }
            return (weighed, one.variables), one._replace(grads={}, variables={})

        microbatches = jax.tree.map(
            lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch
        )
        keys = jax.random.split(key, num_microbatches)
        zeros = {name: jnp.zeros(p.shape, _wide(p)) for name, p in trained.items()}
        (sums, variables), parts = jax.lax.scan(
            accumulate, (zeros, variables), (microbatches, keys)
        )
        loss = _combine(parts.loss)
        divisor = jnp.where(loss.weight == 0, 1, loss.weight)
        return Harvest(
            loss,
            {name: _combine(mean) for name, mean in parts.metrics.items()},
            {n: (g / divisor).astype(trained[n].dtype) for n, g in sums.items()},
            variables,
            jax.tree.map(lambda x: x[-1], parts.sown),
            parts.fetched,
            parts.beside,
            parts.is_maskable,
        )


def _sees_whole_batch(before: Variables, after: Variables) -> bool:
    """Whether a pass changed statistics, which rows of weight 0 would be part of."""
    return any(
        jnp.issubdtype(value.dtype, jnp.floating) and value is not before[name]
        for name, value in after.items()
    )


def _wide(param: Array) -> jnp.dtype:
    return jnp.promote_types(param.dtype, jnp.float32)


def _combine(means: Mean) -> Mean:
    """One weighted mean of stacked ones ``[n]``."""
    weight = jnp.sum(means.weight)
    total = jnp.sum(means.mean * means.weight)
    return Mean(total / jnp.where(weight == 0, 1, weight), weight)
