"""Following a thread that trains: it says what it does, and waits for nothing."""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from fuelflow.run.compiling import is_compiling
from fuelflow.run.watchdog import doing
from fuelflow.run.watching import Dispatched
from fuelflow.step.outcome import StepOutcome
from fuelflow.step.program import CompileRecord
from fuelflow.watch.record.making import make_compile, make_event, make_record
from fuelflow.watch.record.records import Record
from fuelflow.watch.record.sampler import Sampler, Sight

# A step that is done so soon after it was sent off is waited for. One that takes longer
# is looked at now and then, so that the screen does not stand still meanwhile.
_PROMPT_SECS = 0.5
_MAX_PENDING = 128
_MAX_WANTED = 16
# Of epochs that are shorter not each has a sample of its last step.
_SECS_BETWEEN_ENDS = 0.1


class Follower(Protocol):
    """Where records come from."""

    def poll(self) -> Iterator[Record]:
        """The records of what happened since the last time."""
        ...


class Pending:
    """The newest steps on their way, of which the last one that is done is sampled.

    Args:
        sampler: Makes the records.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._sights: deque[Sight] = deque(maxlen=_MAX_PENDING)
        self._wanted: deque[Sight] = deque(maxlen=_MAX_WANTED)
        self._is_prompt = False

    def add(self, sight: Sight, *, must_be_read: bool = False) -> None:
        """Takes note of a step that was sent off.

        Args:
            sight: The step.
            must_be_read: Whether it is to have a record, whatever comes after it.
        """
        (self._wanted if must_be_read else self._sights).append(sight)

    def _observed(self, until: int, secs_compiling: float) -> list[Record]:
        """The records of steps that were to have one, up to a step that is done."""
        records: list[Record] = []
        while self._wanted and self._wanted[0].step <= until:
            sight = self._wanted.popleft()
            records += self.sampler.sample(sight, time.time(), secs_compiling)
        return records

    def poll(self, secs_compiling: float) -> list[Record]:
        """The records of the last step that is done, if it has none yet."""
        done = None
        while self._sights and self._sights[0].is_ready():
            done = self._sights.popleft()
        if done is None and self._sights and self._is_prompt:
            done = self._sights.pop()
            self._sights.clear()
            done.read()
        if done is None:
            return []
        secs = time.perf_counter() - done.started
        self._is_prompt = secs < _PROMPT_SECS
        observed = self._observed(done.step, secs_compiling)
        return observed + self.sampler.sample(done, time.time(), secs_compiling)

    def forget(self) -> None:
        """Lets go of the steps on their way, one of which cannot be read."""
        self._sights.clear()
        self._wanted.clear()

    def end(self, sight: Sight, at: float, secs_compiling: float) -> list[Record]:
        """The records of a step that was done at some time, as were all before it."""
        self._sights.clear()
        observed = self._observed(sight.step, secs_compiling)
        return observed + self.sampler.sample(sight, at, secs_compiling)


class _Opening(NamedTuple):
    """An epoch's first dispatch, or that of the rest of one.

    Attributes:
        step: The updates before it.
        first: The dispatch.
        num_compiles: The loop's compilations up to it.
    """

    step: int
    first: Dispatched
    num_compiles: int


class _Ending(NamedTuple):
    """The end of an epoch's steps.

    Attributes:
        at: When they were done, in seconds since 1970.
        last: Their last dispatch.
        opening: Their first one.
        num_compiles: The loop's compilations up to then.
    """

    at: float
    last: Dispatched
    opening: _Opening | None
    num_compiles: int


class TrainerFollower:
    """Follows a trainer's run. Made by the thread that trains.

    Args:
        compiles: Its compilations, a list that grows as they come.
        sampler: Makes the records of steps.
        step: The updates that were done before.
        observe_every: Steps from one that is observed to the next, of each of which
            there is to be a record, if it is not too soon after another; or None.
    """

    def __init__(
        self,
        compiles: Sequence[CompileRecord],
        sampler: Sampler,
        step: int,
        observe_every: int | None = None,
    ) -> None:
        self._first_step = step
        self._observe_every = observe_every
        self._num_observed = step // (observe_every or 1)
        self._observed: deque[Dispatched] = deque(maxlen=1)
        self._thread = threading.get_ident()
        self._compiles, self._num_compiles = compiles, len(compiles)
        self._secs_compiling = 0.0
        self._pending = Pending(sampler)
        self._newest: Dispatched | None = None
        self._added: Dispatched | None = None
        self._opening: _Opening | None = None
        self._opened = step
        self._done_at = 0.0
        self._phase = ""
        self._told: deque[Record | _Ending] = deque()

    # Called by the thread that trains.

    def note(self, dispatched: Dispatched) -> None:
        """Steps were sent off."""
        before, self._newest = self._newest, dispatched
        if before is None or before.epoch != dispatched.epoch:
            step = self._first_step if before is None else before.step
            self._opening = _Opening(step, dispatched, len(self._compiles))
        if self._observe_every is not None:
            num_observed = dispatched.step // self._observe_every
            if num_observed != self._num_observed:
                self._num_observed = num_observed
                self._observed.append(dispatched)

    def note_done(self) -> None:
        """All steps that were sent off are done."""
        if self._newest is not None:
            num_compiles = len(self._compiles)
            self._told.append(
                _Ending(time.time(), self._newest, self._opening, num_compiles)
            )

    def tell(self, record: Record) -> None:
        """Something else happened."""
        self._told.append(record)

    # Called by the thread that watches.

    def poll(self) -> Iterator[Record]:
        """The records of what happened since the last time."""
        newest, opening = self._newest, self._opening
        yield from self._phase_now(is_getting_on=newest is not self._added)
        if self._observed:
            observed = self._observed.pop()
            self._pending.add(_sight(observed), must_be_read=True)
        while self._told:
            told = self._told.popleft()
            if isinstance(told, Record):
                yield told
            elif told.at - self._done_at >= _SECS_BETWEEN_ENDS or not self._told:
                self._done_at, self._added = told.at, told.last
                yield from self._opened_by(told.opening)
                yield from self._compiled(told.num_compiles)
                yield from self._pending.end(
                    _sight(told.last), told.at, self._secs_compiling
                )
        yield from self._opened_by(opening)
        yield from self._compiled(len(self._compiles))
        if newest is not None and newest is not self._added:
            self._added = newest
            self._pending.add(_sight(newest))
        yield from self._pending.poll(self._secs_compiling)

    def _opened_by(self, opening: _Opening | None) -> Iterator[Record]:
        """Takes note of an epoch's first dispatch, if it is a new one."""
        if opening is None or opening.first.step <= self._opened:
            return
        self._opened = opening.first.step
        yield from self._compiled(opening.num_compiles)
        self._pending.sampler.open(
            _sight(opening.first), opening.step, self._secs_compiling
        )

    def _compiled(self, num_compiles: int) -> Iterator[Record]:
        """The records of compilations up to some number of them."""
        made = list(self._compiles[self._num_compiles : num_compiles])
        self._num_compiles += len(made)
        for each in made:
            self._secs_compiling += each.seconds
            yield make_compile(each)
            if not each.is_first:
                text = f"compiled `{each.program}` again: {each.reason}"
                step = None if self._newest is None else self._newest.step
                yield make_event("warning", "recompile", text, step)

    def _phase_now(self, *, is_getting_on: bool) -> Iterator[Record]:
        phase = phase_of(self._thread)
        if phase == "waiting for data" and is_getting_on:
            phase = "training"
        if phase != self._phase:
            self._phase = phase
            yield make_record("phase", phase=phase)


def phase_of(thread: int) -> str:
    """What a thread that trains does, in a word or three."""
    frame = sys._current_frames().get(thread)
    with contextlib.suppress(RuntimeError):  # it goes on while it is looked at
        if frame is not None and is_compiling(frame):
            return "compiling"
        parts = doing(frame)
        for phase in ("evaluating", "saving", "waiting for data"):
            if phase in parts:
                return phase
    return "training"


def _sight(dispatched: Dispatched) -> Sight:
    return Sight(
        StepOutcome(dispatched.output, dispatched.layout, aside=dispatched.aside),
        epoch=dispatched.epoch,
        epoch_step=dispatched.epoch_step,
        step=dispatched.step,
        started=dispatched.started,
        secs_waited=dispatched.secs_waited,
    )
