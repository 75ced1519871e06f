"""Whole runs that end early and go on, shared by the tests of resuming.

As a program it begins such runs, and is killed in the last, or goes on with them::

    python run_problems.py begin|go_on DIRECTORY NAME...
"""

import os
import pickle
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from saved_problems import CASES, CLASSES, FEATURES, SIZE, arrays_by_name

import fuelflow as ff

EPOCHS = 2
NUM_ROWS = 4 * SIZE - 8  # three full batches, and a tail
STEPS = 4  # of an epoch


def rows(num_rows: int = NUM_ROWS) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(num_rows, FEATURES)).astype(np.float32)
    y = (x @ random.normal(size=(FEATURES, CLASSES))).argmax(-1).astype(np.int32)
    return {"x": x, "y": y}


def make_grain() -> Any:
    """Endless batches of grain's, which say where they are."""
    import grain

    data = rows(STEPS * SIZE)
    source = [{"x": x, "y": y} for x, y in zip(data["x"], data["y"], strict=True)]
    shuffled = grain.MapDataset.source(source).seed(4).shuffle().repeat()
    batches = shuffled.batch(SIZE, drop_remainder=True)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(batches.to_iter_dataset(options))


class Stream:
    """Batches that can be gone through again, in a number that is not known."""

    def __iter__(self) -> Any:
        data = rows(STEPS * SIZE)
        for start in range(0, STEPS * SIZE, SIZE):
            yield {name: part[start : start + SIZE] for name, part in data.items()}


@dataclass(frozen=True)
class Run:
    """A run: what is trained, on which data, and how many steps go in a dispatch."""

    case: str
    data: str
    steps_per_call: int

    def make_loop(self) -> ff.TrainingLoop:
        return CASES[self.case].make_loop(nonfinite="skip")

    def make_data(self) -> Any:
        if self.data == "grain":
            return make_grain()
        if self.data == "stream":
            return Stream()
        has_tail = self.case.startswith("dict")
        return ff.DataLoader(
            rows(NUM_ROWS if has_tail else STEPS * SIZE),
            SIZE,
            seed=3,
            resident=self.data == "resident",
        )

    def make_trainer(
        self,
        loop: ff.TrainingLoop,
        *,
        checkpointer: ff.Checkpointer | None = None,
        resume: bool = False,
        epochs: int = EPOCHS,
        **options: Any,
    ) -> ff.Trainer:
        return ff.Trainer(
            loop,
            CASES[self.case].make_model(),
            self.make_data(),
            epochs=epochs,
            eval_data=ff.DataLoader(rows(SIZE), SIZE, shuffle=False),
            steps_per_epoch=STEPS if self.data == "grain" else None,
            steps_per_call=self.steps_per_call,
            seed=7,
            checkpointer=checkpointer,
            resume=resume,
            **options,
        )


RUNS = {
    f"{case} {data} {steps_per_call}": Run(case, data, steps_per_call)
    for case, data, steps_per_call in (
        ("nnx-0", "resident", 1),
        ("nnx-8", "streaming", 1),
        ("linen-0", "streaming", 2),
        ("linen-0", "grain", 1),
        ("dict-0", "streaming", 1),
        ("dict-8", "resident", 2),
        ("dict-0", "grain", 2),
    )
}


def result_of(trained: ff.TrainedState) -> dict[str, Any]:
    """What must be the same: all arrays, and the history without its times."""
    return {
        "arrays": arrays_by_name(trained.state),
        "history": [untimed(metrics) for metrics in trained.history],
    }


def untimed(metrics: ff.EpochMetrics) -> dict[str, Any]:
    """The fields that no clock has a part in."""
    return {
        name: value
        for name, value in metrics.to_dict().items()
        if not name.endswith(("_ms", "_throughput"))
    }


def assert_same_result(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["history"] == expected["history"]
    assert set(actual["arrays"]) == set(expected["arrays"])
    for name, values in expected["arrays"].items():
        assert actual["arrays"][name].tobytes() == values.tobytes(), name


class Hooked:
    """A checkpointer that calls a function after each dispatch, before it looks."""

    def __init__(self, checkpointer: ff.Checkpointer, hook: Any) -> None:
        self._checkpointer = checkpointer
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpointer, name)

    def is_due(self, step: int, *, num_epochs: int | None = None) -> str | None:
        self._hook(step)
        return self._checkpointer.is_due(step, num_epochs=num_epochs)


def begin(directory: Path, names: list[str]) -> None:
    """Runs that are saved every three steps; all but the last are stopped."""
    for name in names:
        begin_one(directory, name, is_killed=name == names[-1])


def begin_one(directory: Path, name: str, *, is_killed: bool) -> None:
    checkpointer = ff.Checkpointer(directory / name, every_steps=3)

    def end(step: int) -> None:
        if step >= STEPS + 2 and not is_killed:
            trainer.stop()
        elif step > STEPS + 2:
            checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    hooked: Any = Hooked(checkpointer, end)
    trainer = RUNS[name].make_trainer(RUNS[name].make_loop(), checkpointer=hooked)
    trainer.fit()


def go_on(directory: Path, names: list[str]) -> None:
    """The same runs, resumed to their ends."""
    for name in names:
        loop = RUNS[name].make_loop()
        checkpointer = ff.Checkpointer(directory / name)
        before = checkpointer.latest()
        trained = (
            RUNS[name].make_trainer(loop, checkpointer=checkpointer, resume=True).fit()
        )
        compiles = [record.program for record in loop.compiles]
        told = {**result_of(trained), "from": before, "compiles": compiles}
        (directory / f"{name}.pickle").write_bytes(pickle.dumps(told))


if __name__ == "__main__":
    {"begin": begin, "go_on": go_on}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:])
