"""A run that is told to end is kept, at an exact step, by all its processes."""

import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import launching
import numpy as np
import preempted_problem
import pytest
from launching import started
from preempted_problem import (
    EPOCHS,
    MOMENTS,
    NUM_BATCHES,
    STEPS_PER_CALL,
    make_trainer,
)
from rank_problems import small_batch, small_loop
from run_problems import assert_same_result, result_of

import fuelflow as ff

PROGRAM = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(launching.__file__).parent)!r})
import fuelflow as ff

ff.initialize()
import jax
from process_problems import make_loop
from rank_problems import small_batch, small_model

is_last = jax.process_index() == jax.process_count() - 1

def end(metrics):
    if metrics.epoch == 1 and is_last:
        os.kill(os.getpid(), signal.SIGTERM)

# More epochs than anybody waits for.
trained = ff.Trainer(
    make_loop(), small_model(), [small_batch(32, seed=seed) for seed in range(7)],
    epochs=1_000_000, metrics_fn=end, checkpointer=ff.Checkpointer(
        sys.argv[1], every_epochs=None
    ), steps_per_call=1, time_ranks=False,
).fit()
sys.stdout.write(f"\\n> {{trained.stopped_by}} {{int(trained.state.step)}}\\n")
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a process says for each moment, and its exit code; and their directory."""
    directory = tmp_path_factory.mktemp("runs")
    told = {}
    for moment in (*MOMENTS, "twice"):
        command = [sys.executable, preempted_problem.__file__, str(directory / moment)]
        with started(*command, moment, env=dict(os.environ)) as process:
            said, _ = process.communicate(timeout=launching.DEADLINE_SECS)
            told[moment] = process.returncode, said
    return told, directory


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_saves_the_run_at_an_exact_step(ended: Any, moment: str):
    told, directory = ended

    assert told[moment] == (0, f"SIGTERM {MOMENTS[moment]}\n")
    shutil.copytree(directory / moment, copy := directory / f"{moment} copy")
    checkpointer = ff.Checkpointer(copy)
    assert checkpointer.latest() == MOMENTS[moment]
    resumed = make_trainer(checkpointer=checkpointer, resume=True).fit()
    assert_same_result(result_of(resumed), result_of(make_trainer().fit()))
    assert resumed.history[-1].global_step == EPOCHS * NUM_BATCHES


def test_a_second_sigterm_ends_the_process(ended: Any):
    told, _ = ended

    assert told["twice"] == (-signal.SIGTERM, "")


@pytest.mark.parametrize(
    ("num_processes", "service"),
    [
        (2, "true"),
        pytest.param(2, "false", marks=pytest.mark.slow),
        pytest.param(4, "true", marks=pytest.mark.slow),
    ],
)
def test_processes_end_after_the_same_step(
    tmp_path: Path, num_processes: int, service: str
):
    program = launching.write(tmp_path / "program.py", PROGRAM)
    directory = tmp_path / "run"
    setting = {"JAX_ENABLE_PREEMPTION_SERVICE": service}
    done = launching.run(num_processes, program, str(directory), **setting)

    assert_ended_together(done, num_processes, ff.Checkpointer(directory).latest())


def assert_ended_together(done: Any, num_processes: int, step: int | None) -> None:
    """All processes of a run were ended by SIGTERM after a step, and went on well."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    said = [launching.said(number, lines) for number in range(num_processes)]
    assert said == [[f"SIGTERM {step}"]] * num_processes


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_four_processes_end_after_the_same_step_whatever_they_do(
    moment: str, tmp_path: Path
):
    directory = tmp_path / "run"
    done = launching.run(4, preempted_problem.__file__, str(directory), moment)

    checkpointer = ff.Checkpointer(directory)
    step = checkpointer.latest()
    assert_ended_together(done, 4, step)
    # The call after the one in which the signal was heard may be the last one.
    about = MOMENTS[moment]
    calls = (0, NUM_BATCHES - STEPS_PER_CALL) if "fused" in moment else (-1, 0, 1)
    assert step in [about + num_steps for num_steps in calls]
    restored = checkpointer.restore(small_loop(0), preempted_problem.small_model())
    assert int(restored.state.step) == step


def test_an_interrupted_fit_is_saved(tmp_path: Path):
    interrupt = preempted_problem.once(lambda: os.kill(os.getpid(), signal.SIGINT))
    make = partial(
        ff.Trainer,
        small_loop(0),
        preempted_problem.small_model(),
        preempted_problem.Batches(NUM_BATCHES, interrupt),
        epochs=EPOCHS,
        steps_per_call=1,
    )
    checkpointer = ff.Checkpointer(tmp_path)
    trainer = make(checkpointer=checkpointer)
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        trainer.fit()

    step = int(trainer.state.step)
    assert 8 <= step < EPOCHS * NUM_BATCHES
    assert checkpointer.latest() == step
    assert signal.getsignal(signal.SIGTERM) is before
    assert_same_result(result_of(trainer.fit()), result_of(make().fit()))


@pytest.mark.parametrize("is_running", [False, True])
def test_a_save_that_fails_fails_the_run(tmp_path: Path, is_running: bool):
    directory = tmp_path / "run"

    def vanish() -> None:
        shutil.rmtree(directory)
        directory.write_text("in the way")

    if not is_running:
        directory.write_text("in the way")
    trainer = ff.Trainer(
        small_loop(0),
        preempted_problem.small_model(),
        preempted_problem.Batches(20, vanish if is_running else lambda: None),
        epochs=1,
        steps_per_call=1,
        checkpointer=ff.Checkpointer(directory, every_epochs=None, every_steps=9),
    )

    with pytest.raises(ff.SaveError, match=str(directory)):
        trainer.run().join()

    step = int(trainer.state.step)
    assert (step >= 9) == is_running
    state, outcome = small_loop(0).step(trainer.state, small_batch())
    assert outcome.global_step == step + 1
    assert np.isfinite(np.asarray(state.params["w"])).all()


def test_sigterm_is_python_s_again_after_a_run(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)

    make_trainer(checkpointer=ff.Checkpointer(tmp_path)).fit()

    assert signal.getsignal(signal.SIGTERM) is before
