"""Seeing when devices are done, without making them wait."""

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax

# Waking up to look at a dispatch takes as long as the host's part of several steps.
INTERVAL_SECS = 10e-3
# A device can have been idle in between if the host was waiting for data.
SHORT_INTERVAL_SECS = 1e-3
_NOTABLE_WAIT = 0.1


@dataclass(frozen=True)
class Observation:
    """When each device of this process was done, and how long it was at work.

    Attributes:
        done: When its last work was seen done, by `time.perf_counter`.
        busy: Seconds that it had work.
    """

    done: dict[Any, float]
    busy: dict[Any, float]


class _Sight(NamedTuple):
    """Something to wait for: an output, and when the work on it began at the latest."""

    output: jax.Array
    started: float
    step: int | None


class Observer:
    """Watches the outputs of dispatches from a thread of its own.

    A device is at work from a dispatch, or from its last one's end if that is later,
    until its own part of the output is ready. Dispatches within ten milliseconds are
    seen as one; within one, if the host waited for data for a tenth of the time.

    Args:
        devices: The devices of this process.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self._last_step: int | None = None
        self._devices = devices
        self._sights: SimpleQueue[_Sight | threading.Event | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._watch, name="fuelflow observer", daemon=True
        )
        self.begin()
        self._thread.start()

    @property
    def last_step(self) -> int | None:
        """The last step that is known to be done, asked by any thread."""
        unseen = self._unseen
        if unseen is not None:
            output: Any = unseen[0]
            if output.is_ready():
                return unseen[1]
        return self._last_step

    def begin(self) -> None:
        """Begins anew, nothing being under way."""
        self._done = dict.fromkeys(self._devices, 0.0)
        self._busy = dict.fromkeys(self._devices, 0.0)
        self._first: float | None = None
        self._noted = self._waited = 0.0
        self._unseen: tuple[jax.Array, int | None] | None = None

    def note(
        self,
        output: jax.Array,
        started: float,
        step: int | None = None,
        *,
        waited: float = 0.0,
    ) -> None:
        """Takes note of a dispatch.

        Args:
            output: One of its outputs, whole on every device, that nobody donates.
            started: When the dispatch began, not counting a compilation.
            step: Its last step.
            waited: Seconds of the epoch that were spent waiting for data.
        """
        if self._first is None:
            self._first = started
        since = started - self._noted
        has_waited = waited - self._waited > _NOTABLE_WAIT * since
        if since < (SHORT_INTERVAL_SECS if has_waited else INTERVAL_SECS):
            self._unseen = output, step
            return
        self._send(output, step)
        self._noted, self._waited = started, waited

    def finish(self) -> Observation:
        """What was seen, once all that was noted is done."""
        if self._unseen is not None:
            self._send(*self._unseen)
        is_seen = threading.Event()
        self._sights.put(is_seen)
        is_seen.wait()
        return Observation(self._done, self._busy)

    def close(self) -> None:
        """Ends the thread."""
        self._sights.put(None)
        self._thread.join()

    def _send(self, output: jax.Array, step: int | None) -> None:
        assert self._first is not None
        self._sights.put(_Sight(output, self._first, step))
        self._first, self._unseen = None, None

    def _watch(self) -> None:
        while (sight := self._sights.get()) is not None:
            if isinstance(sight, threading.Event):
                sight.set()
            else:
                self._look(sight)
            del sight  # which would keep the output until the next one

    def _look(self, sight: _Sight) -> None:
        parts = {part.device: part.data for part in sight.output.addressable_shards}
        for device in self._devices:
            # Whoever reads the output is told of an error, and waits for this thread.
            with contextlib.suppress(Exception):
                parts[device].block_until_ready()
            now = time.perf_counter()
            self._busy[device] += now - max(self._done[device], sight.started)
            self._done[device] = now
        self._last_step = sight.step
