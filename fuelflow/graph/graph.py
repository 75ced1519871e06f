"""Graph: a model bound to its optimizer, schedule and data, trained line by line."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

import jax
import optax
from jax.sharding import Mesh

from fuelflow._types import Grads, Schedule
from fuelflow.graph.array import call
from fuelflow.graph.binding import BoundEpoch, DataBinding
from fuelflow.graph.expression import Ref, Use
from fuelflow.graph.inputs import inputs_of_model
from fuelflow.graph.library import is_library_function
from fuelflow.graph.passes import ModelCall, asked_for
from fuelflow.graph.static import FunctionKey
from fuelflow.graph.steps import Steps
from fuelflow.model.definition import Definition
from fuelflow.step.loop import NonFinite, TrainingLoop
from fuelflow.step.optimizer import Factory, Transformation
from fuelflow.step.outcome import StepOutcome
from fuelflow.step.plan import StepPlan
from fuelflow.step.program import CompileRecord
from fuelflow.step.state import TrainState


class Graph:
    """A model bound to its optimizer, schedule and data, trained line by line.

    Calls of the graph are recorded; `step` runs what was recorded, forward and
    backward, clips and updates, as one program. It is the program of `TrainingLoop`,
    with the same numbers.

    Args:
        model: An `nnx.Module`, a `Linen`, or a pytree with floating leaves.
        seed: Seed, or key, of the keys that a linen model is given.
        apply: ``(model, *inputs)`` to the outputs, for a model that is not called, or
            not called so.
        inputs: Names of the model's inputs; by default those of its signature. Inputs
            named ``train``, ``training``, ``deterministic`` and the like are told the
            graph's mode.
        max_grad_norm: As in `TrainingLoop`, like all that follow.
        max_grad_value: Largest absolute value of a gradient's entry.
        trainable: Patterns of the parameters to train.
        lr_groups: Pattern to factor on the rate.
        nonfinite: What a loss or gradient does that is not finite.
        log_interval: Steps between log records.
        strict_compile: Whether compiling a line's program twice is an error.
        max_in_flight: Dispatches the host may be ahead of the device.
        mesh: Devices to train on. What is recorded is about the whole batch, whatever
            devices its rows are on: a sum is one over all rows, a BatchNorm sees all of
            them, and a dropout mask is that of a single device.

    Raises:
        TypeError: If an argument has the wrong kind.
        ValueError: If the model has nothing to train, or a pattern selects nothing.

    Example:
        >>> import fuelflow as ff, jax.numpy as jnp, numpy as np, optax
        >>> graph = ff.Graph({"w": jnp.float32(0)}, apply=lambda m, x: m["w"] * x)
        >>> graph.set_optimizer(optax.sgd)
        >>> graph.set_lr(0.1)
        >>> loss = ((graph(np.float32([1, 2])) - np.float32([2, 4])) ** 2).mean()
        >>> outcome = graph.step(loss)
        >>> float(loss), round(float(graph.state.params["w"]), 6)
        (10.0, 1.0)
    """

    def __init__(
        self,
        model: Any,
        *,
        seed: SupportsIndex | jax.Array = 0,
        apply: Callable[..., Any] | None = None,
        inputs: Iterable[str] | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        trainable: str | Iterable[str] = "*",
        lr_groups: Mapping[str, float] | None = None,
        nonfinite: NonFinite = "raise",
        log_interval: int | None = None,
        strict_compile: bool = False,
        max_in_flight: int = 64,
        mesh: Mesh | None = None,
    ) -> None:
        self._apply = call_model if apply is None else apply
        # A library's function holds nothing that could change, and is its own key.
        is_fixed = is_library_function(self._apply)
        self._apply_key = self._apply if is_fixed else FunctionKey(self._apply)
        self._inputs = inputs_of_model(model, apply, inputs)
        loop = TrainingLoop(
            unwritten_loss,
            optax.set_to_zero(),
            max_grad_norm=max_grad_norm,
            max_grad_value=max_grad_value,
            trainable=trainable,
            lr_groups=lr_groups,
            nonfinite=nonfinite,
            log_interval=log_interval,
            strict_compile=strict_compile,
            max_in_flight=max_in_flight,
            mesh=mesh,
        )
        self._steps = Steps(self, loop, loop.init(model, seed=seed))
        self.training = True
        state = self.state
        self._calls = [
            ModelCall(
                state.definition,
                _shapes(state.params),
                _shapes(state.variables),
                training,
            )
            for training in (False, True)
        ]
        self._data = DataBinding(self._inputs)

    # The run.

    @property
    def loop(self) -> TrainingLoop:
        """The loop whose step this graph takes; give it a loss to use it alone.

        ``graph.loop.replace(loss_fn=...)`` takes ``graph.state``, and its states may be
        set as ``graph.state``: the run goes on.
        """
        return self._steps.loop

    @property
    def state(self) -> TrainState:
        """The state so far. The next step takes over its buffers."""
        return self._steps.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._steps.set_state(state)

    @property
    def definition(self) -> Definition:
        """The model without its arrays."""
        return self.state.definition

    @property
    def model(self) -> Any:
        """The user's kind of model with the arrays so far, copied."""
        return self.loop.model(self.state)

    @property
    def training_step(self) -> int:
        """Calls of `step` so far, from the state's own count on."""
        return self._steps.training_step

    @property
    def compiles(self) -> tuple[CompileRecord, ...]:
        """Every compilation of a step so far, and what made it necessary."""
        return self._steps.log_records()

    def set_optimizer(self, optimizer: Transformation | Factory) -> None:
        """Sets or replaces the optimizer, whose own state starts anew.

        The count of steps, the schedule and the rates stay.

        Args:
            optimizer: A factory of the learning rate such as `optax.adamw`, or an optax
                transformation, which keeps its own rate.

        Raises:
            TypeError: If it is neither.
            ValueError: If it keeps its own rate, and there is a scheduler.
        """
        self._steps.set_optimizer(optimizer)

    def set_scheduler(self, schedule: Schedule | float | None) -> None:
        """Sets, replaces or, with None, removes the schedule. The count stays.

        Raises:
            TypeError: If it is no schedule.
            ValueError: If the optimizer keeps its own rate.
        """
        self._steps.set_scheduler(schedule)

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate; a scheduler, if there is one, wins.

        Raises:
            ValueError: If it is negative or not finite, or the optimizer has its own.
        """
        self._steps.set_lr(lr)

    def set_lr_scale(self, scale: float) -> None:
        """Sets the factor on a scheduled rate; without a scheduler it has no effect.

        Raises:
            ValueError: If it is negative or not finite, or the optimizer has its own
                rate.
        """
        self._steps.set_lr_scale(scale)

    def set_trainable(self, patterns: str | Iterable[str]) -> None:
        """Sets which parameters are trained; ``"!encoder"`` freezes.

        The optimizer's state of those that stay trained is kept, and that of others is
        fresh or gone.

        Raises:
            ValueError: If a pattern selects nothing, or nothing is left to train.
        """
        self._steps.set_trainable(patterns)

    def set_lr_groups(self, groups: Mapping[str, float] | None) -> None:
        """Sets the factors on the rates of parameters, by pattern.

        Raises:
            ValueError: If patterns overlap, or one selects nothing that is trained.
        """
        self._steps.change(lr_groups=groups)

    def train(self) -> "Graph":
        """Records calls in training mode from now on; returns the graph."""
        self.training = True
        return self

    def eval(self) -> "Graph":
        """Records calls in eval mode from now on; returns the graph.

        Such a call changes no variables. A step may be taken through it all the same.
        """
        self.training = False
        return self

    # Recording.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Records a call of the model; its outputs have `Lazy` for arrays.

        Args:
            *args: Inputs of the model: arrays, lazy or not, static values, and trees.
            **kwargs: The same by name.
        """
        if self._inputs.mode:
            told = self._inputs.mode_arguments(kwargs, training=self.training)
            kwargs = {**kwargs, **told}
        return call(self._apply, self._apply_key, args, kwargs, self._use())

    def record(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Records ``function(model, ...)``, for what is no call of the model.

        Such as a penalty on its parameters, or another method of it.
        """
        return call(function, None, args, kwargs, self._use())

    def _use(self) -> Use:
        return Use(self._calls[self.training], self._steps.stamp)

    # Stepping.

    def step(
        self,
        loss: Any = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        fetch: Iterable[Ref] | Ref = (),
    ) -> StepOutcome:
        """One optimizer step, dispatched and not waited for.

        Forward, backward, clip and update are one program, which also gives the loss
        and what is fetched their values. Without a loss, the step is taken along the
        gradients that calls of `backward` have added up since the last step.

        Args:
            loss: A lazy scalar, a lazy vector, of which the mean is meant, or
                `Weighted` of lazy arrays.
            metrics: Further such values by name, for the outcome; also bool or integer.
            fetch: Lazy arrays to be given their values, so that reading them later
                runs nothing.

        Returns:
            A promise of what the step said.

        Raises:
            NonFiniteError: If the host now sees that an earlier step was not finite.
            RecompileError: If this line needed a second compilation, in strict mode.
            StaleGraphError: If the loss was stepped before, or recorded with parameters
                that have moved on.
            TypeError: If the loss is not lazy.
            ValueError: If it does not depend on this graph, no optimizer or rate was
                set, or there is neither a loss nor a gradient.
        """
        if loss is None:
            return self._steps.apply()
        return self._steps.step(asked_for(loss, metrics), _as_tuple(fetch))

    def backward(self, loss: Any, *, fetch: Iterable[Ref] | Ref = ()) -> None:
        """Adds the gradient of a loss to those that wait for the next `step`.

        As in PyTorch the gradients are summed: to take their mean over n calls, divide
        each loss by n. The parameters, and what was recorded with them, stay; changes
        of the model's variables take effect with the step.

        Args:
            loss: As in `step`.
            fetch: As in `step`.

        Raises:
            StaleGraphError: As `step`, as are the other errors.
        """
        self._steps.backward(asked_for(loss), _as_tuple(fetch))

    def grads(self, loss: Any) -> Grads:
        """The gradients of a loss by parameter name, before clipping, with no update.

        Raises:
            StaleGraphError: As `step`, as are the other errors.
        """
        return self._steps.grads(asked_for(loss))

    def plan(self, loss: Any) -> StepPlan:
        """What a step over a loss will do: see `TrainingLoop.plan`. Runs nothing.

        Raises:
            StaleGraphError: As `step`, as are the other errors.
        """
        return self._steps.plan(asked_for(loss))

    # Data.

    def set_data_loader(self, loader: Any, entry: str) -> None:
        """Binds a loader, and wires its fields to the model's inputs by name.

        Args:
            loader: A `DataLoader`, or anything with its ``epoch``, ``field_names``,
                ``batch_size`` and ``len``. On a mesh, a `DataLoader` without one gives
                way to `DataLoader.on` the mesh.
            entry: The field for the model's first input. Each other input is given the
                field of its name, if there is one; what no input takes is a target.

        Raises:
            RuntimeError: If an epoch of the loader there is, is being iterated.
            UnwiredInputError: If the entry, or an input without default, is no field.
        """
        mesh = self.loop.mesh
        if mesh is not None and getattr(loader, "mesh", mesh) is None:
            loader = loader.on(mesh)
        self._data.bind(loader, entry)

    def epoch(self, epoch: int) -> BoundEpoch:
        """The batches of an epoch, which depends on the loader's seed and this number.

        An iterator, and a context that closes it.

        Raises:
            RuntimeError: If no loader was set.
        """
        return self._data.epoch(epoch)

    @property
    def data_num_batches(self) -> int:
        """Batches in an epoch.

        Raises:
            RuntimeError: If no loader was set.
        """
        return len(self._data.loader)

    @property
    def data_batch_size(self) -> int:
        """Rows in a batch.

        Raises:
            RuntimeError: If no loader was set.
        """
        return self._data.loader.batch_size

    def forward_batch(self, batch: Mapping[str, Any]) -> Any:
        """Records a call of the model on the fields of a batch that are its inputs.

        Raises:
            MissingFieldError: If the batch lacks one.
            RuntimeError: If no loader was set, so that nothing is wired.
        """
        args, kwargs = self._data.arguments(batch)
        return self(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Graph({self.state!r}, {self.training_step} steps)"


def call_model(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model called as it is."""
    return model(*args, **kwargs)


def unwritten_loss(model: Any, batch: Any) -> Any:
    """Stands in a graph's loop for the losses that are written in the graph."""
    del model, batch
    raise TypeError(
        "this loop is a graph's, whose losses are recorded: give it a loss of its own, "
        "`loop = graph.loop.replace(loss_fn=...)`"
    )


def _as_tuple(fetch: Iterable[Ref] | Ref) -> tuple[Ref, ...]:
    fetched = (fetch,) if isinstance(fetch, Ref) else tuple(fetch)
    for value in fetched:
        if not isinstance(value, Ref):
            raise TypeError(
                f"`fetch` must hold lazy arrays, got a {type(value).__name__}"
            )
    return fetched


def _shapes(arrays: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
