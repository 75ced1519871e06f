"""Ranks: one update, whatever the number of devices the batch is spread over."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_bitwise, host_copy
from rank_problems import (
    assert_close,
    dense_loss,
    dense_params,
    digit_loader,
    least_squares,
    mesh_of,
    small_batch,
    small_loop,
    small_model,
    token_loss,
    token_model,
    tokens,
)

import fuelflow as ff

NUM_STEPS = 200
RATE, CLIP = 1e-2, 1.0
MESHES = [1, 2, 8]
# A sum over ranks has another order than one over rows: one part in 2^23 of values of
# order one, some forty times over. The largest difference seen is 6e-7.
ROUNDING = {"rtol": 0, "atol": 5e-6}


@functools.cache
def _trained(num_ranks: int, accumulate_steps: int = 1) -> Any:
    """Two hundred steps of the digits: parameters, losses and accuracies."""
    loop = ff.TrainingLoop(
        dense_loss,
        optax.adamw,
        schedule=RATE,
        max_grad_norm=CLIP,
        accumulate_steps=accumulate_steps,
        mesh=mesh_of(num_ranks),
        strict_compile=True,
    )
    loader = digit_loader(mesh=mesh_of(num_ranks))
    state = loop.init(dense_params())
    losses, rights = [], []
    for epoch in range(-(-NUM_STEPS // len(loader))):
        state, outcome = loop.run(state, loader.epoch(epoch))
        losses += outcome.loss.tolist()
        rights += outcome.metrics["accuracy"].tolist()
    return host_copy(dict(state.params)), losses, rights, state


def test_two_hundred_steps_learn_the_digits():
    _, losses, rights, _ = _trained(0)

    assert len(losses) >= NUM_STEPS
    assert np.mean(losses[-20:]) < 0.2 < 2 < losses[0]
    assert np.mean(rights[-20:]) > 0.95


def test_a_mesh_of_one_trains_bit_for_bit_as_no_mesh():
    params, losses, rights, _ = _trained(1)
    expected, *curves, _ = _trained(0)

    assert_bitwise(params, expected)
    assert [losses, rights] == curves


@pytest.mark.parametrize(("num_ranks", "accumulate_steps"), [(2, 1), (8, 1), (8, 4)])
def test_ranks_train_the_digits_as_one_device_does(
    num_ranks: int, accumulate_steps: int
):
    params, losses, rights, _ = _trained(num_ranks, accumulate_steps)
    expected, *curves, _ = _trained(0)

    assert_close(params, expected, **ROUNDING)
    np.testing.assert_allclose(losses, curves[0], rtol=1e-5, atol=1e-5)
    # A digit on the edge between two classes may fall to either side.
    assert np.mean(np.abs(np.subtract(rights, curves[1]))) < 1e-4


def test_every_rank_holds_the_same_bits():
    *_, state = _trained(8)

    for name, param in state.params.items():
        first, *others = [np.asarray(shard.data) for shard in param.addressable_shards]
        assert len(others) == 7
        assert all((other == first).all() for other in others), name


@pytest.mark.parametrize("num_ranks", [0, 8])
def test_ranks_train_the_digits_as_a_hand_written_loop_does(num_ranks: int):
    params, losses, *_ = _trained(num_ranks)
    expected, by_hand = _train_by_hand()

    names = {"['first.kernel']", "['second.bias']"}
    assert names <= set(params)
    assert_close(params, expected, **ROUNDING)
    np.testing.assert_allclose(losses, by_hand, rtol=1e-5, atol=1e-5)


def _train_by_hand() -> Any:
    """The same steps by plain optax over the true rows, the tail at its own shape."""
    tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE))

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return dense_loss(params, batch)[0].mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, losses = dense_params(), []
    opt_state = tx.init(params)
    loader = digit_loader()
    for epoch in range(-(-NUM_STEPS // len(loader))):
        for batch in loader.epoch(epoch):
            params, opt_state, loss = step(params, opt_state, dict(batch))
            losses.append(float(loss))
    flat = {
        f"['{layer}.{name}']": np.asarray(values)
        for layer, arrays in params.items()
        for name, values in arrays.items()
    }
    return flat, losses


# Weights, forms and accumulation.


@functools.cache
def _trained_on_tokens(num_ranks: int, accumulate_steps: int) -> Any:
    loop = ff.TrainingLoop(
        token_loss,
        optax.adam,
        schedule=0.02,
        accumulate_steps=accumulate_steps,
        mesh=mesh_of(num_ranks),
    )
    state = loop.init(token_model())
    batches = [tokens(seed) for seed in range(NUM_STEPS)]
    state, outcome = loop.run(state, batches, steps_per_call=100)
    return host_copy(dict(state.params)), outcome


@pytest.mark.parametrize(
    ("num_ranks", "accumulate_steps"), [(1, 2), (2, 1), (8, 1), (8, 2)]
)
def test_tokens_count_alike_whichever_rank_has_them(
    num_ranks: int, accumulate_steps: int
):
    params, outcome = _trained_on_tokens(num_ranks, accumulate_steps)
    expected, one = _trained_on_tokens(0, 1)

    assert tokens(0)["mask"][:2].sum() == 0  # one of eight ranks has no token
    assert_close(params, expected, **ROUNDING)
    np.testing.assert_allclose(outcome.loss, one.loss, rtol=1e-5)
    for name, values in one.metrics.items():
        np.testing.assert_allclose(outcome.metrics[name], values, rtol=1e-5)


def test_the_gradient_of_tokens_is_that_of_all_of_them():
    batch = tokens(0)
    loop = ff.TrainingLoop(token_loss, optax.sgd, schedule=0.1, mesh=mesh_of(8))
    state = loop.init(token_model())

    def by_hand(w: Any) -> Any:
        error = (batch["x"] @ w + np.float32(0.1) - batch["y"]) ** 2
        return (error * batch["mask"]).sum() / batch["mask"].sum()

    expected = jax.grad(by_hand)(token_model()["w"])
    np.testing.assert_allclose(loop.grads(state, batch)["w"], expected, rtol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_scalar_loss_is_the_mean_over_the_whole_batch(num_ranks: int):
    def mean_loss(params: Any, batch: Any) -> Any:
        errors, metrics = least_squares(params, batch)
        return errors.mean(), {"absolute": metrics["absolute"].mean()}

    loop = ff.TrainingLoop(mean_loss, optax.sgd, schedule=1.0, mesh=mesh_of(num_ranks))
    batch, w = small_batch(), small_model()["w"]
    state, outcome = loop.step(loop.init(small_model()), batch)
    error = batch["x"] @ w - batch["y"]
    gradient = (2 * error[:, None] * batch["x"]).mean(0)

    assert outcome.loss == pytest.approx((error**2).mean(), rel=1e-6)
    assert outcome.metrics["absolute"] == pytest.approx(np.abs(error).mean(), rel=1e-6)
    np.testing.assert_allclose(state.params["w"], w - gradient, rtol=1e-5)


# Faces of the step.


def test_a_run_on_ranks_equals_its_steps_bit_for_bit():
    loop = small_loop()
    batches = [small_batch(seed=seed) for seed in range(7)]
    expected, outcomes = loop.init(small_model()), []
    for batch in batches:
        expected, outcome = loop.step(expected, batch)
        outcomes.append(outcome)
    state, outcome = loop.run(loop.init(small_model()), batches, steps_per_call=3)

    assert_bitwise(host_copy(state), host_copy(expected))
    for name in ("loss", "grad_norm", "lr", "global_step"):
        one_by_one = [getattr(each, name) for each in outcomes]
        np.testing.assert_array_equal(getattr(outcome, name), one_by_one)


def test_a_fused_stretch_of_resident_rows_equals_its_steps():
    rows = small_batch(67)  # four batches, and three rows
    loader = ff.DataLoader(rows, 16, resident=True, mesh=mesh_of(8))
    loop = small_loop()
    expected, _ = loop.run(loop.init(small_model()), loader.epoch(0))
    state, outcome = loop.run(
        loop.init(small_model()), loader.epoch(0), steps_per_call=2
    )

    assert outcome.global_step.tolist() == [1, 2, 3, 4, 5]
    # Gathered inside a scan, XLA fuses the rows otherwise.
    assert_close(state.params, expected.params, rtol=1e-6, atol=1e-7)


def test_a_step_applies_the_gradients_that_grads_gives():
    loop = ff.TrainingLoop(least_squares, optax.sgd, schedule=1.0, mesh=mesh_of(8))
    one = ff.TrainingLoop(least_squares, optax.sgd, schedule=1.0)
    state = loop.init(small_model())
    grads = host_copy(loop.grads(state, small_batch()))
    state, outcome = loop.step(state, small_batch())
    expected = one.grads(one.init(small_model()), small_batch())["w"]

    np.testing.assert_allclose(grads["['w']"], expected, rtol=1e-6)
    np.testing.assert_allclose(
        state.params["w"], small_model()["w"] - grads["['w']"], rtol=1e-6
    )
    assert outcome.grad_norm == pytest.approx(np.linalg.norm(expected), rel=1e-6)


def test_a_plan_is_of_the_program_that_then_runs(compile_counter: Any):
    loop = ff.TrainingLoop(
        least_squares, optax.adam, schedule=0.1, mesh=mesh_of(8), strict_compile=True
    )
    state = loop.init(small_model())
    plan = loop.plan(state, small_batch())
    compile_counter.reset()
    state, outcome = loop.step(state, small_batch())

    assert [(param.name, param.size) for param in plan.params] == [("w", 3)]
    assert "all-reduce" in (plan.text or "")
    assert compile_counter.compiled == []
    assert np.isfinite(outcome.loss)


def test_evaluation_and_restoring_cost_one_compile_each(compile_counter: Any):
    loop = ff.TrainingLoop(
        least_squares, optax.adam, schedule=0.1, mesh=mesh_of(8), strict_compile=True
    )
    state = loop.init(small_model())
    state, outcome = loop.step(state, small_batch())
    assert np.isfinite(outcome.loss)
    compile_counter.reset()
    for seed in range(3):
        state = loop.set_lr_scale(state, 0.5)
        state, _ = loop.step(state, small_batch(seed=seed))
    assert (compile_counter.compiled, compile_counter.traced) == ([], [])

    # The tail of one evaluation is filled up to the other batches' size.
    dict(loop.evaluate(state, [small_batch(), small_batch(5)]))
    state, outcome = loop.step(state, small_batch())
    assert np.isfinite(outcome.loss)
    restored = jax.tree.map(_reread, state)
    restored, outcome = loop.step(restored, small_batch())
    assert outcome.global_step == 6
    assert [record.program for record in loop.compiles] == ["step", "evaluate"]


def _reread(leaf: Any) -> Any:
    """A leaf as a file gives it back."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        bits: Any = np.asarray(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(bits)
    return np.array(leaf)


def test_steps_over_placed_batches_move_nothing(monkeypatch: pytest.MonkeyPatch):
    loop = small_loop()
    batch = jax.device_put(
        small_batch(),
        jax.sharding.NamedSharding(_mesh(), jax.sharding.PartitionSpec("data")),
    )
    state, _ = loop.step(loop.init(small_model()), batch)
    transfers = []
    original = np.asarray

    def counting(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, jax.Array):
            transfers.append(value.shape)
        return original(value, *args, **kwargs)

    monkeypatch.setattr(np, "asarray", counting)
    with jax.transfer_guard("disallow"):
        outcomes = []
        for _ in range(20):
            state, outcome = loop.step(state, batch)
            outcomes.append(outcome)
    assert transfers == []

    assert outcomes[-1].global_step == 21
    assert len(transfers) == 1


def test_a_loaders_batches_are_where_the_step_takes_them():
    loop = small_loop()
    loader = ff.DataLoader(small_batch(48), 16, mesh=mesh_of(8), prefetch=0)
    first, *batches = loader.epoch(0)
    state, _ = loop.step(loop.init(small_model()), first)

    with jax.transfer_guard("disallow"):
        for batch in batches:
            state, _ = loop.step(state, batch)

    assert int(state.step) == 3


def _mesh(num_ranks: int = 8) -> jax.sharding.Mesh:
    mesh = mesh_of(num_ranks)
    assert mesh is not None
    return mesh


def test_a_step_takes_over_the_state_on_every_rank():
    loop = small_loop()
    state = loop.init(small_model())
    after, _ = loop.step(state, small_batch())

    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.opt_state))
    assert not after.params["w"].is_deleted()
    with pytest.raises(ff.UsedStateError, match="this state has been used up"):
        loop.step(state, small_batch())


def test_the_model_comes_back_on_one_device():
    given = jax.tree.map(jnp.asarray, small_model())
    loop = small_loop()
    state = loop.init(given)
    places = {len(leaf.devices()) for leaf in jax.tree.leaves(state)}
    state, _ = loop.step(state, small_batch())
    model = loop.model(state)
    copied = np.array(model["w"])
    state, outcome = loop.step(state, small_batch())

    assert places == {8}
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(state)} == {8}
    assert model["w"].devices() == {jax.devices()[0]}
    assert outcome.global_step == 2
    np.testing.assert_array_equal(model["w"], copied)
    np.testing.assert_array_equal(given["w"], small_model()["w"])


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_bad_row_of_one_rank_leaves_the_state_of_all_as_it_was(nonfinite: Any):
    loop = small_loop(nonfinite=nonfinite)
    state, _ = loop.step(loop.init(small_model()), small_batch())
    before = host_copy((state.params, state.opt_state, state.step))
    bad = small_batch()
    bad["x"][13] = np.nan
    state, outcome = loop.step(state, bad)

    assert outcome.finite is False
    assert_bitwise(host_copy((state.params, state.opt_state, state.step)), before)
    for shard in state.params["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, before["[0]['w']"])
    assert int(state.num_skipped) == 1
    if nonfinite == "raise":
        with pytest.raises(ff.NonFiniteError, match="step 2 is not finite: loss nan"):
            _ = outcome.loss
    state, outcome = loop.step(state, small_batch())
    assert outcome.global_step == 2


# Evaluation.


@pytest.mark.parametrize("num_ranks", [0, *MESHES])
def test_an_evaluation_of_uneven_batches_is_the_mean_over_all_rows(num_ranks: int):
    loop = small_loop(num_ranks)
    batches = [small_batch(size, seed=size) for size in (16, 16, 13, 1, 24)]
    means = loop.evaluate(loop.init(small_model()), batches)
    x, y = (np.concatenate([batch[name] for batch in batches]) for name in "xy")
    error = np.float64(x) @ small_model()["w"] - y

    assert means.weight == len(x) == 70
    assert means["loss"] == pytest.approx((error**2).mean(), rel=1e-6)
    assert means["absolute"] == pytest.approx(np.abs(error).mean(), rel=1e-6)


def test_an_evaluation_over_a_loader_counts_each_row_once_on_ranks():
    rows = small_batch(37)
    error = np.float64(rows["x"]) @ small_model()["w"] - rows["y"]
    loop = small_loop()
    state = loop.init(small_model())
    for resident in (True, False):
        loader = ff.DataLoader(
            rows, 32, shuffle=False, mesh=mesh_of(8), resident=resident
        )
        means = loop.evaluate(state, loader)

        assert means.weight == 37
        assert means["loss"] == pytest.approx((error**2).mean(), rel=1e-6)


# Meshes.


@pytest.mark.parametrize(
    ("shape", "names", "types"),
    [
        ((8,), ("data",), None),  # by default Explicit
        ((4, 2), ("data", "model"), "Explicit"),
        ((2, 4), ("model", "data"), "Auto"),
    ],
)
def test_meshes_of_any_type_and_with_further_axes_train_alike(
    shape: Any, names: Any, types: str | None
):
    kinds = (jax.sharding.AxisType[types],) * len(names) if types else None
    mesh = jax.make_mesh(shape, names, kinds)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    loop = small_loop().replace(mesh=mesh)
    state = loop.init(small_model())
    placed = jax.device_put(small_batch(), sharding)
    state, outcome = loop.step(state, small_batch())
    state, _ = loop.step(state, placed)
    state, _ = loop.step(state, placed)
    loader = ff.DataLoader(small_batch(19), 16, shuffle=False, mesh=mesh)
    state, _ = loop.run(state, loader)
    means = loop.evaluate(state, [placed, small_batch(3)])

    one = small_loop(0)
    tail = {name: values[16:] for name, values in small_batch(19).items()}
    batches = [*[small_batch()] * 3, {n: v[:16] for n, v in small_batch(19).items()}]
    expected, told = one.run(one.init(small_model()), [*batches, tail])
    assert outcome.loss == pytest.approx(told.loss[0], rel=1e-6)
    assert_close(state.params, expected.params, rtol=1e-5, atol=1e-6)
    means_of_one = one.evaluate(expected, [small_batch(), small_batch(3)])
    assert dict(means) == pytest.approx(dict(means_of_one), rel=1e-5)


# Refusals.


def test_no_mesh_and_a_mesh_without_data_are_refused():
    devices = np.array(jax.devices())

    with pytest.raises(TypeError, match=r"ff\.mesh\(\) makes, got a list"):
        ff.TrainingLoop(least_squares, optax.sgd, mesh=jax.devices())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="axis named `data`.* got the axes .'batch'"):
        ff.TrainingLoop(
            least_squares, optax.sgd, mesh=jax.sharding.Mesh(devices, ("batch",))
        )
    for wrong in ([], [devices[0], devices[0]]):
        with pytest.raises(ValueError, match="`devices` must be at least one device"):
            ff.mesh(wrong)


def test_rows_that_the_ranks_do_not_divide_are_refused_with_what_to_do():
    loop = small_loop()
    state = loop.init(small_model())
    remedies = (
        "the 8 ranks of the mesh must divide the rows of a batch, got 12: take a batch "
        "size that is a multiple of 8; .* have the loss and every metric return one "
        r"value for each row"
        r".* or drop those rows with DataLoader\(drop_last=True\)"
    )

    for call in (loop.step, loop.grads, loop.plan):
        with pytest.raises(ValueError, match=remedies):
            call(state, small_batch(12))
    with pytest.raises(ValueError, match=remedies):
        loop.run(state, [small_batch(12)] * 2, steps_per_call=2)
    state, outcome = loop.step(state, small_batch())
    assert outcome.global_step == 1


def test_a_scalar_loss_refuses_a_tail_that_the_ranks_do_not_divide():
    def mean_loss(params: Any, batch: Any) -> Any:
        return least_squares(params, batch)[0].mean()

    loop = ff.TrainingLoop(mean_loss, optax.sgd, schedule=0.1, mesh=mesh_of(8))
    state = loop.init(small_model())
    full, tail = ff.DataLoader(small_batch(21), 16, mesh=mesh_of(8))
    even_full, even_tail = ff.DataLoader(small_batch(24), 16, mesh=mesh_of(8))

    state, _ = loop.step(state, full)
    with pytest.raises(ValueError, match="ranks of the mesh must divide .* got 5"):
        loop.step(state, tail)
    with pytest.raises(ValueError, match="ranks of the mesh must divide .* got 5"):
        loop.evaluate(state, [full, tail])
    state, _ = loop.run(state, [even_full, even_tail])
    assert int(state.step) == 3


def test_microbatches_must_divide_the_rows_of_each_rank():
    loop = small_loop(accumulate_steps=2)

    with pytest.raises(
        ValueError,
        match="`accumulate_steps` must divide the batch, got 2 microbatches for 3 rows "
        "of each of 8 ranks",
    ):
        loop.step(loop.init(small_model()), small_batch(24))
    _, outcome = loop.step(loop.init(small_model()), small_batch())
    assert outcome.global_step == 1
