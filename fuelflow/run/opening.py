"""What comes before an epoch's first step."""

import time
from typing import Any

from fuelflow.run.rank_pass import RankPass
from fuelflow.step.batch import Pick
from fuelflow.step.program import CompileLog
from fuelflow.step.programs import Programs
from fuelflow.step.state import TrainState, evolve


class Opening:
    """What is done before an epoch's first step, once its batch is there.

    Attributes:
        secs: How long that took, tracing and compiling apart.
    """

    def __init__(
        self, rank_pass: RankPass, log: CompileLog, num_tail_rows: int
    ) -> None:
        self.secs = 0.0
        self._num_tail_rows = num_tail_rows
        self._rank_pass = rank_pass
        self._log = log

    def __call__(self, programs: Programs, state: TrainState, batch: Any) -> TrainState:
        """The state with an account of nothing, unless it has one that goes on.

        Raises:
            ValueError: If the ranks will not be able to take the epoch's last batch.
        """
        if state.sums is not None:
            return state
        start, num_compiles = time.perf_counter(), len(self._log.records)
        tracing = programs.secs_tracing
        if not isinstance(batch, Pick):
            batch = programs.placed(batch)
        if self._num_tail_rows:
            programs.require_tail(state, batch, self._num_tail_rows)
        self._rank_pass.run(programs, state, batch)
        state = evolve(state, sums=programs.zero_sums())
        made = self._log.records[num_compiles:]
        secs = time.perf_counter() - start - (programs.secs_tracing - tracing)
        self.secs = secs - sum(record.seconds for record in made)
        return state
