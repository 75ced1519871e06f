"""The step as a pure function: the only place that takes a gradient and applies it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fuelflow._types import Array, Grads, Params, PyTree, Scalar, Variables
from fuelflow._types import Batch as BatchTree
from fuelflow.devices.ranks import ROWS, WHOLE, OneRank, Ranks
from fuelflow.model.definition import Definition
from fuelflow.step.across import combined, own_variables
from fuelflow.step.batch import Batch, Rows, Stretch, rows_here, spec_of
from fuelflow.step.clipping import square_sum, sum_in_order
from fuelflow.step.forward import Forward
from fuelflow.step.gradients import JOINED, Backward, Flag, Harvest, Own, Part
from fuelflow.step.loss import rows_of_pass, with_probes
from fuelflow.step.observe import Looks, Observing
from fuelflow.step.outcome import METRIC, OBSERVED, SQUARES, WEIGHT
from fuelflow.step.packing import Packed, pack
from fuelflow.step.parts import Fixed, Held, Moving, Seen, Still
from fuelflow.step.probed import call_with_probes
from fuelflow.step.rules import StepRules
from fuelflow.step.tally import Tally
from fuelflow.step.update import Update
from fuelflow.step.weighted import Mean


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
        observing: What is looked at of each parameter, if anything.
    """

    rules: StepRules
    definition: Definition
    trained_names: tuple[str, ...]
    multipliers: Mapping[str, float]
    can_branch: bool
    ranks: Ranks
    observing: Observing | None = None

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
        if self.rules.stops_at_bad:
            # One more than the host has seen: the state stays what that step met.
            is_finite &= moving.num_skipped == fixed.num_seen
        update = Update(
            self.rules,
            self.trained_names,
            self.multipliers,
            self.can_branch,
            self.observing,
        )
        after, looks = update(moving, found, rate, norm, is_finite)
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
        observed, facts = self._observed(
            moving.step, squares, looks, is_finite, found.metrics
        )
        if observed is not None:
            numbers[OBSERVED] = _or_nan(observed)
        packed = pack(
            numbers,
            params=self.trained_names,
            is_maskable=found.is_maskable.is_set,
            **facts,
        )
        beside, before = found.beside
        if not self.rules.keeps_bad_updates:
            beside = jax.tree.map(partial(jnp.where, is_finite), beside, before)
        after = self.ranks.keep_whole(after._replace(sums=None))
        sums = self._summed(moving.sums, found, is_finite, observed)
        after = after._replace(sums=sums)
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
        ) -> tuple[tuple[Moving, Seen], tuple[Array, Array | None]]:
            moving, packed, seen = step(carry[0], fixed, batch)
            return (moving, seen), (packed.words, packed.aside)

        (moving, seen), (words, aside) = jax.lax.scan(body, (moving, nothing), inputs)
        return moving, Packed(words, packed.layout, aside), seen

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

    def rank_pass(self, moving: Moving, fixed: Fixed, batch: BatchTree) -> Array:
        """A number ``[num_ranks]`` from each rank's pass over its rows alone.

        No rank waits for another, unless the model itself makes it, so a clock can tell
        which of them takes long. The number depends on all that the pass finds.
        """
        ranks = self.ranks

        def pass_here(
            params: Params, variables: Variables, batch: BatchTree, key: jax.Array
        ) -> Array:
            batch, key = rows_here(batch, ranks), ranks.own_key(key)
            part = self._pass(params, variables, batch, key, OneRank())
            squares = [square_sum(grad) for grad in part.grads.values()]
            return jnp.atleast_1d(part.loss.mean + sum_in_order(squares))

        inputs = (WHOLE, WHOLE, spec_of(batch), WHOLE)
        rank_pass = ranks.spread(pass_here, inputs, ROWS)
        return rank_pass(moving.params, moving.variables, batch, fixed.key)

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
            if isinstance(batch, Rows):
                batch = Batch.held(batch.fields, row_weight)
            reader = self.rules.eval_loss

            def read() -> tuple[Mean, dict[str, Mean], Flag]:
                forward = Forward(
                    self.definition, still.params, variables, key, training=False
                )
                reading = reader.read(forward, batch, key, row_weight)
                return reading.loss, reading.metrics, Flag(reading.is_maskable)

            rows = rows_of_pass(reader, batch, row_weight)
            (loss, metrics, is_maskable), probes = call_with_probes(read, rows)
            means = {"loss": loss, **with_probes(metrics, probes)}
            return combined(means, ranks), is_maskable

        evaluate = ranks.spread(evaluate_here, (WHOLE, ROWS, ROWS, WHOLE), WHOLE)
        means, is_maskable = evaluate(still, batch, row_weight, key)
        numbers = {"loss": means["loss"].mean, WEIGHT + "loss": means["loss"].weight}
        for name, mean in means.items():
            if name != "loss":
                numbers[METRIC + name] = mean.mean
                numbers[WEIGHT + METRIC + name] = mean.weight
        return pack(numbers, is_maskable=is_maskable.is_set)

    def _observed(
        self,
        step: Array,
        squares: list[Scalar],
        looks: Looks | None,
        is_finite: Array,
        metrics: Mapping[str, Mean],
    ) -> tuple[Mean | None, dict[str, Any]]:
        """The metrics of single parameters, and what is to be packed with them."""
        observing = self.observing
        if observing is None:
            return None, {}
        if twice := set(observing.scalar_names) & set(metrics):
            raise ValueError(
                f"a metric must not be named `{min(twice)}`, as what the loop observes"
            )
        if looks is None:
            looks = observing.nothing()
        norms = {
            name: jnp.sqrt(square).astype(jnp.float32)
            for name, square in zip(self.trained_names, squares, strict=True)
        }
        is_due = observing.is_due(step)
        is_seen = is_due if self.rules.keeps_bad_updates else is_due & is_finite
        facts = {
            "observed": observing.scalar_names,
            "histograms": observing.histogram_names,
            "aside": observing.aside(step, looks, is_seen),
        }
        if not observing.scalar_names:
            return None, facts
        return observing.scalars(norms, looks, is_due), facts

    def _summed(
        self,
        sums: Tally | None,
        found: Harvest,
        is_finite: Array,
        observed: Mean | None,
    ) -> Tally | None:
        """The sums with a step's own added; of a step left out its rows alone."""
        if sums is None:
            return None
        means = [found.own.means[name] for name in ("loss", *found.metrics)]
        is_good = None if self.rules.keeps_bad_updates else is_finite
        num_rows = found.own.num_rows
        return self.ranks.keep_rows(sums.plus(means, num_rows, is_good, observed))

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


def _or_nan(mean: Mean) -> Scalar:
    """The mean as reported: NaN if it stands for no weight at all."""
    return jnp.where(mean.weight == 0, jnp.nan, mean.mean)
