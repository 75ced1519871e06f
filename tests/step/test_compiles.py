"""One trace and one compile per program, or an explanation."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import KINDS, Kind, make_batches, mlp_loss

import fuelflow as ff


def _counted(kind: Kind, **options: Any) -> tuple[ff.TrainingLoop, list[int]]:
    """A loop whose loss counts how often it is traced."""
    traces = [0]
    loss_fn = mlp_loss(kind)

    def counting(model: Any, batch: Any) -> Any:
        traces[0] += 1
        return loss_fn(model, batch)

    schedule = options.pop("schedule", None)
    return ff.TrainingLoop(counting, optax.adamw, schedule=schedule, **options), traces


def _restored(state: ff.TrainState) -> ff.TrainState:
    """The state as a file gives it back: host arrays, no marks of this process."""

    def reread(leaf: jax.Array) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            bits: Any = np.asarray(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(bits)
        return np.array(leaf)

    return jax.tree.map(reread, state)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_whole_run_traces_and_compiles_each_program_once(
    kind: Kind, compile_counter: Any
):
    batches = make_batches(6)
    loop, traces = _counted(kind, max_grad_norm=1.0)
    state = loop.set_lr(loop.init(kind.make()), 1e-3)
    state, outcome = loop.step(state, batches[0])
    assert np.isfinite(outcome.loss)

    compile_counter.reset()
    state, _ = loop.step(state, batches[1])
    state = loop.set_lr(state, 1e-4)
    state = loop.set_lr_scale(state, 0.5)
    state = loop.set_global_step(state, 100)
    state, _ = loop.step(state, batches[2])
    assert (traces[0], compile_counter.compiled, compile_counter.traced) == (1, [], [])

    evaluation = loop.evaluate(state, batches[3:5])
    assert compile_counter.compiled == ["jit(evaluate)"]
    assert np.isfinite(evaluation["loss"])

    state, _ = loop.step(state, batches[3])
    state = _restored(state)
    state, _ = loop.step(state, batches[4])
    state, outcome = loop.step(state, batches[5])
    assert outcome.global_step == 104
    assert traces[0] == 2
    assert [name for name in compile_counter.compiled if "step" in name] == []
    assert [record.program for record in loop.compiles] == ["step", "evaluate"]
    assert all(record.is_first for record in loop.compiles)
    assert all(record.seconds > 0 for record in loop.compiles)


def test_a_recompile_names_the_leaf_and_its_change(caplog: pytest.LogCaptureFixture):
    loop, traces = _counted(KINDS[0], schedule=1e-3)
    state = loop.init(KINDS[0].make())
    with caplog.at_level(logging.WARNING, logger="fuelflow"):
        for size in (32, 17, 9, 17, 32):
            state, _ = loop.step(state, make_batches(1, size)[0])

    assert traces[0] == 3
    assert [record.changes for record in loop.compiles] == [
        (),
        ('batch["x"]: f32[32,12] → f32[17,12]', 'batch["y"]: i32[32] → i32[17]'),
        ('batch["x"]: f32[17,12] → f32[9,12]', 'batch["y"]: i32[17] → i32[9]'),
    ]
    assert len(caplog.records) == 1
    assert 'batch["x"]: f32[32,12] → f32[17,12]' in caplog.text


def test_each_kind_of_recompile_is_warned_of_once(caplog: pytest.LogCaptureFixture):
    loop, _ = _counted(KINDS[0], schedule=1e-3)
    state = loop.init(KINDS[0].make())
    batch = make_batches(1)[0]
    other_dtype = {**batch, "y": batch["y"].astype(np.uint8)}
    another_field = {**batch, "z": batch["y"]}
    with caplog.at_level(logging.WARNING, logger="fuelflow"):
        for changed in (batch, other_dtype, another_field):
            state, _ = loop.step(state, changed)

    assert [record.reason for record in loop.compiles[1:]] == [
        'batch["y"]: i32[32] → u8[32]',
        'batch["z"]: absent → i32[32]',
    ]
    assert len(caplog.records) == 2


def test_strict_compile_refuses_a_second_compilation_and_keeps_the_state():
    loop, traces = _counted(KINDS[0], schedule=1e-3, strict_compile=True)
    state = loop.init(KINDS[0].make())
    state, _ = loop.step(state, make_batches(1)[0])

    with pytest.raises(
        ff.RecompileError, match=r'batch\["x"\]: f32\[32,12\]'
    ) as caught:
        loop.step(state, make_batches(1, 17)[0])
    assert caught.value.program == "step"
    assert traces[0] == 1
    _, outcome = loop.step(state, make_batches(1)[0])
    assert outcome.global_step == 2


def test_equal_dtypes_under_other_names_do_not_recompile():
    loop, traces = _counted(KINDS[0], schedule=1e-3, strict_compile=True)
    state = loop.init(KINDS[0].make())
    batch = make_batches(1)[0]
    for x in (batch["x"], batch["x"].astype(np.float64), jnp.asarray(batch["x"])):
        state, _ = loop.step(state, {**batch, "x": x})

    assert traces[0] == 1


def test_training_an_equal_model_again_compiles_nothing():
    loop, traces = _counted(KINDS[2], schedule=1e-3, strict_compile=True)
    for _ in range(2):
        state = loop.init(KINDS[2].make())
        state, _ = loop.step(state, make_batches(1)[0])

    assert traces[0] == 1


def test_training_another_model_is_explained_by_its_parameters():
    def loss_fn(params: Any, batch: Any) -> Any:
        return (batch["x"] @ params["w"]) ** 2

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    batch = {"x": np.ones((4, 3), np.float32)}
    loop.step(loop.init({"w": np.ones(3, np.float32)}), batch)
    wider = {"x": np.ones((4, 5), np.float32)}
    loop.step(loop.init({"w": np.ones(5, np.float32)}), wider)

    assert loop.compiles[1].changes == (
        "params.w: f32[3] → f32[5]",
        'batch["x"]: f32[4,3] → f32[4,5]',
    )


def test_a_loop_from_replace_takes_the_states_of_the_first():
    loop, _ = _counted(KINDS[2], schedule=1e-3)
    gentler = loop.replace(max_grad_norm=0.1)
    batch = make_batches(1)[0]
    state, _ = loop.step(loop.init(KINDS[2].make()), batch)
    for each in (gentler, loop, gentler):
        state, outcome = each.step(state, batch)

    assert outcome.global_step == 4
    assert [len(each.compiles) for each in (loop, gentler)] == [1, 1]


def test_only_the_programs_that_are_used_are_compiled():
    loop, _ = _counted(KINDS[0], schedule=1e-3)
    state = loop.init(KINDS[0].make())
    loop.run(state, make_batches(6), steps_per_call=3)

    assert [record.program for record in loop.compiles] == ["run"]


def test_with_jit_disabled_everything_runs_eagerly_to_the_same_numbers():
    batches = make_batches(2)
    seen = []

    def loss_fn(model: Any, batch: Any) -> Any:
        losses = mlp_loss(KINDS[0])(model, batch)
        seen.append(type(losses).__name__)
        return losses

    loop = ff.TrainingLoop(loss_fn, optax.adamw, schedule=1e-3, max_grad_norm=0.1)
    expected, _ = loop.run(loop.init(KINDS[0].make()), batches)
    with jax.disable_jit():
        state, outcome = loop.step(loop.init(KINDS[0].make()), batches[0])
        state, _ = loop.step(state, batches[1])
        evaluation = loop.evaluate(state, batches)

    assert outcome.finite
    assert np.isfinite(evaluation["loss"])
    for name, param in expected.params.items():
        np.testing.assert_allclose(state.params[name], param, rtol=1e-5, atol=1e-7)
