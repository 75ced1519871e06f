"""An epoch's batches, as they are waited for."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from queue import SimpleQueue
from typing import Any

from fuelflow.run.compiling import secs_compiled
from fuelflow.step.batch import Stretch, Stretchable


class Abandoned(BaseException):
    """The run of a thread that waited for data was ended meanwhile by another."""


class Timed:
    """An iterator over batches that knows how long it was waited for.

    While one thread waits for a batch, which may take for ever, another can `claim` the
    iterator, and leave that thread behind: it ends when its batch comes.

    Args:
        batches: The batches.
        mark: Says where they are, before each is taken; None if that cannot be told.

    Attributes:
        secs_waited: Seconds so far, compiling apart.
        secs_compiling: Seconds of compiling so far, such as of a loader's transform.
        num_given: Batches given so far.
        untrained: Those given and not trained on yet, if it has no marks.
        is_abandoned: Whether the thread that waits was left behind.
    """

    def __init__(
        self, batches: Iterator[Any], mark: Callable[[], Any] = lambda: None
    ) -> None:
        self._batches = batches
        self._ahead: deque[Any] = deque(maxlen=1)
        self._mark = mark
        self._marks: deque[tuple[int, Any]] = deque(maxlen=2)
        self._turn = threading.Lock()
        self._waits_since: float | None = None
        self._late: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.secs_waited = 0.0
        self.secs_compiling = 0.0
        self.num_given = 0
        self.untrained: deque[Any] = deque()
        self.is_abandoned = False

    def keep_marks(self, num_ahead: int) -> None:
        """Has as many batches taken together have their marks kept."""
        self._marks = deque(maxlen=num_ahead + 1)

    def mark_at(self, num_given: int) -> tuple[int, Any] | None:
        """That number and where the batches were after so many, if it is known."""
        return next((each for each in self._marks if each[0] == num_given), None)

    def __iter__(self) -> "Timed":
        return self

    def __next__(self) -> Any:
        batch = self._ahead.pop() if self._ahead else self._next()
        self.num_given += 1
        if self._marks[-1][1] is None:
            self.untrained.append(batch)
        return batch

    def trained_on(self, num_batches: int) -> None:
        """Lets go of as many from the first on, which nobody needs again."""
        while len(self.untrained) > self.num_given - num_batches:
            self.untrained.popleft()

    def is_over(self) -> bool:
        """Whether there is no batch left, for which the next one is made."""
        if not self._ahead:
            with contextlib.suppress(StopIteration):
                self._ahead.append(self._next())
        return not self._ahead

    def _next(self) -> Any:
        self._marks.append((self.num_given, self._mark()))
        compiled, start = secs_compiled(), time.perf_counter()
        self._waits_since = start
        try:
            batch = next(self._batches)
        except BaseException as error:
            self._arrive(compiled, start, None, error)
            raise
        self._arrive(compiled, start, batch, None)
        return batch

    def _arrive(
        self, compiled: float, start: float, batch: Any, error: BaseException | None
    ) -> None:
        with self._turn:
            self._waits_since = None
        self._waited(compiled, start)
        if self.is_abandoned:
            self._late.put((batch, error))
            raise Abandoned

    def pulse(self) -> Hashable:
        """What is another one once a batch was given, or while nobody waits."""
        return object() if self.is_abandoned else (id(self), self.num_given)

    def late(self) -> tuple[Any, BaseException | None]:
        """The batch, or error, that an abandoned thread was waiting for, waited for."""
        return self._late.get()

    def claim(self, secs: float) -> bool:
        """Holds up a thread that has waited so long for a batch, should it come now.

        If it does, `release` is to be called.
        """
        self._turn.acquire()
        if self.is_waiting(secs):
            return True
        self._turn.release()
        return False

    def is_waiting(self, secs: float) -> bool:
        """Whether a thread has waited so long for a batch, and still does."""
        since = self._waits_since
        return since is not None and time.perf_counter() - since >= secs

    def release(self, *, is_abandoned: bool) -> None:
        """Lets a thread go that `claim` has held up: on, or to its end."""
        self.is_abandoned = is_abandoned
        self._turn.release()

    def stretch(self, num_steps: int) -> Stretch | None:
        """The next batches in one, if they are on the device."""
        if self._ahead or not isinstance(self._batches, Stretchable):
            return None
        self._marks.append((self.num_given, self._mark()))
        compiled, start = secs_compiled(), time.perf_counter()
        try:
            stretch = self._batches.stretch(num_steps)
        finally:
            self._waited(compiled, start)
        self.num_given += num_steps if stretch is not None else 0
        return stretch

    def _waited(self, compiled: float, start: float) -> None:
        secs = time.perf_counter() - start
        compiling = min(secs, secs_compiled() - compiled)
        self.secs_compiling += compiling
        self.secs_waited += secs - compiling

    def close(self) -> None:
        """Lets go of what was made ahead."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
