"""A run that is stopped or killed goes on as if nothing had happened."""

import pickle
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import run_problems
from run_problems import RUNS, STEPS, assert_same_result, result_of

import fuelflow as ff
from fuelflow.testing import assert_resumes_exactly

# Of each kind of model, of data, and of ranks.
FRESH = (
    "nnx-0 resident 1",
    "nnx-8 streaming 1",
    "linen-0 grain 1",
    "dict-8 resident 2",
)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_exactly_wherever_it_is_stopped(name: str):
    run = RUNS[name]
    # The first step, the last full one, the tail, and the first of the next epoch; a
    # dispatch of two goes on to the second.
    steps = [1, 3, 4, 5] if run.steps_per_call == 1 else [1, 3, 5]

    assert_resumes_exactly(partial(run.make_trainer, run.make_loop()), at_steps=steps)


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, run_problems.__file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Told by a process that went on with the runs of one that was killed."""
    directory = tmp_path_factory.mktemp("runs")
    begun = in_a_process("begin", str(directory), *FRESH)
    assert begun.returncode == -signal.SIGKILL, begun.stderr
    done = in_a_process("go_on", str(directory), *FRESH)
    assert done.returncode == 0, done.stderr
    return {
        name: pickle.loads(Path(directory, f"{name}.pickle").read_bytes())
        for name in FRESH
    }


@pytest.mark.parametrize("name", FRESH)
def test_a_fresh_process_goes_on_with_a_run_to_the_same_bits(resumed: Any, name: str):
    told = resumed[name]
    expected = RUNS[name].make_trainer(RUNS[name].make_loop()).fit()

    assert_same_result(told, result_of(expected))
    # Those that were stopped were saved there; the one that was killed, before.
    assert told["from"] == STEPS + 2


@pytest.mark.parametrize("name", FRESH)
def test_going_on_compiles_each_program_once(resumed: Any, name: str):
    compiles = resumed[name]["compiles"]

    assert "evaluate" in compiles
    assert len(compiles) == len(set(compiles))


def test_a_stream_goes_on_after_what_proves_to_be_its_last_batch(tmp_path: Path):
    run = run_problems.Run("dict-0", "stream", 1)

    assert_resumes_exactly(
        partial(run.make_trainer, run.make_loop()), at_steps=[STEPS - 1, STEPS]
    )


def test_a_run_that_is_over_is_not_run_again(tmp_path: Path):
    run = RUNS["dict-0 streaming 1"]
    loop = run.make_loop()
    trained = run.make_trainer(loop, checkpointer=ff.Checkpointer(tmp_path)).fit()

    again = run.make_trainer(
        loop, checkpointer=ff.Checkpointer(tmp_path), resume=True
    ).fit()

    assert_same_result(result_of(again), result_of(trained))
    assert again.history == trained.history  # times and all
