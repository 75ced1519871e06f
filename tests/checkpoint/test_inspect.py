"""What is in a checkpoint, told without loading it."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fuelflow as ff
from fuelflow._errors import DamagedCheckpointError
from fuelflow.checkpoint.checkpointer import Checkpointer
from fuelflow.checkpoint.inspect import compare, describe
from fuelflow.checkpoint.record import RunRecord


@pytest.fixture
def runs(tmp_path):
    """Two checkpoints of one run, and one of another model."""
    loop = ff.TrainingLoop(
        lambda params, batch: batch["x"] * params["a"]["w"], optax.adam, schedule=0.1
    )
    state = loop.init({"a": {"w": jnp.float32(1)}, "b": jnp.ones((2, 3))})
    with Checkpointer(tmp_path / "one", keep=None) as checkpointer:
        checkpointer.save(state, reason="every_steps")
        state, _ = loop.step(state, {"x": np.array([1], np.float32)})
        record = RunRecord(
            epoch=4,
            position={"epoch": 4, "rows": 96},
            metrics={"eval.loss": 0.25},
        )
        checkpointer.save(state, record, reason="every_epochs")
    other = ff.TrainingLoop(lambda params, batch: batch["x"] * params["b"], optax.sgd)
    with Checkpointer(tmp_path / "two") as checkpointer:
        checkpointer.save(other.init({"b": jnp.ones((4, 3)), "c": jnp.ones(2)}))
    return tmp_path


def test_a_directory_is_described_by_its_checkpoints_and_the_newest(runs):
    text = describe(runs / "one")

    assert text.startswith(f"2 checkpoints in {runs / 'one'}\n  00001-step-0  step 0")
    assert "every_epochs" in text
    assert "eval.loss 0.25" in text
    assert "epoch 4, after 96 rows" in text
    assert "opt_state.0.mu.a.w" in text
    assert "float32[2,3]" in text
    assert "jax version" in text


def test_one_checkpoint_is_described_by_itself(runs):
    text = describe(runs / "one" / "00001-step-0", verify=True)

    assert text.splitlines()[0].endswith("00001-step-0")
    assert "2, 7 values" in text


def test_damage_is_said_in_its_line(runs):
    path = runs / "one" / "00002-step-1"
    (path / "arrays" / "manifest.ocdbt").unlink()

    assert "damaged" not in describe(runs / "one")
    text = describe(runs / "one", verify=True)
    assert "damaged:  arrays/manifest.ocdbt is missing" in text
    assert "00001-step-0" in text.splitlines()[4]  # the newest one that is whole
    with pytest.raises(DamagedCheckpointError, match="manifest.ocdbt is missing"):
        describe(path, verify=True)


def test_two_steps_of_a_run_differ_in_values(runs):
    text = compare(runs / "one" / "00001-step-0", runs / "one" / "00002-step-1")

    assert re.search(r"step +0 +→ +1\n", text)
    assert "  params.a.w\n" in text
    assert "  params.b\n" not in text.partition("other values:")[2]
    assert "differently" not in text
    assert "with the same values" in text


def test_two_models_differ_in_names_and_shapes(runs):
    text = compare(runs / "one", runs / "two")

    assert "only in the first:\n" in text
    assert "1 only in the second:\n  params.c\n" in text
    assert "  params.b float32[2,3] → float32[4,3]\n" in text


def test_where_there_is_nothing_that_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        describe(tmp_path)
