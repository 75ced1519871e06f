"""The evaluation after an epoch, which may be stopped between two batches."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from fuelflow.run.stopping import StopSign
from fuelflow.run.timed import Timed
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.state import TrainState


class StoppedError(Exception):
    """An evaluation was stopped."""


def evaluate(
    loop: TrainingLoop, state: TrainState, batches: Timed, sign: StopSign
) -> tuple[dict[str, float], float]:
    """The means of a state, and the seconds that took, compiling apart.

    Raises:
        StoppedError: If the sign was up; nothing comes of the rest then.
    """
    num_compiles, start = len(loop.compiles), time.perf_counter()
    try:
        means = dict(loop.evaluate(state, _until_stopped(batches, sign)))
    finally:
        batches.close()
    secs = time.perf_counter() - start - batches.secs_compiling
    secs -= sum(record.seconds for record in loop.compiles[num_compiles:])
    return means, max(0.0, secs)


def _until_stopped(batches: Iterable[Any], sign: StopSign) -> Iterator[Any]:
    """The batches, asked before each whether to stop."""
    if sign.is_up():
        raise StoppedError
    for number, batch in enumerate(batches, start=1):
        if sign.is_up(number):
            raise StoppedError
        yield batch
