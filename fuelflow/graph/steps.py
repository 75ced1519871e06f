"""The steps of a graph: its state, and a program for each structure of a loss."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fuelflow._errors import StaleGraphError
from fuelflow._types import Grads, Schedule
from fuelflow.graph.expression import Ref, Stamp, caller
from fuelflow.graph.passes import Arguments, Form, RecordedLoss
from fuelflow.graph.realize import (
    MAX_PROGRAMS,
    Promise,
    accept,
    describe_nothing,
    pass_of,
    settle_leaves,
)
from fuelflow.graph.recent import Recent
from fuelflow.graph.structure import Structure
from fuelflow.step.checks import checked_rate
from fuelflow.step.engine import Held, Seen
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.optimizer import Factory, Transformation
from fuelflow.step.outcome import StepOutcome
from fuelflow.step.plan import StepPlan, make_plan
from fuelflow.step.program import CompileRecord, Program
from fuelflow.step.programs import Programs, fixed_part, moving_part
from fuelflow.step.state import TrainState, evolve


@dataclass(frozen=True)
class LossPrograms:
    """The programs of one structure of a loss.

    Attributes:
        step: A step over it.
        grads: Its gradients alone.
        begin: Its gradients, held for a later step.
        add: Its gradients, added to those that are held.
    """

    step: Program
    grads: Program
    begin: Program
    add: Program


class Request(NamedTuple):
    """A loss that something is to be done with.

    Attributes:
        arguments: The arrays to run it on.
        programs: The programs of its structure.
        others: Other graphs' parameters that it runs through.
    """

    arguments: Arguments
    programs: LossPrograms
    others: list[Stamp]


class Steps:
    """A graph's state, and what moves it on.

    Args:
        graph: The graph.
        loop: The loop whose step it takes.
        state: A first state.
    """

    def __init__(self, graph: Any, loop: TrainingLoop, state: TrainState) -> None:
        self._graph = graph
        self.loop = loop
        self.state = state
        self.training_step = 0
        self.stamp = Stamp(graph, 0)
        self._programs: Recent[LossPrograms] = Recent(MAX_PROGRAMS)
        self._apply: Program | None = None
        self._held: Held | None = None
        self._past_compiles: tuple[CompileRecord, ...] = ()
        self._has_optimizer = False
        self._lr_scale = 1.0

    # What is set.

    def log_records(self) -> tuple[CompileRecord, ...]:
        """Every compilation of a step so far."""
        return (*self._past_compiles, *self.loop.compiles)

    def set_state(self, state: TrainState) -> None:
        """Goes on from another state, which must be of the same model."""
        self._require_none_held("the state is")
        state, _ = self.loop._host.ready(state)
        self.state = state
        self.training_step = int(state.step)
        if self.loop.schedule is not None:
            self._lr_scale = float(state.lr_scale)
        self._move_on()

    def set_optimizer(self, optimizer: Transformation | Factory) -> None:
        """Another optimizer, whose state starts anew."""
        self._replace(self.loop.replace(optimizer=optimizer), keep=False)
        self._has_optimizer = True

    def set_scheduler(self, schedule: Schedule | float | None) -> None:
        """Another schedule."""
        self._require_optimizer("`set_scheduler`")
        self._replace(self.loop.replace(schedule=schedule), keep=True)
        self._apply_lr_scale()

    def set_lr(self, lr: float) -> None:
        """Another rate."""
        self._require_optimizer("`set_lr`")
        self.state = self.loop.set_lr(self.state, lr)

    def set_lr_scale(self, scale: float) -> None:
        """Another factor on a scheduled rate."""
        self._require_optimizer("`set_lr_scale`")
        self.loop._host.rules.require_given_rate("`set_lr_scale`")
        self._lr_scale = checked_rate("scale", scale)
        self._apply_lr_scale()

    def _apply_lr_scale(self) -> None:
        scale = 1.0 if self.loop.schedule is None else self._lr_scale
        if not self.loop._host.rules.optimizer.has_own_rate:
            self.state = self.loop.set_lr_scale(self.state, scale)

    def set_trainable(self, patterns: str | Iterable[str]) -> None:
        """Other parameters to train."""
        self.change(trainable=patterns)

    def change(self, **changes: Any) -> None:
        """Another loop, that goes on with the state there is."""
        self._replace(self.loop.replace(**changes), keep=True)

    def _replace(self, loop: TrainingLoop, *, keep: bool) -> None:
        """Takes another loop; optimizer state of one name and shape may be kept."""
        self._require_none_held("the optimizer, scheduler or parameters to train are")
        self.state = loop._host.adopt(self.state, keep=keep)
        self._past_compiles = self.log_records()
        self.loop = loop
        self._programs = Recent(MAX_PROGRAMS)
        self._apply = None

    def _require_none_held(self, what: str) -> None:
        if self._held is not None:
            raise RuntimeError(
                "gradients are waiting for a step: call `graph.step()` before "
                f"{what} replaced"
            )

    def _require_optimizer(self, what: str) -> None:
        if not self._has_optimizer:
            raise ValueError(
                f"{what} needs an optimizer: `graph.set_optimizer(optax.adamw)` first"
            )

    # What is done.

    def step(self, forms: Mapping[str, Form], fetch: Sequence[Ref]) -> StepOutcome:
        """A step over a loss."""
        self._require_optimizer("`step`")
        if self._held is not None:
            raise RuntimeError(
                "gradients of `graph.backward` are waiting for a step: call "
                "`graph.step()` for them, or `graph.backward(loss)` for this loss too"
            )
        loss = next(iter(forms.values())).value
        dispatcher = self.loop._dispatcher
        state, base = self._ready()
        request = self._request(base, forms, fetch)
        arguments = request.arguments
        moving, packed, seen = request.programs.step(
            arguments, moving_part(state), fixed_part(state), arguments
        )
        self.state, outcome = dispatcher.advance(state, moving, packed, seen)
        if not loss._type.shape and len(forms["the loss"].refs()) == 1:
            loss._node.values[loss._index] = Promise(outcome, loss._type.dtype)
        self._conclude(request, forms, fetch, seen)
        # Their parameters are about to be gone, and so is the use of their inputs.
        for ref in (loss, *fetch):
            ref._node.release_if_known()
        self._count()
        return outcome

    def backward(self, forms: Mapping[str, Form], fetch: Sequence[Ref]) -> None:
        """Gradients of a loss, added to those that are held."""
        self._require_optimizer("`backward`")
        state, base = self._ready()
        loss = next(iter(forms.values())).value
        wanted = (*fetch, loss)
        request = self._request(base, forms, wanted)
        arguments = request.arguments
        parts = (moving_part(state), fixed_part(state), arguments)
        if self._held is None:
            self._held, seen = request.programs.begin(arguments, *parts)
        else:
            held = self._held
            # What was sown differs from loss to loss, and is part of the signature.
            self._held, seen = request.programs.add((arguments, held), held, *parts)
        self._conclude(request, forms, wanted, seen)
        self.stamp.look([ref._node for ref in wanted])
        # What comes after this pass follows from variables that wait for the step.
        self.stamp.last_call = None

    def apply(self) -> StepOutcome:
        """The step that held gradients wait for."""
        self._require_optimizer("`step`")
        if self._held is None:
            raise ValueError(
                "`graph.step()` needs gradients: give it a loss, or call "
                "`graph.backward(loss)` before"
            )
        state, base = self._ready()
        if self._apply is None:
            self._apply = _program("apply", base.engine.apply, base, {}, (0,))
        arguments = (moving_part(state), fixed_part(state), self._held)
        self.state, outcome = self.loop._dispatcher.advance(
            state, *self._apply(self._held, *arguments)
        )
        self._held = None
        self._count()
        return outcome

    def grads(self, forms: Mapping[str, Form]) -> Grads:
        """The gradients of a loss."""
        state, base = self.loop._host.ready(self.state)
        request = self._request(base, forms, ())
        arguments = request.arguments
        return request.programs.grads(
            arguments, moving_part(state), fixed_part(state), arguments
        )

    def plan(self, forms: Mapping[str, Form]) -> StepPlan:
        """What a step over a loss will do."""
        state, base = self.loop._host.ready(self.state)
        request = self._request(base, forms, ())
        arguments = request.arguments
        executable = request.programs.step.executable(
            arguments, moving_part(state), fixed_part(state), arguments
        )
        engine = base.engine
        params = {name: state.params[name] for name in engine.definition.param_names}
        trained = frozenset(engine.trained_names)
        return make_plan(executable, params, trained, engine.multipliers)

    def _ready(self) -> tuple[TrainState, Programs]:
        try:
            return self.loop._dispatcher.ready(self.state)
        except ValueError as error:
            if "learning rate must be given" not in str(error):
                raise
            raise ValueError(
                "the learning rate must be given before the first step: "
                "`graph.set_scheduler(...)` (a number will do), or `graph.set_lr(lr)`"
            ) from None

    def _request(
        self, base: Programs, forms: Mapping[str, Form], fetch: Sequence[Ref]
    ) -> Request:
        stamp = self.stamp
        loss = forms["the loss"].value
        self._require_own(loss)
        refs = [ref for form in forms.values() for ref in form.refs()]
        structure = Structure([*refs, *fetch], through=stamp)
        own = structure.stamps.index(stamp)
        others = structure.stamps[:own] + structure.stamps[own + 1 :]
        definitions = [other.graph.definition for other in others]
        weights = tuple([form.weight is not None for form in forms.values()])
        # A program keeps its definitions alive: no other has their identity.
        key = (structure.key, weights, tuple(forms), own, *map(id, definitions))
        programs = self._programs.get(key)
        if programs is None:
            reader = RecordedLoss(
                structure.recipe(), weights, tuple(forms)[1:], own, tuple(definitions)
            )
            programs = _make_programs(base, reader, structure)
            self._programs.add(key, programs)
        settle_leaves(structure.leaves)
        passes = tuple([pass_of(other) for other in others])
        return Request(Arguments(tuple(structure.leaves), passes), programs, others)

    def _require_own(self, loss: Ref) -> None:
        node = loss._node
        if self.stamp in node.stamps and loss._index not in node.used:
            return
        for stamp in node.stamps:
            if stamp.graph is self._graph:
                raise StaleGraphError(
                    stamp.step, f"the loss, `{node.operation.name}` at {node.site},"
                )
        raise ValueError(
            "the loss must depend on this graph's model, but nothing in it was made by "
            "`graph(...)` or `graph.forward_batch(batch)`"
        )

    def _conclude(
        self,
        request: Request,
        forms: Mapping[str, Form],
        fetch: Sequence[Ref],
        seen: Seen,
    ) -> None:
        """Gives what was run its values, and other graphs their changed variables."""
        for ref, value in zip(fetch, seen.fetched, strict=True):
            ref._node.values[ref._index] = value
        for form in forms.values():
            form.value._node.used.add(form.value._index)
        for stamp, variables in zip(request.others, seen.beside, strict=True):
            stamp.last_call = None
            if variables:
                steps = stamp.graph._steps
                steps.state = evolve(steps.state, variables=variables)

    def _count(self) -> None:
        self.training_step += 1
        self._move_on()

    def _move_on(self) -> None:
        self.stamp.expire()
        self.stamp = Stamp(self._graph, self.training_step)


def _make_programs(
    base: Programs, reader: RecordedLoss, structure: Structure
) -> LossPrograms:
    engine = replace(base.engine, rules=replace(base.engine.rules, loss=reader))
    table = structure.table()
    line = f"({caller(1)})"  # where the step is asked for
    return LossPrograms(
        _program(f"step {line}", engine.step, base, table, (0,)),
        _program(f"grads {line}", engine.grads, base, table, ()),
        _program(f"backward {line}", engine.begin, base, table, ()),
        _program(f"further backward {line}", engine.add, base, table, (0,)),
    )


def _program(
    name: str,
    function: Any,
    base: Programs,
    table: Mapping[str, str],
    donate: tuple[int, ...],
) -> Program:
    return Program(
        name,
        function,
        base.log,
        fixed_table={**base.spec.table, **table},
        check_batch=accept,
        donate=donate,
        describe=describe_nothing,
    )
