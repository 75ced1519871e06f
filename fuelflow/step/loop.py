"""TrainingLoop: a model, a loss and an optimizer as one compiled step."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, SupportsIndex

import jax
import numpy as np
from jax.sharding import Mesh

from fuelflow._types import Batch as BatchTree
from fuelflow._types import Grads, LossFunction, Schedule
from fuelflow.devices.ranks import checked_mesh
from fuelflow.model.nnx import write_into
from fuelflow.step.batch import Batch
from fuelflow.step.checks import checked_choice, checked_count, checked_rate
from fuelflow.step.dispatch import Dispatcher
from fuelflow.step.evaluation import evaluate_batches
from fuelflow.step.host import Host
from fuelflow.step.keys import as_key
from fuelflow.step.loss import resolve_loss
from fuelflow.step.observe import Observe
from fuelflow.step.optimizer import Factory, Transformation, resolve_optimizer
from fuelflow.step.outcome import Evaluation, StepOutcome
from fuelflow.step.plan import StepPlan, make_plan
from fuelflow.step.program import CompileLog, CompileRecord
from fuelflow.step.programs import fixed_part, moving_part
from fuelflow.step.rules import StepRules
from fuelflow.step.schedules import as_schedule
from fuelflow.step.state import TrainState, evolve

NonFinite = Literal["raise", "skip", "propagate"]


@dataclass(frozen=True)
class TrainingLoop:
    """One optimizer step as one compiled program, and what belongs around it.

    Immutable: `replace` gives another loop. A step is loss and gradient → global norm →
    clip by norm → clip by value → optimizer at ``schedule(step) * lr_scale`` →
    ``step + 1``. Steps are dispatched without waiting for their results.

    Args:
        loss_fn: ``(model, batch)`` or ``(model, batch, key)`` to a loss, or to a loss
            and a dict of metrics. Each is a floating scalar (the mean over the batch),
            a vector ``[batch]`` (one value per example) or `Weighted`.
        optimizer: A factory ``learning_rate -> transformation`` such as `optax.adamw`,
            or an optax transformation, which keeps its own rate.
        schedule: ``step -> learning rate``, or a number for a constant rate.
        eval_fn: Replaces ``loss_fn`` in `evaluate`.
        max_grad_norm: Largest global norm of the gradient, positive.
        max_grad_value: Largest absolute value of a gradient's entry, positive; applied
            after the norm.
        accumulate_steps: Microbatches that a batch is split into, in the memory of one.
        trainable: Patterns of the parameters to train; ``"!encoder"`` freezes.
        lr_groups: Pattern to factor on the rate; the patterns must not overlap.
        nonfinite: What a loss, gradient or rate does that is not finite. ``"raise"``
            leaves the state as it was, also by the steps after it that were dispatched
            meanwhile, and raises `NonFiniteError` when the host next looks; ``"skip"``
            leaves it as it was and counts; ``"propagate"`` applies it.
        log_interval: Steps, skipped ones included, between records in the ``fuelflow``
            logger, each with step, loss, lr and grad_norm. A record is written when its
            step is done, without waiting for it.
        strict_compile: Whether compiling a program a second time is an error.
        max_in_flight: Dispatches the host may be ahead of the device.
        observe: Norms, ratios and histograms of single parameters, every so many steps.
        mesh: Devices to train on, such as `mesh` makes: each along its axis ``data`` is
            a rank, with rows of its own of every batch. By default the one device that
            the model is on. Batch sizes are those of all ranks together. The update is
            the one that a single device would make of the whole batch, up to rounding,
            and the same on every rank. Random keys differ from rank to rank. A
            BatchNorm shares its statistics if it names the axis ``"data"``; else they
            are each rank's own, averaged after the step. A scalar loss or metric is
            the mean over a rank's rows.

    Raises:
        TypeError: If an argument has the wrong kind.
        ValueError: If a limit or count is out of range, or a schedule is given for an
            optimizer with a rate of its own.

    Example:
        >>> import fuelflow as ff, jax.numpy as jnp, numpy as np, optax
        >>> def loss_fn(params, batch):
        ...     return (params["w"] * batch["x"] - batch["y"]) ** 2
        >>> loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
        >>> state = loop.init({"w": jnp.float32(0.0)})
        >>> batch = {"x": np.float32([1, 2]), "y": np.float32([2, 4])}
        >>> state, outcome = loop.step(state, batch)
        >>> outcome.loss, round(float(state.params["w"]), 6)
        (10.0, 1.0)
    """

    loss_fn: LossFunction
    optimizer: Transformation | Factory
    _: dataclasses.KW_ONLY
    schedule: Schedule | float | None = None
    eval_fn: LossFunction | None = None
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    accumulate_steps: int = 1
    trainable: str | Iterable[str] = "*"
    lr_groups: Mapping[str, float] | None = None
    nonfinite: NonFinite = "raise"
    log_interval: int | None = None
    strict_compile: bool = False
    max_in_flight: int = 64
    mesh: Mesh | None = None
    observe: Observe | None = None
    _host: Host = field(init=False, repr=False, compare=False)
    _dispatcher: Dispatcher = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checked_choice("nonfinite", self.nonfinite, ("raise", "skip", "propagate"))
        checked_count("max_in_flight", self.max_in_flight, least=1)
        if self.log_interval is not None:
            checked_count("log_interval", self.log_interval, least=1)
        trainable = self.trainable
        if not isinstance(trainable, str):
            trainable = tuple(trainable)  # an iterator would be used up by one model
            object.__setattr__(self, "trainable", trainable)
        rules = StepRules(
            loss=resolve_loss(self.loss_fn, "loss_fn"),
            eval_loss=resolve_loss(
                self.loss_fn if self.eval_fn is None else self.eval_fn, "eval_fn"
            ),
            optimizer=resolve_optimizer(self.optimizer),
            schedule=None if self.schedule is None else as_schedule(self.schedule),
            max_grad_norm=self.max_grad_norm,
            max_grad_value=self.max_grad_value,
            accumulate_steps=self.accumulate_steps,
            trainable=trainable,
            lr_groups=self.lr_groups,
            observe=self.observe,
            keeps_bad_updates=self.nonfinite == "propagate",
            stops_at_bad=self.nonfinite == "raise",
        )
        mesh = None if self.mesh is None else checked_mesh(self.mesh)
        host = Host(rules, CompileLog(is_strict=self.strict_compile), mesh)
        object.__setattr__(self, "_host", host)
        dispatcher = Dispatcher(
            host, self.nonfinite == "raise", self.log_interval, self.max_in_flight
        )
        object.__setattr__(self, "_dispatcher", dispatcher)

    def replace(self, **changes: Any) -> "TrainingLoop":
        """Another loop, with some arguments changed and nothing compiled yet.

        It takes the states of this one as long as model and optimizer state agree.

        Raises:
            TypeError: If there is no such argument.
        """
        return dataclasses.replace(self, **changes)

    @property
    def compiles(self) -> tuple[CompileRecord, ...]:
        """Every compilation so far, the first of each program included."""
        return tuple(self._host.log.records)

    def init(self, model: Any, *, seed: SupportsIndex | jax.Array = 0) -> TrainState:
        """A first state: the model's arrays, copied, with fresh optimizer state.

        A loop holds the programs of the model it was given last, and refuses states of
        an earlier one; for two models at a time take two loops.

        Args:
            model: An `nnx.Module`, a `Linen`, or a pytree with floating leaves.
            seed: Seed, or key, of the keys that the loss and a linen model are given. A
                module of `flax.nnx` draws from its own `nnx.Rngs`.

        Raises:
            TypeError: If the model or seed has the wrong kind.
            ValueError: If the model has nothing to train, two parameters have one name,
                or a pattern of this loop selects nothing.
        """
        return self._host.init(model, as_key(seed))

    def adopt(self, state: TrainState) -> TrainState:
        """The state of another loop over the same model, to go on with in this one.

        For a loop with other parameters to train, or another optimizer: ``replace``
        gives the loop, and this its first state. Parameters, variables, key, step and
        rate are as they were. Of the optimizer's state all is kept that this loop has
        under the same name and shape: counts, and the moments of parameters that both
        train. Those of newly trained ones start at zero; as the counts go on, Adam does
        not correct their bias, and their first updates are about three times as large
        as usual: lower the rate for a while. Those of newly frozen ones are gone.

        Args:
            state: The state, usable afterwards only through the one returned.

        Raises:
            TypeError: If it is no `TrainState`.
            UsedStateError: If a step has taken over the state's buffers.
            ValueError: If a pattern of this loop selects nothing.
        """
        return self._host.adopt(state, keep=True)

    def step(
        self, state: TrainState, batch: BatchTree
    ) -> tuple[TrainState, StepOutcome]:
        """One optimizer step, dispatched and not waited for.

        Args:
            state: The state, whose buffers the step takes over.
            batch: A `Batch`, or a tree of NumPy or JAX arrays that share their leading
                axis, on the host or where the state is. Do not write into it
                afterwards: the device may not have read it yet.

        Returns:
            The new state, and a promise of what the step said.

        Raises:
            MissingFieldError: If the loss asks for a field the batch lacks.
            NonFiniteError: If the host now sees that an earlier step was not finite;
                the given state is still good.
            RecompileError: If a second compilation were needed, in strict mode.
            StateMismatchError: If the state belongs to another loop or model.
            TypeError: If the batch, loss or a metric has the wrong kind.
            UsedStateError: If the state was used before.
            ValueError: If the batch, loss or a metric has the wrong shape, or the
                learning rate was never given.
        """
        state, programs = self._dispatcher.ready(state)
        return self._dispatcher.step(programs, state, batch)

    def run(
        self,
        state: TrainState,
        batches: Iterable[BatchTree],
        *,
        steps_per_call: int = 1,
    ) -> tuple[TrainState, StepOutcome]:
        """A step over each batch, several in one dispatch.

        The same numbers as that many calls of `step`. Batches that do not fill a
        dispatch, at the end or before a change of shape, go through the program of
        `step`. If the host sees that a step was not finite, no further ones are
        dispatched; reading the outcomes raises then.

        Several steps in a dispatch pay where a step is short. On a CPU they do not for
        convolutions, which XLA runs some thirty times slower inside a loop.

        Args:
            state: The state, whose buffers are taken over.
            batches: Batches like those of `step`, or an epoch of a `DataLoader`, whose
                resident rows are gathered inside the dispatch. Several are held at a
                time, so an iterator must not write the next one into the same buffer.
            steps_per_call: Steps in one dispatch, at least 1.

        Returns:
            The state after the last step, and the outcomes, whose fields are arrays
            with one entry for each step.

        Raises:
            ValueError: If ``steps_per_call`` is below 1, or there is no batch; besides
                everything that `step` raises. An error after the first dispatch, even
                an interrupt, has the state so far as its ``state`` and the outcomes as
                its ``outcome``.
        """
        checked_count("steps_per_call", steps_per_call, least=1)
        return self._dispatcher.run(state, batches, steps_per_call)

    def grads(self, state: TrainState, batch: BatchTree) -> Grads:
        """The gradients that a step would harvest, before clipping, by name.

        Nothing is updated and the state stays usable. Frozen parameters have none.

        Raises:
            TypeError: As `step`.
            UsedStateError: As `step`, as are the other errors about its arguments.
            ValueError: As `step`.
        """
        state, programs = self._host.ready(state)
        if type(batch) is Batch:
            batch = programs.rows_of(batch, state)
        batch = programs.placed(batch)
        return programs.grads(batch, moving_part(state), fixed_part(state), batch)

    def evaluate(
        self, state: TrainState, batches: Iterable[BatchTree], *, fill_up: bool = True
    ) -> Evaluation:
        """The weighted means of the loss and metrics over all examples of a data set.

        An `nnx.Module` is put in eval mode; a linen model's bound object says
        ``model.training`` is false. The state stays as it is and usable. A last batch
        with fewer rows counts by its rows; it compiles nothing more if every value is
        per example or `Weighted`.

        Args:
            state: The state to evaluate.
            batches: Batches, of any sizes.
            fill_up: Whether a smaller batch may be filled up with copies of its last
                row, of weight 0. Turn it off for a loss in which the rows of a batch
                see each other, such as a contrastive one: a smaller batch then runs at
                its own shape.

        Returns:
            A promise: a mapping with ``loss`` and each metric, which waits when read.

        Raises:
            ValueError: If there is no batch; besides everything that `step` raises
                about its arguments.
        """
        state, programs = self._host.ready(state)
        return evaluate_batches(
            programs,
            state,
            batches,
            fill_up=fill_up,
            max_in_flight=self.max_in_flight,
        )

    def plan(self, state: TrainState, batch: BatchTree) -> StepPlan:
        """What the step will do with such a state and batch, before it runs.

        Compiles the step if it is not compiled yet, and runs nothing.

        Raises:
            TypeError: As `step`.
            UsedStateError: As `step`, as are the other errors about its arguments.
            ValueError: As `step`.
        """
        state, programs = self._host.ready(state)
        if type(batch) is Batch:
            batch = programs.rows_of(batch, state)
        batch = programs.placed(batch)
        executable = programs.steps(state).step.executable(
            batch, moving_part(state), fixed_part(state), batch
        )
        engine = programs.engine
        params = {name: state.params[name] for name in engine.definition.param_names}
        return make_plan(
            executable, params, frozenset(engine.trained_names), engine.multipliers
        )

    def model(self, state: TrainState, *, into: Any = None) -> Any:
        """The user's kind of model with a state's arrays, copied.

        Args:
            state: The state, which stays usable.
            into: An `nnx.Module`, such as the one given to `init`, to write the arrays
                into and return.

        Raises:
            NonFiniteError: If a step so far was not finite.
            UsedStateError: If a step has taken over the state's buffers.
        """
        state, programs = self._host.ready(state)
        assert state.flight is not None
        state.flight.land()
        arrays = (state.params, state.variables)
        params, variables = programs.placement.taken(arrays)
        if into is None:
            return state.definition.build(params, variables)
        write_into(into, params, variables)
        return into

    def set_lr(self, state: TrainState, lr: float) -> TrainState:
        """The state with another learning rate. A schedule, if there is one, wins.

        Shares its other buffers with the given state. Compiles nothing.

        Args:
            state: The state.
            lr: The rate, at least 0.

        Raises:
            ValueError: If it is negative or not finite, or the optimizer keeps its own.
        """
        self._host.rules.require_given_rate("`set_lr`")
        return self._with_scalar(state, "lr", np.float32(checked_rate("lr", lr)))

    def set_lr_scale(self, state: TrainState, scale: float) -> TrainState:
        """The state with another factor on the rate, scheduled or set; 1 at first.

        Shares its other buffers with the given state. Compiles nothing.

        Args:
            state: The state.
            scale: The factor, at least 0.

        Raises:
            ValueError: If it is negative or not finite, or the optimizer keeps its own.
        """
        self._host.rules.require_given_rate("`set_lr_scale`")
        value = np.float32(checked_rate("scale", scale))
        return self._with_scalar(state, "lr_scale", value)

    def set_global_step(self, state: TrainState, step: int) -> TrainState:
        """The state with another count of completed updates.

        The schedule follows it. The optimizer's own counts, such as Adam's, stay.
        Compiles nothing.

        Args:
            state: The state.
            step: Completed updates, at least 0.

        Raises:
            TypeError: If it is no integer.
            ValueError: If it is negative.
        """
        step = checked_count("step", step, least=0)
        changed = self._with_scalar(state, "step", np.int32(step))
        if changed.flight is not None:
            changed.flight.set_step(step)
        return changed

    def _with_scalar(
        self, state: TrainState, name: str, value: np.generic
    ) -> TrainState:
        placement = self._host.placement_of(state.params)
        return evolve(state, **{name: placement.put(value)})
