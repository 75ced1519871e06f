"""Sinks: what they write can be read, whatever happens to them meanwhile."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pandas as pd
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from watched_stories import (
    epoch_record,
    given,
    records_of,
    run_record,
    step_record,
)

import fuelflow as ff
from fuelflow.watch.record.reading import read_records
from fuelflow.watch.record.records import Record
from fuelflow.watch.sinks.delivery import Delivery


def kinds_of(records):
    return [record["kind"] for record in records]


# JSON lines.


def test_json_lines_read_back_as_they_were(tmp_path):
    records = [each for each in records_of(3) if each["kind"] != "phase"]
    records.append(step_record(3, 40, 340, loss=math.nan, grad_norm=math.inf))
    given(ff.sinks.JsonLines(tmp_path / "a" / "records.jsonl"), records)

    assert read_records(tmp_path / "a") == records
    assert math.isnan(read_records(tmp_path / "a")[-1].scalars["loss"])


def test_a_phase_is_not_written(tmp_path):
    given(ff.sinks.JsonLines(tmp_path), records_of(1))

    assert "phase" not in kinds_of(read_records(tmp_path))


KILLED = """
import sys
from fuelflow.watch.sinks.jsonl import JsonLines
sink = JsonLines(sys.argv[1])
number = 0
while True:
    sink({"kind": "step", "step": number, "filling": "x" * (number % 5000)})
    print(number, flush=True)
    number += 1
"""


def test_a_writer_that_is_killed_leaves_every_earlier_record(tmp_path):
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    while int(writer.stdout.readline()) < 500:
        pass
    os.kill(writer.pid, signal.SIGKILL)
    said = writer.communicate()[0].split()

    steps = [record["step"] for record in read_records(tmp_path)]
    last = int(said[-1]) if said else 500
    assert len(steps) > last
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize(
    "torn", [b'{"kind":"step","st', b'{"kind":"ep\xc3', b"{", b"\0\0\0"]
)
def test_a_torn_last_line_is_passed_over_and_mended(tmp_path, torn):
    path = tmp_path / "records.jsonl"
    given(ff.sinks.JsonLines(tmp_path), [run_record()])
    with path.open("ab") as file:
        file.write(torn)

    assert kinds_of(read_records(tmp_path)) == ["run"]
    given(ff.sinks.JsonLines(tmp_path), [epoch_record(0)])
    assert kinds_of(read_records(path)) == ["run", "epoch"]
    for line in path.read_text().splitlines():
        json.loads(line)


def test_a_last_line_that_lacks_its_end_alone_is_kept(tmp_path):
    path = tmp_path / "records.jsonl"
    given(ff.sinks.JsonLines(tmp_path), [run_record(), epoch_record(0)])
    path.write_bytes(path.read_bytes()[:-1])
    given(ff.sinks.JsonLines(tmp_path), [epoch_record(1)])

    assert kinds_of(read_records(tmp_path)) == ["run", "epoch", "epoch"]


def test_a_file_that_gets_too_large_loses_steps_and_nothing_else(tmp_path):
    sink = ff.sinks.JsonLines(tmp_path, max_bytes=60_000)
    sink(run_record())
    for number in range(2000):
        sink(step_record(number // 200, number % 200 + 1, number + 1))
        if number % 200 == 199:
            sink(epoch_record(number // 200))
        assert (tmp_path / "records.jsonl").stat().st_size <= 60_000
    sink.close()

    records = read_records(tmp_path)
    steps = [record["step"] for record in records if record["kind"] == "step"]
    assert kinds_of(records).count("epoch") == 10
    assert kinds_of(records).count("run") == 1
    assert steps == sorted(steps)
    assert 1 in steps
    assert steps[-1] == 2000
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_epochs_are_thinned_out_when_there_is_nothing_else_left(tmp_path):
    sink = ff.sinks.JsonLines(tmp_path, max_bytes=30_000)
    given(sink, [run_record(), *(epoch_record(number) for number in range(200))])

    records = read_records(tmp_path)
    epochs = [each["metrics"]["epoch"] for each in records if each["kind"] == "epoch"]
    assert records[0]["kind"] == "run"
    assert epochs == sorted(epochs)
    assert epochs[-1] == 199
    assert (tmp_path / "records.jsonl").stat().st_size <= 30_000


FULL_DISK = """
import resource, signal, sys
from fuelflow.watch.sinks import Csv, JsonLines, Record
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
kind, path = sys.argv[1:]
sink = JsonLines(path) if kind == "json" else Csv(path, kinds="step")

def put(step):
    sink(Record(kind="step", time=0.0, epoch=0, step=step, metrics={}, memory=[],
                host={}, loss=1 / 3))

infinite = resource.RLIM_INFINITY
put(0)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, infinite))
num_failed = 0
for step in range(1, 100):
    try:
        put(step)
    except OSError:
        num_failed += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (infinite, infinite))
put(100)
print(num_failed)
"""


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_a_full_disk_tears_no_line_and_later_records_follow(tmp_path, kind):
    path = tmp_path / "file.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, kind, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = path.read_text().splitlines()
    num_kept = 100 - int(done.stdout)
    assert 1 < num_kept < 20
    if kind == "json":
        steps = [json.loads(line)["step"] for line in lines]
    else:
        steps = pd.read_csv(path)["step"].tolist()
    assert steps == [*range(num_kept), 100]


def test_json_lines_load_in_pandas(tmp_path):
    given(ff.sinks.JsonLines(tmp_path), records_of(2))
    table = pd.read_json(tmp_path / "records.jsonl", lines=True)

    losses = table[table.kind == "step"].set_index("step").loss
    assert losses[10] == pytest.approx(step_record(0, 10, 10)["loss"])


def test_too_small_a_file_is_refused():
    with pytest.raises(ValueError, match="`max_bytes` must be at least 10000, got 10"):
        ff.sinks.JsonLines("x", max_bytes=10)


# CSV.


def test_csv_has_a_row_for_each_epoch_and_loads_in_pandas(tmp_path):
    path = tmp_path / "epochs.csv"
    given(ff.sinks.Csv(path), records_of(4))
    table = pd.read_csv(path)

    assert table.epoch.tolist() == [0, 1, 2, 3]
    assert table.step.tolist() == [100, 200, 300, 400]
    for epoch in range(4):
        metrics = epoch_record(epoch)["metrics"]
        assert table.loss[epoch] == metrics["avg_loss"]
        assert table["eval/accuracy"][epoch] == metrics["evaluation"]["accuracy"]


def test_csv_may_have_steps_and_epochs_with_blanks_for_what_is_absent(tmp_path):
    path = tmp_path / "all.csv"
    given(ff.sinks.Csv(path, kinds=("step", "epoch")), records_of(2, every=50))
    table = pd.read_csv(path)

    steps, epochs = table[table.kind == "step"], table[table.kind == "epoch"]
    assert steps.step.tolist() == [50, 100, 150, 200]
    assert epochs.step.tolist() == [100, 200]
    assert list(map(math.isnan, steps["eval/loss"])) == [True] * 4
    assert list(map(math.isnan, epochs["grad_norm"])) == [True] * 2
    assert list(map(math.isnan, epochs["eval/loss"])) == [False] * 2


def test_a_column_that_comes_later_is_blank_before(tmp_path):
    path = tmp_path / "steps.csv"
    sink = ff.sinks.Csv(path, kinds="step")
    metrics = {"top, five": 0.5}
    given(sink, [step_record(0, 1, 1, metrics={}), step_record(0, 2, 2)])
    given(sink, [step_record(0, 3, 3, metrics=metrics, loss=math.nan)])
    table = pd.read_csv(path)

    assert table.step.tolist() == [1, 2, 3]
    assert table.accuracy.isna().tolist() == [True, False, True]
    assert table["top, five"].tolist()[2] == 0.5
    assert path.read_text().splitlines()[3].split(",")[4] == "nan"


def test_a_run_that_goes_on_adds_to_the_file_and_drops_what_is_done_anew(tmp_path):
    path = tmp_path / "epochs.csv"
    given(ff.sinks.Csv(path), records_of(3))
    again = [run_record(epoch=2, step=200), epoch_record(2), epoch_record(3)]
    given(ff.sinks.Csv(path), again)

    assert pd.read_csv(path).epoch.tolist() == [0, 1, 2, 3]
    given(ff.sinks.Csv(path), [run_record(), epoch_record(0)])
    assert pd.read_csv(path).epoch.tolist() == [0]


def test_an_unknown_kind_of_row_is_refused():
    with pytest.raises(ValueError, match="`kinds` must be some of epoch, pass, step"):
        ff.sinks.Csv("x.csv", kinds=["epochs"])


# TensorBoard.


def read_events(directory):
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return events


def scalars(events, name):
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_reads_steps_epochs_and_ranks(tmp_path):
    given(ff.sinks.TensorBoard(tmp_path), records_of(3, num_ranks=4))
    events = read_events(tmp_path)

    losses = [each for each in records_of(3) if each["kind"] == "step"]
    assert scalars(events, "loss") == [
        (each["step"], pytest.approx(each["loss"])) for each in losses
    ]
    metrics = epoch_record(1, num_ranks=4)["metrics"]
    assert scalars(events, "epoch/loss")[1] == (200, pytest.approx(metrics["avg_loss"]))
    assert scalars(events, "ranks/3/samples_per_sec")[1] == (
        200,
        pytest.approx(1e3 * metrics["per_rank_throughput"][3]),
    )


def test_tensorboard_reads_many_ranks_and_histograms(tmp_path):
    histogram = {"low": -1.0, "high": 3.0, "counts": [1, 0, 5, 2]}
    step = step_record(0, 1, 1, histograms={"grads/dense.kernel": histogram})
    records = [run_record(), step, epoch_record(0, num_ranks=64)]
    given(ff.sinks.TensorBoard(tmp_path), records)
    events = read_events(tmp_path)

    (ranks,) = events.Histograms("ranks/samples_per_sec")
    assert ranks.histogram_value.num == 64
    (found,) = events.Histograms("grads/dense.kernel")
    assert (found.histogram_value.min, found.histogram_value.max) == (-1, 3)
    assert list(found.histogram_value.bucket_limit) == [0, 1, 2, 3]
    assert list(found.histogram_value.bucket) == [1, 0, 5, 2]


def test_tensorboard_shows_no_step_twice_after_a_run_went_on(tmp_path):
    first = [run_record(), *(step_record(0, n, n, loss=1) for n in range(1, 9))]
    second = [
        run_record(step=4),
        *(step_record(0, n, n, loss=2) for n in range(5, 12)),
    ]
    given(ff.sinks.TensorBoard(tmp_path), first)
    given(ff.sinks.TensorBoard(tmp_path), second)

    expected = [(n, 1) for n in range(1, 5)] + [(n, 2) for n in range(5, 12)]
    assert scalars(read_events(tmp_path), "loss") == expected


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)

    with pytest.raises(ImportError, match=r"pip install 'fuelflow\[tensorboard\]'"):
        ff.sinks.TensorBoard(tmp_path)


# Delivery.


@pytest.fixture
def delivery():
    """A delivery to a function, with what it told of, ended after the test."""
    made = []

    def make(sink, **options):
        told = []
        made.append(Delivery(sink, told.append, **options))
        return made[-1], told

    yield make
    for each in made:
        each.finish()


def test_a_sink_gets_every_record_in_order_and_is_closed(delivery):
    class Sink(list):
        __call__ = list.append
        is_closed = False

        def close(self):
            self.is_closed = True

    sink = Sink()
    carried, told = delivery(sink)
    records = [Record(step_record(0, n, n)) for n in range(500)]
    for record in records:
        carried.put(record)
    carried.finish()
    carried.join(60)

    assert sink == records
    assert sink.is_closed
    assert told == []


def test_a_sink_that_raises_is_told_of_once_and_gets_the_rest(delivery):
    got = []

    def sink(record):
        got.append(record["step"])
        if record["step"] % 2:
            raise RuntimeError("no such host")

    carried, told = delivery(sink)
    for number in range(10):
        carried.put(Record(step_record(0, number, number)))

    assert carried.drain(60)
    assert got == list(range(10))
    (text,) = told
    assert "sink` failed" in text
    assert text.endswith("RuntimeError: no such host")


def test_a_sink_that_lags_loses_steps_first_and_epochs_last(delivery):
    got, may_go_on, is_in = [], threading.Event(), threading.Event()

    def sink(record):
        is_in.set()
        may_go_on.wait(60)
        got.append(record)

    carried, _ = delivery(sink, max_waiting=20)
    carried.put(Record(run_record()))
    is_in.wait(60)
    for number in range(300):
        carried.put(Record(step_record(0, number, number)))
        if number % 20 == 0:
            carried.put(Record(epoch_record(number // 20)))
    may_go_on.set()

    assert carried.drain(60)
    assert kinds_of(got).count("epoch") == 15
    assert [each["step"] for each in got if each["kind"] == "step"][-1] == 299


def test_a_sink_that_hangs_is_told_of_once_and_not_waited_for_again(
    delivery, monkeypatch
):
    monkeypatch.setattr("fuelflow.watch.sinks.delivery.STUCK_SECS", 0.0)
    may_go_on, is_in = threading.Event(), threading.Event()

    def sink(record):
        is_in.set()
        may_go_on.wait(60)

    carried, told = delivery(sink)
    carried.put(Record(run_record()))
    is_in.wait(60)
    carried.look()
    carried.look()

    (text,) = told
    assert "has been busy with one record" in text
    start = time.monotonic()
    assert not carried.drain(60)
    carried.finish()
    carried.join(60)
    assert time.monotonic() - start < 30
    may_go_on.set()
