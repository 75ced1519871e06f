"""One local process, with all that it starts."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fuelflow.devices.relay import Relay

# What has closed its output may leave it to others, who keep it open.
_DRAIN_SECS = 2.0


class Ended(NamedTuple):
    """A process has ended.

    Attributes:
        process_id: Its number.
        returncode: Its exit code, or less than 0 the signal that killed it.
    """

    process_id: int
    returncode: int

    @property
    def status(self) -> int:
        """The exit status as a shell gives it."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def described(self) -> str:
        """What happened, in words."""
        if self.returncode >= 0:
            return f"process {self.process_id} failed with exit code {self.returncode}"
        number = -self.returncode
        name = signal.strsignal(number) or "unknown"
        with contextlib.suppress(ValueError):  # a real-time signal has no name
            name = signal.Signals(number).name
        return f"process {self.process_id} was killed by signal {number} ({name})"


class Child:
    """A process that leads a group of its own, so that it can be ended as a whole.

    Args:
        process_id: Its number in the run.
        command: What to run.
        environment: Its environment variables.
        inherited: A file descriptor it gets.
        prefix: What each line of its output begins with.
        events: Gets an `Ended` when it has.
        on_broken: Called when its output can be passed on no more.
    """

    def __init__(
        self,
        process_id: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        inherited: int,
        prefix: bytes,
        events: "queue.SimpleQueue[Any]",
        on_broken: Callable[[], object],
    ) -> None:
        self._process_id = process_id
        self._events = events
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(inherited,),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._relays = (
            Relay(self._process.stdout, sys.stdout.buffer, prefix, on_broken),
            Relay(self._process.stderr, sys.stderr.buffer, prefix, on_broken),
        )
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        for thread in (*self._relays, self._waiter):
            thread.start()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to all of its group, if it still runs."""
        with self._lock:
            if self._process.returncode is None:
                self._send(number)

    def join(self) -> None:
        """Waits until it has ended and its output has been passed on."""
        self._waiter.join()
        for relay in self._relays:
            relay.join(_DRAIN_SECS)

    def _wait(self) -> None:
        # Not reaping it yet: until then its number is no one else's.
        if hasattr(os, "waitid"):  # on macOS from Python 3.13 on
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()
        with self._lock:
            self._send(signal.SIGKILL)  # what it left behind
            returncode = self._process.wait()
        self._events.put(Ended(self._process_id, returncode))

    def _send(self, number: signal.Signals) -> None:
        # Gone, or on macOS a group that holds only its dead leader.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
