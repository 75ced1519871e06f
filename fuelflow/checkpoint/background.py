"""Work in a thread of its own, one piece at a time, whose errors are kept."""

import atexit
import threading
import weakref
from collections.abc import Callable


class Background:
    """Does one piece of work at a time in a thread.

    A program that ends waits for what is under way, and shows its error. It may come to
    nothing, as from then on Python lets work start no threads of its own.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        _unfinished.add(self)

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

        self._thread = threading.Thread(target=run, name=self._name)
        self._thread.start()

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


_unfinished: "weakref.WeakSet[Background]" = weakref.WeakSet()


def _finish() -> None:
    for background in list(_unfinished):
        background.wait()
        error = background.taken_error()
        if error is not None:
            raise error


atexit.register(_finish)
