import subprocess
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import fuelflow as ff

BATCH = {
    "x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=8).astype(np.float32),
}


class Named(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclass
class Registered:
    w: Any
    b: Any


class Equinox(eqx.Module):
    w: Any
    b: Any


W, B = np.array([0.5, -1.0, 2.0], np.float32), np.float32(0.25)


def squared_error(w, b, batch):
    return (batch["x"] @ w + b - batch["y"]) ** 2


def mean_error(w, b):
    return squared_error(w, b, BATCH).mean()


def attributes(model):
    return model.w, model.b


def train(loss_fn, model, num_steps=3, **options):
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1, **options)
    state = loop.init(model)
    for _ in range(num_steps):
        state, _ = loop.step(state, BATCH)
    return loop, state


@pytest.mark.parametrize(
    ("model", "parts", "names"),
    [
        ({"w": W, "b": B}, lambda m: (m["w"], m["b"]), ["b", "w"]),
        ((W, B), lambda m: m, ["0", "1"]),
        ({"a": [W, (B,)]}, lambda m: (m["a"][0], m["a"][1][0]), ["a.0", "a.1.0"]),
        (Named(W, B), attributes, ["b", "w"]),
        (Registered(W, B), attributes, ["b", "w"]),
        (Equinox(W, B), attributes, ["b", "w"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_tree_trains_as_by_hand_and_comes_back_as_it_was(
    model, parts, names
):
    w, b = jnp.asarray(W), jnp.asarray(B)
    for _ in range(3):
        grads = jax.grad(mean_error, (0, 1))(w, b)
        w, b = w - 0.1 * grads[0], b - 0.1 * grads[1]

    def loss_fn(model, batch):
        w, b = parts(model)
        return squared_error(w, b, batch)

    loop, state = train(loss_fn, model)
    trained = loop.model(state)

    assert sorted(state.params) == names
    assert jax.tree.structure(trained) == jax.tree.structure(model)
    # What XLA fuses in one program rounds otherwise than operations one by one.
    np.testing.assert_allclose(parts(trained)[0], w, rtol=1e-5)
    np.testing.assert_allclose(parts(trained)[1], b, rtol=1e-5)


def test_a_bare_array_is_a_model_of_one_parameter():
    loop, state = train(lambda w, batch: squared_error(w, 0.0, batch), jnp.asarray(W))

    assert list(state.params) == ["param"]
    assert loop.model(state).shape == (3,)


def test_leaves_that_are_no_floating_arrays_keep_their_values():
    model = {
        "w": W,
        "activation": jnp.tanh,
        "name": "a text",
        "indices": jnp.arange(3),
        "mask": np.array([True, False, True]),
        "key": jax.random.key(3),
        "size": 5,
        "empty": jnp.zeros((0, 2), jnp.int32),
    }

    def loss_fn(model, batch):
        noise = jax.random.normal(model["key"], (3,))
        w = jnp.where(model["mask"], model["w"][model["indices"]], 0.0) + noise
        return squared_error(model["activation"](w), model["size"], batch)

    loop, state = train(loss_fn, model)
    trained = loop.model(state)

    assert list(state.params) == ["w"]
    assert list(state.variables) == ["empty", "indices", "key", "mask"]
    assert trained["activation"] is jnp.tanh
    assert (trained["name"], trained["size"]) == ("a text", 5)
    assert trained["indices"].tolist() == [0, 1, 2]
    assert trained["mask"].tolist() == [True, False, True]
    assert jnp.array_equal(trained["key"], jax.random.key(3))
    assert trained["w"][1] == W[1]  # masked: no gradient
    assert trained["w"][0] != W[0]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_numpy_arrays_of_every_floating_dtype_are_parameters(dtype):
    model = {"w": W.astype(dtype)}
    expected = jnp.bfloat16 if dtype is ml_dtypes.bfloat16 else jnp.float32

    loop, state = train(lambda m, batch: squared_error(m["w"], 0.0, batch), model)

    assert state.params["w"].dtype == expected
    assert not np.array_equal(loop.model(state)["w"], W)
    np.testing.assert_array_equal(model["w"], W.astype(dtype))


@pytest.mark.parametrize("number", [2.0, np.float64(2)], ids=["float", "np.float64"])
def test_a_float_is_a_parameter_in_containers_and_a_setting_in_an_object(number):
    model = {"scale": number, "pair": Named(number, [number]), "dropout": None}
    model["dropout"] = (eqx.nn.Dropout(p=number), Equinox(W, number))

    state = ff.TrainingLoop(lambda m, batch: 0.0, optax.sgd).init(model)

    assert set(state.params) == {"dropout.1.w", "pair.w", "pair.b.0", "scale"}
    assert {p.dtype for p in state.params.values()} == {np.dtype(np.float32)}


def test_an_equinox_mlp_trains_as_in_equinox_and_its_dropout_rate_stays():
    mlp = eqx.nn.MLP(3, "scalar", 4, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    model = eqx.nn.Sequential([eqx.nn.Dropout(0.5, inference=True), mlp])

    def loss_fn(model, batch):
        return (jax.vmap(model)(batch["x"]) - batch["y"]) ** 2

    expected = model
    for _ in range(3):
        grads = eqx.filter_grad(lambda m: loss_fn(m, BATCH).mean())(expected)
        updates = jax.tree.map(lambda grad: -0.1 * grad, grads)
        expected = eqx.apply_updates(expected, updates)
    loop, state = train(loss_fn, model)
    trained = loop.model(state)

    assert isinstance(trained, eqx.nn.Sequential)
    dropout = trained.layers[0]
    assert isinstance(dropout, eqx.nn.Dropout)
    assert (dropout.p, dropout.inference) == (0.5, True)
    for one, other in zip(
        jax.tree.leaves(eqx.filter(trained, eqx.is_array)),
        jax.tree.leaves(eqx.filter(expected, eqx.is_array)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


class TiedInEquinox(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, key):
        pair = (
            eqx.nn.Embedding(4, 3, key=key),
            eqx.nn.Linear(3, 4, use_bias=False, key=key),
        )
        self.shared = eqx.nn.Shared(pair, lambda m: m[1].weight, lambda m: m[0].weight)

    def __call__(self, x, token):
        embedding, linear = self.shared()
        return linear(x + embedding(token))


def test_an_embedding_shared_in_equinox_is_one_parameter_with_both_gradients():
    model = TiedInEquinox(jax.random.key(0))
    token = jnp.array(2)

    def loss_fn(model, batch):
        return (jax.vmap(lambda x: model(x, token))(batch["x"]) ** 2).sum(-1)

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    state = loop.init(model)
    (name,) = state.params
    (weight,) = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    expected = jax.grad(
        lambda weight: (((BATCH["x"] + weight[2]) @ weight.T) ** 2).sum(-1).mean()
    )(weight)

    np.testing.assert_allclose(
        loop.grads(state, BATCH)[name], expected, rtol=1e-5, atol=1e-6
    )


def test_an_array_object_in_two_places_is_two_parameters():
    w = jnp.asarray(W)

    def loss_fn(model, batch):
        return squared_error(model["one"] + 2 * model["two"], 0.0, batch)

    _, state = train(loss_fn, {"one": w, "two": w})
    moved = {name: param - w for name, param in state.params.items()}

    np.testing.assert_allclose(moved["two"], 2 * moved["one"], rtol=1e-5)


def test_evaluation_gives_a_tree_as_it_is_and_changes_nothing():
    loop, state = train(lambda m, batch: squared_error(m["w"], 0.0, batch), {"w": W})
    w = np.asarray(state.params["w"])
    expected = np.mean((BATCH["x"] @ w - BATCH["y"]) ** 2)

    evaluation = loop.evaluate(state, [BATCH])

    assert evaluation["loss"] == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(state.params["w"], w)


def test_fuelflow_imports_no_equinox():
    code = "import sys, fuelflow; sys.exit('equinox' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
