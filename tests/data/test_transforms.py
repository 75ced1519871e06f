"""Transforms see true rows, repeat with their seed, and must keep the rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuelflow.data.loader import DataLoader
from fuelflow.data.memory import aligned_empty


def loader_with(name: str, function: Any, **options: Any) -> DataLoader:
    given: dict[str, Any] = {name: function}
    return DataLoader(SOURCE, 4, **given, **options)


SOURCE = {"x": np.arange(22, dtype=np.float32).reshape(11, 2), "row": np.arange(11)}
ROADS = [{"prefetch": 0}, {"prefetch": 1}, {"prefetch": 7}, {}]


def with_noise(fields, rng):
    return {**fields, "noise": rng.random(len(fields["row"]))}


def with_noise_on_device(fields, key):
    return {**fields, "noise": jax.random.uniform(key, fields["row"].shape)}


def noise(epoch):
    return [np.asarray(batch["noise"]) for batch in epoch]


@pytest.mark.parametrize("road", ROADS)
def test_a_transform_is_given_a_generator_of_seed_epoch_and_batch(road):
    loader = DataLoader(SOURCE, 4, seed=3, transform=with_noise, **road)

    made = noise(loader.epoch(2))

    for number, (ours, size) in enumerate(zip(made, (4, 4, 3), strict=True)):
        sequence = np.random.SeedSequence(3, spawn_key=(2, 0, number))
        expected = np.random.default_rng(sequence).random(size)
        np.testing.assert_array_equal(ours, expected.astype(np.float32))


def test_a_generator_can_be_asked_for_by_name():
    def by_name(fields, scale=1, *, rng):
        return with_noise(fields, rng)

    made = noise(DataLoader(SOURCE, 4, transform=by_name))

    expected = noise(DataLoader(SOURCE, 4, transform=with_noise))
    np.testing.assert_array_equal(made[1], expected[1])


def test_a_second_argument_with_a_default_is_none_of_ours():
    def scaled(fields, scale=2):
        return {"x": fields["x"] * scale}

    (batch,) = DataLoader(SOURCE, 11, shuffle=False, transform=scaled)

    np.testing.assert_array_equal(batch["x"], SOURCE["x"] * 2)


def test_functions_that_do_not_show_their_arguments_are_given_the_fields():
    (batch,) = DataLoader(SOURCE, 11, shuffle=False, transform=dict)

    np.testing.assert_array_equal(batch["x"], SOURCE["x"])


@pytest.mark.parametrize("on_device", [True, False])
def test_a_transform_sees_true_rows_alone(on_device):
    def centred(fields):
        return {"x": fields["x"] - fields["x"].mean(axis=0)}

    name = "device_transform" if on_device else "transform"
    loader = loader_with(name, centred, shuffle=False)

    *_, tail = loader

    last = SOURCE["x"][8:]
    np.testing.assert_allclose(tail["x"], last - last.mean(axis=0), rtol=1e-6)
    assert tail.rows().fields["x"].shape == (4, 2)
    assert tail.rows().weight.tolist() == [1, 1, 1, 0]


def test_a_compiled_transform_is_the_same_on_every_road():
    roads = [{"resident": True}, *({"resident": False, **road} for road in ROADS)]
    loaders = [
        DataLoader(SOURCE, 4, device_transform=with_noise_on_device, **road)
        for road in roads
    ]

    first, *others = [list(loader.epoch(1)) for loader in loaders]

    assert len({tuple(values.tolist()) for values in noise(first)}) == 3
    for batches in others:
        for ours, expected in zip(batches, first, strict=True):
            jax.tree.map(np.testing.assert_array_equal, ours.rows(), expected.rows())


def test_epochs_have_keys_of_their_own():
    loader = DataLoader(SOURCE, 4, device_transform=with_noise_on_device)

    zero, one = noise(loader.epoch(0)), noise(loader.epoch(1))

    assert zero[0].tolist() != one[0].tolist()
    assert zero[0].tolist() == noise(loader.epoch(0))[0].tolist()


@pytest.mark.parametrize("resident", [True, False])
def test_a_compiled_transform_is_traced_once_for_each_size(resident):
    sizes = []

    def traced(fields):
        sizes.append(fields["x"].shape[0])
        return fields

    loader = DataLoader(SOURCE, 4, device_transform=traced, resident=resident)
    for epoch in range(3):
        list(loader.epoch(epoch))

    assert sizes == [4, 3]


def test_both_transforms_follow_each_other():
    loader = DataLoader(
        SOURCE,
        4,
        shuffle=False,
        transform=lambda fields: {"y": fields["x"] + 1},
        device_transform=lambda fields: {"z": 2 * fields["y"]},
    )

    z = np.concatenate([np.asarray(batch["z"]) for batch in loader])

    assert loader.field_names == ("z",)
    np.testing.assert_array_equal(z, 2 * (SOURCE["x"] + 1))


def test_what_a_transform_uses_again_does_not_change_earlier_batches():
    shared = aligned_empty((4, 2), np.dtype("float32"))  # which jax would take over

    def into_shared(fields):
        shared[: len(fields["x"])] = fields["x"]
        return {"x": shared[: len(fields["x"])]}

    loader = DataLoader(SOURCE, 4, shuffle=False, transform=into_shared, prefetch=0)

    kept = np.concatenate([np.asarray(batch["x"]) for batch in list(loader)])

    np.testing.assert_array_equal(kept, SOURCE["x"])


@pytest.mark.parametrize("name", ["transform", "device_transform"])
@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda f: None, TypeError, "must return a mapping of fields, got a NoneType"),
        (lambda f: {}, ValueError, "the result of `.*` must have at least one field"),
        (lambda f: {3: f["x"]}, TypeError, "a field's name must be a string, got 3"),
        (lambda f: {"x": "a"}, TypeError, "`x` must be a NumPy or JAX array, got a"),
        (
            lambda f: {"x": f["x"][1:]},
            ValueError,
            r"must keep the 4 rows of a batch, got shape \(3, 2\) in the field `x`",
        ),
        (lambda f: {"x": f["x"].sum()}, ValueError, r"got shape \(\) in the field `x`"),
    ],
)
def test_wrong_results_are_refused(name, function, error, message):
    loader = loader_with(name, function)

    with pytest.raises(error, match=message):
        next(iter(loader))


@pytest.mark.parametrize("name", ["transform", "device_transform"])
def test_functions_of_other_arguments_are_refused(name):
    with pytest.raises(
        TypeError, match=rf"`{name}` must take \(fields\) or \(fields, "
    ):
        loader_with(name, lambda a, b, c: a)
    with pytest.raises(TypeError, match=rf"`{name}` must take .* function of \(\)"):
        loader_with(name, lambda: None)
    with pytest.raises(TypeError, match=f"`{name}` must be a function of fields, got"):
        loader_with(name, 3)


def test_a_compiled_transform_takes_what_it_closes_over():
    table = jnp.arange(11) * 10
    loader = DataLoader(
        SOURCE,
        11,
        shuffle=False,
        device_transform=lambda fields: {"ten": table[fields["row"]]},
    )

    (batch,) = loader

    assert batch["ten"].tolist() == list(range(0, 110, 10))
