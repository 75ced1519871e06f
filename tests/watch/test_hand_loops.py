"""Loops written by hand: what goes wrong in them, and how they end."""

import logging
import subprocess
import sys
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rank_problems import small_batch, small_loop, small_model

import fuelflow as ff
from fuelflow.watch.record.reading import read_records


@pytest.fixture
def quiet():
    """A monitor that shows nothing."""
    with ff.Monitor(display="none") as monitor:
        yield monitor


def of_kind(records, kind):
    return [record for record in records if record["kind"] == kind]


def loader():
    return ff.DataLoader(small_batch(67), 16, seed=5)


# What is logged.


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("hello", "a str"),
        (None, "a NoneType"),
        (1 + 2j, "a complex"),
        ({"a": 1}, "a dict"),
        (np.zeros((2, 3)), r"an array of float64 \[2, 3\]"),
        (np.zeros(0), r"an array of float64 \[0\]"),
        (jnp.zeros((), jnp.complex64), r"an array of complex64 \[\]"),
        (np.array("x"), r"an array of <U1 \[\]"),
    ],
)
def test_what_is_no_number_is_refused_before_anything_is_noted(quiet, value, kind):
    with pytest.raises(TypeError, match=f"`loss` must be a number.*got {kind}$"):
        quiet.log({"good": 1.0, "loss": value})
    with pytest.raises(TypeError, match=f"`loss` must be a number.*got {kind}$"):
        quiet.log({"good": 1.0}, loss=value)
    quiet.close()

    assert quiet.records == []


def test_a_name_that_is_no_string_is_refused(quiet):
    names: dict = {1: 2.0}
    with pytest.raises(TypeError, match="named by strings, got 1 of type int"):
        quiet.log(names)


def test_numbers_of_every_kind_are_logged(quiet):
    numbers = {
        "int": 2,
        "bool": True,
        "float32": np.float32(2.5),
        "bfloat16": jnp.bfloat16(1.5),
        "row": np.array([1.0, 2.0]),
        "flag": jnp.array([True, False]),
    }
    for _ in quiet.track([0]):
        quiet.log(numbers)
        numbers["int"] = 7  # as it was is what was logged
    quiet.close()

    (whole,) = of_kind(quiet.records, "pass")
    assert whole["means"] == {
        "int": 2,
        "bool": 1,
        "float32": 2.5,
        "bfloat16": 1.5,
        "row": 1.5,
        "flag": 0.5,
    }


class Unreadable:
    """A number of another library, that breaks when it is read."""

    def __float__(self):
        raise OSError("its device is lost")


def gone():
    array = jnp.float32(1.0)
    array.delete()
    return array


@pytest.mark.parametrize("make", [Unreadable, gone])
def test_what_cannot_be_read_is_left_out_with_one_warning(quiet, make, caplog):
    for _ in range(2):
        for number in quiet.track(range(4)):
            quiet.log({"loss": make() if number == 3 else float(number)})
    quiet.close()

    passes = of_kind(quiet.records, "pass")
    assert [each["means"] for each in passes] == [{"loss": 1.0}] * 2
    (event,) = of_kind(quiet.records, "event")
    assert (event["level"], event["what"]) == ("warning", "logged")
    assert of_kind(quiet.records, "end")[0]["reason"] == "done"
    loud = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert [each.message for each in loud] == [event["text"]]


def test_two_fused_runs_that_are_logged_without_track_count_their_steps(quiet):
    loop, data = small_loop(0), loader()
    state = loop.init(small_model())
    for epoch in range(2):
        state, outcome = loop.run(state, data.epoch(epoch), steps_per_call=2)
        assert outcome.num_steps == 5
        quiet.log(outcome)
        assert len(outcome.loss) == outcome.num_steps == 5
    quiet.close()

    (whole,) = of_kind(quiet.records, "pass")
    assert (whole["num_steps"], whole["step"]) == (10, 10)


# What is tracked.


def test_track_inside_track_is_refused(quiet):
    def train():
        for _ in quiet.track([1, 2, 3]):
            for value in quiet.track([10.0, 20.0]):
                quiet.log({"eval": value})

    with pytest.raises(RuntimeError, match="pass 0 was ended by another `track`"):
        train()


def test_a_pass_that_is_broken_off_may_be_followed_by_another(quiet):
    broken_off = quiet.track([1, 2, 3])
    assert next(iter(broken_off)) == 1
    assert list(quiet.track([4, 5])) == [4, 5]
    quiet.close()

    assert [each["num_steps"] for each in of_kind(quiet.records, "pass")] == [1, 2]


def test_a_tracked_epoch_of_a_loader_or_a_graph_says_how_long_it_is(quiet):
    graph = ff.Graph({"w": np.float32(0)}, apply=lambda params, x: params["w"] * x)
    graph.set_optimizer(optax.sgd(0.1))
    graph.set_data_loader(loader(), "x")

    assert len(quiet.track(loader().epoch(0))) == 5
    epoch = loader().epoch(0)
    next(epoch)
    assert len(quiet.track(epoch)) == 4
    epoch.close()
    with graph.epoch(0) as batches:
        assert len(quiet.track(batches)) == 5
        assert batches


def test_tracked_batches_are_a_context_that_ends_their_pass(quiet):
    with quiet.track(loader().epoch(0)) as batches:
        next(batches)
        assert any(
            "prefetch" in t.name or "fuelflow" in t.name for t in threading.enumerate()
        )
    assert list(batches) == []
    quiet.log({"loss": 2.0})
    quiet.close()

    assert [each["num_steps"] for each in of_kind(quiet.records, "pass")] == [1, 1]


# How it ends.

LOOP = """
import signal, sys, threading
import fuelflow as ff
{before}
monitor = ff.Monitor(directory=sys.argv[1], display="plain")
{after}
for number in monitor.track(range(5)):
    monitor.log({{"loss": 1.0}})
    if number == 3:
        {ending}
"""
HOOK = "sys.excepthook = lambda *_: print('my own hook', file=sys.stderr)"


def ended(directory, ending, *, before="", after="", options=()):
    """How a program's record ends, and what it wrote."""
    source = LOOP.format(ending=ending, before=before, after=after)
    done = subprocess.run(
        [sys.executable, *options, "-c", source, str(directory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    (end,) = of_kind(read_records(directory), "end")
    return end["reason"], end["text"], done.stdout


def test_an_error_that_nobody_catches_is_the_end_and_shown_before_it(tmp_path):
    reason, text, said = ended(tmp_path, "raise ValueError('boom')")

    assert (reason, text) == ("error", "ValueError: boom")
    assert said.index("failed: 1 epoch") < said.index("Traceback")
    assert said.rstrip().endswith("ValueError: boom")


def test_an_interruption_that_nobody_catches_is_the_end(tmp_path):
    ending = "signal.raise_signal(signal.SIGINT)"
    reason, _, said = ended(tmp_path, ending)

    assert reason == "interrupted"
    assert said.rstrip().endswith("KeyboardInterrupt")


def test_a_hook_that_was_there_is_asked_too(tmp_path):
    reason, _, said = ended(tmp_path, "raise ValueError('boom')", before=HOOK)

    assert reason == "error"
    assert "my own hook" in said
    assert "Traceback" not in said


def test_a_hook_that_came_later_hides_no_error(tmp_path):
    ending = f"{HOOK}; raise ValueError('boom')"
    reason, text, said = ended(tmp_path, ending)

    assert (reason, text) == ("error", "ValueError: boom")
    assert "my own hook" in said


def test_a_loop_that_ends_well_is_done(tmp_path):
    assert ended(tmp_path, "pass")[0] == "done"


def test_at_a_prompt_an_error_ends_nothing(tmp_path):
    reason, _, said = ended(tmp_path, "raise ValueError('boom')", options=["-i"])

    assert reason == "done"
    assert "ValueError: boom" in said


def test_the_hook_is_put_back(quiet):
    before = sys.excepthook
    quiet.log({"loss": 1.0})
    assert sys.excepthook is not before
    quiet.close()

    assert sys.excepthook is before


# Runs of trainers.


def test_a_second_run_at_once_is_not_watched_and_the_first_one_is(quiet, caplog):
    has_begun, may_end = threading.Event(), threading.Event()

    def hold(_):
        has_begun.set()
        may_end.wait(60)

    def trainer(**options):
        return ff.Trainer(
            small_loop(0), small_model(), loader(), monitor=quiet, **options
        )

    handle = trainer(epochs=2, metrics_fn=hold).run()
    assert has_begun.wait(60)
    trainer(epochs=1).fit()
    may_end.set()
    trained = handle.join()

    seen = [each["metrics"] for each in of_kind(quiet.records, "epoch")]
    assert seen == [metrics.to_dict() for metrics in trained.history]
    loud = [each for each in caplog.records if "watch" in each.message]
    (warning,) = loud
    assert warning.message.startswith(
        "this run is not watched: a monitor can watch one"
    )
    assert warning.exc_info is None


def test_a_stop_without_a_checkpointer_saves_nothing_and_says_so(quiet):
    trainer = ff.Trainer(
        *(small_loop(0), small_model(), loader()),
        epochs=9,
        monitor=quiet,
        metrics_fn=lambda _: trainer.stop(),
    )
    trainer.fit()

    assert [each["what"] for each in of_kind(quiet.records, "event")] == ["stopped"]


def test_a_stop_with_a_checkpointer_is_said_to_be_saved(quiet, tmp_path):
    trainer = ff.Trainer(
        *(small_loop(0), small_model(), loader()),
        epochs=9,
        monitor=quiet,
        checkpointer=ff.Checkpointer(tmp_path, every_epochs=100),
        metrics_fn=lambda _: trainer.stop(),
    )
    trainer.fit()

    texts = [each["text"] for each in of_kind(quiet.records, "event")]
    assert "saved, as the run was stopped" in texts


def test_the_class_is_no_monitor():
    kind: Any = ff.Monitor
    with pytest.raises(TypeError, match="not its class"):
        ff.Trainer(small_loop(0), small_model(), loader(), epochs=1, monitor=kind)


def test_an_epoch_of_another_kind_is_refused(quiet):
    epochs: list = ["a", 1.5]
    for epoch in epochs:
        with pytest.raises(TypeError, match="`epoch` must be an integer"):
            quiet.track([1], epoch=epoch)


def test_a_place_that_is_none_is_refused(quiet):
    wrong: list = ["a", 3]
    with pytest.raises(TypeError, match="`port` must be an integer"):
        quiet.serve(port=wrong[0])
    with pytest.raises(TypeError, match="`host` must be a name"):
        quiet.serve(host=wrong[1])
    with pytest.raises(ValueError, match="`port` must be at most 65535, got 70000"):
        quiet.serve(port=70_000)
