"""Batches over a mesh: the same rows in the same order, each rank with its own."""

import gc
import itertools
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rank_problems import mesh_of

import fuelflow as ff
from fuelflow.data.loader import DataLoader
from fuelflow.data.prefetch import THREAD_NAME

NUM_ROWS, SIZE = (
    43,
    16,
)  # two full batches, and eleven rows: two of eight ranks get none
MESHES = [1, 2, 8]
ROADS = {
    "resident": {"resident": True},
    "streaming": {"resident": False},
    "one by one": {"resident": False, "prefetch": 0},
}


def source(num_rows=NUM_ROWS):
    return {"row": np.arange(num_rows), "x": np.arange(2.0 * num_rows).reshape(-1, 2)}


def make_loader(num_ranks=8, num_rows=NUM_ROWS, size=SIZE, **options):
    return DataLoader(source(num_rows), size, mesh=mesh_of(num_ranks), **options)


def stream(num_rows=NUM_ROWS):
    def rows():
        return ({"row": np.int32(row)} for row in range(num_rows))

    return rows


def seen(batches, field="row"):
    return [np.asarray(batch[field]).tolist() for batch in batches]


def by_rank(values):
    """The rows that each device has, in the order of the ranks."""
    shards = sorted(values.addressable_shards, key=lambda shard: shard.device.id)
    return [np.asarray(shard.data).tolist() for shard in shards]


@pytest.fixture(autouse=True)
def no_threads_afterwards():
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_NAME):
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("num_ranks", MESHES)
def test_a_mesh_changes_neither_rows_nor_order(num_ranks, road):
    loader = make_loader(num_ranks, **ROADS[road])
    expected = make_loader(0)

    assert len(loader) == len(expected) == 3
    for epoch in range(2):
        assert seen(loader.epoch(epoch)) == seen(expected.epoch(epoch))
    assert seen(loader.epoch(1), "x") == seen(expected.epoch(1), "x")
    assert sorted(itertools.chain(*seen(loader.epoch(0)))) == list(range(NUM_ROWS))


@pytest.mark.parametrize("road", ROADS)
def test_each_rank_has_its_own_rows_and_a_tail_is_filled_up(road):
    loader = make_loader(shuffle=False, **ROADS[road])
    mesh = mesh_of(8)
    assert mesh is not None
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    *full, tail = list(loader)

    assert [batch.num_held for batch in (*full, tail)] == [SIZE] * 3
    assert tail.size == 11
    for batch in (*full, tail):
        for leaf in jax.tree.leaves(batch.rows()):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    pairs = np.arange(SIZE, 2 * SIZE).reshape(8, 2).tolist()
    assert by_rank(full[1].rows().fields["row"]) == pairs
    assert by_rank(full[1].rows().weight) == [[1, 1]] * 8
    filled = np.minimum(np.arange(32, 48), NUM_ROWS - 1).reshape(8, 2).tolist()
    assert by_rank(tail.rows().fields["row"]) == filled
    assert by_rank(tail.rows().weight) == [[1, 1]] * 5 + [[1, 0]] + [[0, 0]] * 2


@pytest.mark.parametrize("road", ROADS)
def test_an_epoch_shorter_than_a_batch_is_filled_up_to_what_ranks_divide(road):
    loader = make_loader(num_rows=5, size=32, shuffle=False, **ROADS[road])

    (batch,) = loader

    assert (batch.size, batch.num_held) == (5, 8)
    assert by_rank(batch.rows().weight) == [[1]] * 5 + [[0]] * 3


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [16]), (False, [16, 8])])
@pytest.mark.parametrize("road", ROADS)
def test_a_tail_that_ranks_divide_is_left_as_it_is_or_dropped(road, drop_last, sizes):
    loader = make_loader(num_rows=24, drop_last=drop_last, **ROADS[road])

    batches = list(loader)

    assert [batch.num_held for batch in batches] == sizes
    assert [batch.rows().weight for batch in batches] == [None] * len(sizes)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(("before", "after"), [(8, 2), (0, 8)])
def test_a_position_goes_on_with_another_number_of_ranks(before, after, road):
    first = make_loader(before)
    expected = seen(first.epoch(1))
    batches = first.epoch(1)
    next(batches)
    position = json.loads(json.dumps(first.state()))
    batches.close()

    second = make_loader(after, **ROADS[road])
    second.restore(position)

    assert seen(second.epoch(1)) == expected[1:]
    assert seen(second.epoch(2)) == seen(make_loader(0).epoch(2))


def test_a_loader_moved_to_a_mesh_is_where_it_was():
    mesh = mesh_of(8)
    assert mesh is not None
    loader = make_loader(0)
    expected = [seen(loader.epoch(epoch)) for epoch in range(3)]
    batches = loader.epoch(1)
    next(batches)
    position = loader.state()
    batches.close()

    fresh, restored = make_loader(0), make_loader(0)
    seen(fresh)
    restored.restore(position)
    on_mesh = [each.on(mesh) for each in (fresh, restored)]

    assert [each.mesh for each in on_mesh] == [mesh, mesh]
    assert loader.mesh is None
    assert seen(on_mesh[0]) == expected[1]
    assert seen(on_mesh[1]) == expected[1][1:]
    assert seen(on_mesh[1]) == expected[2]
    assert seen(fresh) == expected[1]  # the first goes its own way


# Transforms.


def add_noise(fields, key):
    return {**fields, "noise": jax.random.normal(key, fields["row"].shape)}


def test_the_keys_of_a_device_transform_differ_between_ranks():
    options = {"device_transform": add_noise, "shuffle": False}
    noises = {
        road: np.concatenate(
            [
                np.asarray(batch.rows().fields["noise"])
                for batch in make_loader(8, **options, **ROADS[road])
            ]
        )
        for road in ROADS
    }

    for noise in noises.values():
        np.testing.assert_array_equal(noise, noises["resident"])
        of_ranks = noise.reshape(3 * 8, -1)
        assert len(np.unique(of_ranks, axis=0)) == 3 * 8


def test_a_fused_run_draws_the_noise_that_batches_have():
    def loss_fn(params, batch):
        return params["w"] * batch["noise"]

    loader = make_loader(num_rows=64, device_transform=add_noise, resident=True)
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.0, mesh=mesh_of(8))
    expected = [np.asarray(batch["noise"]).mean() for batch in loader.epoch(0)]

    _, outcome = loop.run(
        loop.init({"w": jnp.ones(())}), loader.epoch(0), steps_per_call=2
    )

    assert [record.program for record in loop.compiles] == ["run on resident data"]
    np.testing.assert_allclose(outcome.loss, expected, rtol=1e-5, atol=1e-7)


def test_a_host_transform_sees_the_true_rows_of_the_whole_batch():
    sizes = []

    def jitter(fields, rng):
        sizes.append(len(fields["row"]))
        return {**fields, "noise": rng.normal(size=len(fields["row"]))}

    loader = make_loader(8, transform=jitter, prefetch=1)
    noise = seen(loader, "noise")

    assert sizes == [16, 16, 11]
    assert noise == seen(make_loader(0, transform=jitter), "noise")


# Streams.


@pytest.mark.parametrize("num_ranks", MESHES)
def test_a_stream_over_ranks_has_its_rows_in_order(num_ranks):
    mesh = mesh_of(num_ranks)
    loader = DataLoader(stream(), SIZE, shuffle=False, mesh=mesh)

    batches = list(loader.epoch(0))

    assert list(itertools.chain(*seen(batches))) == list(range(NUM_ROWS))
    assert [batch.num_held for batch in batches] == [SIZE] * 3
    assert len(by_rank(batches[0].rows().fields["row"])) == num_ranks


def test_a_stream_goes_on_inside_an_epoch_with_other_ranks():
    first = DataLoader(stream(), SIZE, shuffle=False, mesh=mesh_of(2))
    batches = first.epoch(0)
    next(batches)
    position = first.state()
    batches.close()

    second = DataLoader(stream(), SIZE, shuffle=False, mesh=mesh_of(8))
    second.restore(position)

    rest = list(itertools.chain(*seen(second.epoch(0))))
    assert rest == list(range(SIZE, NUM_ROWS))


# Where things are.


def test_resident_rows_are_on_every_device_and_picked_without_the_host():
    loader = make_loader(num_rows=48, resident=True)
    list(loader.epoch(0))  # what is compiled, and the rows
    epoch = loader.epoch(1)

    with jax.transfer_guard_host_to_device("disallow"):
        first = next(epoch)
        stretch = epoch.stretch(2)

    assert stretch is not None
    assert first.rows().weight is None
    for values in stretch.data.values():
        assert len(values.devices()) == 8
        assert values.is_fully_replicated


def test_an_explicit_mesh_is_as_good_as_an_automatic_one():
    mesh = jax.make_mesh((8,), ("data",))
    loader = DataLoader(source(), SIZE, mesh=mesh)

    assert seen(loader.epoch(0)) == seen(make_loader(0).epoch(0))


def test_an_abandoned_epoch_over_a_mesh_leaves_no_thread():
    epoch = make_loader(resident=False, prefetch=3, size=8).epoch(0)
    next(epoch)
    started = [t for t in threading.enumerate() if t.name.startswith(THREAD_NAME)]

    del epoch
    gc.collect()

    assert started
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()


# Refusals.


@pytest.mark.parametrize(
    ("size", "remedy"), [(30, "take 24 or 32"), (5, "take 8"), (9, "take 8 or 16")]
)
def test_a_batch_that_ranks_do_not_divide_is_refused(size, remedy):
    with pytest.raises(
        ValueError,
        match=rf"`batch_size` must divide by the 8 ranks of the mesh, got {size}: "
        rf"{remedy}, or a mesh of fewer devices, ff\.mesh\(devices\)",
    ):
        make_loader(size=size)
    with pytest.raises(ValueError, match=remedy):
        make_loader(0, size=size).on(jax.make_mesh((8,), ("data",)))


def test_a_smaller_last_batch_that_ranks_do_not_divide_is_refused():
    with pytest.raises(
        ValueError,
        match="`drop_last` must not be False where the 8 ranks of the mesh do not "
        "divide the last batch, of 11 rows: leave it out .* or drop it with True",
    ):
        make_loader(drop_last=False)
    with pytest.raises(ValueError, match="of rows of no known number: leave it out"):
        DataLoader(stream(), SIZE, shuffle=False, drop_last=False, mesh=mesh_of(8))


def test_what_is_no_mesh_with_ranks_is_refused():
    devices = np.array(jax.devices())

    with pytest.raises(TypeError, match="`mesh` must be a jax.sharding.Mesh, .* list"):
        DataLoader(source(), SIZE, mesh=jax.devices())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="an axis named `data`.*axes .'rows'"):
        DataLoader(source(), SIZE, mesh=Mesh(devices, ("rows",)))
