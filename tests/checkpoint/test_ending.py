"""A program that ends loses no save, and trouble with a directory ends with it."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import launching
import numpy as np
import optax
import pytest
from problems import assert_bitwise, host_copy
from rank_problems import small_batch, small_loop, small_model
from waiting_problem import STOPS_BEFORE

import fuelflow as ff
from fuelflow.checkpoint.background import Background

WAITS = {"wait", "join", "_wait_for_tstate_lock"}  # functions of Python's threading
# The save is still under way when the program's last line is done: it is large.
ENDING = f"""
import sys
sys.path.insert(0, {str(Path(launching.__file__).parent)!r})
import numpy as np, optax
import fuelflow as ff

loop = ff.TrainingLoop(lambda p, b: b["x"] * p["w"].sum(), optax.adam, schedule=0.1)
state = loop.init({{"w": np.ones((3000, 1000), np.float32)}})
checkpointer = ff.Checkpointer(sys.argv[1])
checkpointer.save(state)
print(checkpointer.is_saving)
"""
RUNNING = f"""
import sys
sys.path.insert(0, {str(Path(launching.__file__).parent)!r})
from waiting_problem import make_trainer
import fuelflow as ff

make_trainer("iterable", checkpointer=ff.Checkpointer(sys.argv[1])).run()
"""


def ended(program: str, tmp_path: Path) -> Any:
    """What becomes of a program that is given a directory of its own."""
    path = launching.write(tmp_path / "program.py", program)
    return subprocess.run(
        [sys.executable, path, str(tmp_path / "run")],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=launching.DEADLINE_SECS,
    )


starts_threads_to_the_end = pytest.mark.skipif(
    sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)),
    reason="these start no thread once the main program is done, which saving needs: "
    "https://github.com/python/cpython/issues/113964",
)


@starts_threads_to_the_end
def test_a_save_under_way_is_not_lost_when_the_program_ends(tmp_path: Path):
    done = ended(ENDING, tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    loop = ff.TrainingLoop(lambda p, b: b["x"] * p["w"].sum(), optax.adam, schedule=0.1)
    model = {"w": np.zeros((3000, 1000), np.float32)}
    restored = ff.Checkpointer(tmp_path / "run").restore(loop, model)
    assert np.asarray(restored.state.params["w"]).min() == 1


@starts_threads_to_the_end
def test_a_program_does_not_end_before_its_run(tmp_path: Path):
    done = ended(RUNNING, tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert ff.Checkpointer(tmp_path / "run").steps() == (12, 24)


INTERRUPTED = f"""
import sys
sys.path.insert(0, {str(Path(launching.__file__).parent)!r})
from waiting_problem import make_trainer, never
import fuelflow as ff

checkpointer = ff.Checkpointer(sys.argv[1])
make_trainer("iterable", "training", never, checkpointer=checkpointer).run()
"""
BUSY = f"""
import sys
sys.path.insert(0, {str(Path(launching.__file__).parent)!r})
from waiting_problem import make_endless_trainer

trainer = make_endless_trainer()
trainer.run()
"""


@starts_threads_to_the_end
def test_an_interrupt_of_a_program_that_only_waits_for_its_run_saves_it(tmp_path: Path):
    path = launching.write(tmp_path / "program.py", INTERRUPTED)
    command = [sys.executable, path, str(tmp_path / "run")]

    with launching.started(*command, env=dict(os.environ)) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=launching.DEADLINE_SECS)

    assert (process.returncode, said) == (-signal.SIGINT, "")
    assert ff.Checkpointer(tmp_path / "run").steps() == (STOPS_BEFORE["training"],)


@starts_threads_to_the_end
def test_a_second_interrupt_ends_a_program_that_only_waits_for_its_run(tmp_path: Path):
    path = launching.write(tmp_path / "program.py", BUSY)

    with launching.started(sys.executable, path, env=dict(os.environ)) as process:
        for said in ("ready\n", "waiting\n"):
            assert process.stdout.readline() == said
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=launching.DEADLINE_SECS)

    assert process.returncode == -signal.SIGINT


def test_an_interrupted_wait_for_work_does_not_take_it_for_done():
    main = threading.get_ident()
    has_started, may_end = threading.Event(), threading.Event()

    def interrupt_who_waits() -> None:
        has_started.wait(launching.DEADLINE_SECS)
        launching.wait_until(
            lambda: sys._current_frames()[main].f_code.co_name in WAITS
        )
        signal.pthread_kill(main, signal.SIGINT)
        may_end.wait(launching.DEADLINE_SECS)

    work = Background("interrupted")
    work.start(interrupt_who_waits)
    has_started.set()
    with pytest.raises(KeyboardInterrupt):
        work.wait()

    assert work.is_busy
    may_end.set()
    work.wait()
    assert not work.is_busy


@pytest.mark.parametrize("ends_by", ["itself", "stop_when"])
def test_a_fit_after_a_failed_last_save_makes_it(tmp_path: Path, ends_by: str):
    directory, away = tmp_path / "run", tmp_path / "away"

    def take_away(metrics: Any) -> None:
        if metrics.epoch == 1:
            checkpointer.wait()
            directory.rename(away)

    checkpointer = ff.Checkpointer(directory)
    trainer = ff.Trainer(
        small_loop(0),
        small_model(),
        [small_batch(seed=seed) for seed in range(3)],
        epochs=2,
        metrics_fn=take_away,
        stop_when=lambda history: ends_by == "stop_when" and len(history) == 2,
        checkpointer=checkpointer,
    )
    with pytest.raises(ff.SaveError, match="there is none yet"):
        trainer.fit()
    assert checkpointer.missed is not None
    away.rename(directory)
    trainer.fit()

    assert checkpointer.missed is None
    assert ff.Checkpointer(directory).steps() == (3, 6)
    trainer.fit()
    assert ff.Checkpointer(directory).steps() == (3, 6)
    restored = checkpointer.restore(small_loop(0), small_model())
    assert_bitwise(host_copy(restored.state.params), host_copy(trainer.state.params))
    assert restored.record.epoch == 2


def test_a_run_goes_on_by_saving_what_it_missed(tmp_path: Path):
    directory, away = tmp_path / "run", tmp_path / "away"

    def take_away(metrics: Any) -> None:
        if metrics.epoch == 0:
            directory.rename(away)

    checkpointer = ff.Checkpointer(directory, every_epochs=None, every_steps=3)
    trainer = ff.Trainer(
        small_loop(0),
        small_model(),
        [small_batch(seed=seed) for seed in range(3)],
        epochs=2,
        metrics_fn=take_away,
        checkpointer=checkpointer,
        steps_per_call=1,
    )
    with pytest.raises(ff.SaveError, match="there is none yet"):
        trainer.fit()
    step = int(trainer.state.step)
    away.rename(directory)
    trainer.fit()

    assert ff.Checkpointer(directory).steps()[0] == step


def test_a_directory_that_vanished_is_made_again_by_the_next_fit(tmp_path: Path):
    directory = tmp_path / "run"

    def vanish(metrics: Any) -> None:
        if metrics.epoch == 1:
            checkpointer.wait()
            shutil.rmtree(directory)

    checkpointer = ff.Checkpointer(directory)
    trainer = ff.Trainer(
        small_loop(0),
        small_model(),
        [small_batch(seed=seed) for seed in range(3)],
        epochs=4,
        metrics_fn=vanish,
        checkpointer=checkpointer,
    )
    with pytest.raises(ff.SaveError, match="there is none yet"):
        trainer.fit()
    assert not directory.exists()
    trained = trainer.fit()

    assert len(trained.history) == 4
    assert ff.Checkpointer(directory).latest() == 12


@pytest.mark.parametrize(
    ("directory", "error", "text"),
    [
        ("", ValueError, '`directory` must name a directory, got ""'),
        (b"run", TypeError, "`directory` must be a str or a Path, got b'run'"),
        (3, TypeError, "`directory` must be a str or a Path, got 3"),
    ],
)
def test_what_is_no_directory_is_refused(directory: Any, error: Any, text: str):
    with pytest.raises(error, match=text):
        ff.Checkpointer(directory)


def make_trainer(best: str, directory: Path, data: Any, **options: Any) -> ff.Trainer:
    checkpointer = ff.Checkpointer(directory, best=best, higher_is_better=True)
    return ff.Trainer(
        small_loop(0), small_model(), data, epochs=2, checkpointer=checkpointer,
        steps_per_call=1, **options,
    )  # fmt: skip


def test_best_by_an_evaluation_that_is_none_is_refused_at_once(tmp_path: Path):
    with pytest.raises(ValueError, match=r"`best` .* 'eval\.loss'.* no `eval_data`"):
        make_trainer("eval.loss", tmp_path, [small_batch()])


def test_best_by_a_metric_that_is_none_is_refused_after_the_first_step(tmp_path: Path):
    given = []

    def batches() -> Any:
        for seed in range(200):
            given.append(seed)
            yield small_batch(seed=seed)

    trainer = ff.Trainer(
        small_loop(0),
        small_model(),
        batches(),
        epochs=1,
        steps_per_call=1,
        checkpointer=ff.Checkpointer(tmp_path, best="acuracy", higher_is_better=True),
    )
    with pytest.raises(ValueError, match="`best` must be one of `loss`.*'acuracy'"):
        trainer.fit()

    assert given == [0]
