"""The digits, their batches, and the one network written in three ways."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import fuelflow as ff
from fuelflow.examples import digits

MAKERS = [digits.nnx_example, digits.linen_example, digits.plain_example]


@pytest.fixture
def rows():
    """Ten digits, told apart by their labels."""
    return {"image": np.zeros((10, 8, 8, 1), np.float32), "label": np.arange(10)}


def test_the_two_sets_are_all_digits_each_once():
    train, held_out = digits.load()

    assert [len(train["label"]), len(held_out["label"])] == [1437, 360]
    both = [
        np.column_stack([16 * part["image"].reshape(-1, 64), part["label"]])
        for part in (train, held_out)
    ]
    pixels, labels = load_digits(return_X_y=True)
    original = np.column_stack([np.asarray(pixels), np.asarray(labels)])
    assert sorted(map(tuple, np.concatenate(both))) == sorted(map(tuple, original))


def test_the_split_is_the_same_every_time():
    first, second = digits.load(), digits.load()

    assert jax.tree.all(jax.tree.map(np.array_equal, first, second))


@pytest.mark.parametrize("make_example", MAKERS)
def test_training_moves_what_the_model_carries(make_example):
    train, _ = digits.load()
    batch = {name: values[:32] for name, values in train.items()}
    example = make_example(0)
    loop = ff.TrainingLoop(example.loss_fn, optax.adamw, schedule=1e-3)
    state = loop.init(example.model)
    before = _host_copy(state.variables)

    state, _ = loop.step(state, batch)

    after = _host_copy(state.variables)
    moved = {n.rpartition(".")[2] for n in after if (before[n] != after[n]).any()}
    expected = {
        digits.nnx_example: {"mean", "var", "count"},
        digits.linen_example: {"mean", "var"},
        digits.plain_example: set(),
    }
    assert moved == expected[make_example]


def _host_copy(variables):
    return {
        name: np.array(value)
        for name, value in variables.items()
        if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    }


def test_the_three_are_one_network():
    image = digits.load()[1]["image"][:16]
    params = digits.plain_params(0)
    module = digits.nnx_example(0).model
    for layer, name in ((module.conv1, "conv1"), (module.conv2, "conv2")):
        layer.kernel[...] = params[name]["kernel"]
    module.head.kernel[...] = params["head"]["kernel"]
    linen = digits.linen_example(0)
    names = {"Conv_0": "conv1", "Conv_1": "conv2", "Dense_0": "head"}
    variables = linen.model.variables
    weights = {name: params[ours] for name, ours in names.items()}
    variables = {**variables, "params": {**variables["params"], **weights}}

    logits = [
        digits.plain_network(params, jnp.asarray(image)),
        digits.nnx_example(0).predict(module, image),
        linen.predict(ff.Linen(linen.model.module, variables), image),
    ]

    # A fresh BatchNorm divides by sqrt(1 + 1e-5), which is all they differ by.
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)
    np.testing.assert_allclose(logits[2], logits[0], atol=1e-4)
    assert np.std(logits[0]) > 0.1


def test_predictions_have_no_dropout():
    image = digits.load()[1]["image"][:4]
    example = digits.nnx_example(0)

    first, second = (example.predict(example.model, image) for _ in range(2))

    assert np.array_equal(first, second)
