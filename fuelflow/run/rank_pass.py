"""How long each rank takes for its own rows, which steps in lockstep do not show."""

import time
from collections import deque
from typing import Any

import jax
import numpy as np

from fuelflow._types import Batch, PyTree
from fuelflow.step.programs import Programs, fixed_part, moving_part
from fuelflow.step.state import TrainState

_NUM_KEPT = 3
_POLL_SECS = 1e-4


class RankPass:
    """Times a pass of every rank of this process over its own rows, without the others.

    In a step the ranks wait for each other, so to the host all take as long as the
    slowest. It is forward and backward of one batch, thrown away, before an
    epoch begins; of the last few the shortest counts, since other work on the machine
    makes a pass longer and nothing makes it shorter.

    Args:
        devices: The device of each rank.
    """

    def __init__(self, devices: list[Any]) -> None:
        self._devices = devices
        self._secs: deque[np.ndarray] = deque(maxlen=_NUM_KEPT)

    def run(self, programs: Programs, state: TrainState, batch: Batch) -> None:
        """Takes the time of a pass over a batch, if there are ranks to compare."""
        if len(self._devices) == 1:
            return
        if not self._secs:  # the first run of a program is no measure
            self._time(programs, state, batch)
        while True:
            self._secs.append(self._time(programs, state, batch))
            if len(self._secs) == _NUM_KEPT:
                return

    @property
    def secs(self) -> np.ndarray | None:
        """Seconds of each rank ``[num_ranks]``, 0 for those of other processes."""
        return np.min(self._secs, axis=0) if self._secs else None

    def _time(self, programs: Programs, state: TrainState, batch: Batch) -> np.ndarray:
        arguments: tuple[PyTree, ...] = (
            moving_part(state)._replace(sums=None),
            fixed_part(state),
            batch,
        )
        # Compiled before the clock starts.
        programs.rank_pass.executable(batch, *arguments)
        jax.block_until_ready(arguments)
        start = time.perf_counter()
        made = programs.rank_pass(batch, *arguments)
        waiting = {part.device: part.data for part in made.addressable_shards}
        secs = np.zeros(len(self._devices))
        while waiting:
            for device in [d for d, part in waiting.items() if part.is_ready()]:
                del waiting[device]
                if device in self._devices:
                    rank = self._devices.index(device)
                    secs[rank] = time.perf_counter() - start
            time.sleep(_POLL_SECS)
        return secs
