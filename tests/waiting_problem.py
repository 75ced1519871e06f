"""Runs whose data never comes, in the middle of an epoch or of an evaluation.

    [fuelflow launch -n N] python waiting_problem.py DIRECTORY DATA PART

Writes a line when it waits, and when it has ended what ended it, its last step, the
epochs it had, and a digest of what it learned. With PART "nothing" it waits for nothing
and goes on from where another one was. Of several processes, which all wait, the last
is told by SIGTERM to end.
"""

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from launching import report
from rank_problems import small_batch, small_loop_of_all, small_model
from run_problems import untimed

import fuelflow as ff

NUM_BATCHES, EPOCHS = 12, 2
STOPS_BEFORE = {"training": 5, "evaluating": 3}


def never() -> None:
    """Waits for what nobody will give, having said so."""
    report("waiting")
    sys.stdout.flush()
    if 0 < jax.process_index() == jax.process_count() - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()


def nothing() -> None:
    """Waits for nothing."""


class Batches:
    """Batches that are made as they are asked for, something being done before one."""

    def __init__(self, count: int, before: int, moment: Callable[[], None]) -> None:
        self._count, self._before, self._moment = count, before, moment

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for seed in range(self._count):
            if seed == self._before:
                self._moment()
            yield small_batch(seed=seed)


class Positioned:
    """Batches one after the other for ever, with a position that runs ahead.

    As of an iterator that reads several rows for a batch: while it waits for one of
    them its position is none to go on from.
    """

    def __init__(self, before: int, moment: Callable[[], None]) -> None:
        self._number, self._before, self._moment = 0, before, moment

    def __iter__(self) -> "Positioned":
        return self

    def __next__(self) -> Any:
        number, self._number = self._number, self._number + 1
        if number == self._before:
            self._moment()
        return small_batch(seed=number % NUM_BATCHES)

    def get_state(self) -> dict[str, int]:
        return {"number": self._number}

    def set_state(self, state: dict[str, int]) -> None:
        self._number = state["number"]


class Rows:
    """Rows that a loader reads, something being done before one."""

    def __init__(self, before: int, moment: Callable[[], None]) -> None:
        whole = small_batch(NUM_BATCHES * 16)
        self._rows = [
            {name: values[index] for name, values in whole.items()}
            for index in range(NUM_BATCHES * 16)
        ]
        self._before, self._moment = before, moment

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        if index == self._before:
            self._moment()
        return self._rows[index]


def make_data(kind: str, before: int, moment: Callable[[], None]) -> Any:
    if kind == "iterable":
        return Batches(NUM_BATCHES, before, moment)
    if kind == "iterator":
        return Positioned(before, moment)
    prefetch = 0 if kind == "direct loader" else 2
    rows = Rows(16 * before, moment)
    return ff.DataLoader(rows, 16, shuffle=False, prefetch=prefetch)


def make_trainer(
    kind: str,
    part: str = "",
    moment: Callable[[], None] = nothing,
    *,
    steps_per_call: int = 1,
    **options: Any,
) -> ff.Trainer:
    """A run in whose epochs something is done before a batch of a part."""
    is_training = part == "training"
    before = STOPS_BEFORE["training"] + NUM_BATCHES * (kind == "iterator")
    return ff.Trainer(
        small_loop_of_all(),
        small_model(),
        make_data(kind, before, moment if is_training else nothing),
        epochs=EPOCHS,
        eval_data=Batches(
            6, STOPS_BEFORE["evaluating"], nothing if is_training else moment
        ),
        steps_per_epoch=NUM_BATCHES if kind == "iterator" else None,
        steps_per_call=steps_per_call,
        **options,
    )


def make_endless_trainer() -> ff.Trainer:
    """A run whose callback never returns, and says so once a stop is wished for."""

    def endless(metrics: Any) -> None:
        print("ready", flush=True)
        while not trainer._course.stop_sign.is_wished:
            time.sleep(0.01)
        never()

    trainer = make_trainer("iterable", metrics_fn=endless)
    return trainer


def main(directory: str, kind: str, part: str) -> None:
    ff.initialize()
    checkpointer = ff.Checkpointer(directory)
    moment = nothing if part == "nothing" else never
    trained = make_trainer(
        kind, part, moment, checkpointer=checkpointer, resume=part == "nothing"
    ).fit()
    learned = hashlib.sha256(np.asarray(trained.model["w"]).tobytes())
    learned.update(repr(list(map(untimed, trained.history))).encode())
    ended = trained.stopped_by, int(trained.state.step), len(trained.history)
    report(*ended, learned.hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
