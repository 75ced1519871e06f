"""Results made ahead of use by threads, in order, and dropped when nobody wants them.

The threads know the function they call and two queues, and not the iterator: when that
is closed or forgotten, they end. All that a garbage collection does here is to put into
a `SimpleQueue`, which is made for that; a lock could be one that its thread holds.
"""

import atexit
import threading
import weakref
from collections import deque
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
THREAD_NAME = "fuelflow-data"
_EXIT_SECS = 5.0  # that a batch in the making may take when the interpreter ends


class Maker(Protocol[T]):
    """What makes results, in two parts: the second is cheaper for several at once."""

    def make(self, number: int) -> T | None:
        """The result of a number; None after the last."""
        ...

    def finish(self, made: list[T]) -> list[T]:
        """Results as they are given out."""
        ...


class Supply(Protocol[T_co]):
    """Results one after the other, of which some may be made ahead of use.

    Attributes:
        depth: Results asked for ahead of use.
        chunk: Results that are made together.
    """

    depth: int
    chunk: int

    def __next__(self) -> T_co:
        """The next result."""
        ...

    def close(self) -> None:
        """Lets go of what was made, and of the threads."""
        ...


class Direct(Generic[T]):
    """Each result is made when it is asked for, by the thread that asks.

    Args:
        maker: Makes the results.
        num_results: How many there are; None if only ``maker`` knows.
    """

    depth = 0
    chunk = 1

    def __init__(self, maker: Maker[T], num_results: int | None) -> None:
        self._maker: Maker[T] | None = maker
        self._num_results = num_results
        self._number = 0

    def __next__(self) -> T:
        if self._maker is None or self._number == self._num_results:
            self.close()
            raise StopIteration
        ((result, error),) = _outcomes(
            self._maker, range(self._number, self._number + 1)
        )
        self._number += 1
        return _given(self, result, error)

    def close(self) -> None:
        """Forgets the maker."""
        self._maker = None


class Prefetch(Generic[T]):
    """Results are made by threads, at most ``depth`` of them before they are used.

    An error comes out in the place of the result that it prevented. Threads start with
    the first result asked for.

    Args:
        maker: Makes the results, called by several threads.
        num_results: How many there are; None if only ``maker`` knows.
        depth: Results asked for ahead of use, at least 1; it can be set later.
        num_threads: Threads that make them.
    """

    def __init__(
        self,
        maker: Maker[T],
        num_results: int | None,
        *,
        depth: int,
        num_threads: int,
    ) -> None:
        self.depth = depth
        self.chunk = 1
        self._num_results = num_results
        self._num_asked = 0
        self._num_given = 0
        self._slots: deque[_Slot] = deque()
        self._ready: deque[_Outcome] = deque()
        self._tasks: _Tasks = SimpleQueue()
        self._gate = _Gate()
        self._threads = [
            threading.Thread(
                target=_work,
                args=(maker, self._tasks, self._gate),
                name=f"{THREAD_NAME}-{number}",
                daemon=True,  # the end of the interpreter waits for them, see below
            )
            for number in range(num_threads)
        ]
        self._release = weakref.finalize(
            self, _end, self._gate, self._tasks, num_threads
        )
        self._release.atexit = False

    def __next__(self) -> T:
        self._ask()
        if not self._ready:
            if not self._slots:
                self.close()
                raise StopIteration
            self._ready.extend(self._slots.popleft().get())
        self._num_given += 1
        self._ask()
        return _given(self, *self._ready.popleft())

    def close(self) -> None:
        """Drops what was made and lets the threads end with what they are at."""
        # Called here, since at the interpreter's end no finalizer runs when called.
        if self._release.detach() is not None:
            _end(self._gate, self._tasks, len(self._threads))
        self._slots.clear()
        self._ready.clear()
        _OPEN.discard(self)

    def join(self, secs: float) -> None:
        """Waits for the threads to end, after `close`."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(secs)

    def _ask(self) -> None:
        if self._gate.is_closed:
            return
        if self._num_asked == 0:
            self._start()
        last = self._num_given + self.depth
        if self._num_results is not None:
            last = min(last, self._num_results)
        # Whole chunks alone, but for the last.
        while self._num_asked + self.chunk <= last or (
            self._num_asked < last == self._num_results
        ):
            numbers = range(self._num_asked, min(self._num_asked + self.chunk, last))
            slot: _Slot = SimpleQueue()
            self._slots.append(slot)
            self._tasks.put((numbers, slot))
            self._num_asked = numbers.stop

    def _start(self) -> None:
        _OPEN.add(self)
        for thread in self._threads:
            thread.start()


_Outcome = tuple[Any, BaseException | None]
_Slot = SimpleQueue[list[_Outcome]]
_Tasks = SimpleQueue[tuple[range, _Slot] | None]
_OVER: list[_Outcome] = [(None, None)]


class _Gate:
    """Whether the results are still wanted."""

    def __init__(self) -> None:
        self.is_closed = False


def _end(gate: _Gate, tasks: _Tasks, num_threads: int) -> None:
    gate.is_closed = True
    for _ in range(num_threads):
        tasks.put(None)


def _work(maker: Maker[Any], tasks: _Tasks, gate: _Gate) -> None:
    while (task := tasks.get()) is not None:
        numbers, slot = task
        # Once closed, an answer all the same: another thread may be waiting for it.
        slot.put(_OVER if gate.is_closed else _outcomes(maker, numbers))
        del task, slot  # the results are the consumer's alone


def _outcomes(maker: Maker[T], numbers: range) -> list[_Outcome]:
    """The results of some numbers, up to the first that has none."""
    made: list[T] = []
    end: list[_Outcome] = []
    try:
        for number in numbers:
            result = maker.make(number)
            if result is None:
                end = _OVER
                break
            made.append(result)
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        end = [(None, error)]
    try:
        return [*((result, None) for result in maker.finish(made)), *end]
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        return [(None, error)]


def _given(supply: Supply[T], result: T | None, error: BaseException | None) -> T:
    """A result, or what came in its place."""
    if result is not None:
        return result
    supply.close()
    if isinstance(error, StopIteration):  # would end the epoch as if it were over
        raise RuntimeError("a source or transform raised StopIteration") from error
    try:
        raise StopIteration if error is None else error
    finally:
        del error  # its traceback holds this frame


# Closed before JAX takes its devices down, which it does at exit too: what is
# registered later, and JAX was imported before, comes first.
_OPEN: "weakref.WeakSet[Prefetch[Any]]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    still_open = list(_OPEN)
    for prefetch in still_open:
        prefetch.close()
    for prefetch in still_open:
        prefetch.join(_EXIT_SECS)
