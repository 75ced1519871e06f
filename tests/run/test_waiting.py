"""A run that waits for data, or evaluates, ends at once where it is, and goes on."""

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import launching
import pytest
import waiting_problem
from launching import started
from problems import assert_bitwise, host_copy
from rank_problems import small_batch, small_loop, small_model
from run_problems import assert_same_result, result_of
from waiting_problem import EPOCHS, NUM_BATCHES, STOPS_BEFORE, make_trainer

import fuelflow as ff

SECS = 60  # to give up after
# What a run reads, which part of it waits, and the step and epochs it ends after.
WAITS = {
    ("iterable", "training"): (STOPS_BEFORE["training"], 0),
    ("iterator", "training"): (NUM_BATCHES + STOPS_BEFORE["training"], 1),
    ("loader", "training"): (STOPS_BEFORE["training"], 0),
    ("direct loader", "training"): (STOPS_BEFORE["training"], 0),
    ("iterable", "evaluating"): (NUM_BATCHES, 0),
}


class Gate:
    """Holds up whoever comes to it first, until it is let through."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.is_open = threading.Event()

    def __call__(self) -> None:
        if not self.is_reached.is_set():
            self.is_reached.set()
            assert self.is_open.wait(SECS)


class Ongoing:
    """Batches one after the other, which cannot say where they are."""

    def __init__(self, moment: Any, before: int = 5) -> None:
        self._moment, self._before, self._number = moment, before, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self._number == self._before:
            self._moment()
        self._number += 1
        return small_batch(seed=self._number - 1)


class Positioned(Ongoing):
    """Those that can."""

    def get_state(self) -> int:
        return self._number

    def set_state(self, state: int) -> None:
        self._number = state


def make_ongoing(data: Any, **options: Any) -> ff.Trainer:
    return ff.Trainer(
        small_loop(0), small_model(), data, epochs=2, steps_per_epoch=4, **options
    )


def trained_on(seeds: Any, steps_per_call: int = 4) -> Any:
    loop = small_loop(0)
    batches = [small_batch(seed=seed) for seed in seeds]
    state = loop.init(small_model())
    return host_copy(loop.run(state, batches, steps_per_call=steps_per_call)[0].params)


def is_waiting(trainer: ff.Trainer, num_given: int | None = None) -> bool:
    """Whether its newest thread waits for a batch, after so many."""
    batches = trainer._course._batches
    if batches is None or batches.is_abandoned or batches._waits_since is None:
        return False
    return num_given is None or batches.num_given == num_given


def is_left(name: str = "fuelflow trainer") -> bool:
    return any(thread.name == name for thread in threading.enumerate())


@pytest.mark.parametrize("wait", WAITS, ids=" ".join)
def test_sigterm_ends_a_run_that_waits(wait: tuple[str, str], tmp_path: Path):
    last_step, num_epochs = WAITS[wait]
    directory = tmp_path / "run"
    command = [sys.executable, waiting_problem.__file__, str(directory), *wait]

    with started(*command, env=dict(os.environ)) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=SECS)

    assert process.returncode == 0
    reason, step, num_done, _ = said.split()
    step = int(step)
    assert (reason, num_done) == ("SIGTERM", str(num_epochs))
    # A loader's own threads wait before the run does.
    assert step <= last_step if wait[0] == "loader" else step == last_step
    checkpointer = ff.Checkpointer(directory)
    assert checkpointer.latest() == step
    resumed = make_trainer(wait[0], checkpointer=checkpointer, resume=True).fit()
    assert_same_result(result_of(resumed), result_of(make_trainer(wait[0]).fit()))
    assert [metrics.epoch for metrics in resumed.history] == list(range(EPOCHS))


def launched(num_processes: int, program: str, *arguments: str) -> Any:
    """A program of several processes that ended well, and what each of them said."""
    done = launching.run(num_processes, program, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return done, [launching.said(number, lines) for number in range(num_processes)]


@pytest.mark.parametrize(
    ("num_processes", "wait"),
    [
        (2, ("iterable", "training")),
        pytest.param(2, ("iterable", "evaluating"), marks=pytest.mark.slow),
        pytest.param(4, ("iterator", "training"), marks=pytest.mark.slow),
    ],
)
def test_processes_that_all_wait_end_where_they_are_and_go_on_from_there(
    num_processes: int, wait: tuple[str, str], tmp_path: Path
):
    step, num_epochs = WAITS[wait]
    program, kind = waiting_problem.__file__, wait[0]
    directory = str(tmp_path / "run")
    _, ended = launched(num_processes, program, directory, *wait)
    assert ff.Checkpointer(directory).latest() == step
    _, resumed = launched(num_processes, program, directory, kind, "nothing")
    _, whole = launched(num_processes, program, str(tmp_path / "2"), kind, "nothing")

    for waiting, line in ended:
        assert waiting == "waiting"
        assert line.startswith(f"SIGTERM {step} {num_epochs} ")
    assert resumed == whole
    assert {line.split()[0] for (line,) in whole} == {"None"}


# One process waits for a batch, and the other goes on, or waits for the one after it.
APART = f"""
import sys, time
sys.path.insert(0, {str(Path(launching.__file__).parent)!r})
import fuelflow as ff

ff.initialize()
import jax, os, signal
import waiting_problem
from launching import report

directory, steps_per_call = sys.argv[1], int(sys.argv[2])
is_first = jax.process_index() == 0
waiting_problem.STOPS_BEFORE["training"] += is_first

def wait():
    if not is_first:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(6)

trained = waiting_problem.make_trainer(
    "iterable", "training", wait, steps_per_call=steps_per_call,
    checkpointer=ff.Checkpointer(directory),
).fit()
report(trained.stopped_by, int(trained.state.step))
"""


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_processes_that_wait_for_different_batches_end_where_they_can(
    steps_per_call: int, tmp_path: Path
):
    program = launching.write(tmp_path / "program.py", APART)
    directory = tmp_path / "run"
    done, said = launched(2, program, str(directory), str(steps_per_call))

    # Of a call of four neither has sent anything off: they leave where it began.
    step = STOPS_BEFORE["training"] + 1 if steps_per_call == 1 else 4
    assert said == [[f"SIGTERM {step}"]] * 2
    assert ff.Checkpointer(directory).latest() == step
    has_warned = (
        "process 1 waits for data and is asked to stop (SIGTERM)" in done.stderr
    )
    assert has_warned == (steps_per_call == 1)


ALONE = f"""
import sys, threading, time
sys.path.insert(0, {str(Path(launching.__file__).parent)!r})
import fuelflow as ff

ff.initialize()
import jax
import waiting_problem
from launching import report

is_first = jax.process_index() == 0

class Late(waiting_problem.Batches):
    def __iter__(self):
        for seed, batch in enumerate(super().__iter__()):
            if seed == 4 and not is_first:
                time.sleep(5)  # while the first one waits already, and says so
            yield batch

def wait():
    if is_first:
        trainer.stop()
    threading.Event().wait()

waiting_problem.Batches = Late
trainer = waiting_problem.make_trainer("iterable", "training", wait)
trained = trainer.fit()
report(trained.stopped_by, int(trained.state.step))
"""


@pytest.mark.slow
def test_one_process_stops_all_that_come_to_wait_one_after_the_other(tmp_path: Path):
    program = launching.write(tmp_path / "program.py", ALONE)
    _, said = launched(2, program)

    assert said == [[f"stop {STOPS_BEFORE['training']}"]] * 2


PLACES = f"""
import sys, time
sys.path.insert(0, {str(Path(launching.__file__).parent)!r})
import fuelflow as ff

ff.initialize()
import jax
from fuelflow.run.stopping import StopSign
from launching import report

sign = StopSign()
is_first = jax.process_index() == 0

def asks(place, secs=1.0):
    end = time.monotonic() + secs
    while not (is_up := sign.is_up_where(place)) and time.monotonic() < end:
        time.sleep(0.05)
    return is_up, sign.reason

sign.take_down()
if is_first:
    sign.put_up()
sign.confer()
while not sign.is_wished:
    time.sleep(0.05)
    sign.confer()
report(*(asks("here", 3.0) if is_first else asks("there", 0.5)))
report(*asks("there" if is_first else "elsewhere", 6.0))
report(*asks("at last", 30.0))
"""


def test_processes_stop_only_in_a_place_where_all_are(tmp_path: Path):
    program = launching.write(tmp_path / "program.py", PLACES)
    done, said = launched(2, program)

    assert said == [["False None", "False None", "True stop"]] * 2
    assert "process 0 waits for data and is asked to stop (stop)" in done.stderr


def test_an_interrupt_ends_a_run_that_waits(tmp_path: Path):
    directory = tmp_path / "run"
    wait = ("iterable", "training")
    command = [sys.executable, waiting_problem.__file__, str(directory), *wait]

    with started(*command, env=dict(os.environ)) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=SECS)

    assert process.returncode == -signal.SIGINT
    assert said.endswith("KeyboardInterrupt\n")
    assert ff.Checkpointer(directory).latest() == WAITS[wait][0]


ENDLESS = f"""
import sys
sys.path.insert(0, {str(Path(launching.__file__).parent)!r})
from waiting_problem import make_endless_trainer

trainer = make_endless_trainer()
trainer.fit()
"""


def test_a_second_interrupt_waits_for_nothing(tmp_path: Path):
    program = launching.write(tmp_path / "program.py", ENDLESS)

    with started(sys.executable, program, env=dict(os.environ)) as process:
        for said in ("ready\n", "waiting\n"):
            assert process.stdout.readline() == said
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECS)

    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("kind", ["iterable", "iterator", "loader", "direct loader"])
def test_a_run_that_was_left_waiting_goes_on(kind: str, steps_per_call: int):
    options: Any = {"steps_per_call": steps_per_call}
    gate = Gate()
    trainer = make_trainer(kind, "training", gate, **options)
    handle = trainer.run()
    assert gate.is_reached.wait(SECS)
    start = time.monotonic()
    handle.stop()
    stopped = handle.join(SECS)
    secs = time.monotonic() - start

    assert stopped.stopped_by == "stop"
    assert secs < 5  # a third of one, on a machine with time
    num_done = STOPS_BEFORE["training"] + NUM_BATCHES * (kind == "iterator")
    step, expected_step = int(stopped.state.step), num_done // steps_per_call
    expected_step *= steps_per_call
    # A loader's own threads come to the gate before the run does.
    is_ahead = kind == "loader"
    assert step <= expected_step if is_ahead else step == expected_step
    gate.is_open.set()
    going_on = trainer.fit()
    expected = make_trainer(kind, **options).fit()
    assert_same_result(result_of(going_on), result_of(expected))
    launching.wait_until(lambda: not is_left())


def test_the_batch_that_an_iterator_was_waited_for_is_not_lost():
    def ongoing() -> Any:
        for seed in range(8):
            if seed == 5:
                gate()
            yield small_batch(seed=seed)

    gate = Gate()
    trainer = ff.Trainer(
        small_loop(0), small_model(), ongoing(), epochs=2, steps_per_epoch=4,
        steps_per_call=1,
    )  # fmt: skip
    handle = trainer.run()
    assert gate.is_reached.wait(SECS)
    handle.stop()
    assert int(handle.join(SECS).state.step) == 5
    gate.is_open.set()
    loop = small_loop(0)
    expected, _ = loop.run(
        loop.init(small_model()), [small_batch(seed=seed) for seed in range(8)]
    )

    assert_bitwise(host_copy(trainer.fit().state.params), host_copy(expected.params))


@pytest.mark.parametrize("num_stops", [2, 3])
@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("kind", [Ongoing, Positioned])
def test_no_batch_is_lost_or_comes_twice_when_several_runs_wait_for_one(
    kind: Any, steps_per_call: int, num_stops: int
):
    gate = Gate()
    trainer = make_ongoing(kind(gate), steps_per_call=steps_per_call)
    for _ in range(num_stops):
        handle = trainer.run()
        assert gate.is_reached.wait(SECS)
        launching.wait_until(lambda: is_waiting(trainer))
        handle.stop()
        stopped = handle.join(SECS)
        assert int(stopped.state.step) == 4 + (steps_per_call == 1)
    gate.is_open.set()
    launching.wait_until(lambda: not is_left())
    trained = trainer.fit()

    expected = trained_on(range(8), steps_per_call)
    assert_bitwise(host_copy(trained.state.params), expected)
    assert [metrics.num_steps for metrics in trained.history] == [4, 4]


def test_batches_taken_for_one_dispatch_come_again_after_a_stop():
    gate = Gate()
    trainer = make_ongoing(Ongoing(gate, before=7), steps_per_call=4)
    handle = trainer.run()
    assert gate.is_reached.wait(SECS)
    handle.stop()
    assert int(handle.join(SECS).state.step) == 4
    gate.is_open.set()
    trainer.fit()

    assert_bitwise(host_copy(trainer.state.params), trained_on(range(8)))


def test_what_comes_again_comes_again_after_another_stop():
    gate = Gate()
    trainer = make_ongoing(Ongoing(gate, before=7), steps_per_call=4)
    for _ in range(3):
        handle = trainer.run()
        launching.wait_until(lambda: is_waiting(trainer, num_given=3))
        handle.stop()
        assert int(handle.join(SECS).state.step) == 4
    gate.is_open.set()
    trainer.fit()

    assert_bitwise(host_copy(trainer.state.params), trained_on(range(8)))


def test_a_new_process_is_told_of_batches_that_were_taken_in_vain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    gate = Gate()
    trainer = make_ongoing(
        Ongoing(gate, before=7),
        steps_per_call=4,
        checkpointer=ff.Checkpointer(tmp_path),
    )
    handle = trainer.run()
    assert gate.is_reached.wait(SECS)
    handle.stop()
    handle.join(SECS)
    gate.is_open.set()
    launching.wait_until(lambda: not is_left())
    going_on = (small_batch(seed=seed) for seed in range(7, 11))
    resumed = make_ongoing(
        going_on,
        steps_per_call=4,
        checkpointer=ff.Checkpointer(tmp_path),
        resume=True,
    ).fit()

    (record,) = [each for each in caplog.records if "goes on without" in each.message]
    assert "without 3 batches that its iterator had given" in record.message
    expected = trained_on([*range(4), *range(7, 11)])
    assert_bitwise(host_copy(resumed.state.params), expected)


def test_a_stopped_evaluation_is_done_again():
    calls = []

    def stop_once() -> None:
        calls.append(len(trainer.history))
        if len(calls) == 2:  # in the last evaluation of all
            trainer.stop()

    trainer = make_trainer("iterable", "evaluating", stop_once)
    stopped = trainer.fit()

    assert stopped.stopped_by == "stop"
    assert len(stopped.history) == EPOCHS - 1
    assert int(stopped.state.step) == EPOCHS * NUM_BATCHES
    assert_same_result(
        result_of(trainer.fit()), result_of(make_trainer("iterable").fit())
    )
    assert calls == [0, 1, 1]


def test_a_save_that_fails_is_told_when_a_run_is_left_waiting(tmp_path: Path):
    directory, gate = tmp_path / "run", Gate()
    trainer = make_trainer(
        "iterable", "training", gate, checkpointer=ff.Checkpointer(directory)
    )
    handle = trainer.run()
    assert gate.is_reached.wait(SECS)
    shutil.rmtree(directory)
    directory.write_text("in the way")
    handle.stop()

    with pytest.raises(ff.SaveError, match=str(directory)):
        handle.join(SECS)
    gate.is_open.set()
    directory.unlink()
    assert_same_result(
        result_of(trainer.fit()), result_of(make_trainer("iterable").fit())
    )
    assert ff.Checkpointer(directory).latest() == EPOCHS * NUM_BATCHES
