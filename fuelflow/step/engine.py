"""The step as a pure function: the only place that takes a gradient and applies it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from fuelflow._types import Array, Grads, Params, PyTree, Scalar, Variables
from fuelflow._types import Batch as BatchTree
from fuelflow.devices.ranks import ROWS, WHOLE, OneRank, Ranks
from fuelflow.model.definition import Definition
from fuelflow.model.names import named_leaves
from fuelflow.step.across import combined, own_variables
from fuelflow.step.batch import Batch, Rows, Stretch, rows_here, spec_of
from fuelflow.step.clipping import (
    clip_by_global_norm,
    clip_by_value,
    square_sum,
    sum_in_order,
)
from fuelflow.step.forward import Forward
from fuelflow.step.gradients import JOINED, Backward, Flag, Harvest, Own, Part
from fuelflow.step.optimizer import scale_updates
from fuelflow.step.outcome import METRIC, SQUARES, WEIGHT
from fuelflow.step.packing import Packed, pack
from fuelflow.step.rules import StepRules
from fuelflow.step.spec import changes_between, leaf_text
from fuelflow.step.tally import Tally
from fuelflow.step.weighted import Mean


class Moving(NamedTuple):
    """The part of a state that a step replaces; its buffers are donated."""

    params: Params
    variables: Variables
    opt_state: PyTree
    step: Array
    num_skipped: Array
    sums: Tally | None


class Fixed(NamedTuple):
    """The part of a state that a step only reads."""

    lr: Scalar
    lr_scale: Scalar
    key: jax.Array


class Seen(NamedTuple):
    """What a step leaves besides: what it created, was asked for, or changed."""

    sown: Variables
    fetched: PyTree
    beside: PyTree


class Held(NamedTuple):
    """Gradients of several backward passes, added up, that wait for one step."""

    loss: Scalar
    grads: Grads
    variables: Variables
    sown: Variables
    num_passes: Array


class Still(NamedTuple):
    """The part of a state that an evaluation reads."""

    params: Params
    variables: Variables
    key: jax.Array


@dataclass(frozen=True)
class Engine:
    """A loop's rules applied to one model: pure functions, and no state.

    Attributes:
        rules: What a step does.
        definition: The model.
        trained_names: The parameters to update, in the model's order.
        multipliers: Factor on a parameter's rate, where it is not 1.
        can_branch: Whether the device takes a branch without asking the host. A GPU
            does not, so there both results are computed and one is selected. On a CPU
            selecting is slower, and changes how multiplications and additions fuse.
        ranks: What a batch's rows are spread over.
    """

    rules: StepRules
    definition: Definition
    trained_names: tuple[str, ...]
    multipliers: Mapping[str, float]
    can_branch: bool
    ranks: Ranks

    def step(
        self, moving: Moving, fixed: Fixed, batch: BatchTree
    ) -> tuple[Moving, Packed, Seen]:
        """One optimizer step over a batch: `harvest`, then `finish`."""
        return self.finish(moving, fixed, self.harvest(moving, fixed, batch))

    def finish(
        self, moving: Moving, fixed: Fixed, found: Harvest
    ) -> tuple[Moving, Packed, Seen]:
        """What becomes of a harvest.

        Loss and gradient → global norm → clip by norm → clip by value → optimizer at
        ``schedule(step) * lr_scale`` → ``step + 1``. Unless ``keeps_bad_updates``, a
        step whose loss, gradient norm or rate is not finite leaves everything as it was
        but the count of skipped steps.

        Returns:
            The new moving part, the packed outcome, and what else there is to see.
        """
        squares = [square_sum(found.grads[name]) for name in self.trained_names]
        norm = jnp.sqrt(sum_in_order(squares))
        loss = _or_nan(found.loss)
        rate = self._rate(moving.step, fixed)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        if not self.rules.optimizer.has_own_rate:
            # Below 0 is a rate that was never given.
            is_finite &= jnp.isfinite(rate) & (rate >= 0)
        after = self._update(moving, found, rate, norm, is_finite)
        numbers = {
            "loss": loss,
            "grad_norm": norm,
            **self._reported_rate(rate, after.opt_state),
            "global_step": moving.step + 1,
            "num_skipped": after.num_skipped,
            "finite": is_finite,
            **{METRIC + name: _or_nan(mean) for name, mean in found.metrics.items()},
            SQUARES: jnp.stack(squares),
        }
        packed = pack(
            numbers, params=self.trained_names, is_maskable=found.is_maskable.is_set
        )
        beside, before = found.beside
        if not self.rules.keeps_bad_updates:
            beside = jax.tree.map(partial(jnp.where, is_finite), beside, before)
        after = self.ranks.keep_whole(after._replace(sums=None))
        after = after._replace(sums=self._summed(moving.sums, found, is_finite))
        return after, packed, Seen(found.all_sown(), found.fetched, beside)

    def run(
        self, moving: Moving, fixed: Fixed, batches: BatchTree | Stretch
    ) -> tuple[Moving, Packed, Seen]:
        """A step over each of stacked batches, ``[num_steps, batch, ...]``.

        The batches of a `Stretch` are gathered here, from all the rows on the device.

        Returns:
            The moving part after the last step, the outcomes
            ``[num_steps, num_words]``, and what there is to see of the last step.
        """
        is_stretch = isinstance(batches, Stretch)
        inputs = batches.steps() if is_stretch else batches

        def step_over(
            moving: Moving, fixed: Fixed, step: PyTree
        ) -> tuple[Moving, Packed, Seen]:
            return self.step(moving, fixed, batches.pick(step) if is_stretch else step)

        # Inside one jit the step is traced once, for its shapes and for the scan.
        step = jax.jit(step_over, inline=True)
        first = jax.tree.map(lambda x: x[0], inputs)
        _, packed, seen = jax.eval_shape(step, moving, fixed, first)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), seen)

        def body(
            carry: tuple[Moving, Seen], batch: BatchTree
        ) -> tuple[tuple[Moving, Seen], Array]:
            moving, packed, seen = step(carry[0], fixed, batch)
            return (moving, seen), packed.words

        (moving, seen), words = jax.lax.scan(body, (moving, nothing), inputs)
        return moving, Packed(words, packed.layout), seen

    def begin(
        self, moving: Moving, fixed: Fixed, batch: BatchTree
    ) -> tuple[Held, Seen]:
        """The first backward pass of several, and what it leaves besides."""
        found = self.harvest(moving, fixed, batch)
        one = jnp.int32(1)
        loss = _or_nan(found.loss)
        sown = found.all_sown()
        held = Held(loss, found.grads, found.variables, sown, one)
        return held, Seen(sown, found.fetched, found.beside[0])

    def add(
        self, held: Held, moving: Moving, fixed: Fixed, batch: BatchTree
    ) -> tuple[Held, Seen]:
        """A further backward pass, whose loss and gradients are added."""
        moving = moving._replace(variables=held.variables)
        found = self.harvest(moving, fixed, batch, num_passes=held.num_passes)
        added = Held(
            held.loss + _or_nan(found.loss),
            jax.tree.map(jnp.add, held.grads, found.grads),
            found.variables,
            found.all_sown(),
            held.num_passes + 1,
        )
        return added, Seen(added.sown, found.fetched, found.beside[0])

    def apply(
        self, moving: Moving, fixed: Fixed, held: Held
    ) -> tuple[Moving, Packed, Seen]:
        """The step that the held gradients were waiting for."""
        found = Harvest(
            Mean(held.loss, jnp.float32(1)),
            {},
            held.grads,
            held.variables,
            (held.sown, {}),
            (),
            ((), ()),
            Flag(False),
            Own({}, jnp.zeros(self.ranks.count, jnp.int32)),
        )
        return self.finish(moving, fixed, found)

    def harvest(
        self,
        moving: Moving,
        fixed: Fixed,
        batch: BatchTree,
        *,
        num_passes: Array | None = None,
    ) -> Harvest:
        """Loss, metrics and unclipped gradients of one batch.

        Args:
            moving: The part of a state that a step replaces.
            fixed: The part that it reads.
            batch: The batch.
            num_passes: Backward passes before this one in the same step, each of which
                has a key of its own.
        """
        key = jax.random.fold_in(fixed.key, moving.step)
        if num_passes is not None:
            key = jax.random.fold_in(key, num_passes)
        ranks = OneRank() if self.rules.loss.sees_all_rows else self.ranks

        def harvest_here(
            params: Params, variables: Variables, batch: BatchTree, key: jax.Array
        ) -> Harvest:
            batch, key = rows_here(batch, ranks), ranks.own_key(key)
            return self._pass(params, variables, batch, key, ranks).join(ranks)

        inputs = (WHOLE, WHOLE, spec_of(batch), WHOLE)
        harvest = ranks.spread(harvest_here, inputs, JOINED)
        return harvest(moving.params, moving.variables, batch, key)

    def probe(self, moving: Moving, fixed: Fixed, batch: BatchTree) -> Array:
        """A number ``[num_ranks]`` from each rank's pass over its rows alone.

        No rank waits for another, unless the model itself makes it, so a clock can tell
        which of them takes long. The number depends on all that the pass finds.
        """
        ranks = self.ranks

        def probe_here(
            params: Params, variables: Variables, batch: BatchTree, key: jax.Array
        ) -> Array:
            batch, key = rows_here(batch, ranks), ranks.own_key(key)
            part = self._pass(params, variables, batch, key, OneRank())
            squares = [square_sum(grad) for grad in part.grads.values()]
            return jnp.atleast_1d(part.loss.mean + sum_in_order(squares))

        inputs = (WHOLE, WHOLE, spec_of(batch), WHOLE)
        probe = ranks.spread(probe_here, inputs, ROWS)
        return probe(moving.params, moving.variables, batch, fixed.key)

    def _pass(
        self,
        params: Params,
        variables: Variables,
        batch: BatchTree,
        key: jax.Array,
        ranks: Ranks,
    ) -> Part:
        """The backward pass over one rank's rows."""
        trained, frozen = self._split(params)
        backward = Backward(self.rules.loss, self.definition, frozen, ranks)
        if self.rules.accumulate_steps == 1:
            return backward(trained, variables, batch, key)
        return backward.by_microbatch(
            trained, variables, batch, key, self.rules.accumulate_steps
        )

    def grads(self, moving: Moving, fixed: Fixed, batch: BatchTree) -> Grads:
        """The unclipped gradients of one batch, by name."""
        return self.harvest(moving, fixed, batch).grads

    def evaluate(
        self, still: Still, batch: BatchTree, row_weight: Array, index: Array
    ) -> Packed:
        """The weighted mean and weight of the loss and each metric over one batch.

        Args:
            still: Read and left as it is; ``index`` is folded into its key.
            batch: Arrays that share their leading axis.
            row_weight: Weight of each row ``[batch]``: 0 leaves it out.
            index: Number of the batch in its data set, int32 ``[]``.
        """
        # A step folds in its number alone, so that no key serves twice.
        key = jax.random.fold_in(jax.random.fold_in(still.key, 0x7FFFFFFF), index)
        ranks = self.ranks

        def evaluate_here(
            still: Still, batch: BatchTree, row_weight: Array, key: jax.Array
        ) -> tuple[dict[str, Mean], Flag]:
            key = ranks.own_key(key)
            variables = own_variables(still.variables, ranks)
            forward = Forward(
                self.definition, still.params, variables, key, training=False
            )
            if isinstance(batch, Rows):
                batch = Batch.held(batch.fields, row_weight)
            reading = self.rules.eval_loss.read(forward, batch, key, row_weight)
            means = combined({"loss": reading.loss, **reading.metrics}, ranks)
            return means, Flag(reading.is_maskable)

        evaluate = ranks.spread(evaluate_here, (WHOLE, ROWS, ROWS, WHOLE), WHOLE)
        means, is_maskable = evaluate(still, batch, row_weight, key)
        numbers = {"loss": means["loss"].mean, WEIGHT + "loss": means["loss"].weight}
        for name, mean in means.items():
            if name != "loss":
                numbers[METRIC + name] = mean.mean
                numbers[WEIGHT + METRIC + name] = mean.weight
        return pack(numbers, is_maskable=is_maskable.is_set)

    def _summed(
        self, sums: Tally | None, found: Harvest, is_finite: Array
    ) -> Tally | None:
        """The sums with a step's own added; of a step left out its rows alone."""
        if sums is None:
            return None
        means = [found.own.means[name] for name in ("loss", *found.metrics)]
        is_good = None if self.rules.keeps_bad_updates else is_finite
        return self.ranks.keep_rows(sums.plus(means, found.own.num_rows, is_good))

    def _split(self, params: Params) -> tuple[Params, Params]:
        trained = {name: params[name] for name in self.trained_names}
        frozen = {name: p for name, p in params.items() if name not in trained}
        return trained, frozen

    def _rate(self, step: Array, fixed: Fixed) -> Scalar:
        if self.rules.schedule is None:
            return fixed.lr * fixed.lr_scale
        return self.rules.schedule(step) * fixed.lr_scale

    def _reported_rate(self, rate: Scalar, opt_state: PyTree) -> dict[str, Scalar]:
        if not self.rules.optimizer.has_own_rate:
            return {"lr": rate}
        own = self.rules.optimizer.own_rate(opt_state)
        return {} if own is None else {"lr": own}

    def _clip(self, grads: Grads, norm: Scalar) -> Grads:
        if self.rules.max_grad_norm is not None:
            grads = clip_by_global_norm(grads, norm, self.rules.max_grad_norm)
        if self.rules.max_grad_value is not None:
            grads = clip_by_value(grads, self.rules.max_grad_value)
        return grads

    def _update(
        self,
        moving: Moving,
        found: Harvest,
        rate: Scalar,
        norm: Scalar,
        is_finite: Array,
    ) -> Moving:
        """What the optimizer makes of a harvest, or what was there before a bad one."""
        trained, _ = self._split(moving.params)

        def apply() -> Moving:
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

        _require_same(keep(), jax.eval_shape(apply))
        if self.rules.keeps_bad_updates:
            after = apply()
        elif self.can_branch:
            after = jax.lax.cond(is_finite, apply, keep)
        else:
            after = jax.tree.map(partial(jnp.where, is_finite), apply(), keep())
        return after._replace(params={**moving.params, **after.params})


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


def _or_nan(mean: Mean) -> Scalar:
    """The mean as reported: NaN if it stands for no weight at all."""
    return jnp.where(mean.weight == 0, jnp.nan, mean.mean)
