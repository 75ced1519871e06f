"""A run that was saved goes on as if nothing had happened."""

import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saved_problems
from saved_problems import (
    AFTER,
    BEFORE,
    CASES,
    arrays_by_name,
    assert_same_bits,
    batches_of,
    begin,
    run,
    with_sums,
)

import fuelflow as ff
from fuelflow.checkpoint import restoring
from fuelflow.checkpoint.checkpointer import Checkpointer
from fuelflow.checkpoint.manifest import ArraySpec
from fuelflow.checkpoint.record import RunRecord
from fuelflow.checkpoint.tallies import resized
from fuelflow.data.memory import aligned_empty
from fuelflow.step.tally import Tally, totals_of

RESUMED = ("nnx-0", "nnx-8", "linen-0", "dict-8")


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """The arrays of each run at its end, uninterrupted and from another process."""
    directory = tmp_path_factory.mktemp("runs")
    expected = {name: begin(CASES[name], directory / name) for name in RESUMED}
    done = subprocess.run(
        [sys.executable, saved_problems.__file__, str(directory), *RESUMED],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {
        name: (arrays, pickle.loads((directory / f"{name}.pickle").read_bytes()))
        for name, arrays in expected.items()
    }


@pytest.mark.parametrize("name", RESUMED)
def test_another_process_goes_on_to_the_same_bits(resumed, name):
    expected, actual = resumed[name]

    assert_same_bits(actual, expected)
    assert any("sums" in array for array in expected)


def test_restoring_compiles_nothing(tmp_path, compile_counter):
    case = CASES["nnx-8"]
    loop = case.make_loop()
    batches = batches_of(case.make_loader(loop))
    state = run(loop, loop.init(case.make_model()), batches, 2)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state)
    state = run(loop, state, batches, 1)
    compile_counter.reset()

    checkpointer.save(state)
    restored = checkpointer.restore(loop, state)
    run(loop, restored.state, batches, 2)

    assert compile_counter.compiled == []
    assert len(loop.compiles) == 1


@pytest.mark.parametrize("name", ["dict-0", "dict-8"])
def test_a_restored_state_is_placed_and_donated_like_any_other(tmp_path, name):
    case = CASES[name]
    loop = case.make_loop()
    batches = batches_of(case.make_loader(loop))
    state = run(loop, loop.init(case.make_model()), batches, 1)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state)

    restored = checkpointer.restore(loop, case.make_model()).state
    before = jax.tree.leaves((restored.params, restored.opt_state))
    places = [leaf.sharding for leaf in before]
    buffers = {leaf.addressable_data(0).unsafe_buffer_pointer() for leaf in before}
    stepped = run(loop, restored, batches, 1)
    after = jax.tree.leaves((stepped.params, stepped.opt_state))

    assert places == [leaf.sharding for leaf in after]
    assert all(leaf.is_deleted() for leaf in before)
    reused = {leaf.addressable_data(0).unsafe_buffer_pointer() for leaf in after}
    assert len(buffers & reused) > len(buffers) / 2


def test_a_restored_array_is_in_memory_of_its_own():
    # Aligned like this, JAX on a CPU would use NumPy's memory, and not take it over.
    values = aligned_empty((1000,), np.dtype(np.float32))
    values[:] = 1
    spec = ArraySpec("float32", (1000,), checksum=0)
    there = jax.device_put(values).unsafe_buffer_pointer()
    assert there == values.__array_interface__["data"][0]

    leaf = restoring._as_leaf(values, spec, values)

    assert leaf.unsafe_buffer_pointer() != there


@pytest.mark.parametrize(
    ("before", "after"), [("dict-0", "dict-8"), ("dict-8", "dict-0")]
)
def test_another_number_of_ranks_goes_on_to_rounding(tmp_path, before, after):
    def no_key(params, batch):
        return saved_problems.dict_loss(params, batch, jax.random.key(0))

    def make(name):
        case = saved_problems.Case(
            CASES[name].make_model, no_key, CASES[name].num_ranks
        )
        loop = case.make_loop()
        return loop, case.make_loader(loop), case.make_model()

    loop, loader, model = make(before)
    state = run(loop, with_sums(loop, loop.init(model)), batches_of(loader), 3)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(state, RunRecord(position=loader.state()))
    saved = totals_of(jax.device_get(state.sums), ["loss", "accuracy"])

    loop, loader, model = make(after)
    restored = checkpointer.restore(loop, model)
    there = totals_of(jax.device_get(restored.state.sums), ["loss", "accuracy"])

    assert_same_bits(
        {k: np.asarray(v) for k, v in restored.state.params.items()},
        {k: np.asarray(v) for k, v in state.params.items()},
    )
    assert len(there.num_rows) == (CASES[after].num_ranks or 1)
    assert there.num_rows.sum() == saved.num_rows.sum()
    for name, sums in saved.sums.items():
        np.testing.assert_allclose(there.sums[name].sum(), sums.sum(), rtol=1e-12)
    loader.restore(restored.record.position)
    state = run(loop, restored.state, batches_of(loader), 2)
    assert np.asarray(state.step) == 5


def test_sums_that_are_dealt_out_anew_keep_their_totals():
    random = np.random.default_rng(0)
    sums = random.normal(size=(3, 2, 4)).astype(np.float32) * 1e6
    errors = random.normal(size=(3, 2, 4)).astype(np.float32) * 1e-2
    tally = Tally.of(sums, errors, np.array([5, 0, 6], np.int32))

    dealt = resized(tally, 8)

    exact = (np.float64(sums) - errors).sum(0)
    np.testing.assert_allclose(
        (np.float64(dealt.sums) - dealt.errors).sum(0), exact, rtol=1e-13
    )
    assert dealt.num_rows.tolist() == [2, 2, 2, 1, 1, 1, 1, 1]


def test_a_record_comes_back_as_it_was(tmp_path):
    loop = ff.TrainingLoop(lambda params, batch: batch["x"] * params["w"], optax.sgd)
    state = loop.set_lr(loop.init({"w": jnp.float32(2)}), 0.125)
    position = {"epoch": 2, "rows": 96, "iterator": {"deep": [1, None, b"\x00\xff"]}}
    record = RunRecord(
        epoch=2,
        position=position,
        metrics={"eval.loss": float("nan"), "loss": 0.1},
        clocks={"training": 1.5},
    )
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, record)
    restored = checkpointer.restore(loop, state)

    assert restored.record.position == position
    assert restored.record.epoch == 2
    assert np.isnan(restored.record.metrics["eval.loss"])
    assert restored.record.metrics["loss"] == 0.1
    assert restored.record.clocks == {"training": 1.5}
    assert np.asarray(restored.state.lr) == 0.125


def test_a_position_that_json_lacks_is_refused_at_once(tmp_path):
    loop = ff.TrainingLoop(lambda params, batch: batch["x"] * params["w"], optax.sgd)
    state = loop.init({"w": jnp.float32(2)})

    with pytest.raises(TypeError, match="`position` must hold what JSON has"):
        Checkpointer(tmp_path).save(state, RunRecord(position={"rows": object()}))


def test_a_graph_goes_on_from_a_checkpoint(tmp_path):
    def make():
        graph = ff.Graph({"w": jnp.ones(3)}, apply=lambda params, x: params["w"] * x)
        graph.set_optimizer(optax.adam)
        graph.set_lr(0.1)
        return graph

    def steps(graph, count):
        for _ in range(count):
            graph.step(((graph(np.array([1, 2, 3], np.float32)) - 3.0) ** 2).mean())

    graph = make()
    with Checkpointer(tmp_path) as checkpointer:
        steps(graph, BEFORE)
        checkpointer.save(graph.state)
        steps(graph, AFTER)
    expected = np.asarray(graph.state.params["w"])

    other = make()
    other.state = checkpointer.restore(other.loop, other.state).state
    steps(other, AFTER)

    assert int(other.state.step) == BEFORE + AFTER
    np.testing.assert_array_equal(np.asarray(other.state.params["w"]), expected)


def test_a_state_of_arrays_that_are_odd_comes_back_to_the_bit(tmp_path):
    model = {
        "a/b c%é": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "empty": jnp.zeros((0, 3)),
        "half": jnp.float16(0.1),
        "nan": jnp.float32(jnp.nan),
    }
    loop = ff.TrainingLoop(lambda params, batch: batch["x"] * 1.0, optax.sgd)
    state = loop.init(model, seed=jax.random.key(3, impl="rbg"))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
    expected = arrays_by_name(state)

    restored = checkpointer.restore(loop, model | {"half": jnp.float16(7)}).state

    assert_same_bits(arrays_by_name(restored), expected)
