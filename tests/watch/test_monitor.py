"""The monitor: it sees a run as it was, and the run is as if it was not there."""

import json
import logging
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from launching import launched, write
from problems import assert_bitwise, host_copy
from rank_problems import small_batch, small_loop, small_model

import fuelflow as ff
from fuelflow.run.watching import RunFacts
from fuelflow.watch import hub
from fuelflow.watch.record.reading import read_records
from fuelflow.watch.record.story import Story

SIZE, NUM_ROWS, EPOCHS = 16, 67, 3
STEPS = 5


def make_loader(**options: Any) -> ff.DataLoader:
    return ff.DataLoader(small_batch(NUM_ROWS), SIZE, seed=5, **options)


def make_trainer(
    monitor: Any = None, *, num_ranks: int = 0, epochs: int = EPOCHS, **options: Any
) -> ff.Trainer:
    return ff.Trainer(
        small_loop(num_ranks),
        small_model(),
        make_loader(),
        epochs=epochs,
        monitor=monitor,
        **options,
    )


def arrays_of(state: ff.TrainState) -> Any:
    return host_copy((state.params, state.opt_state, state.step, state.key))


def of_kind(records, kind):
    return [record for record in records if record["kind"] == kind]


@pytest.fixture
def quiet():
    """A monitor that shows nothing."""
    with ff.Monitor(display="none") as monitor:
        yield monitor


# With a trainer.


def test_the_epochs_seen_are_those_of_the_history(quiet):
    trained = make_trainer(quiet, eval_data=make_loader()).fit()

    seen = [record["metrics"] for record in of_kind(quiet.records, "epoch")]
    assert seen == [metrics.to_dict() for metrics in trained.history]


def test_the_last_step_of_the_last_epoch_is_seen_as_it_was(quiet):
    told = []
    loop = small_loop(0)
    state, loader = loop.init(small_model()), make_loader()
    for epoch in range(EPOCHS):
        for batch in loader.epoch(epoch):
            state, outcome = loop.step(state, batch)
            told.append(outcome)
    make_trainer(quiet, steps_per_call=1).fit()

    step = of_kind(quiet.records, "step")[-1]
    assert step["step"] == EPOCHS * STEPS
    assert (step["epoch"], step["epoch_step"]) == (EPOCHS - 1, STEPS)
    # To rounding, as the program that keeps an account is another one.
    assert step["loss"] == pytest.approx(told[-1].loss, rel=1e-6)
    assert step["grad_norm"] == pytest.approx(told[-1].grad_norm, rel=1e-6)
    assert step["lr"] == told[-1].lr
    assert step["metrics"] == pytest.approx(told[-1].metrics, rel=1e-6)


def test_the_last_step_of_an_epoch_is_timed_before_its_evaluation(quiet, monkeypatch):
    secs = 0.3

    class Slow:
        def __iter__(self):
            threading.Event().wait(secs)
            yield small_batch(8)

    monkeypatch.setattr(hub, "TICK_SECS", 60)  # it looks once, when all is over
    make_trainer(quiet, epochs=1, eval_data=Slow()).fit()

    (step,) = of_kind(quiet.records, "step")
    (epoch,) = of_kind(quiet.records, "epoch")
    assert step["step"] == STEPS
    assert epoch["time"] - step["time"] >= secs


def test_a_run_says_what_it_is(quiet):
    make_trainer(quiet, num_ranks=4, epochs=2).fit()

    run = quiet.records[0]
    assert (run["kind"], run["epochs"], run["steps_per_epoch"]) == ("run", 2, STEPS)
    assert (run["epoch"], run["step"]) == (0, 0)
    assert [rank["device"] for rank in run["ranks"]] == [
        f"cpu:{number}" for number in range(4)
    ]
    model = small_model()
    assert {param["name"]: tuple(param["shape"]) for param in run["params"]} == {
        name: np.shape(value) for name, value in model.items()
    }
    assert run["versions"]["jax"] == jax.__version__
    assert run["settings"]["data.batch_size"] == str(SIZE)
    assert run["settings"]["trainer.epochs"] == "2"
    json.dumps(quiet.records, allow_nan=False)


def test_every_compilation_is_seen_and_a_second_one_is_a_warning(quiet):
    loop = small_loop(0).replace()  # with nothing compiled yet
    batches = [small_batch(8), small_batch(12)]
    ff.Trainer(loop, small_model(), batches, epochs=1, monitor=quiet).fit()

    seen = of_kind(quiet.records, "compile")
    assert [each["program"] for each in seen] == [c.program for c in loop.compiles]
    assert [each["seconds"] for each in seen] == [c.seconds for c in loop.compiles]
    (event,) = of_kind(quiet.records, "event")
    assert (event["level"], event["what"]) == ("warning", "recompile")
    assert "[8," in event["text"]


def test_parameters_are_the_same_to_the_bit_and_nothing_more_compiles(
    quiet, tmp_path, compile_counter
):
    make_trainer(steps_per_call=2).fit()  # what is compiled once for all runs
    plain = make_trainer(steps_per_call=2)
    compile_counter.reset()
    expected = plain.fit()
    num_compiles = compile_counter.compiles
    sinks = [ff.sinks.Csv(tmp_path / "x.csv"), ff.sinks.TensorBoard(tmp_path)]
    with ff.Monitor(directory=tmp_path, sinks=sinks, display="none") as monitor:
        watched = make_trainer(monitor, steps_per_call=2)
        compile_counter.reset()
        trained = watched.fit()

    assert_bitwise(arrays_of(trained.state), arrays_of(expected.state))
    assert compile_counter.compiles == num_compiles
    assert len(trained.loop.compiles) == len(expected.loop.compiles)


def test_the_thread_that_trains_reads_no_outcome(quiet, monkeypatch):
    readers = set()
    realize = ff.StepOutcome.realize

    def watched(self):
        readers.add(threading.current_thread().name)
        return realize(self)

    make_trainer(epochs=1).fit()
    monkeypatch.setattr(ff.StepOutcome, "realize", watched)
    make_trainer(epochs=2).fit()
    without, readers = readers, set()
    make_trainer(quiet, epochs=2).fit()

    assert readers - without == {"fuelflow monitor"}


def test_a_step_that_is_not_finite_is_seen_and_raises_where_it_should(quiet):
    x = small_batch(NUM_ROWS)
    x["x"][40] = np.nan
    data = ff.DataLoader(x, SIZE, shuffle=False)
    trainer = ff.Trainer(small_loop(0), small_model(), data, epochs=1, monitor=quiet)
    with pytest.raises(ff.NonFiniteError):
        trainer.fit()

    end = of_kind(quiet.records, "end")[-1]
    assert end["reason"] == "error"
    assert end["text"].startswith("NonFiniteError: ")
    events = of_kind(quiet.records, "event")
    assert ("error", "stopped") in [(each["level"], each["what"]) for each in events]


def test_steps_left_out_are_an_event():
    x = small_batch(NUM_ROWS)
    x["x"][40] = np.nan
    data = ff.DataLoader(x, SIZE, seed=5)
    loop = small_loop(0).replace(nonfinite="skip")
    with ff.Monitor(display="none") as monitor:
        ff.Trainer(loop, small_model(), data, epochs=3, monitor=monitor).fit()

        steps = of_kind(monitor.records, "step")
        events = of_kind(monitor.records, "event")
    assert steps[-1]["num_skipped"] == 3
    assert all(event["what"] == "skipped" for event in events)


def test_a_step_that_was_left_out_is_no_update_done(quiet):
    bad = small_batch(SIZE)
    bad["x"][0] = np.nan
    loop = small_loop(0).replace(nonfinite="skip")
    data = [small_batch(SIZE), bad]
    trainer = ff.Trainer(loop, small_model(), data, epochs=2, monitor=quiet)
    state = trainer.fit().state

    last = of_kind(quiet.records, "step")[-1]
    assert (last["epoch"], last["epoch_step"]) == (1, 2)
    assert last["step"] == int(state.step) == 2
    assert last["num_skipped"] == 2


# Kept, stopped and gone on.


def test_records_lie_beside_the_checkpoints_and_go_on_there(tmp_path):
    def train(epochs, **options):
        with ff.Monitor(display="none") as monitor:
            trainer = make_trainer(
                monitor,
                epochs=epochs,
                checkpointer=ff.Checkpointer(tmp_path, every_steps=3),
                **options,
            )
            return trainer.fit(), monitor.records

    def is_over(history):
        return len(history) == 2

    first, _ = train(4, stop_when=is_over)
    second, records = train(4, resume=True)

    assert first.stopped_by == "stop_when"
    kept = read_records(tmp_path)
    assert [run["step"] for run in of_kind(kept, "run")] == [0, 2 * STEPS]
    assert [end["reason"] for end in of_kind(kept, "end")] == ["stop_when", "done"]
    for seen in (kept, records):  # also those of the process before
        assert [each["metrics"] for each in of_kind(seen, "epoch")] == [
            metrics.to_dict() for metrics in second.history
        ]
    events = {event["what"]: event for event in of_kind(kept, "event")}
    assert events["checkpoint"]["level"] == "info"
    assert "goes on after step 10, in epoch 2" in events["resumed"]["text"]


def test_a_run_that_goes_on_elsewhere_brings_its_history(tmp_path):
    checkpointer = ff.Checkpointer(tmp_path / "run")
    make_trainer(checkpointer=checkpointer, epochs=2).fit()
    got: list[Any] = []
    with ff.Monitor(
        directory=tmp_path / "new", sinks=[got.append], display="none"
    ) as monitor:
        trained = make_trainer(
            monitor,
            checkpointer=ff.Checkpointer(tmp_path / "run"),
            resume=True,
            epochs=3,
        ).fit()

    expected = [metrics.to_dict() for metrics in trained.history]
    kept = of_kind(read_records(tmp_path / "new"), "epoch")
    assert [each["metrics"] for each in kept] == expected
    assert [each["metrics"] for each in of_kind(got, "epoch")] == expected[2:]


def test_a_second_fit_goes_on_in_the_same_records(quiet):
    def is_over(history):
        return len(history) == 1

    trainer = make_trainer(quiet, stop_when=is_over)
    trainer.fit()
    trainer.fit()

    epochs = [each["metrics"]["epoch"] for each in of_kind(quiet.records, "epoch")]
    assert epochs == [0, 1, 2]
    assert [run["epoch"] for run in of_kind(quiet.records, "run")] == [0, 1]
    assert quiet.records[-1]["kind"] == "end"


# What goes wrong in it.


class Broken:
    """A watcher that fails, each time it is told something of one kind."""

    def __init__(self, name: str) -> None:
        self.calls: list[str] = []
        self._name = name

    def __getattr__(self, name: str) -> Any:
        def hear(*_: Any) -> None:
            self.calls.append(name)
            if name == self._name:
                raise RuntimeError("broken")

        return hear


@pytest.mark.parametrize(
    "name",
    ["open", "begin", "dispatched", "finished_steps", "finished_epoch", "end"],
)
def test_a_monitor_that_fails_is_told_of_once_and_the_run_goes_on(name, caplog):
    expected = make_trainer().fit()
    broken = Broken(name)
    trained = make_trainer(broken).fit()

    assert_bitwise(arrays_of(trained.state), arrays_of(expected.state))
    assert broken.calls[-1] == name
    (record,) = [each for each in caplog.records if "monitor failed" in each.message]
    assert record.levelno == logging.ERROR
    assert "RuntimeError: broken" in str(record.exc_text or record.exc_info)


def test_a_display_that_fails_is_given_up_and_the_rest_goes_on(
    monkeypatch, caplog, tmp_path
):
    class BrokenView:
        def show(self, story):
            raise RuntimeError("no such terminal")

        def close(self, story):
            pass

    monkeypatch.setattr("fuelflow.watch.monitor.choose_view", lambda _: BrokenView())
    with ff.Monitor(directory=tmp_path) as monitor:
        make_trainer(monitor).fit()

    assert len(of_kind(read_records(tmp_path), "epoch")) == EPOCHS
    assert len([each for each in caplog.records if "display" in each.message]) == 1


def test_a_sink_that_raises_is_an_event_and_a_warning_once(caplog, tmp_path):
    def sink(record):
        raise ConnectionError("no such host")

    with ff.Monitor(directory=tmp_path, sinks=[sink], display="none") as monitor:
        make_trainer(monitor, epochs=5).fit()

    warnings = [each for each in caplog.records if "no such host" in each.message]
    assert [each.levelno for each in warnings] == [logging.WARNING]
    events = of_kind(monitor.records, "event")
    assert [event["what"] for event in events] == ["sink"]
    assert len(of_kind(read_records(tmp_path), "epoch")) == 5


def test_a_sink_that_hangs_holds_up_neither_the_steps_nor_for_long_the_end():
    is_over = threading.Event()

    def sink(record):
        is_over.wait(300)

    make_trainer(epochs=1).fit()
    start = time.monotonic()
    with ff.Monitor(sinks=[sink], display="none") as monitor:
        trained = make_trainer(monitor).fit()
    secs = time.monotonic() - start
    is_over.set()

    assert len(trained.history) == EPOCHS
    assert secs < 20  # the sink would take minutes


HANGING = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import fuelflow as ff
monitor = ff.Monitor(sinks=[lambda record: threading.Event().wait()], display="none")
for number in monitor.track(range(3)):
    monitor.log({"loss": 1.0})
print("over", flush=True)
"""


def test_a_program_with_a_hanging_sink_ends_after_a_few_seconds():
    program = [sys.executable, "-c", HANGING, "tests"]
    running = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "over\n"
    start = time.monotonic()
    _, said = running.communicate(timeout=60)

    assert time.monotonic() - start < 15
    assert running.returncode == 0, said
    assert "did not end in time" in said


def test_a_full_disk_for_records_stops_nothing(caplog, tmp_path):
    (tmp_path / "records.jsonl").symlink_to("/dev/full")
    with ff.Monitor(directory=tmp_path, display="none") as monitor:
        trained = make_trainer(monitor).fit()

    assert len(trained.history) == EPOCHS
    warnings = [each for each in caplog.records if "JsonLines" in each.message]
    assert len(warnings) == 1
    assert "No space left" in warnings[0].message


def test_what_is_no_monitor_is_refused():
    with pytest.raises(TypeError, match="`monitor` must be a Monitor, got a str"):
        make_trainer("console")


@pytest.mark.parametrize(
    ("sinks", "told"),
    [
        (["x.csv"], "each of `sinks` must be callable with a record, got 'x.csv'"),
        ("x.csv", "`sinks` must be a list of sinks, got a str"),
        (3, "`sinks` must be a list of sinks, got a int"),
        (print, "got a builtin_function_or_method: write `[...]`"),
        ([ff.sinks.Csv], "got <class 'fuelflow.watch.sinks.csv.Csv'>"),
    ],
)
def test_what_is_no_sink_is_refused(sinks: Any, told: str):
    with pytest.raises(TypeError, match=re.escape(told)):
        ff.Monitor(sinks=sinks)


def test_what_is_no_display_or_flag_is_refused():
    not_display: Any = "curses"
    with pytest.raises(ValueError, match="`display` must be"):
        ff.Monitor(display=not_display)
    not_flag: Any = "no"
    with pytest.raises(TypeError, match="`all_processes` must be True or False"):
        ff.Monitor(all_processes=not_flag)


# What it does now.


def test_what_a_run_does_now_is_seen_while_it_does_it(monkeypatch):
    phases = ("compiling", "waiting for data", "evaluating")
    seen = {phase: threading.Event() for phase in phases}

    class View:
        def show(self, story):
            if story.phase in seen:
                seen[story.phase].set()

        def close(self, story):
            pass

    def loss_fn(params, batch):
        assert seen["compiling"].wait(60)
        return (params["w"] * batch["x"].sum(-1) - batch["y"]) ** 2

    class Data:
        def __init__(self, phase):
            self._phase = phase

        def __iter__(self):
            yield small_batch(8)
            assert seen[self._phase].wait(60)
            yield small_batch(8)

    monkeypatch.setattr("fuelflow.watch.monitor.choose_view", lambda _: View())
    with ff.Monitor() as monitor:
        ff.Trainer(
            ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1),
            {"w": np.float32(0)},
            Data("waiting for data"),
            epochs=1,
            eval_data=Data("evaluating"),
            monitor=monitor,
        ).fit()

    assert all(event.is_set() for event in seen.values())


# Loops written by hand.


def by_hand(monitor, *, epochs=2):
    loop, loader = small_loop(0), make_loader()
    state, losses = loop.init(small_model()), []
    for epoch in range(epochs):
        losses.append([])
        for batch in monitor.track(loader.epoch(epoch)):
            state, outcome = loop.step(state, batch)
            monitor.log(outcome, epoch_squared=epoch**2)
            losses[-1].append(outcome)
    return [[outcome.loss for outcome in each] for each in losses]


def test_a_loop_written_by_hand_has_the_means_of_each_pass(quiet):
    losses = by_hand(quiet)
    quiet.close()

    passes = of_kind(quiet.records, "pass")
    assert [(each["epoch"], each["step"]) for each in passes] == [
        (0, STEPS),
        (1, 2 * STEPS),
    ]
    for number, each in enumerate(passes):
        assert each["num_steps"] == STEPS
        assert each["means"]["loss"] == pytest.approx(np.mean(losses[number]))
        assert each["means"]["epoch_squared"] == number**2
    step = of_kind(quiet.records, "step")[-1]
    assert step["loss"] == losses[-1][-1]
    assert of_kind(quiet.records, "run")[0]["epochs"] is None
    assert of_kind(quiet.records, "end")[0]["reason"] == "done"


def test_the_length_of_what_is_tracked_is_kept(quiet):
    tracked = quiet.track([1, 2, 3])

    assert len(tracked) == 3
    assert list(tracked) == [1, 2, 3]
    with pytest.raises(TypeError, match="a generator has no length"):
        len(quiet.track(x for x in [1]))


def test_numbers_of_any_loop_may_be_logged(quiet):
    for number in quiet.track(range(1, 5)):
        loss = jax.numpy.float32(number)
        quiet.log({"loss": loss, "accuracy": 0.5} | ({"late": 7} if number > 2 else {}))
    quiet.close()

    (whole,) = of_kind(quiet.records, "pass")
    assert whole["means"] == {"loss": 2.5, "accuracy": 0.5, "late": 7.0}
    step = of_kind(quiet.records, "step")[-1]
    assert (step["loss"], step["step"]) == (4.0, 4)
    assert step["metrics"] == {"accuracy": 0.5, "late": 7.0}
    assert step["grad_norm"] is None


def test_many_steps_are_added_up_before_the_pass_ends(quiet, monkeypatch):
    monkeypatch.setattr("fuelflow.watch.passes._MAX_LOGGED", 8)
    monkeypatch.setattr(hub, "TICK_SECS", 0.001)
    for number in quiet.track(range(3000)):
        quiet.log({"loss": float(number)})
    quiet.close()

    (whole,) = of_kind(quiet.records, "pass")
    assert whole["means"]["loss"] == 1499.5
    assert whole["num_steps"] == 3000


def test_a_fused_run_may_be_logged_after_its_pass(quiet):
    loop, loader = small_loop(0), make_loader(resident=True)
    _, outcome = loop.run(
        loop.init(small_model()), quiet.track(loader.epoch(0)), steps_per_call=2
    )
    quiet.log(outcome)
    expected = np.mean(outcome.loss)
    quiet.close()

    (whole,) = of_kind(quiet.records, "pass")
    assert (whole["epoch"], whole["num_steps"]) == (0, STEPS)
    assert whole["means"]["loss"] == pytest.approx(expected)
    assert "run on resident data" in [each.program for each in loop.compiles]


def test_a_graph_may_be_watched(quiet):
    model = {"w": np.float32(0)}
    graph = ff.Graph(model, apply=lambda params, x: params["w"] * x)
    graph.set_optimizer(optax.sgd)
    graph.set_lr(0.01)
    x = np.arange(8, dtype=np.float32)
    graph.set_data_loader(ff.DataLoader({"x": x, "y": 2 * x}, 4), "x")
    losses = []
    for epoch in range(2):
        for batch in quiet.track(graph.epoch(epoch)):
            error = graph.forward_batch(batch) - batch["y"]
            outcome = graph.step((error**2).mean())
            quiet.log(outcome)
            losses.append(outcome)
    quiet.close()

    whole = of_kind(quiet.records, "pass")[-1]
    assert whole["means"]["loss"] == pytest.approx(
        np.mean([outcome.loss for outcome in losses[2:]])
    )


def test_what_cannot_be_logged_is_refused(quiet):
    with pytest.raises(TypeError, match="`outcome` must be a StepOutcome, or numbers"):
        quiet.log(0.5)


def test_an_interruption_is_how_it_ended():
    monitor = ff.Monitor(display="none")

    def train():
        with monitor:
            for _ in monitor.track(range(3)):
                monitor.log({"loss": 1.0})
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()

    assert of_kind(monitor.records, "end")[0]["reason"] == "interrupted"
    (whole,) = of_kind(monitor.records, "pass")
    assert whole["num_steps"] == 1


# Time.


def test_the_time_left_of_a_real_run_is_told_after_a_tenth(quiet):
    secs_per_batch, steps, epochs = 0.02, 11, 20

    class Slow:
        """Batches that take their time, by a clock that no other program slows."""

        def __len__(self):
            return steps

        def __iter__(self):
            yield small_batch(8)
            start = time.perf_counter()  # not to make up for compiling
            for number in range(1, steps):
                yield small_batch(8)
                left = start + number * secs_per_batch - time.perf_counter()
                threading.Event().wait(max(left, 0))

    ff.Trainer(
        small_loop(0),
        small_model(),
        Slow(),
        epochs=epochs,
        steps_per_call=1,
        monitor=quiet,
    ).fit()

    story, told, ends = Story(), [], []
    for record in quiet.records:
        story.add(record)
        if record["kind"] == "epoch":
            ends.append(record["time"])
            told.append(story.eta_secs(record["time"]))
    secs = np.median(np.diff(ends))  # an epoch may be held up by other programs
    left = secs * np.arange(epochs - 1, -1, -1)
    tenth = epochs // 10
    errors = np.abs(np.array(told[tenth:-1], float) / left[tenth:-1] - 1)
    assert np.median(errors) <= 0.1
    assert secs >= (steps - 1) * secs_per_batch


# Several processes.

PROCESSES = """
import sys
sys.path.insert(0, sys.argv[1])
import fuelflow as ff
ff.initialize()
import jax
from rank_problems import small_batch, small_loop, small_model
loop = small_loop(0).replace(mesh=ff.mesh())
data = ff.DataLoader(small_batch(64), 16)
told = f"> sink {jax.process_index()}" + chr(10)  # in one piece: a view prints too
sinks = [lambda record: print(told, end="", flush=True)]
monitor = ff.Monitor(
    directory=sys.argv[2], display="plain", all_processes=sys.argv[3] == "all",
    sinks=sinks)
ff.Trainer(loop, small_model(), data, epochs=2, monitor=monitor).fit()
monitor.close()
"""


@pytest.mark.parametrize("who", ["first", "all"])
def test_of_two_processes_the_first_one_writes_unless_all_are_to(
    who, tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    program = write(tmp_path / "program.py", PROCESSES)
    tests = str(Path(__file__).parents[1])
    directory = tmp_path / "run"
    status, out, err = launched(capsys, "-n", "2", program, tests, str(directory), who)

    assert status == 0, "\n".join(err)
    names = sorted(path.name for path in directory.iterdir())
    wanted = {"first": ["records.jsonl"], "all": ["records.1.jsonl", "records.jsonl"]}
    assert names == wanted[who]
    records = read_records(directory)
    assert [rank["process"] for rank in records[0]["ranks"]] == [0, 1]
    assert len(of_kind(records, "epoch")) == 2
    said = set(re.findall(r"> sink (\d)", "\n".join(out)))
    assert said == ({"0"} if who == "first" else {"0", "1"})


def test_facts_of_a_run_are_made_for_nobody_if_nobody_watches(monkeypatch):
    made = []
    monkeypatch.setattr(RunFacts, "__init__", lambda self, **_: made.append(self))
    make_trainer(epochs=1).fit()

    assert made == []
