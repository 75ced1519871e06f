"""Saving goes on beside training, keeps what it should, and fails loudly."""

import json
import os
import shutil
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fuelflow as ff
from fuelflow._errors import SaveError, UsedStateError
from fuelflow.checkpoint.checkpointer import Checkpointer
from fuelflow.checkpoint.manifest import FILE_NAME, checksum_of
from fuelflow.checkpoint.nothing import NoCheckpointer
from fuelflow.checkpoint.record import RunRecord
from fuelflow.metrics.history import History

WIDTH = 200
BATCH = {
    "x": np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32),
    "y": np.ones(8, np.float32),
}


def loss_fn(params, batch):
    return ((batch["x"] @ params["w"]).sum(-1) - batch["y"]) ** 2


@pytest.fixture(scope="module")
def loop():
    return ff.TrainingLoop(loss_fn, optax.adam, schedule=0.1)


@pytest.fixture
def state(loop):
    return loop.init({"w": jnp.ones((WIDTH, WIDTH))})


def checksums(directory):
    """The checksum of the parameters of each checkpoint, in order."""
    manifests = [
        json.loads(path.read_text())
        for path in sorted(directory.glob(f"*/{FILE_NAME}"))
    ]
    return [each["arrays"]["params.w"]["checksum"] for each in manifests]


def test_a_save_is_not_torn_by_the_steps_right_after_it(loop, state, tmp_path):
    # Saves wait for nothing, so steps before and after them are on their way together.
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        for _ in range(25):
            state, _ = loop.step(state, BATCH)
            checkpointer.save(state)
            for _ in range(3):
                state, _ = loop.step(state, BATCH)

    expected = []
    state = loop.init({"w": jnp.ones((WIDTH, WIDTH))})
    for _ in range(25):
        state, _ = loop.step(state, BATCH)
        expected.append(checksum_of(np.asarray(state.params["w"])))
        for _ in range(3):
            state, _ = loop.step(state, BATCH)
    assert len(set(expected)) == 25
    assert checksums(tmp_path) == expected


def test_a_save_where_copies_have_no_room_is_not_torn_either(
    loop, state, tmp_path, monkeypatch
):
    monkeypatch.setattr("fuelflow.checkpoint.snapshot.free_device_bytes", lambda _: 0)
    state, _ = loop.step(state, BATCH)
    expected = checksum_of(np.asarray(state.params["w"]))

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
        for _ in range(3):
            state, _ = loop.step(state, BATCH)

    assert checksums(tmp_path) == [expected]


def test_a_used_up_state_is_refused(loop, state, tmp_path):
    loop.step(state, BATCH)

    with pytest.raises(UsedStateError, match="this state has been used up"):
        Checkpointer(tmp_path).save(state)


def test_the_newest_stay_and_the_best_besides(loop, state, tmp_path):
    accuracies = [float("nan"), 0.9, 0.1, 0.5, 0.4]
    with Checkpointer(
        tmp_path, keep=2, best="eval.accuracy", higher_is_better=True
    ) as checkpointer:
        for accuracy in accuracies:
            state, _ = loop.step(state, BATCH)
            checkpointer.save(state, RunRecord(metrics={"eval.accuracy": accuracy}))

    assert checkpointer.steps() == (2, 4, 5)
    assert checkpointer.latest() == 5


def test_of_one_step_the_later_save_stays(loop, state, tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, reason="first")
        checkpointer.save(state, reason="second")

    (path,) = tmp_path.iterdir()
    assert path.name == "00002-step-0"
    assert json.loads((path / FILE_NAME).read_text())["reason"] == "second"


def test_a_run_that_went_back_is_the_newest(loop, state, tmp_path):
    states = [loop.set_global_step(state, step) for step in (600, 700, 520)]
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for each in states:
            checkpointer.save(each)

    assert checkpointer.steps() == (700, 520)
    assert checkpointer.latest() == 520


def test_a_metric_that_there_is_not_is_refused(loop, state, tmp_path):
    checkpointer = Checkpointer(tmp_path, best="accuracy", higher_is_better=True)

    with pytest.raises(
        ValueError, match="`best` must be one of `loss`, got 'accuracy'"
    ):
        checkpointer.save(state, RunRecord(metrics={"loss": 1.0}))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"keep": 0}, ValueError, "`keep` must be at least 1, got 0"),
        ({"every_steps": 1.5}, TypeError, "`every_steps` must be an integer"),
        ({"every_secs": 0}, ValueError, "`every_secs` must be finite and more than 0"),
        ({"best": "loss"}, ValueError, "`best` and `higher_is_better` must be given"),
        ({"best": 3, "higher_is_better": True}, TypeError, "`best` must be the name"),
    ],
)
def test_wrong_settings_are_refused_by_name(options, error, text, tmp_path):
    with pytest.raises(error, match=text):
        Checkpointer(tmp_path, **options)


def test_a_save_is_due_by_steps_epochs_and_the_clock(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("fuelflow.checkpoint.cadence.time.monotonic", lambda: now[0])
    checkpointer = Checkpointer(
        tmp_path, every_epochs=2, every_steps=10, every_secs=60.0
    )

    assert checkpointer.is_due(9) is None
    assert checkpointer.is_due(10) == "every_steps"
    assert checkpointer.is_due(10, num_epochs=1) == "every_steps"
    assert checkpointer.is_due(10, num_epochs=2) == "every_epochs"
    checkpointer._cadence.saved()
    assert checkpointer.is_due(19) is None
    assert checkpointer.is_due(25) == "every_steps"  # several steps in one dispatch
    now[0] += 60
    assert checkpointer.is_due(12) == "every_secs"


def test_a_restore_counts_as_a_save(loop, state, tmp_path):
    checkpointer = Checkpointer(tmp_path, every_steps=100)
    checkpointer.save(loop.set_global_step(state, 150))
    checkpointer.restore(loop, state)

    assert checkpointer.is_due(199) is None
    assert checkpointer.is_due(200) == "every_steps"


def test_nobody_is_never_due(state):
    checkpointer = NoCheckpointer()
    checkpointer.prepare()
    checkpointer.save(state, RunRecord(history=History()), reason="none")

    assert checkpointer.is_due(1, num_epochs=1) is None


# Trouble.


def test_a_directory_that_cannot_be_is_trouble_at_once(tmp_path):
    file = tmp_path / "file"
    file.write_text("")

    with pytest.raises(SaveError, match="could not be written .* there is none yet"):
        Checkpointer(file / "runs").prepare()


def test_a_vanished_directory_fails_the_next_call_and_no_other(loop, state, tmp_path):
    directory = tmp_path / "runs"
    checkpointer = Checkpointer(directory)
    checkpointer.save(state)
    checkpointer.wait()
    shutil.rmtree(directory)
    checkpointer.save(state)

    with pytest.raises(SaveError, match="could not be written to .*runs: FileNotFound"):
        checkpointer.wait()
    checkpointer.wait()
    assert int(loop.step(state, BATCH)[0].step) == 1


def in_child(script, *arguments):
    """Run a script that has a loop and a state, in a process of its own."""
    head = f"""
import os, resource, sys
sys.path[:0] = {sys.path!r}
import jax.numpy as jnp, numpy as np, optax
import fuelflow as ff
from fuelflow.checkpoint.checkpointer import Checkpointer

loop = ff.TrainingLoop(
    lambda params, batch: (batch["x"] @ params["w"]).sum(-1) ** 2,
    optax.adam, schedule=0.1,
)
state = loop.init({{"w": jnp.ones((300, 300))}})
batch = {{"x": np.ones((8, 300), np.float32)}}
checkpointer = Checkpointer(sys.argv[1])

def step_and_save():
    global state
    state, _ = loop.step(state, batch)
    checkpointer.save(state)
    checkpointer.wait()

"""
    return subprocess.run(
        [sys.executable, "-c", head + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


FAILS = """
try:
    step_and_save()
except ff.FuelflowError as error:
    print(type(error).__name__, error.last_good, sep="|")
undo()
step_and_save()
print(int(state.step), checkpointer.steps())
"""


def test_a_full_disk_is_loud_and_the_state_stays_usable(tmp_path):
    done = in_child(
        "step_and_save()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "def undo():\n"
        "    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)\n" + FAILS,
        tmp_path,
    )

    assert done.returncode == 0, done.stderr
    good = tmp_path / "00001-step-1"
    assert done.stdout == f"SaveError|{good}\n3 (1, 3)\n"
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == "00002-step-3"


def test_a_read_only_directory_is_loud_and_the_state_stays_usable(tmp_path):
    # For a superuser no directory is read-only, so it becomes another user for a while.
    done = in_child(
        "step_and_save()\n"
        "user = os.geteuid()\n"
        "os.chmod(sys.argv[1], 0o555)\n"
        "if user == 0: os.seteuid(65534)\n"
        "def undo():\n"
        "    if user == 0: os.seteuid(0)\n"
        "    os.chmod(sys.argv[1], 0o755)\n" + FAILS,
        tmp_path,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("SaveError|")
    assert done.stdout.splitlines()[1] == "3 (1, 3)"


def test_a_program_that_ends_during_a_save_finishes_it_or_says_so(tmp_path):
    done = in_child("checkpointer.save(state)", tmp_path)

    names = [path.name for path in tmp_path.iterdir()]
    if names:
        assert names == ["00001-step-0"]
        assert done.stderr == ""
    else:
        assert "end it with `checkpointer.wait()`, or save inside" in done.stderr


def modules_after(imports):
    """The names of all modules that some imports load in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {imports}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout.split()


def test_importing_fuelflow_opens_neither_this_room_nor_orbax():
    heavy = ("orbax", "flax.nnx", "fuelflow.checkpoint", "safetensors")
    modules = modules_after("fuelflow")

    assert [name for name in modules if name.startswith(heavy)] == []


def test_opening_the_room_does_not_open_orbax():
    modules = modules_after("fuelflow.checkpoint.checkpointer, fuelflow.run.trainer")

    assert "fuelflow.checkpoint.orbax" in modules
    assert "orbax.checkpoint" not in modules
    assert "flax.nnx" not in modules
