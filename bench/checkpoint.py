"""What keeping a run costs: the training held up by a save, and the way back.

Three questions, at 1, 100 and 500 MB of state. How long does an asynchronous save hold
up the thread that trains, beside one that is waited for? What does a restore take,
beside the save that was waited for? What does a step take while a save is under way,
beside one with the disk at rest?

The state is that of Adam over one matrix, with parameters and two moments of a third
each. Before a timed save nothing is on its way: neither steps nor an earlier save. A
restore reads files that the system has in memory, and checks them; it ends when the
arrays are on the device. Steps are timed from the call of `save` until it is on disk,
and then as many with the disk at rest; each waits for its result. On a CPU the writing
and the steps share the cores, which they would not on an accelerator.

    python bench/checkpoint.py [--smoke] [--json PATH]
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import Row, Target, make_parser, make_row, report

import fuelflow as ff
from fuelflow.checkpoint.checkpointer import Checkpointer

A_TENTH = Target(text="≤ 10 %", max_ratio=0.1)
NO_TARGET = Target(text="none: what it takes")
COLUMNS = 256
BYTES_OF_A_VALUE = 3 * 4  # the parameter and two moments


@dataclass(frozen=True)
class Size:
    """How much to measure.

    Attributes:
        rounds: By the size of state in MB, the timed rounds, after one that is not.
    """

    rounds: Mapping[float, int]


FULL = Size(rounds={1: 40, 100: 10, 500: 5})
SMOKE = Size(rounds={1: 2})


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return (batch["x"] @ params["w"]).mean(-1) ** 2


class Run:
    """A run over a state of some size, and a checkpointer that keeps one save."""

    def __init__(self, directory: str, megabytes: float) -> None:
        num_rows = int(megabytes * 1e6 / BYTES_OF_A_VALUE / COLUMNS)
        random = np.random.default_rng(0)
        values = random.normal(size=(num_rows, COLUMNS)).astype(np.float32)
        self.model = {"w": jnp.asarray(values)}
        self.loop = ff.TrainingLoop(loss_fn, optax.adam, schedule=1e-3)
        self.state = self.loop.init(self.model)
        self.batch = {"x": random.normal(size=(4, num_rows)).astype(np.float32)}
        self.checkpointer = Checkpointer(directory, keep=1)
        self.checkpointer.prepare()

    def step(self) -> None:
        """One step, waited for."""
        self.state, _ = self.loop.step(self.state, self.batch)
        jax.block_until_ready(self.state)

    def save(self) -> None:
        """A save, not waited for."""
        self.checkpointer.save(self.state)

    def save_and_wait(self) -> None:
        """A save that is on disk."""
        self.save()
        self.checkpointer.wait()

    def restore(self) -> None:
        """The newest save, on the device."""
        restored = self.checkpointer.restore(self.loop, self.state)
        jax.block_until_ready(restored.state)


def secs_of(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def one_round(run: Run) -> dict[str, float]:
    """Seconds of everything, once."""
    run.step()
    secs = {"synchronous": secs_of(run.save_and_wait)}
    run.step()
    secs["asynchronous"] = secs_of(run.save)
    during = [secs_of(run.step)]
    while run.checkpointer.is_saving:
        during.append(secs_of(run.step))
    run.checkpointer.wait()
    secs["step while saving"] = statistics.mean(during)
    secs["step"] = statistics.mean(secs_of(run.step) for _ in during)
    secs["restore"] = secs_of(run.restore)
    return secs


def rows(size: Size) -> Iterator[Row]:
    for megabytes, num_rounds in size.rounds.items():
        with tempfile.TemporaryDirectory() as directory:
            run = Run(directory, megabytes)
            one_round(run)
            rounds = [one_round(run) for _ in range(num_rounds)]
        times = {name: [each[name] for each in rounds] for name in rounds[0]}
        state = f"{megabytes:g} MB of state"
        for name, ours, against, peer, target in (
            ("blocked by a save", "asynchronous", "waited for", "synchronous", A_TENTH),
            ("restore", "restore", "a save waited for", "synchronous", NO_TARGET),
            ("step while saving", "step while saving", "step", "step", NO_TARGET),
        ):
            names = (f"{name}, {state}", against)
            yield make_row(names, times[ours], times[peer], "ms", target)


def main() -> None:
    assert __doc__ is not None
    arguments = make_parser(__doc__.splitlines()[0], __file__).parse_args()
    size = SMOKE if arguments.smoke else FULL
    report(rows(size), arguments.json, ("orbax-checkpoint", "tensorstore"))


if __name__ == "__main__":
    main()
