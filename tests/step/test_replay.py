"""A bad step run again names what went bad first, where, and from what."""

import copy
import pickle
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import assert_bitwise, host_copy
from rank_problems import mesh_of

import fuelflow as ff

ROWS = np.array([[0, 3.2], [1, 2]], np.float32)
BAD = np.ones((16, 4), np.float32)
BAD[3], BAD[7, 1] = np.nan, np.inf


def error_of(
    loss_fn: Any, model: Any, *batches: Any, optimizer: Any = optax.sgd, **options: Any
) -> ff.NonFiniteError:
    """What the last of some steps raises."""
    loop = ff.TrainingLoop(loss_fn, optimizer, **{"schedule": 0.1, **options})
    state, outcome = loop.init(model), None
    for batch in batches:
        state, outcome = loop.step(state, batch)
    with pytest.raises(ff.NonFiniteError) as info:
        str(outcome)
    assert info.value.state is state
    return info.value


def place(function: Any) -> str:
    """The second line of a function, as it is told."""
    name, line = function.__qualname__, function.__code__.co_firstlineno + 1
    return f"{name} ({Path(__file__).name}:{line})"


def log_loss(params: Any, batch: Any) -> Any:
    return jnp.log(params["w"] * batch["x"]).sum(-1)


def root_loss(params: Any, batch: Any) -> Any:
    return jnp.sqrt(params["w"] * batch["x"]).sum(-1)


def guarded_loss(params: Any, batch: Any) -> Any:
    return jnp.where(batch["x"] > 0, jnp.sqrt(params["w"] * batch["x"]), 0).sum(-1)


def product_loss(params: Any, batch: Any) -> Any:
    return (params["w"] * batch["x"]).astype(jnp.float32).sum(-1)


def masked_loss(params: Any, batch: Any) -> Any:
    return -jax.nn.log_softmax(jnp.where(batch["x"] > 5, params["w"], -jnp.inf))[:, 0]


ONE = {"w": jnp.float32(1)}


def test_a_logarithm_of_zero_is_named_with_its_line_and_inputs():
    found = error_of(log_loss, ONE, {"x": ROWS}).replay()

    assert (found.kind, found.name, found.reaches) == ("operation", "log", "the loss")
    assert found.place == place(log_loss)
    assert found.ranges == ((0.0, pytest.approx(3.2)),)
    assert str(found) == (
        "step 1, the loss: the first bad value is made by `log` in "
        f"{place(log_loss)}, from inputs in [0, 3.2]"
    )


@pytest.mark.parametrize("loss_fn", [root_loss, guarded_loss])
def test_what_is_bad_in_the_backward_pass_alone_is_named(loss_fn: Any):
    error = error_of(loss_fn, ONE, {"x": ROWS})
    found = error.replay()

    assert np.isfinite(error.loss)
    assert (found.name, found.reaches) == ("div", "the gradient of `w`")
    assert found.place == place(loss_fn)
    assert "`div` in the backward pass of" in str(found)


@pytest.mark.parametrize(
    ("dtype", "large"), [(jnp.bfloat16, 3e38), (jnp.float16, 60000)]
)
def test_an_overflow_of_a_narrow_parameter_is_named(dtype: Any, large: float):
    batch = {"x": (2 * ROWS).astype(dtype)}
    found = error_of(product_loss, {"w": jnp.asarray(large, dtype)}, batch).replay()

    assert (found.name, found.place) == ("mul", place(product_loss))
    assert found.ranges[0][0] == float(jnp.asarray(large, dtype))


def test_a_mask_is_no_fault_but_what_makes_nan_of_it():
    found = error_of(masked_loss, ONE, {"x": np.ones((4, 2), np.float32)}).replay()

    assert (found.kind, found.name) == ("operation", "sub")
    assert found.place == place(masked_loss)
    assert np.isfinite(
        np.asarray(masked_loss(ONE, {"x": np.full((4, 2), 9, np.float32)}))
    ).all()


def test_bad_rows_of_a_batch_are_named():
    error = error_of(product_loss, ONE, {"x": BAD})
    found = error.replay()

    assert (found.kind, found.name, found.rows) == ("batch", "x", (3, 7))
    assert str(found).endswith("the batch's `x` is not finite in rows 3, 7")
    np.testing.assert_array_equal(error.batch["x"], BAD)


def test_a_parameter_that_was_bad_before_is_named():
    model = {"encoder": {"kernel": jnp.float32(np.nan)}, "bias": jnp.float32(0)}

    def loss_fn(params: Any, batch: Any) -> Any:
        return batch["x"].sum(-1) * params["encoder"]["kernel"] + params["bias"]

    found = error_of(loss_fn, model, {"x": ROWS}).replay()

    assert (found.kind, found.name) == ("parameter", "encoder.kernel")
    assert "the parameter `encoder.kernel` was not finite before" in str(found)


def test_a_bad_rate_is_named():
    def schedule(step: Any) -> Any:
        return jnp.where(step == 1, jnp.inf, 0.1)

    batch = {"x": ROWS}
    found = error_of(product_loss, ONE, batch, batch, schedule=schedule).replay()

    assert (found.step, found.kind) == (2, "rate")
    assert "step 2: the learning rate was inf" in str(found)


def test_weights_that_sum_to_0_and_squares_that_overflow_are_named():
    def weighted(params: Any, batch: Any) -> Any:
        return ff.Weighted(params["w"] * batch["x"][:, 0], batch["x"][:, 0] * 0)

    assert error_of(weighted, ONE, {"x": ROWS}).replay().kind == "weights"
    model, batch = {"w": jnp.ones(2)}, {"x": ROWS * np.float32(1e25)}
    found = error_of(product_loss, model, batch).replay()
    assert (found.kind, found.name) == ("norm", "w")


def test_the_iteration_of_a_scan_is_looked_into():
    def loss_fn(params: Any, batch: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return jnp.log(carry - params["w"]), None

        return jax.lax.scan(body, batch["x"], length=5)[0].sum(-1)

    found = error_of(loss_fn, ONE, {"x": np.full((4, 2), 3, np.float32)}).replay()

    # log(3 - 1) - 1 < 0 is what the second one is given.
    below = float(np.log(2.0) - 1)
    assert found.name == "log"
    assert found.ranges == ((pytest.approx(below), pytest.approx(below)),)
    assert found.place.startswith(f"{loss_fn.__qualname__}.<locals>.body (")


def test_a_loop_and_a_condition_are_looked_into():
    def loss_fn(params: Any, batch: Any) -> Any:
        def halve(carry: Any) -> Any:
            return carry[0] + 1, carry[1] - params["w"]

        _, left = jax.lax.while_loop(lambda c: c[0] < 3, halve, (0, batch["x"]))
        left = jax.lax.stop_gradient(left)
        return (
            jax.lax.cond(left[0, 0] < 1, jnp.log, jnp.sin, left).sum(-1) * (params["w"])
        )

    found = error_of(loss_fn, ONE, {"x": np.full((4, 2), 2, np.float32)}).replay()

    assert (found.name, found.ranges) == ("log", ((-1.0, -1.0),))


# A model with dropout and BatchNorm: the same key, the same statistics.


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(2, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(self.first(x)))


DATA = {"x": np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)}


def net_loss(model: Any, batch: Any, key: Any) -> Any:
    hidden = model(batch["x"]) * jax.random.uniform(key, (4,))
    return jnp.where(batch["at"] == 0, hidden.sum(-1), jnp.log(-jnp.abs(hidden[:, 0])))


@pytest.mark.parametrize("num_ranks", [0, 8])
def test_dropout_and_statistics_are_those_of_the_step(num_ranks: int):
    seen = []

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        losses = net_loss(model, batch, key)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), losses)
        return losses

    mesh = mesh_of(num_ranks) if num_ranks else None
    good = {**DATA, "at": np.zeros(16, np.int32)}
    bad = {**DATA, "at": np.r_[np.zeros(15, np.int32), 1].astype(np.int32)}
    error = error_of(loss_fn, Net(nnx.Rngs(0)), good, good, bad, mesh=mesh)
    jax.effects_barrier()
    ran = np.sort(np.concatenate(seen[-(num_ranks or 1) :]))
    seen.clear()
    found = error.replay()
    jax.effects_barrier()

    assert (found.step, found.name) == (3, "log")
    again = np.sort(np.concatenate([np.ravel(each) for each in seen]))
    assert np.isfinite(ran).sum() == 15
    # Sums over rows are added up in another order, and cancel in the statistics.
    np.testing.assert_allclose(again[: len(ran)], ran, rtol=2e-5, atol=1e-5)


# What is kept.


def test_the_state_stays_what_the_step_met_until_it_is_raised():
    loop = ff.TrainingLoop(product_loss, optax.adam, schedule=0.1, max_in_flight=8)
    good, bad = {"x": BAD[:2]}, {"x": BAD[2:4]}
    state, _ = loop.step(loop.init(ONE), good)
    before = host_copy((state.params, state.opt_state, state.step))
    state, _ = loop.step(state, bad)
    for _ in range(5):
        state, _ = loop.step(state, good)
    state, outcome = loop.step(state, good)
    with pytest.raises(ff.NonFiniteError, match="step 2 is not finite") as info:
        loop.step(state, good)
    error = info.value

    assert error.state is state
    assert_bitwise(host_copy((state.params, state.opt_state, state.step)), before)
    np.testing.assert_array_equal(error.batch["x"], bad["x"])
    with pytest.raises(ff.NonFiniteError) as again:
        _ = outcome.loss  # of a step after it
    assert again.value is error
    assert error.replay().rows == (1,)
    state, outcome = loop.step(state, good)
    assert outcome.global_step == 2
    with pytest.raises(RuntimeError, match="a step has taken over its state since"):
        error.replay()


def test_going_on_after_an_error_equals_leaving_out_what_was_in_flight():
    loop = ff.TrainingLoop(product_loss, optax.adam, schedule=0.1)
    good, bad = {"x": BAD[:2]}, {"x": BAD[2:4]}
    state = loop.init(ONE)
    for batch in (good, bad, good, good):
        state, outcome = loop.step(state, batch)
    with pytest.raises(ff.NonFiniteError, match="step 2"):
        _ = outcome.loss
    for _ in range(2):
        state, outcome = loop.step(state, good)
    expected = loop.init(ONE)
    for _ in range(3):
        expected, _ = loop.step(expected, good)

    assert (outcome.global_step, outcome.num_skipped) == (3, 3)
    assert_bitwise(host_copy(state.params), host_copy(expected.params))
    assert [record.program for record in loop.compiles] == ["step"]


def test_a_state_goes_from_a_loop_that_skips_to_one_that_raises_and_back():
    raising = ff.TrainingLoop(product_loss, optax.sgd, schedule=0.1)
    skipping = raising.replace(nonfinite="skip")
    good, bad = {"x": BAD[:2]}, {"x": BAD[2:4]}
    state, _ = skipping.step(raising.init(ONE), bad)
    for loop in (raising, skipping, raising):
        state, outcome = loop.step(state, good)

    assert (outcome.global_step, outcome.num_skipped) == (3, 1)
    state, _ = raising.step(state, bad)
    with pytest.raises(ff.NonFiniteError, match="step 4 is not finite"):
        skipping.step(state, good)


@pytest.mark.parametrize("kind", ["stacked", "resident", "stream"])
@pytest.mark.parametrize("num_ranks", [0, 8])
def test_a_step_of_a_fused_run_is_replayed_with_its_own_batch(
    kind: str, num_ranks: int
):
    mesh = mesh_of(num_ranks) if num_ranks else None
    rows = np.ones((96, 4), np.float32)
    rows[66, 2] = np.nan  # in the fifth of six, the second of its dispatch
    batches: Any = [{"x": rows[at : at + 16]} for at in range(0, 96, 16)]
    if kind != "stacked":
        loader = ff.DataLoader(
            {"x": rows}, 16, shuffle=False, resident=kind == "resident", mesh=mesh
        )
        batches = loader.epoch(0)
    loop = ff.TrainingLoop(product_loss, optax.sgd, schedule=0.1, mesh=mesh)
    state, outcome = loop.run(loop.init(ONE), batches, steps_per_call=3)

    with pytest.raises(ff.NonFiniteError, match="step 5 is not finite") as info:
        _ = outcome.loss
    error = info.value
    assert error.state is state
    assert int(state.step) == 4
    assert np.argwhere(~np.isfinite(np.asarray(error.batch["x"]))).tolist() == [[2, 2]]
    found = error.replay()
    assert (found.kind, found.name, found.rows) == ("batch", "x", (2,))


def test_a_graph_s_step_is_replayed():
    numpy = ff.lazy(jnp)
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    graph = ff.Graph(model)
    graph.set_optimizer(optax.sgd)
    graph.set_scheduler(0.1)
    outcome = graph.step(numpy.log(graph(BAD[:2, :2] * 0) * 0).mean())

    with pytest.raises(ff.NonFiniteError) as info:
        _ = outcome.loss
    found = info.value.replay()
    assert (found.kind, found.name) == ("operation", "log")
    assert found.ranges == ((0.0, 0.0),)


def test_the_error_of_a_trainer_is_replayed_after_the_run():
    rows = np.ones((96, 4), np.float32)
    rows[50, 2] = np.nan
    loader = ff.DataLoader({"x": rows}, 16, shuffle=False)
    loop = ff.TrainingLoop(product_loss, optax.sgd, schedule=0.1)
    trainer = ff.Trainer(loop, ONE, loader, epochs=3, steps_per_call=1)

    with pytest.raises(ff.NonFiniteError, match="step 4 is not finite") as info:
        trainer.fit()
    assert int(info.value.state.step) == int(trainer.state.step) == 3
    assert info.value.replay().rows == (2,)


def test_an_error_s_state_is_trained_on_without_the_account_of_its_epoch():
    rows = np.arange(16, dtype=np.float32).reshape(4, 4)
    loop = ff.TrainingLoop(root_loss, optax.sgd, schedule=1e-3)
    batches = [{"x": rows + 1}, {"x": -rows - 1}]
    trainer = ff.Trainer(loop, {"w": np.float32(1)}, batches, epochs=1)
    with pytest.raises(ff.NonFiniteError) as info:
        trainer.fit()
    again = ff.Trainer(loop, info.value.state, batches[:1], epochs=1).fit()

    assert info.value.state.sums is None
    assert list(again.history[0].per_rank_samples) == [4]


def test_a_copied_error_and_one_whose_state_is_gone_say_why_they_cannot():
    loop = ff.TrainingLoop(product_loss, optax.sgd, schedule=0.1)
    _, outcome = loop.step(loop.init(ONE), {"x": BAD})
    del _
    with pytest.raises(ff.NonFiniteError) as info:
        _ = outcome.loss

    with pytest.raises(RuntimeError, match="nobody has its state any more"):
        info.value.replay()
    for copied in (pickle.loads(pickle.dumps(info.value)), copy.copy(info.value)):
        assert (copied.step, copied.batch, copied.state) == (1, None, None)
        with pytest.raises(RuntimeError, match="step 1 cannot be run again: its batch"):
            copied.replay()


def test_large_batches_are_let_go_once_they_are_done(monkeypatch: Any):
    from fuelflow.step import flight

    monkeypatch.setattr(flight, "MAX_HELD_BYTES", 3 * BAD.nbytes)
    loop = ff.TrainingLoop(product_loss, optax.sgd, schedule=0.1)
    state = loop.init(ONE)
    held = []

    def step_over_another(state: ff.TrainState) -> ff.TrainState:
        x = jnp.ones((16, 4))
        held.append(weakref.ref(x))
        state, outcome = loop.step(state, {"x": x})
        outcome.realize()
        return state

    for _ in range(8):
        state = step_over_another(state)

    assert [each() is not None for each in held] == [False] * 5 + [True] * 3
    state, _ = loop.step(state, {"x": BAD})
    outcome = None
    for _ in range(5):
        state, outcome = loop.step(state, {"x": BAD[:1].repeat(16, 0)})
        jax.block_until_ready(state.params)
    assert outcome is not None
    with pytest.raises(ff.NonFiniteError) as info:
        _ = outcome.loss
    assert info.value.replay().rows == (3, 7)
