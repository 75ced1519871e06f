"""Sinks in trouble: numbers that are none, no room, and places that are no files."""

import math
import os
import subprocess
import sys

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
from fuelflow.watch.record.records import Record


def scalars(directory, name):
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_says_nothing_of_a_nan(tmp_path, capfd, caplog):
    step = step_record(0, 1, 1, loss=math.nan)
    given(ff.sinks.TensorBoard(tmp_path), [run_record(), step])

    ((_, loss),) = scalars(tmp_path, "loss")
    assert math.isnan(loss)
    assert "".join(capfd.readouterr()) == ""
    assert caplog.records == []


def test_tensorboard_has_an_epoch_in_its_file_when_it_returns(tmp_path):
    sink = ff.sinks.TensorBoard(tmp_path)
    sink(Record(epoch_record(0)))

    assert len(scalars(tmp_path, "epoch/loss")) == 1  # not closed yet
    sink.close()


LIMITED = """
import resource, signal, sys
import fuelflow as ff
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
sink = ff.sinks.TensorBoard(sys.argv[1])
with ff.Monitor(display="none", sinks=[sink]) as monitor:
    for epoch in range(3):
        for _ in monitor.track(range(3)):
            monitor.log({f"number {n}": 1.0 for n in range(20)})
texts = [each["text"] for each in monitor.records if each.kind == "event"]
print(texts)
"""


def test_tensorboard_without_room_is_an_event_and_ends(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert "the sink `TensorBoard` failed" in done.stdout
    assert "Traceback" not in done.stderr


# Where no file is.


def test_a_device_is_never_replaced(tmp_path):
    device = tmp_path / "device"
    os.mkfifo(device)
    with pytest.raises(ValueError, match="but it is a device or a pipe"):
        ff.sinks.Csv(device)
    with pytest.raises(ValueError, match="but it is a device or a pipe"):
        ff.Monitor(display="none").save_html(device)
    with pytest.raises(ValueError, match="but it is a directory"):
        ff.sinks.Csv(tmp_path)

    assert device.is_fifo()


def test_a_link_stays_one_and_its_file_is_written(tmp_path):
    link, file = tmp_path / "link.csv", tmp_path / "file.csv"
    link.symlink_to(file)
    given(ff.sinks.Csv(link), records_of(2))

    assert link.is_symlink()
    assert len(pd.read_csv(file)) == 2
