"""The steps of a graph: its state, and a program for each structure of a loss."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fuelflow._errors import StaleGraphError
from fuelflow._types import Grads, Schedule
from fuelflow.graph.expression import Promise, Ref, Stamp, site_text
from fuelflow.graph.passes import Arguments, Asked, Kind, RecordedLoss
from fuelflow.graph.pattern import Pattern
from fuelflow.graph.realize import (
    MAX_PROGRAMS,
    accept,
    definitions_of,
    describe_nothing,
    pass_of,
)
from fuelflow.graph.recent import Recent
from fuelflow.graph.recording import caller
from fuelflow.graph.structure import Recipe, Structure
from fuelflow.step.checks import checked_rate
from fuelflow.step.engine import Engine, Held, Seen
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
        pattern: The structure.
        engine: The pure functions.
        loss: The loss.
        step: A step over it.
        grads: Its gradients alone.
        begin: Its gradients, held for a later step.
        add: Its gradients, added to those that are held.
    """

    pattern: Pattern
    engine: Engine
    loss: RecordedLoss
    step: Program
    grads: Program
    begin: Program
    add: Program

    def match(
        self, refs: tuple[Ref, ...], stamp: Stamp
    ) -> tuple[list[Any], list[Stamp]] | None:
        """What to run them on for some results, and other graphs' parameters.

        None if they are made for other results. Which models those run through is part
        of their operations.
        """
        found = self.pattern.match(refs, stamp)
        if found is None:
            return None
        leaves, others = found
        del others[self.loss.own]
        return leaves, others


Request = tuple[Arguments, LossPrograms, list[Stamp]]
"""What to run a loss on, its programs, and other graphs' parameters that it is in."""


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
        self._forget()
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
        self._forget()

    def _forget(self) -> None:
        """Drops all programs."""
        # By structure, and what was asked for last at some line.
        self._programs: Recent[LossPrograms] = Recent(MAX_PROGRAMS)
        self._guesses: Recent[LossPrograms] = Recent(MAX_PROGRAMS)
        self._last: LossPrograms | None = None
        self._apply: Program | None = None

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

    def step(self, asked: Asked, fetch: tuple[Ref, ...]) -> StepOutcome:
        """A step over a loss."""
        self._require_optimizer("`step`")
        if self._held is not None:
            raise RuntimeError(
                "gradients of `graph.backward` are waiting for a step: call "
                "`graph.step()` for them, or `graph.backward(loss)` for this loss too"
            )
        loss = asked.loss
        dispatcher = self.loop._dispatcher
        state, base = self._ready()
        arguments, programs, others = self._request(base, asked, fetch)
        moving, packed, seen = programs.step(
            arguments, moving_part(state), fixed_part(state), arguments
        )
        taken = programs.engine, arguments
        self.state, outcome = dispatcher.advance(
            state, moving, packed, seen, taken=taken
        )
        node = loss._node
        if asked.is_plain:
            node.values[loss._index] = Promise(outcome, loss._type.dtype)
        if others or fetch or len(asked.refs) > 1:
            self._conclude(others, asked, fetch, seen)
        else:
            node.used += (loss._index,)
        # Their parameters are about to be gone, and so is the use of their inputs.
        node.release_if_known()
        for ref in fetch:
            ref._node.release_if_known()
        self.training_step += 1
        self._move_on()
        return outcome

    def backward(self, asked: Asked, fetch: tuple[Ref, ...]) -> None:
        """Gradients of a loss, added to those that are held."""
        self._require_optimizer("`backward`")
        state, base = self._ready()
        wanted = (*fetch, asked.loss)
        arguments, programs, others = self._request(base, asked, wanted)
        parts = (moving_part(state), fixed_part(state), arguments)
        if self._held is None:
            self._held, seen = programs.begin(arguments, *parts)
        else:
            held = self._held
            # What was sown differs from loss to loss, and is part of the signature.
            self._held, seen = programs.add((arguments, held), held, *parts)
        self._conclude(others, asked, wanted, seen)
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
        self.training_step += 1
        self._move_on()
        return outcome

    def grads(self, asked: Asked) -> Grads:
        """The gradients of a loss."""
        state, base = self.loop._host.ready(self.state)
        arguments, programs, _ = self._request(base, asked, ())
        return programs.grads(
            arguments, moving_part(state), fixed_part(state), arguments
        )

    def plan(self, asked: Asked) -> StepPlan:
        """What a step over a loss will do."""
        state, base = self.loop._host.ready(self.state)
        arguments, programs, _ = self._request(base, asked, ())
        executable = programs.step.executable(
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

    def _request(self, base: Programs, asked: Asked, fetch: tuple[Ref, ...]) -> Request:
        self._require_own(asked.loss)
        node = asked.loss._node
        refs = (*asked.refs, *fetch) if fetch else asked.refs
        # What was asked for last is likely to be asked for again, and else what was at
        # this line.
        programs = self._last
        found = None
        if programs is not None and programs.loss.kind is asked.kind:
            found = programs.match(refs, self.stamp)
        if programs is None or found is None:
            line = node.operation, node.site[1], asked.kind
            programs = self._guesses.get(line)
            found = None if programs is None else programs.match(refs, self.stamp)
            if programs is None or found is None:
                programs, *found = self._look_up(base, asked.kind, refs)
                self._guesses.add(line, programs)
            self._last = programs
        leaves, others = found
        passes = tuple([pass_of(other) for other in others]) if others else ()
        leaves = tuple(base.placement.leaves(leaves))
        return (leaves, passes), programs, others

    def _look_up(
        self, base: Programs, kind: Kind, refs: tuple[Ref, ...]
    ) -> tuple[LossPrograms, list[Any], list[Stamp]]:
        """The programs of a structure, made if there are none, and what they run on."""
        structure = Structure(refs, through=self.stamp)
        others = structure.stamps
        own = others.index(self.stamp)
        del others[own]
        definitions = definitions_of(others)
        # A program keeps its definitions alive: no other has their identity.
        key = (structure.key, kind, own, *map(id, definitions))
        programs = self._programs.get(key)
        if programs is None:
            reader = RecordedLoss(Recipe(structure.key), kind, own, definitions)
            programs = _make_programs(base, reader, structure)
            self._programs.add(key, programs)
        return programs, structure.leaves, others

    def _require_own(self, loss: Ref) -> None:
        node = loss._node
        if self.stamp in node.stamps and loss._index not in node.used:
            return
        for stamp in node.stamps:
            if stamp.graph is self._graph:
                what = f"the loss, `{node.operation.name}` at {site_text(node.site)},"
                raise StaleGraphError(stamp.step, what)
        raise ValueError(
            "the loss must depend on this graph's model, but nothing in it was made by "
            "`graph(...)` or `graph.forward_batch(batch)`"
        )

    def _conclude(
        self, others: list[Stamp], asked: Asked, fetch: tuple[Ref, ...], seen: Seen
    ) -> None:
        """Gives what was run its values, and other graphs their changed variables."""
        for ref in asked.values():
            ref._node.used += (ref._index,)
        for ref, value in zip(fetch, seen.fetched, strict=True) if fetch else ():
            ref._node.values[ref._index] = value
        for stamp, variables in zip(others, seen.beside, strict=True) if others else ():
            stamp.last_call = None
            if variables:
                steps = stamp.graph._steps
                steps.state = evolve(steps.state, variables=variables)

    def _move_on(self) -> None:
        self.stamp.expire()
        self.stamp = Stamp(self._graph, self.training_step)


def _make_programs(
    base: Programs, reader: RecordedLoss, structure: Structure
) -> LossPrograms:
    engine = replace(base.engine, rules=replace(base.engine.rules, loss=reader))
    table = structure.table()
    line = f"({site_text(caller(1))})"  # where the step is asked for
    return LossPrograms(
        Pattern(structure.key),
        engine,
        reader,
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
        settled=base.placement.settled,
    )
