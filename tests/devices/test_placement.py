import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fuelflow as ff
from fuelflow.devices.placement import SingleDevice, device_of

BATCH = {"x": np.ones((4, 2), np.float32)}


def loss_fn(model, batch):
    return (batch["x"] @ model["w"] + model.get("v", 0.0)) ** 2


def make_loop():
    return ff.TrainingLoop(loss_fn, optax.adam, schedule=0.1, strict_compile=True)


def devices_of(tree):
    return {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}


def test_a_state_lives_where_its_model_does_before_and_after_steps():
    device = jax.devices()[3]
    model = {"w": jax.device_put(jnp.ones(2), device), "v": np.float32(1)}
    loop = make_loop()

    first = loop.init(model)
    places = devices_of(first)
    committed = {leaf.committed for leaf in jax.tree.leaves(first)}
    second, _ = loop.step(first, BATCH)
    third, _ = loop.run(second, [BATCH, BATCH])

    assert places == devices_of(third) == {device}
    assert committed == {True}
    assert devices_of(loop.model(third)) == {device}


def test_a_model_on_the_host_goes_to_the_default_device():
    device = jax.devices()[2]

    with jax.default_device(device):
        state = make_loop().init({"w": np.ones(2, np.float32)})

    assert devices_of(state) == {device}


def test_arrays_that_share_a_buffer_are_parted_so_that_a_step_can_take_them():
    w = jnp.ones(2)
    loop = make_loop()

    state = loop.init({"w": w, "v": w[0] * 1, "same": w, "e": jnp.ones((0,))})
    pointers = [
        leaf.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves((state.params, state.opt_state, state.step))
        if leaf.size
    ]
    state, outcome = loop.step(state, BATCH)

    assert len(set(pointers)) == len(pointers)
    assert outcome.loss == 9.0
    np.testing.assert_array_equal(w, [1, 1])


def test_one_array_in_two_places_becomes_two():
    w = jax.device_put(jnp.ones(2), jax.devices()[0])

    placed = SingleDevice(jax.devices()[0]).place({"a": w, "b": w})

    assert placed["a"].unsafe_buffer_pointer() != placed["b"].unsafe_buffer_pointer()


def test_memory_of_numpy_arrays_is_never_taken_over():
    # At a multiple of 64 bytes, where jax on the CPU would use it without a copy.
    memory = np.ones(32, np.float32)
    start = -memory.ctypes.data % 64 // memory.itemsize
    w = memory[start : start + 16]
    kept = SingleDevice(jax.devices()[0]).place({"w": w, "n": np.int32(3)})

    w[:] = 7

    np.testing.assert_array_equal(kept["w"], np.ones(16))
    assert kept["n"].dtype == jnp.int32


@pytest.mark.parametrize("copy", [False, True])
def test_only_copies_are_apart_from_arrays_that_were_already_there(copy):
    device = jax.devices()[0]
    tree = {"w": jax.device_put(jnp.ones(2), device), "k": jax.random.key(0)}

    placed = SingleDevice(device).place(tree, copy=copy)
    is_shared = {
        name: jax.random.key_data(placed[name]).unsafe_buffer_pointer()
        == jax.random.key_data(tree[name]).unsafe_buffer_pointer()
        if name == "k"
        else placed[name].unsafe_buffer_pointer() == tree[name].unsafe_buffer_pointer()
        for name in tree
    }

    assert is_shared == {"w": not copy, "k": not copy}


def test_a_sharded_model_is_refused_by_name():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    w = jax.device_put(jnp.ones(16), NamedSharding(mesh, PartitionSpec("data")))

    with pytest.raises(ValueError, match=r"w` is sharded over 8: .* as `mesh=`"):
        make_loop().init({"v": jnp.ones(()), "w": w})


def test_a_model_on_two_devices_is_refused_by_both_names():
    first, second = jax.devices()[:2]
    model = {
        "v": jax.device_put(jnp.ones(()), first),
        "w": jax.device_put(jnp.ones(2), second),
    }

    with pytest.raises(ValueError, match=r"v` is on .*0.* and `.*w` on .*1"):
        make_loop().init(model)


def test_arrays_on_the_host_are_on_no_device_of_their_own():
    device = jax.devices()[1]

    assert device_of({"w": np.ones(2)}) == jax.devices()[0]
    assert device_of({"w": np.ones(2), "v": jax.device_put(1.0, device)}) == device
