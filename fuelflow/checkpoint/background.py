"""Work in a thread of its own, one piece at a time, whose errors are kept."""

import concurrent.futures.thread as executors
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Background:
    """Does one piece of work at a time in a thread.

    A program that ends waits for what is under way, and shows its error.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        _saves.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether a piece of work is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Starts a piece of work; the one before must be done."""
        assert not self.is_busy

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised by who waits
                self._error = error

        thread = threading.Thread(target=run, name=self._name)
        thread.start()  # may fail: Python 3.12.0 and 3.12.1 start none as they end
        self._thread = thread

    def wait(self) -> None:
        """Waits until nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def taken_error(self) -> BaseException | None:
        """The error of a piece of work that is done, once; None if there is none."""
        if self.is_busy:
            return None
        error, self._error = self._error, None
        return error


class Unfinished(Protocol):
    """What a program that ends waits for."""

    def wait(self) -> None:
        """Waits for its end."""
        ...


def finish_before_end(run: Unfinished) -> None:
    """Has a program that ends wait for a run first, which may save until then."""
    _runs.add(run)


_runs: "weakref.WeakSet[Unfinished]" = weakref.WeakSet()
_saves: "weakref.WeakSet[Background]" = weakref.WeakSet()


def _finish() -> None:
    for run in list(_runs):
        run.wait()
    for background in list(_saves):
        background.wait()
        error = background.taken_error()
        if error is not None:
            raise error


# Before executors, which work in the background may use, take no more from anybody:
# they say so when Python begins to end, long before `atexit`, and the last one to be
# registered there is called first. https://github.com/python/cpython/issues/113964
assert executors
_threading: Any = threading
_threading._register_atexit(_finish)
