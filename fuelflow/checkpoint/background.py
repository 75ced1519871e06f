"""Work in a thread of its own, one piece at a time, whose errors are kept."""

import atexit
import concurrent.futures.thread as executors
import logging
import os
import signal
import sys
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
        # Not the thread, which an interrupted `join` takes for one that has ended:
        # https://github.com/python/cpython/issues/90882
        self._is_done = threading.Event()
        self._is_done.set()
        self._error: BaseException | None = None
        _saves.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether a piece of work is under way."""
        return not self._is_done.is_set()

    def start(self, work: Callable[[], None]) -> None:
        """Starts a piece of work; the one before must be done."""
        assert not self.is_busy

        is_done = threading.Event()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised by who waits
                self._error = error
            finally:
                is_done.set()

        thread = threading.Thread(target=run, name=self._name)
        thread.start()  # may fail: Python 3.12.0 and 3.12.1 start none as they end
        self._is_done = is_done

    def wait(self) -> None:
        """Waits until nothing is under way."""
        self._is_done.wait()

    def taken_error(self) -> BaseException | None:
        """The error of a piece of work that is done, once; None if there is none."""
        if self.is_busy:
            return None
        error, self._error = self._error, None
        return error


class Unfinished(Protocol):
    """What a program that ends waits for."""

    def stop(self) -> None:
        """Has it end soon."""
        ...

    def wait(self) -> None:
        """Waits for its end."""
        ...


def finish_before_end(run: Unfinished) -> None:
    """Has a program that ends wait for a run first, which may save until then."""
    _runs.add(run)


_runs: "weakref.WeakSet[Unfinished]" = weakref.WeakSet()
_saves: "weakref.WeakSet[Background]" = weakref.WeakSet()


def _finish() -> None:
    """Waits for all of it; interrupted it stops the runs, and once more it ends."""
    try:
        _wait()
    except KeyboardInterrupt:
        for run in list(_runs):
            run.stop()
        _is_interrupted.set()
        try:
            _wait()
        except KeyboardInterrupt:
            _end_interrupted()


def _end_interrupted() -> None:
    """Ends an interrupted process so, which Python would end as if all were well.

    What is raised while threads are waited for it only prints.
    """
    if not _is_interrupted.is_set():
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _wait() -> None:
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
_is_interrupted = threading.Event()
atexit.register(_end_interrupted)
_threading: Any = threading
_threading._register_atexit(_finish)
