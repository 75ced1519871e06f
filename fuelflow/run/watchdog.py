"""A watch on a run that says where it hangs, and leaves it alone otherwise."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Protocol

from fuelflow.checkpoint.checkpointer import Checkpointer
from fuelflow.devices.agreement import require_agreement
from fuelflow.run.callbacks import Callbacks
from fuelflow.run.compiling import is_compiling
from fuelflow.run.observer import Observer
from fuelflow.run.rank_pass import RankPass
from fuelflow.run.stopping import StopSign
from fuelflow.run.timed import Timed
from fuelflow.step.dispatch import Dispatcher
from fuelflow.step.flight import Flight
from fuelflow.step.loop import TrainingLoop

logger = logging.getLogger("fuelflow")

# A hang is told of so much of its time later than it could be, at most.
_LOOKS_PER_HANG = 8
# Read off the stack, so that a run need not say what it does, which would cost time.
_ACTIVITIES: dict[CodeType, str] = {
    Timed.__next__.__code__: "waiting for data",
    Timed.stretch.__code__: "waiting for data",
    TrainingLoop.evaluate.__code__: "evaluating",
    Dispatcher._run_part.__code__: "dispatching a step",
    Flight.make_room.__code__: "waiting for a step to be done",
    Flight.land.__code__: "waiting for a step to be done",
    Observer.finish.__code__: "waiting for a step to be done",
    RankPass.run.__code__: "timing its ranks",
    Checkpointer.prepare.__code__: "making the directory of its checkpoints",
    Checkpointer.save.__code__: "saving",
    Checkpointer.wait.__code__: "waiting for a save",
    Callbacks.before.__code__: "in a callback",
    Callbacks.after.__code__: "in a callback",
    StopSign.is_up.__code__: "asking the other processes whether to stop",
    require_agreement.__code__: "comparing itself with the other processes",
}


class Watched(Protocol):
    """What is asked of a run, from another thread."""

    def pulse(self) -> Hashable:
        """What is another one whenever the run has got on."""
        ...

    def last_done(self) -> str:
        """The last step that is known to be done."""
        ...


@contextmanager
def watched(run: Watched, hang_after: float | None) -> Iterator[None]:
    """Logs every thread's stack if the run of this thread does not get on.

    There is one warning for each hang. Compiling, in any thread, is none. What keeps
    Python's lock to itself keeps this from looking too.

    Args:
        run: The run.
        hang_after: Seconds without getting on that are a hang; None for no watch.
    """
    if hang_after is None:
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(
        target=_watch,
        args=(run, hang_after, threading.get_ident(), is_over),
        name="fuelflow watchdog",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _watch(
    run: Watched, hang_after: float, ident: int, is_over: threading.Event
) -> None:
    pulse, since, is_told = run.pulse(), time.monotonic(), False
    while not is_over.wait(hang_after / _LOOKS_PER_HANG):
        now, frames = run.pulse(), sys._current_frames()
        secs = time.monotonic() - since
        if now != pulse or any(map(is_compiling, frames.values())):
            pulse, since, is_told = now, time.monotonic(), False
        elif secs >= hang_after and not is_told:
            is_told = True
            logger.warning(
                "the run has not got on for %.3g s: the last step done is %s, and it "
                "is %s. It goes on waiting. Its threads:\n%s",
                secs,
                run.last_done(),
                doing(frames.get(ident)),
                _stacks_text(frames),
            )
        del frames  # which keep what the functions have


def doing(frame: FrameType | None) -> str:
    """What the thread of a run does, the whole first, and then which part of it."""
    codes = [each.f_code for each, _ in traceback.walk_stack(frame)]
    doing = [_ACTIVITIES[code] for code in reversed(codes) if code in _ACTIVITIES]
    return ", ".join(dict.fromkeys(doing)) or "between two steps"


def _stacks_text(frames: Mapping[int, FrameType]) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)!r}, most recent call last:\n"
        + "".join(traceback.format_stack(frame)).rstrip()
        for ident, frame in frames.items()
        if ident != threading.get_ident()
    )
