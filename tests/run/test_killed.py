"""A run that is killed at random moments ends as one that is not."""

import pickle
import random
import sys
import time
from pathlib import Path
from typing import Any

import killed_problem
import pytest
from launching import started
from run_problems import assert_same_result, result_of

from fuelflow.checkpoint.checkpointer import Checkpointer
from fuelflow.checkpoint.restoring import read_contents

NUM_KILLS, EPOCHS = 8, 10
MOST_SECS = 0.5


def go_on(directory: Path, epochs: int, moments: random.Random | None) -> str:
    """The last word of a process that goes on with the run.

    It is killed at a random moment after its first save, or once in a while before, if
    it is not done by then.
    """
    command = [sys.executable, killed_problem.__file__, str(directory), str(epochs)]
    before = names(directory)
    with started(*command) as process:
        words = [process.stdout.readline().strip()]
        assert words == ["begins"]
        if moments is not None:
            is_early = moments.random() < 0.2
            while not (is_early or process.poll() is not None):
                if names(directory) - before:
                    break
                time.sleep(0.01)
            time.sleep(moments.uniform(0, MOST_SECS))
            process.kill()
        words += process.stdout.read().split()
        assert process.wait() in ((0,) if moments is None else (0, -9)), words
        return words[-1]


def names(directory: Path) -> set[str]:
    return {path.name for path in (directory / "run").glob("*-step-*[0-9]")}


def whole_checkpoints(directory: Path) -> list[int]:
    """The steps of all that a reader takes for checkpoints, each read to the bit."""
    entries = Checkpointer(directory / "run")._directory.entries()
    return [int(read_contents(entry).arrays["step"]) for entry in entries]


def kill_and_go_on(directory: Path, epochs: int, num_kills: int, seed: int) -> Any:
    """The steps of the last checkpoint after each kill, and how many were in a save."""
    moments = random.Random(seed)
    steps, num_in_saves = [0], 0
    for _ in range(num_kills):
        go_on(directory, epochs, moments)
        left = [path.suffix for path in (directory / "run").glob("*")]
        num_in_saves += any(suffix in {".writing", ".removing"} for suffix in left)
        steps.append(max(whole_checkpoints(directory), default=0))
    return steps, num_in_saves


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_as_if_it_had_not_been(tmp_path: Path):
    steps, num_in_saves = kill_and_go_on(tmp_path, EPOCHS, NUM_KILLS, seed=0)
    last_word = go_on(tmp_path, EPOCHS, None)

    assert last_word == "done"
    assert steps == sorted(steps)  # it never went back behind a checkpoint
    assert len(set(steps)) > NUM_KILLS / 2
    assert num_in_saves > 0
    result = pickle.loads((tmp_path / "result").read_bytes())
    expected = killed_problem.make_trainer(None, EPOCHS).fit()
    assert_same_result(result, result_of(expected))
