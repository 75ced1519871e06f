"""Ending a run that waits for data, which its own thread cannot do."""

import threading
from collections.abc import Callable
from typing import Protocol

import jax

from fuelflow.checkpoint.background import finish_before_end
from fuelflow.run.handle import Mailbox
from fuelflow.run.stopping import StopSign

_SECS_BETWEEN_LOOKS = 0.1
# Between looks for a wish of another process, of which nobody here is told.
_SECS_ASLEEP = 0.5
# Data that comes sooner is waited for: the run's own thread then sees the sign.
PATIENCE_SECS = 0.3


class Leavable(Protocol):
    """What is asked of a run, from another thread."""

    @property
    def stop_sign(self) -> StopSign:
        """Ends it early."""
        ...

    def is_waiting(self, secs: float) -> bool:
        """Whether its thread has waited so long for data."""
        ...

    def leave_waiting(self, secs: float) -> bool:
        """Ends it if its thread has waited so long for data; whether it did."""
        ...


class Attendant:
    """Waits for the end of a run, and ends it where its own thread only waits.

    Asleep until somebody wishes to stop. A thread that waits for data, in somebody
    else's code, cannot be interrupted, so it is left behind, and is a daemon for that;
    this one is none, so a program does not end before its runs. Of several processes
    all are left where they wait or none, as each needs the others in every step.

    Args:
        run: The run.
        mailbox: Where its end is known.
        conclude: Called in the main thread once that has waited for the end.
    """

    def __init__(
        self, run: Leavable, mailbox: Mailbox, conclude: Callable[[], None]
    ) -> None:
        self._run = run
        self._mailbox = mailbox
        self._conclude = conclude
        self._is_given_up = False
        # Several processes can tell each other nothing without this.
        self._can_confer = jax.process_count() > 1 and jax.distributed.is_initialized()
        self._has_ended = threading.Event()  # an interrupted `join` waits no more
        thread = threading.Thread(target=self._attend, name="fuelflow attendant")
        finish_before_end(self)
        thread.start()

    def wait(self) -> None:
        """Waits for the end of the run."""
        self._has_ended.wait()
        if threading.current_thread() is threading.main_thread():
            self._conclude()

    def stop(self) -> None:
        """Has the run end after its current step."""
        self._run.stop_sign.put_up()

    def give_up(self) -> None:
        """Has nobody wait for the run any more."""
        self._is_given_up = True
        self._run.stop_sign.tell()

    def _attend(self) -> None:
        try:
            self._await_end()
        finally:
            self._has_ended.set()

    def _await_end(self) -> None:
        sign = self._run.stop_sign
        while not self._is_done():
            if self._can_confer and self._run.is_waiting(PATIENCE_SECS):
                sign.confer()
            if sign.is_wished:
                self._leave()
                self._mailbox.wait(_SECS_BETWEEN_LOOKS)
            else:
                sign.wait(_SECS_ASLEEP if self._can_confer else None)

    def _is_done(self) -> bool:
        return self._is_given_up or self._mailbox.is_over

    def _leave(self) -> None:
        try:
            is_over = self._run.leave_waiting(PATIENCE_SECS)
        except BaseException as error:  # noqa: BLE001 - raised where the run is held
            self._mailbox.end(error)
        else:
            if is_over:
                self._mailbox.end()
