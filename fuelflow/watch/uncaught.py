"""Errors that nobody catches: told before they are printed, as they end a program."""

import contextlib
import sys
from collections.abc import Callable
from types import TracebackType

Tell = Callable[[str, BaseException | None], None]


class Uncaught:
    """Tells how a program ends that has a loop written by hand.

    While it waits it is `sys.excepthook`, and hands on to the one before. At a prompt,
    where an error ends nothing, it tells none.

    Args:
        tell: Told ``"error"`` and the error, or ``"done"``.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._is_waiting = False
        self._before = sys.excepthook

    def wait(self) -> None:
        """Begins to wait for an error."""
        if not self._is_waiting:
            self._is_waiting = True
            self._before, sys.excepthook = sys.excepthook, self

    def leave(self) -> None:
        """Waits no more; a hook that was put before this one stays."""
        if sys.excepthook is self:
            sys.excepthook = self._before
        self._is_waiting = False

    def __call__(
        self,
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        """Tells of an error, and then has it printed."""
        if self._is_waiting and not _is_at_prompt():
            with contextlib.suppress(Exception):  # of this error alone is to be told
                self._tell("error", error)
        self._before(kind, error, traceback)

    def end(self) -> None:
        """Tells of the program's end, and of an error that another hook has printed."""
        error = getattr(sys, "last_value", None)
        if error is None or not self._is_waiting or _is_at_prompt():
            self._tell("done", None)
        else:
            self._tell("error", error)


def _is_at_prompt() -> bool:
    ipython = sys.modules.get("IPython")
    return (
        hasattr(sys, "ps1")
        or bool(sys.flags.interactive)
        or (ipython is not None and ipython.get_ipython() is not None)
    )
