"""What processes tell each other while their devices, or main threads, may be busy.

By the coordination service of `jax.distributed`, for whose client JAX has no public
name; tests hold what is used of it for each version of JAX.
"""

from contextlib import suppress
from typing import Any

import jax
from jax._src import distributed

# What JAX writes there once a process of the run has been told by SIGTERM to end.
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"


def is_noticed() -> bool:
    """Whether JAX has heard, in some process, that the run is about to be ended."""
    return read(_NOTICE) is not None


def write(key: str, text: str) -> None:
    """Leaves a text where all processes can read it; what is there already stays."""
    with suppress(jax.errors.JaxRuntimeError):
        _client().key_value_set(key, text)


def read(key: str) -> str | None:
    """What a process has left there; None if none has."""
    try:
        return _client().key_value_try_get(key)
    except jax.errors.JaxRuntimeError:
        return None


def come_to(place: str) -> None:
    """Has one more process have come to a place; each may come to it once."""
    _client().key_value_increment(place, 1)


def have_all_come_to(place: str) -> bool:
    """Whether every process has come to a place, though some may have left again."""
    return int(read(place) or 0) == jax.process_count()


def meet(place: str, secs: float) -> bool:
    """Waits for every process, so long; whether all have met, which all hear alike."""
    try:
        _client().wait_at_barrier(place, int(1e3 * secs))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _client() -> Any:
    client = distributed.global_state.client
    assert client is not None, "there is one process, or none has joined others"
    return client
