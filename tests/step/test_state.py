"""The state: one pytree, placed as the step returns it, and donated."""

import copy
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import KINDS, Kind, assert_bitwise, host_copy, make_batches, mlp_loss

import fuelflow as ff


def _loop(kind: Kind = KINDS[2], **options: Any) -> ff.TrainingLoop:
    return ff.TrainingLoop(mlp_loss(kind), optax.adamw, **{"schedule": 1e-3, **options})


def _placements(state: ff.TrainState) -> list[tuple[Any, ...]]:
    return [
        (leaf.shape, leaf.dtype, leaf.sharding, getattr(leaf, "weak_type", None))
        for leaf in jax.tree.leaves(state)
    ]


def _pointer(leaf: jax.Array) -> int:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return (jax.random.key_data(leaf) if is_key else leaf).unsafe_buffer_pointer()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_first_state_is_placed_as_the_step_returns_it(kind: Kind):
    loop = _loop(kind)
    state = loop.init(kind.make())
    before = _placements(state)
    state, _ = loop.step(state, make_batches(1)[0])

    assert _placements(state) == before
    assert all(len(sharding.device_set) == 1 for _, _, sharding, _ in before)


def test_no_two_fields_share_a_buffer():
    shared = np.zeros(3, np.float32)
    on_device = jnp.zeros(3)
    model = {"a": shared, "b": shared, "c": on_device, "d": on_device}

    def loss_fn(params: Any, batch: Any) -> Any:
        return batch["x"] * sum(param.sum() for param in params.values())

    loop = ff.TrainingLoop(loss_fn, optax.adam, schedule=0.1)
    state = loop.init(model)
    pointers = [_pointer(leaf) for leaf in jax.tree.leaves(state)]
    state, outcome = loop.step(state, {"x": np.ones(2, np.float32)})

    assert len(set(pointers)) == len(pointers)
    assert outcome.global_step == 1
    assert not shared.any()
    assert not np.asarray(on_device).any()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_users_own_arrays_survive_training(kind: Kind):
    model = kind.make()
    before = host_copy(kind.params_of(model))
    loop = _loop(kind)
    loop.run(loop.init(model), make_batches(3))

    assert_bitwise(host_copy(kind.params_of(model)), before)


def test_params_gradients_and_fields_are_named():
    loop = _loop()
    state = loop.init(KINDS[2].make())
    names = {"first.bias", "first.kernel", "second.bias", "second.kernel"}

    assert set(state.params) == names
    assert set(loop.grads(state, make_batches(1)[0])) == names
    assert [field.name for field in dataclasses.fields(state) if field.init] == [
        *("params", "variables", "opt_state", "step", "num_skipped"),
        *("lr", "lr_scale", "key", "sown", "sums", "definition"),
    ]
    assert repr(state) == "TrainState(NNX model, 4 parameters, 293 values)"


def test_gradients_are_those_of_jax_and_cost_nothing():
    batch = make_batches(1)[0]
    loop = _loop(KINDS[0], max_grad_norm=1e-3)
    state = loop.init(KINDS[0].make())
    before = host_copy(state)
    grads = loop.grads(state, batch)
    by_hand = jax.grad(lambda params: mlp_loss(KINDS[0])(params, batch).mean())(
        KINDS[0].make()
    )

    for name, grad in grads.items():
        first, second = name.split(".")
        np.testing.assert_allclose(grad, by_hand[first][second], rtol=1e-5, atol=1e-7)
    assert_bitwise(host_copy(state), before)


def test_the_rate_is_the_schedules_times_the_scale():
    batch = make_batches(1)[0]
    set_only = _loop(schedule=None)
    state = set_only.set_lr(set_only.init(KINDS[2].make()), 0.5)
    state, one = set_only.step(state, batch)
    state = set_only.set_lr_scale(set_only.set_lr(state, 0.25), 0.5)
    _, two = set_only.step(state, batch)
    scheduled = _loop(schedule=lambda step: 1.0 + step)
    state = scheduled.set_lr(scheduled.init(KINDS[2].make()), 7.0)
    state, three = scheduled.step(state, batch)
    state = scheduled.set_global_step(scheduled.set_lr_scale(state, 0.5), 9)
    _, four = scheduled.step(state, batch)

    assert [one.lr, two.lr, three.lr, four.lr] == [0.5, 0.125, 1.0, 5.0]
    assert (three.global_step, four.global_step) == (1, 10)


def test_a_scale_of_one_half_equals_half_the_rate():
    batches = make_batches(10)
    scaled, halved = _loop(schedule=0.5), _loop(schedule=0.25)
    state, _ = scaled.run(
        scaled.set_lr_scale(scaled.init(KINDS[2].make()), 0.5), batches
    )
    expected, _ = halved.run(halved.init(KINDS[2].make()), batches)

    assert_bitwise(state.params, expected.params)


def test_setting_a_rate_leaves_the_given_state_as_it_was():
    loop = _loop(schedule=None)
    state = loop.set_lr(loop.init(KINDS[2].make()), 0.5)
    other = loop.set_lr(state, 0.25)

    assert (float(state.lr), float(other.lr)) == (0.5, 0.25)
    loop.step(other, make_batches(1)[0])
    with pytest.raises(ff.UsedStateError):
        loop.step(state, make_batches(1)[0])


def test_a_copied_state_can_be_stepped_again_to_the_same_numbers():
    loop = _loop()
    state, _ = loop.step(loop.init(KINDS[2].make()), make_batches(1)[0])
    kept = jax.tree.map(jnp.copy, state)
    batches = make_batches(5, seed=1)
    one, _ = loop.run(state, batches)
    other, outcome = loop.run(kept, batches)

    assert_bitwise(host_copy(one), host_copy(other))
    assert outcome.global_step.tolist() == [2, 3, 4, 5, 6]


def test_a_state_from_plain_containers_is_put_in_order():
    loop = _loop()
    state, _ = loop.step(loop.init(KINDS[2].make()), make_batches(1)[0])
    expected, _ = loop.step(jax.tree.map(jnp.copy, state), make_batches(1)[0])
    adam = jax.tree.map(np.asarray, state.opt_state[0])
    as_file = [adam._asdict(), *({} for _ in state.opt_state[1:])]
    state, _ = loop.step(
        dataclasses.replace(state, opt_state=as_file), make_batches(1)[0]
    )

    assert_bitwise(host_copy(state), host_copy(expected))


def test_fields_that_share_a_buffer_are_parted():
    loop = _loop()
    state = loop.init(KINDS[2].make())
    zeros = state.opt_state[0].mu["first.kernel"]
    params = {**state.params, "first.kernel": zeros}
    state, outcome = loop.step(
        dataclasses.replace(state, params=params), make_batches(1)[0]
    )

    assert outcome.finite


def test_training_stays_on_the_device_the_model_is_on():
    device = jax.devices()[3]
    model = jax.device_put(KINDS[0].make(), device)
    loop = _loop(KINDS[0])
    state, _ = loop.run(loop.init(model), make_batches(4), steps_per_call=2)

    assert {leaf.device for leaf in jax.tree.leaves(state)} == {device}


def test_seeds_and_keys_start_the_same_stream():
    def loss_fn(params: Any, batch: Any, key: jax.Array) -> Any:
        return batch["x"] * params["w"], {"draw": jax.random.uniform(key)}

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    batch = {"x": np.ones(2, np.float32)}
    draws = []
    for seed in (0, jax.random.key(0), np.int64(0), 1):
        state = loop.init({"w": np.float32(0)}, seed=seed)
        state, one = loop.step(state, batch)
        state, two = loop.step(state, batch)
        draws.append((one.metrics["draw"], two.metrics["draw"]))

    assert draws[0] == draws[1] == draws[2] != draws[3]
    assert draws[0][0] != draws[0][1]


def test_mixed_precision_keeps_every_dtype():
    def loss_fn(params: Any, batch: Any) -> Any:
        return ((batch["x"] @ params["half"]).astype(jnp.float32) * params["full"]) ** 2

    model = {"half": jnp.ones(3, jnp.bfloat16), "full": jnp.ones((), jnp.float32)}
    loop = ff.TrainingLoop(loss_fn, optax.adamw, schedule=0.1, max_grad_norm=1.0)
    state = loop.init(model)
    state, outcome = loop.step(state, {"x": jnp.ones((4, 3), jnp.bfloat16)})

    assert state.params["half"].dtype == jnp.bfloat16
    assert state.params["full"].dtype == jnp.float32
    assert outcome.finite


def test_a_float16_norm_does_not_overflow():
    def loss_fn(params: Any, batch: Any) -> Any:
        return (batch["x"] * params["w"]).sum(-1).astype(jnp.float32)

    x = np.full((1, 3), 300, np.float16)
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=1.0, max_grad_norm=3.0)
    state = loop.init({"w": jnp.zeros(3, jnp.float16)})
    state, outcome = loop.step(state, {"x": x})

    # 300 squared is past float16's largest number.
    assert outcome.grad_norm == pytest.approx(300 * 3**0.5, rel=1e-6)
    np.testing.assert_allclose(state.params["w"], -np.sqrt(3.0), rtol=1e-3)


def test_a_state_is_copied_and_pickled_like_any_object():
    loop = _loop()
    batches = make_batches(2)
    state, outcome = loop.step(loop.init(KINDS[2].make()), batches[0])
    assert outcome.finite
    copied = copy.deepcopy(state)
    one, _ = loop.step(state, batches[1])
    other, _ = loop.step(copied, batches[1])

    assert_bitwise(host_copy(one), host_copy(other))
    assert len(loop.compiles) == 1


def test_a_model_given_again_on_another_device_trains_there():
    loop = _loop(KINDS[0])
    loop.step(loop.init(KINDS[0].make()), make_batches(1)[0])
    model = jax.device_put(KINDS[0].make(), jax.devices()[3])
    state, _ = loop.step(loop.init(model), make_batches(1)[0])

    assert {leaf.device for leaf in jax.tree.leaves(state)} == {jax.devices()[3]}


def test_keys_reach_the_parameter_of_that_name():
    def loss_fn(params: Any, batch: Any, scale: float = 2.0, *, key: Any) -> Any:
        return scale * batch["x"] * params["w"], {"draw": jax.random.uniform(key)}

    batch = {"x": np.ones(2, np.float32)}
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    bound = ff.TrainingLoop(
        functools.partial(loss_fn, key=jax.random.key(7)), optax.sgd, schedule=0.1
    )
    _, free = loop.step(loop.init({"w": np.float32(1)}), batch)
    _, fixed = bound.step(bound.init({"w": np.float32(1)}), batch)

    assert free.loss == fixed.loss == 2.0
    assert fixed.metrics["draw"] == float(jax.random.uniform(jax.random.key(7)))
    assert free.metrics["draw"] != fixed.metrics["draw"]


def test_limits_of_numpy_and_wide_weights_widen_nothing():
    def loss_fn(params: Any, batch: Any) -> Any:
        value = (params["w"] * batch["x"]).astype(jnp.float32)
        return ff.Weighted(value, batch["weight"])

    loop = ff.TrainingLoop(
        loss_fn,
        optax.adam,
        schedule=0.1,
        max_grad_value=np.float64(1),
        max_grad_norm=np.float64(1),
        accumulate_steps=2,
    )
    batch = {"x": np.ones(4, np.float32), "weight": np.arange(4.0)}
    with jax.enable_x64(True):
        state = loop.init({"w": jnp.ones((), jnp.bfloat16)})
        state, outcome = loop.step(state, batch)

    assert outcome.finite
    assert state.params["w"].dtype == jnp.bfloat16
