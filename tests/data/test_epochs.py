"""An epoch has every row once, in one order on every road, and a tail that counts."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelflow.data.loader import DataLoader
from fuelflow.data.memory import aligned_empty
from fuelflow.devices.ranks import OneRank
from fuelflow.step.batch import Stretch

ROADS = {
    "resident": {"resident": True},
    "threads": {"resident": False},
    "one ahead": {"resident": False, "prefetch": 1},
    "in the caller": {"resident": False, "prefetch": 0},
}


def rows_of(num_rows):
    return {
        "x": np.arange(3 * num_rows, dtype=np.float32).reshape(num_rows, 3),
        "row": np.arange(num_rows),
    }


def shown(batches):
    return np.concatenate([np.asarray(batch["row"]) for batch in batches])


@pytest.mark.parametrize("road", ROADS)
@settings(max_examples=15)
@given(
    num_rows=st.integers(1, 40),
    batch_size=st.integers(1, 45),
    epoch=st.integers(0, 3),
)
def test_every_row_comes_exactly_once(road, num_rows, batch_size, epoch):
    loader = DataLoader(rows_of(num_rows), batch_size, **ROADS[road])

    batches = list(loader.epoch(epoch))

    seen = shown(batches)
    assert sorted(seen.tolist()) == list(range(num_rows))
    assert len(batches) == len(loader) == -(-num_rows // batch_size)
    images = np.concatenate([np.asarray(batch["x"]) for batch in batches])
    np.testing.assert_array_equal(images, rows_of(num_rows)["x"][seen])


@pytest.mark.parametrize("road", ROADS)
def test_every_road_has_the_same_order(road):
    loader = DataLoader(rows_of(23), 5, seed=7, **ROADS[road])

    seen = shown(loader.epoch(2))

    # The order that the documentation promises, made without the loader.
    sequence = np.random.SeedSequence(7, spawn_key=(2,))
    expected = np.random.default_rng(sequence).permutation(23)
    np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize("depth", [0, 1, 2, 7, 100])
def test_the_depth_changes_no_order(depth):
    loader = DataLoader(rows_of(50), 4, resident=False, prefetch=depth)

    seen = shown(loader.epoch(1))

    expected = shown(DataLoader(rows_of(50), 4).epoch(1))
    np.testing.assert_array_equal(seen, expected)


def test_epochs_and_seeds_differ_and_runs_do_not():
    loader = DataLoader(rows_of(30), 10)

    zero, one = shown(loader.epoch(0)), shown(loader.epoch(1))

    assert zero.tolist() != one.tolist()
    assert shown(DataLoader(rows_of(30), 10, seed=1).epoch(0)).tolist() != zero.tolist()
    assert shown(DataLoader(rows_of(30), 10).epoch(0)).tolist() == zero.tolist()


def test_a_seed_and_an_epoch_are_folded_not_added():
    one_up = shown(DataLoader(rows_of(30), 10, seed=1).epoch(0))

    next_epoch = shown(DataLoader(rows_of(30), 10, seed=0).epoch(1))

    assert one_up.tolist() != next_epoch.tolist()


def test_iterating_goes_through_the_epochs():
    loader = DataLoader(rows_of(12), 4)

    first, second = shown(loader), shown(loader)

    np.testing.assert_array_equal(first, shown(loader.epoch(0)))
    np.testing.assert_array_equal(second, shown(loader.epoch(1)))


@pytest.mark.parametrize("road", ROADS)
def test_several_epochs_can_be_alive_at_once(road):
    loader = DataLoader(rows_of(20), 5, **ROADS[road])

    pairs = list(zip(loader.epoch(0), loader.epoch(1), strict=True))

    for epoch in (0, 1):
        seen = shown(pair[epoch] for pair in pairs)
        np.testing.assert_array_equal(seen, shown(loader.epoch(epoch)))


def test_without_shuffling_rows_come_as_they_are():
    loader = DataLoader(rows_of(7), 3, shuffle=False, resident=False)

    seen = shown(loader.epoch(4))

    assert seen.tolist() == list(range(7))


@pytest.mark.parametrize("road", ROADS)
def test_a_tail_is_filled_up_with_rows_of_weight_0(road):
    loader = DataLoader(rows_of(7), 3, shuffle=False, **ROADS[road])

    *full, tail = [batch.rows() for batch in loader]

    assert [rows.weight.tolist() for rows in full] == [[1, 1, 1]] * 2
    assert tail.weight.tolist() == [1, 0, 0]
    assert tail.weight.dtype == np.float32
    assert tail.fields["row"].tolist() == [6, 6, 6]


@pytest.mark.parametrize("road", ROADS)
def test_batches_that_need_no_filling_carry_no_weight(road):
    even = DataLoader(rows_of(6), 3, **ROADS[road])
    short = DataLoader(rows_of(2), 3, **ROADS[road])

    weights = [batch.rows().weight for loader in (even, short) for batch in loader]

    assert weights == [None, None, None]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [3, 3]), (False, [3, 3, 1])])
def test_a_tail_can_be_dropped_or_left_as_it_is(road, drop_last, sizes):
    loader = DataLoader(rows_of(7), 3, drop_last=drop_last, **ROADS[road])

    batches = list(loader)

    assert [batch.num_held for batch in batches] == sizes
    assert [batch.rows().weight for batch in batches] == [None] * len(sizes)
    assert len(loader) == len(sizes)


def test_full_batches_of_all_epochs_are_picked_by_one_program(compile_counter):
    loader = DataLoader(rows_of(29), 4, resident=True)

    for epoch in range(3):
        for _ in loader.epoch(epoch):
            pass

    # One for full batches and one for the tail.
    assert compile_counter.compiled.count("jit(pick)") == 2


def test_picking_resident_rows_sends_nothing_to_the_device():
    loader = DataLoader(rows_of(29), 4, resident=True)
    epoch = loader.epoch(0)
    expected = shown(loader.epoch(0))

    with jax.transfer_guard_host_to_device("disallow"):
        stretch = epoch.stretch(2)
        rest = list(epoch)[:-1]  # the tail brings its weight

    assert stretch is not None
    picked = np.concatenate([np.asarray(stretch.rows).ravel(), shown(rest)])
    np.testing.assert_array_equal(picked, expected[:28])


@pytest.mark.parametrize("num_rows", [24, 26])
def test_stretches_have_the_rows_that_iterating_has(num_rows):
    loader = DataLoader(
        rows_of(num_rows),
        4,
        resident=True,
        device_transform=lambda fields, key: (
            {
                **fields,
                "noise": jax.random.uniform(key, (4,)),
            }
            if fields["row"].shape == (4,)
            else {**fields, "noise": fields["x"][:, 0]}
        ),
    )
    expected = list(loader.epoch(1))

    epoch = loader.epoch(1)
    before = next(epoch)
    stretch = epoch.stretch(3)
    after = list(epoch)

    assert stretch is not None
    assert stretch.num_steps == 3
    steps = [jax.tree.map(lambda a, i=i: a[i], stretch.steps()) for i in range(3)]

    @jax.jit
    def gathered(stretch: Stretch, step: Any) -> Any:
        return stretch.pick(step).gathered(OneRank())

    picked = [gathered(stretch, step) for step in steps]
    made = [before.rows(), *picked, *(batch.rows() for batch in after)]
    for ours, batch in zip(made, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, batch.rows())


def test_a_stretch_that_is_too_long_takes_nothing():
    loader = DataLoader(rows_of(13), 4, resident=True)
    epoch = loader.epoch(0)

    too_long, streamed = epoch.stretch(4), None
    with DataLoader(rows_of(13), 4, resident=False).epoch(0) as streaming:
        streamed = streaming.stretch(1)

    assert too_long is None
    assert streamed is None
    np.testing.assert_array_equal(shown(epoch), shown(loader.epoch(0)))


def test_resident_rows_are_copies():
    aligned = aligned_empty((8,), np.dtype("int32"))  # which jax would take over
    aligned[:] = range(8)
    loader = DataLoader({"row": aligned}, 4, resident=True, shuffle=False)
    list(loader)
    aligned[:] = -1

    seen = shown(loader)

    assert seen.tolist() == list(range(8))


def test_a_batch_stays_as_it_was_while_others_are_made():
    rows = np.arange(64, dtype=np.int32)
    loader = DataLoader({"row": rows}, 4, resident=False, prefetch=8, shuffle=False)

    kept, views, batch = [], [], None
    for number, batch in enumerate(loader):
        if number % 3 == 0:  # the memory of others is used again
            kept.append(batch)
            views.append(np.asarray(batch["row"])[1:])
    seen = shown(kept)
    del kept, batch
    list(loader.epoch(1))

    expected = rows.reshape(16, 4)[::3]
    np.testing.assert_array_equal(seen, expected.ravel())
    np.testing.assert_array_equal(views, expected[:, 1:])


def test_the_loader_tells_what_it_has():
    loader = DataLoader(rows_of(10), 4)

    facts = (loader.num_rows, loader.batch_size, loader.field_names, len(loader))

    assert facts == (10, 4, ("x", "row"), 3)
    assert repr(loader) == "DataLoader(10 rows, batches of 4, ShuffledSampler())"
    assert repr(loader.epoch(0)) == "Epoch(0, 0 of 3 batches given)"


def test_waiting_is_counted():
    epoch = DataLoader(rows_of(10), 4, resident=False).epoch(0)

    list(epoch)

    assert 0 < epoch.secs_waited < 60


def test_rows_are_resident_only_where_that_pays(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(8, 2))

    resident = [
        DataLoader(rows_of(8), 4).is_resident,
        DataLoader({"x": mapped}, 4).is_resident,
        DataLoader({"x": mapped}, 4, resident=True).is_resident,
        DataLoader(rows_of(8), 4, transform=dict).is_resident,
        # Takes no memory here: a quarter of a petabyte seen through stride 0.
        DataLoader(
            {"x": np.broadcast_to(np.float32(0), (2**16, 2**30))}, 4
        ).is_resident,
    ]

    assert resident == [True, False, True, False, False]


def test_batches_follow_the_default_device_of_the_loader():
    other = jax.devices()[1]
    with jax.default_device(other):
        loaders = [DataLoader(rows_of(8), 4, **road) for road in ROADS.values()]

    places = {
        place
        for loader in loaders
        for batch in loader
        for place in batch["x"].devices()
    }

    assert places == {other}


@pytest.mark.parametrize("road", ROADS)
def test_the_length_of_an_epoch_is_what_is_left_of_it(road):
    epoch = DataLoader(rows_of(10), 4, **ROADS[road]).epoch(0)
    lengths = [len(epoch), *(len(epoch) for _ in epoch)]

    assert lengths == [3, 2, 1, 0]
    assert epoch
