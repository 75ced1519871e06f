"""Nothing half-written or damaged is ever taken for a checkpoint."""

import json
import random
import subprocess
import sys
import time

import jax.numpy as jnp
import optax
import pytest

import fuelflow as ff
from fuelflow._errors import DamagedCheckpointError
from fuelflow.checkpoint.checkpointer import Checkpointer
from fuelflow.checkpoint.directory import Directory
from fuelflow.checkpoint.manifest import FILE_NAME
from fuelflow.checkpoint.restoring import read_contents

NUM_KILLS = 4


@pytest.fixture(scope="module")
def loop():
    return ff.TrainingLoop(
        lambda p, b: (b["x"] @ p["w"]) ** 2, optax.adam, schedule=0.1
    )


@pytest.fixture
def state(loop):
    return loop.init({"w": jnp.ones(30_000)})


@pytest.fixture
def saved(loop, state, tmp_path):
    """A directory with checkpoints of step 1 and step 2; the folder of the second."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(loop.set_global_step(state, step))
    return tmp_path / "00002-step-2"


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def assert_named(saved, loop, state, text):
    """The newest is refused by name, and the one before is taken when asked to."""
    checkpointer = Checkpointer(saved.parent)
    with pytest.raises(DamagedCheckpointError, match=text) as caught:
        checkpointer.restore(loop, state)

    assert caught.value.path == str(saved)
    assert checkpointer.restore(loop, state, skip_damaged=True).step == 1
    assert checkpointer.restore(loop, state, 1).step == 1


def test_a_flipped_byte_of_any_file_is_named(saved, loop, state):
    chooser = random.Random(0)
    files = files_of(saved)
    for file in files:
        good = file.read_bytes()
        place = chooser.randrange(len(good))
        bad = bytearray(good)
        bad[place] ^= 1 << chooser.randrange(8)
        file.write_bytes(bad)

        with pytest.raises(DamagedCheckpointError, match=file.name) as caught:
            Checkpointer(saved.parent).restore(loop, state)

        assert len(caught.value.faults) == 1
        file.write_bytes(good)
    assert len(files) > 5
    assert Checkpointer(saved.parent).restore(loop, state).step == 2


def largest(path):
    return max(files_of(path), key=lambda file: file.stat().st_size)


def test_a_flipped_byte_is_passed_over_when_asked_to(saved, loop, state, caplog):
    file = largest(saved)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    assert_named(saved, loop, state, f"{file.name} has other bytes than were written")
    assert "passed over: the checkpoint" in caplog.text


def test_a_truncated_file_is_named(saved, loop, state):
    file = largest(saved)
    file.write_bytes(file.read_bytes()[:-1])

    assert_named(saved, loop, state, f"{file.name} has .* bytes and had")


def test_a_removed_file_is_named(saved, loop, state):
    file = largest(saved)
    file.unlink()

    assert_named(saved, loop, state, f"{file.name} is missing")


def test_a_removed_manifest_is_named(saved, loop, state):
    (saved / FILE_NAME).unlink()

    assert_named(saved, loop, state, f"{FILE_NAME} is missing")


def test_a_manifest_that_is_no_json_is_named(saved, loop, state):
    (saved / FILE_NAME).write_text('{"format": 1')

    assert_named(saved, loop, state, f"{FILE_NAME} is no JSON")


def test_a_manifest_that_was_edited_is_named(saved, loop, state):
    file = saved / FILE_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | {"step": 3}))

    assert_named(saved, loop, state, f"{FILE_NAME} does not add up to its checksum")


def test_arrays_that_are_not_those_of_the_manifest_are_named(saved, loop, state):
    # Whole files, but of another checkpoint: only the sums of values can tell.
    file = saved / FILE_NAME
    values = json.loads(file.read_text())
    values["arrays"]["params.w"]["checksum"] += 1
    values.pop("checksum")
    from fuelflow.checkpoint import manifest

    values["checksum"] = manifest._sum_of(values)
    file.write_text(json.dumps(values))

    assert_named(saved, loop, state, "`params.w` has other values than were written")


def test_a_format_of_the_future_is_refused(saved, loop, state):
    file = saved / FILE_NAME
    values = json.loads(file.read_text()) | {"format": 99}
    values.pop("checksum")
    from fuelflow.checkpoint import manifest

    values["checksum"] = manifest._sum_of(values)
    file.write_text(json.dumps(values))

    with pytest.raises(ValueError, match="has format 99, and this fuelflow reads"):
        Checkpointer(saved.parent).restore(loop, state, skip_damaged=True)


def test_an_empty_directory_has_no_checkpoint(loop, state, tmp_path):
    checkpointer = Checkpointer(tmp_path / "none")

    assert checkpointer.latest() is None
    assert checkpointer.steps() == ()
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        checkpointer.restore(loop, state)


def test_a_step_that_there_is_not_is_refused_with_those_there_are(saved, loop, state):
    with pytest.raises(FileNotFoundError, match="of step 7 in .*, only of 1, 2"):
        Checkpointer(saved.parent).restore(loop, state, 7)


def test_if_all_are_damaged_that_is_said(saved, loop, state):
    for manifest in saved.parent.glob(f"*/{FILE_NAME}"):
        manifest.unlink()

    with pytest.raises(DamagedCheckpointError, match="00001-step-1 is damaged"):
        Checkpointer(saved.parent).restore(loop, state, skip_damaged=True)


SAVES_FOREVER = f"""
import sys
sys.path[:0] = {sys.path!r}
import numpy as np
from fuelflow.checkpoint.directory import Directory
from fuelflow.checkpoint.paths import as_path
from fuelflow.checkpoint.record import RunRecord
from fuelflow.checkpoint.retention import Retention
from fuelflow.checkpoint.snapshot import Snapshot
from fuelflow.checkpoint.writing import Writer

writer = Writer(Directory(as_path(sys.argv[1])), Retention(keep=2))
writer.prepare()
step = int(sys.argv[2])
while True:
    arrays = {{"step": np.array(step, np.int32), "w": np.full(400_000, step)}}
    writer.write(Snapshot(arrays, 0), RunRecord().to_dict(), "forever")
    print(step, flush=True)
    step += 1
"""


def test_a_killed_write_is_never_seen(tmp_path):
    chooser = random.Random(1)
    last = 0
    for _ in range(NUM_KILLS):
        with subprocess.Popen(
            [sys.executable, "-c", SAVES_FOREVER, str(tmp_path), str(last + 1)],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            try:
                assert child.stdout is not None
                first = child.stdout.readline()
                time.sleep(chooser.random() / 4)  # the moment of the kill
            finally:
                child.kill()
            said = [int(step) for step in [first, *child.stdout]]
        entries = Directory(tmp_path).entries()

        # Whole, with nothing lost that was said to be there.
        assert [read_contents(entry).arrays["w"][0] for entry in entries] == [
            entry.step for entry in entries
        ]
        assert entries[-1].step in (said[-1], said[-1] + 1)
        last = entries[-1].step

    Directory(tmp_path).create()
    assert all(entry.path.is_dir() for entry in Directory(tmp_path).entries())
    assert len(list(tmp_path.iterdir())) == len(Directory(tmp_path).entries()) <= 3


def test_leftovers_are_cleared_by_who_writes_next(saved, loop, state):
    directory = saved.parent
    saved.rename(directory / "00002-step-2.writing")
    (directory / "notes.txt").write_text("mine")

    Checkpointer(directory).latest()
    assert (directory / "00002-step-2.writing").exists()
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(state)

    assert checkpointer.steps() == (1, 0)
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["00001-step-1", "00002-step-0", "notes.txt"]


def test_what_may_not_be_read_is_not_called_damaged(saved, loop, state, monkeypatch):
    """Else a run would go on from an older checkpoint for a moment's trouble."""

    def refuse(path):
        raise PermissionError(f"not yours: {path}")

    monkeypatch.setattr("fuelflow.checkpoint.restoring.read_arrays", refuse)
    with pytest.raises(PermissionError, match="not yours"):
        Checkpointer(saved.parent).restore(loop, state, skip_damaged=True)
