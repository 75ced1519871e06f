"""How long this process has compiled, whoever asked for it."""

import threading
from pathlib import PurePath
from traceback import walk_stack
from types import FrameType

import jax

from fuelflow.step.program import Program

_EVENTS = frozenset(
    f"/jax/core/compile/{part}_duration"
    for part in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)

# Where JAX traces, for `jax.eval_shape` too, and where it has XLA compile.
_PLACES = {("interpreters", "partial_eval.py"), ("_src", "compiler.py")}


class _CompileClock:
    """Adds up what JAX reports; there can be only one, as listeners never leave."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._secs = 0.0
        self._is_listening = False

    def read(self) -> float:
        if not self._is_listening:  # asked for every batch, so without the lock
            self._listen()
        return self._secs

    def _listen(self) -> None:
        with self._lock:
            if not self._is_listening:
                jax.monitoring.register_event_duration_secs_listener(self._add)
                self._is_listening = True

    def _add(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in _EVENTS:
            with self._lock:
                self._secs += duration_secs


_clock = _CompileClock()


def secs_compiled() -> float:
    """Seconds that JAX reported so far for tracing, lowering and compiling.

    Of functions inside each other both are counted, so of a stretch of time it may be
    more than all. Counting begins with the first call.
    """
    return _clock.read()


def is_compiling(frame: FrameType) -> bool:
    """Whether a thread that is in a frame is tracing or compiling."""
    return any(
        each.f_code is Program._make.__code__
        or PurePath(each.f_code.co_filename).parts[-2:] in _PLACES
        for each, _ in walk_stack(frame)
    )
