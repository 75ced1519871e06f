"""Runs that are told by SIGTERM to end, at moments of their own choice.

    [fuelflow launch -n N] python preempted_problem.py DIRECTORY MOMENT

Prints what stopped the run, and its last step. Of several processes the last is told.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from launching import report
from rank_problems import least_squares, small_batch, small_loop_of_all, small_model

import fuelflow as ff

NUM_BATCHES, EPOCHS, STEPS_PER_CALL = 60, 3, 50
# On several processes it is JAX that hears the signal, within a second.
SECS_TO_HEAR = 1.5
# What a run is doing when the signal comes, and the step that it ends after.
MOMENTS = {"compiling": 1, "evaluating": 60, "in a fused run": 50, "waiting": 8}


def terminate() -> None:
    """A signal, and the time until it was heard."""
    if jax.process_count() > 1:
        if jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SECS_TO_HEAR)
        return
    os.kill(os.getpid(), signal.SIGTERM)
    while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        time.sleep(0.001)


def twice() -> None:
    """A second signal, once the first one was heard, in what takes for ever."""
    terminate()
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


def once(function: Callable[[], None], *, if_so: bool = True) -> Callable[[], None]:
    calls = [function] if if_so else []

    def call() -> None:
        while calls:
            calls.pop()()

    return call


class Batches:
    """Batches, something being done before the eighth."""

    def __init__(self, count: int, moment: Callable[[], None]) -> None:
        self._count = count
        self._moment = moment

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for seed in range(self._count):
            if seed == 7:
                self._moment()
            yield {**small_batch(seed=seed), "number": np.full(16, seed, np.int32)}


def make_trainer(moment: str = "never", **options: Any) -> ff.Trainer:
    """A run to which the signal comes at a moment, once."""
    traced = once(terminate, if_so=moment == "compiling")
    waited = once(twice if moment == "twice" else terminate, if_so=moment != "never")
    evaluated = once(terminate, if_so=moment == "evaluating")

    def look(number: Any) -> None:
        if number == 20:
            terminate()

    def loss_fn(params: Any, batch: Any) -> Any:
        traced()
        if moment == "in a fused run":
            jax.debug.callback(look, batch["number"][0])
        return least_squares(params, batch)

    is_waiting = moment in ("waiting", "twice")
    return ff.Trainer(
        small_loop_of_all().replace(loss_fn=loss_fn),
        small_model(),
        Batches(NUM_BATCHES, waited if is_waiting else lambda: None),
        epochs=EPOCHS,
        eval_data=Batches(10, evaluated),
        steps_per_call=STEPS_PER_CALL if moment == "in a fused run" else 1,
        **options,
    )


def main(directory: str, moment: str) -> None:
    ff.initialize()
    trainer = make_trainer(moment, checkpointer=ff.Checkpointer(directory))
    trained = trainer.fit()
    report(trained.stopped_by, int(trained.state.step))


if __name__ == "__main__":
    main(*sys.argv[1:])
