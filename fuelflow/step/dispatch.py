"""Sending steps to the device: one, or a run of them, without waiting."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import jax

from fuelflow._errors import NonFiniteError
from fuelflow._types import Batch as BatchTree
from fuelflow.step.batch import Batch, Stretch, Stretchable
from fuelflow.step.engine import Moving, Seen
from fuelflow.step.flight import Taken
from fuelflow.step.host import Host
from fuelflow.step.outcome import StepOutcome
from fuelflow.step.packing import Packed
from fuelflow.step.programs import Programs, fixed_part, moving_part
from fuelflow.step.stacking import (
    at_least_one,
    groups_of_equal_shape,
    iterator_of,
)
from fuelflow.step.state import TrainState, evolve
from fuelflow.step.tally import NarrowTallyError

Prepare = Callable[[Programs, TrainState, BatchTree], TrainState]


class Sent(NamedTuple):
    """A dispatch that was made.

    Attributes:
        state: The state after its steps.
        outcome: What they say.
        output: What they say, packed, on the devices.
        num_steps: How many there are.
        started: When the dispatch began, by `time.perf_counter`, not counting a
            compilation.
    """

    state: TrainState
    outcome: StepOutcome
    output: jax.Array
    num_steps: int
    started: float


@dataclass(frozen=True)
class Dispatcher:
    """How a loop sends its programs off.

    Attributes:
        host: The loop's memory.
        raises: Whether reading a step that was not finite is an error.
        log_interval: Steps between log records, or None.
        max_in_flight: Dispatches the host may be ahead of the device.
    """

    host: Host
    raises: bool
    log_interval: int | None
    max_in_flight: int

    def ready(self, state: TrainState) -> tuple[TrainState, Programs]:
        """A state that may be stepped, once there is room for it, and its programs.

        Raises:
            NonFiniteError: If an earlier step turns out not to have been finite.
        """
        state, programs = self.host.ready(state, will_step=True)
        flight = state.flight
        assert flight is not None
        flight.await_room(self.max_in_flight)
        return state, programs

    def step(
        self, programs: Programs, state: TrainState, batch: BatchTree
    ) -> tuple[TrainState, StepOutcome]:
        """One step over a batch."""
        if type(batch) is Batch:
            batch = programs.rows_of(batch, state)
        batch = programs.placed(batch)
        step = programs.steps(state).step
        done = step(batch, moving_part(state), fixed_part(state), batch)
        return self.advance(state, *done, taken=(programs.engine, batch))

    def run(
        self, state: TrainState, batches: Iterable[BatchTree], steps_per_call: int
    ) -> tuple[TrainState, StepOutcome]:
        """A step over each batch, several in one dispatch.

        Raises:
            ValueError: If there is no batch. An error after the first dispatch has the
                state so far as its ``state``, and the outcomes as its ``outcome``.
        """
        outcomes: list[StepOutcome] = []
        seen: NonFiniteError | None = None
        try:
            for sent in self.each(state, batches, steps_per_call):
                state = sent.state
                outcomes.append(sent.outcome)
                assert state.flight is not None
                seen = state.flight.make_room(self.max_in_flight)
                if seen is not None:
                    break
        except BaseException as error:
            # The given state is used up: whoever catches this needs the new one.
            if outcomes:
                _hand_back(error, state, StepOutcome.stacked(outcomes))
            raise
        return state, StepOutcome.stacked(outcomes, seen)

    def each(
        self,
        state: TrainState,
        batches: Iterable[BatchTree],
        steps_per_call: int,
        *,
        prepare: Prepare | None = None,
    ) -> Iterator["Sent"]:
        """A step over each batch, one dispatch at a time.

        Whoever iterates sees to it that not too many are in flight.

        Args:
            state: The state, whose buffers are taken over.
            batches: The batches.
            steps_per_call: Steps in one dispatch.
            prepare: What is done before the first of them, once it is there: given the
                programs, the state and what they are about to take, it returns the
                state to go on with.

        Raises:
            ValueError: If there is no batch.
        """
        state, programs = self.ready(state)
        for part in _parts(programs, state, batches, steps_per_call):
            if prepare is not None:
                batch = part.pick_first() if isinstance(part, Stretch) else part[0]
                state, prepare = prepare(programs, state, batch), None
            start, num_compiles = time.perf_counter(), len(programs.log.records)
            try:
                state, outcome = self._run_part(programs, state, part)
            except NarrowTallyError as error:  # as it is traced, and nothing has run
                state = evolve(state, sums=programs.zero_sums(error.needed))
                state, outcome = self._run_part(programs, state, part)
            start += sum(made.seconds for made in programs.log.records[num_compiles:])
            num_steps = part.num_steps if isinstance(part, Stretch) else len(part)
            yield Sent(state, outcome, outcome.output, num_steps, start)

    def _run_part(
        self, programs: Programs, state: TrainState, part: Stretch | list[BatchTree]
    ) -> tuple[TrainState, StepOutcome]:
        moving, fixed = moving_part(state), fixed_part(state)
        steps = programs.steps(state)
        if isinstance(part, Stretch):
            done = steps.stretch(part, moving, fixed, part)
            taken = programs.engine, part
            return self.advance(state, *done, num_steps=part.num_steps, taken=taken)
        if len(part) == 1:
            batch = programs.placed(part[0])
            done = steps.step(batch, moving, fixed, batch)
            return self.advance(state, *done, taken=(programs.engine, batch))
        stacked = programs.placed_stack(part)
        done = steps.run(part[0], moving, fixed, stacked, num_steps=len(part))
        taken = programs.engine, stacked
        return self.advance(state, *done, num_steps=len(part), taken=taken)

    def advance(
        self,
        state: TrainState,
        moving: Moving,
        packed: Packed,
        seen: Seen,
        *,
        num_steps: int = 1,
        taken: Taken | None = None,
    ) -> tuple[TrainState, StepOutcome]:
        """The state and outcome that a dispatch returned, taken note of.

        Args:
            state: The state before it.
            moving: What it made of that.
            packed: What its steps say.
            seen: What there is to see besides.
            num_steps: Its steps.
            taken: The engine and the batch it took, or stacked batches; None if they
                are not to be had again.
        """
        flight = state.flight
        assert flight is not None
        outcome = StepOutcome(
            packed.words,
            packed.layout,
            flight if self.raises else None,
            packed.aside,
        )
        if not self.raises:
            taken = None
        flight.add(outcome, num_steps, self.log_interval, taken)
        state = evolve(
            state,
            params=moving.params,
            variables=moving.variables,
            opt_state=moving.opt_state,
            step=moving.step,
            num_skipped=moving.num_skipped,
            sown=seen.sown,
            sums=moving.sums,
        )
        if self.raises:
            flight.latest = ref(state)
        return state, outcome


def _parts(
    programs: Programs,
    state: TrainState,
    batches: Iterable[BatchTree],
    steps_per_call: int,
) -> Iterator[Stretch | list[BatchTree]]:
    """Batches by dispatch: stretches of them first, then stacks, then single ones."""
    source = iterator_of(batches)
    is_started = False
    if steps_per_call > 1 and isinstance(source, Stretchable):
        while (stretch := source.stretch(steps_per_call)) is not None:
            is_started = True
            yield stretch

    def as_rows(batch: Any) -> BatchTree:
        return programs.rows_of(batch, state) if type(batch) is Batch else batch

    rest = map(as_rows, source if is_started else at_least_one(source))
    yield from groups_of_equal_shape(rest, steps_per_call)


def _hand_back(error: BaseException, state: TrainState, outcome: StepOutcome) -> None:
    """Puts what a run had reached into the error that ended it."""
    vars(error).update(state=state, outcome=outcome)
    error.add_note(
        "the run had taken steps before this: go on with the `.state` of this error"
    )
