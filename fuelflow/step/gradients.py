"""Loss and gradients of one batch, whole or by microbatches."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fuelflow._types import Array, Batch, Grads, Params, PyTree, Scalar, Variables
from fuelflow.devices.ranks import ROWS, WHOLE, Ranks
from fuelflow.model.definition import Definition
from fuelflow.step.across import (
    Sown,
    combined,
    own_variables,
    part_of_mean,
    settled,
    sown_by_rows,
)
from fuelflow.step.batch import as_seen_by_loss
from fuelflow.step.forward import Forward
from fuelflow.step.loss import LossReader, rows_of_pass, with_probes
from fuelflow.step.probed import grad_with_probes
from fuelflow.step.weighted import Mean


@jax.tree_util.register_static
@dataclass(frozen=True)
class Flag:
    """A truth known when a program is traced."""

    is_set: bool


class Own(NamedTuple):
    """What each rank made of its own rows.

    ``means`` are its loss, named ``loss``, and metrics, and ``num_rows`` the rows that
    counted, each ``[num_ranks]``.
    """

    means: dict[str, Mean]
    num_rows: Array


# Specs take the place of what they are specs of.
_WHOLE: Any = WHOLE
_ROWS: Any = ROWS
_SOWN: Any = (ROWS, WHOLE)


class Harvest(NamedTuple):
    """What the backward pass over one batch gives."""

    loss: Mean
    metrics: dict[str, Mean]
    grads: Grads
    variables: Variables
    sown: Sown
    fetched: PyTree
    beside: tuple[PyTree, PyTree]
    is_maskable: Flag
    own: Own

    def all_sown(self) -> Variables:
        """What the pass created."""
        by_rows, others = self.sown
        return {**by_rows, **others}


class Part(NamedTuple):
    """What one rank's backward pass over its rows gives.

    The gradients are this rank's part of those over all ranks, whose loss has the
    weight ``weight``; loss and metrics are the rank's own.
    """

    loss: Mean
    metrics: dict[str, Mean]
    grads: Grads
    weight: Scalar
    variables: Variables
    sown: Sown
    fetched: PyTree
    beside: tuple[PyTree, PyTree]
    is_maskable: Flag
    num_rows: Array

    def join(self, ranks: Ranks) -> Harvest:
        """What all ranks' parts are together."""
        own = {"loss": self.loss, **self.metrics}
        loss, *metrics = combined(own, ranks).values()
        return Harvest(
            loss,
            dict(zip(self.metrics, metrics, strict=True)),
            ranks.total(self.grads),
            self.variables,
            self.sown,
            self.fetched,
            self.beside,
            self.is_maskable,
            Own(jax.tree.map(jnp.atleast_1d, own), jnp.atleast_1d(self.num_rows)),
        )


JOINED: Any = Harvest(
    loss=_WHOLE,
    metrics=_WHOLE,
    grads=_WHOLE,
    variables=_WHOLE,
    sown=_SOWN,
    fetched=_WHOLE,
    beside=_WHOLE,
    is_maskable=_WHOLE,
    own=_ROWS,
)
"""What of a harvest every rank has whole, and what by rows."""


@dataclass(frozen=True)
class Backward:
    """The backward pass of a loss through a model, as one rank makes it.

    Attributes:
        loss: The loss.
        definition: The model.
        frozen: The parameters that get no gradient.
        ranks: All ranks.
    """

    loss: LossReader
    definition: Definition
    frozen: Params
    ranks: Ranks

    def __call__(
        self, trained: Params, variables: Variables, batch: Batch, key: jax.Array
    ) -> Part:
        """Loss, metrics and gradients by name of the trained parameters."""
        seen, row_weight = as_seen_by_loss(batch)
        given = own_variables(variables, self.ranks)

        def objective(trained: Params) -> tuple[Scalar, Part]:
            params = {**self.frozen, **trained}
            forward = Forward(self.definition, params, given, key, training=True)
            reading = self.loss.read(forward, seen, key, row_weight)
            kept, sown = forward.bound.harvest()
            is_maskable = Flag(
                reading.is_maskable and not _sees_whole_batch(given, kept)
            )
            share, weight = part_of_mean(reading.loss, self.ranks)
            part = Part(
                reading.loss,
                reading.metrics,
                {},
                weight,
                settled(variables, given, kept, self.ranks),
                sown_by_rows(sown, reading.rows, self.ranks),
                reading.fetched,
                reading.beside,
                is_maskable,
                jnp.int32(reading.num_counted),
            )
            return share, part

        rows = rows_of_pass(self.loss, seen, row_weight)
        grads, part, probes = grad_with_probes(objective, trained, rows)
        return part._replace(grads=grads, metrics=with_probes(part.metrics, probes))

    def by_microbatch(
        self,
        trained: Params,
        variables: Variables,
        batch: Batch,
        key: jax.Array,
        num_microbatches: int,
    ) -> Part:
        """The same over consecutive microbatches, in the memory of one.

        Equals the whole batch's loss and gradient, also if the microbatches have
        unequal weights: each gradient counts by its weight, and the sum is divided by
        the total. Variables are carried from one microbatch to the next.
        """

        def accumulate(
            carry: tuple[Grads, Variables], inputs: tuple[Batch, jax.Array]
        ) -> tuple[tuple[Grads, Variables], Part]:
            sums, variables = carry
            one = self(trained, variables, *inputs)
            weighed = {
                name: total
                + one.grads[name].astype(total.dtype) * one.weight.astype(total.dtype)
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
        weight = jnp.sum(parts.weight)
        divisor = jnp.where(weight == 0, 1, weight)
        return Part(
            _combine(parts.loss),
            {name: _combine(mean) for name, mean in parts.metrics.items()},
            {n: (g / divisor).astype(trained[n].dtype) for n, g in sums.items()},
            weight,
            variables,
            jax.tree.map(lambda x: x[-1], parts.sown),
            parts.fetched,
            parts.beside,
            parts.is_maskable,
            jnp.sum(parts.num_rows),
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
