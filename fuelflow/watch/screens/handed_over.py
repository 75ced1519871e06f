"""Log handlers that write to the terminal, while something is drawn there."""

import logging
import sys
from collections.abc import Iterator
from typing import Any


def goes_to_terminal(name: str) -> bool:
    """Whether ``"stdout"`` or ``"stderr"`` is a terminal, and no file or pipe."""
    stream = getattr(sys, name)
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # none, or closed
        return False


class HandedOver:
    """Hands the handlers of ``logging`` that were set up before on to the live streams.

    Such a handler keeps the stream it was made with; it would write past the drawing.

    Args:
        before: What `streams` returned before ``sys.stdout`` and ``sys.stderr`` were
            replaced.
    """

    def __init__(self, before: dict[str, Any]) -> None:
        self._pairs = [
            (stream, getattr(sys, name))
            for name, stream in before.items()
            if stream is not getattr(sys, name)
        ]
        self._pairs += [
            (getattr(sys, f"__{name}__"), getattr(sys, name))
            for name in before
            if before[name] is not getattr(sys, name)
        ]
        self._pass_on(self._pairs)

    @staticmethod
    def streams() -> dict[str, Any]:
        """What ``sys.stdout`` and ``sys.stderr`` are now."""
        return {"stdout": sys.stdout, "stderr": sys.stderr}

    def take_back(self) -> None:
        """Gives the handlers their own streams back, and to newer ones the old."""
        self._pass_on([(live, own) for own, live in reversed(self._pairs)])

    @staticmethod
    def _pass_on(pairs: list[tuple[Any, Any]]) -> None:
        for handler in _handlers():
            for old, new in pairs:
                if handler.stream is old:
                    handler.setStream(new)
                    break


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    """All handlers of all loggers that write to a stream and not to a file."""
    loggers: list[Any] = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and not isinstance(
                handler, logging.FileHandler
            ):
                yield handler
