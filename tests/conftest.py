"""Eight CPU devices for every test, and a count of what jax traces and compiles."""

import os
import signal

# Before jax is imported: it reads its platforms then, and the flags soon after.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")

from typing import Any

import hypothesis
import jax.monitoring
import pytest

# Tests that are started in the background may be made to ignore these, and so would be
# the programs that they start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)  # which no program inherits

# The first example of a property may compile, so no deadline; the same examples in
# every run, so that the verdict on a change does not depend on luck.
hypothesis.settings.register_profile("fuelflow", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fuelflow")


class CompileCounter:
    """The functions jax traced and the programs it compiled since the last reset.

    ``traced`` and ``compiled`` are jax's names in order, ``step`` and ``jit(step)``,
    eager operations among them: ``x + 1`` on a new shape compiles ``jit(add)``. Jax 0.8
    also reports the trace of each jitted function, such as ``jnp.where``, in another.
    """

    def __init__(self) -> None:
        self.traced: list[str] = []
        self.compiled: list[str] = []

    @property
    def traces(self) -> int:
        """How many functions were traced."""
        return len(self.traced)

    @property
    def compiles(self) -> int:
        """How many programs were compiled."""
        return len(self.compiled)

    def reset(self) -> None:
        """Count from here."""
        self.traced.clear()
        self.compiled.clear()

    def record(self, event: str, duration_secs: float, **labels: Any) -> None:
        """Take one of jax's monitoring events."""
        name = str(labels.get("fun_name", "?"))
        if event == "/jax/core/compile/jaxpr_trace_duration":
            self.traced.append(name)
        elif event == "/jax/core/compile/backend_compile_duration":
            self.compiled.append(name)


# One listener for the whole run: jax keeps each one that is registered.
_COUNTER = CompileCounter()
jax.monitoring.register_event_duration_secs_listener(_COUNTER.record)


@pytest.fixture
def compile_counter() -> CompileCounter:
    """The count of traces and compiles, from zero at the start of the test."""
    _COUNTER.reset()
    return _COUNTER
