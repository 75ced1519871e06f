"""A pass, and what `probe` records in it: looked for once anything was ever recorded.

To look for it takes a further layer of tracing, and parts of JAX that take a while to
import, which who records nothing should not pay for.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from fuelflow.step.weighted import Mean
from fuelflow.step.witness import PassRows

Means = dict[str, Mean]

_has_recorded = threading.Event()
_would_miss: ContextVar[bool] = ContextVar("would_miss", default=False)


class FirstRecord(BaseException):
    """Ends a pass that would miss what is recorded; never leaves this module.

    Not an `Exception`, so that nothing of the user's that guards a model catches it.
    """


def take_note() -> None:
    """Something is about to be recorded."""
    if _has_recorded.is_set():
        return
    _has_recorded.set()
    if _would_miss.get():
        raise FirstRecord


def call_with_probes(function: Callable[[], Any], rows: PassRows) -> tuple[Any, Means]:
    """As `fuelflow.step.carrying.call_with_probes`."""
    if not _has_recorded.is_set():
        with _missing(), contextlib.suppress(FirstRecord):
            return function(), {}
    from fuelflow.step import carrying

    return carrying.call_with_probes(function, rows)


def grad_with_probes(
    function: Callable[[Any], tuple[Any, Any]], argument: Any, rows: PassRows
) -> tuple[Any, Any, Means]:
    """As `fuelflow.step.carrying.grad_with_probes`."""
    if not _has_recorded.is_set():
        with _missing(), contextlib.suppress(FirstRecord):
            return *jax.grad(function, has_aux=True)(argument), {}
    from fuelflow.step import carrying

    return carrying.grad_with_probes(function, argument, rows)


@contextmanager
def _missing() -> Iterator[None]:
    token = _would_miss.set(True)
    try:
        yield
    finally:
        _would_miss.reset(token)
