"""What processes tell each other while their devices, or main threads, may be busy.

By the coordination service of `jax.distributed`, for whose client JAX has no public
name; tests hold what is used of it for each version of JAX.
"""

from typing import Any

import jax
from jax._src import distributed

# What JAX writes there once a process of the run has been told by SIGTERM to end.
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"


def is_noticed() -> bool:
    """Whether JAX has heard, in some process, that the run is about to be ended."""
    try:
        _client().key_value_try_get(_NOTICE)
    except jax.errors.JaxRuntimeError:  # there is none
        return False
    return True


def answers_of_all(question: str, answer: str, secs: float) -> list[str] | None:
    """What all processes answer to a question, which each may ask once.

    Args:
        question: Its name.
        answer: What this process answers.
        secs: How long to wait for the others.

    Returns:
        All answers, in any order; None, on whichever ask, if one came too late.
    """
    client = _client()
    client.key_value_set(f"{question}/{jax.process_index()}", answer)
    try:
        client.wait_at_barrier(question, int(1e3 * secs))
    except jax.errors.JaxRuntimeError:
        return None
    return [value for _, value in client.key_value_dir_get(question)]


def _client() -> Any:
    client = distributed.global_state.client
    assert client is not None, "there is one process, or none has joined others"
    return client
