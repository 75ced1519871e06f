import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fuelflow as ff

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
BATCH = {"x": X, "y": X[:, :2] * 3}


def apply_dict(model, x):
    return x @ model["kernel"] + model["bias"]


def call(model, x):
    return model(x)


def call_by_row(model, x):
    return jax.vmap(model)(x)


# A list and a dict that are no parameters: neither has a hash.
def make_linen():
    module = nn.Sequential([nn.Dense(2)])
    return ff.Linen(module, module.init(jax.random.key(0), X))


class Configured(nnx.Module):
    def __init__(self, rngs):
        self.settings = {"scale": 2}
        self.linear = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.linear(x) * self.settings["scale"]


KINDS = {
    "dict": (lambda: {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}, apply_dict),
    "linen": (make_linen, call),
    "nnx": (lambda: Configured(nnx.Rngs(0)), call),
    "equinox": (lambda: eqx.nn.Linear(3, 2, key=jax.random.key(0)), call_by_row),
}


@pytest.fixture(params=KINDS)
def kind(request):
    make, forward = KINDS[request.param]

    def loss_fn(model, batch):
        return ((forward(model, batch["x"]) - batch["y"]) ** 2).sum(-1)

    return make(), forward, ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.05)


def test_the_given_model_stays_as_it_was_and_usable(kind):
    model, forward, loop = kind
    before = np.asarray(forward(model, X))

    state = loop.init(model)
    for _ in range(2):
        state, _ = loop.step(state, BATCH)
    state, _ = loop.run(state, [BATCH] * 2, steps_per_call=2)

    np.testing.assert_array_equal(forward(model, X), before)


def test_a_model_read_from_a_state_is_of_its_kind_and_outlives_further_steps(kind):
    model, forward, loop = kind
    state = loop.init(model)
    state, _ = loop.step(state, BATCH)

    trained = loop.model(state)
    read = np.asarray(forward(trained, X))
    state, outcome = loop.step(state, BATCH)

    assert type(trained) is type(model)
    assert outcome.loss == pytest.approx(
        ((read - BATCH["y"]) ** 2).sum(-1).mean(), rel=1e-5
    )
    np.testing.assert_array_equal(forward(trained, X), read)
    assert not np.array_equal(forward(loop.model(state), X), read)


def test_a_read_model_can_be_trained_on(kind):
    model, _, loop = kind
    state, first = loop.step(loop.init(model), BATCH)

    again, second = loop.step(loop.init(loop.model(state)), BATCH)

    assert second.loss < first.loss
    assert set(again.params) == set(state.params)
    assert len(loop.compiles) == 1


def test_a_state_goes_through_the_users_own_jit(kind):
    model, _, loop = kind
    state = loop.init(model)

    halve = jax.jit(lambda state: {n: p / 2 for n, p in state.params.items()})
    halved = halve(state)

    assert hash(state.definition) == hash(loop.init(model).definition)
    for name, param in state.params.items():
        np.testing.assert_array_equal(halved[name], np.asarray(param) / 2)


def _complex_nnx():
    module = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    module.bias = nnx.Param(jnp.zeros(2, jnp.complex64))
    return module


def _integer_nnx():
    return nnx.Dict(count=nnx.Variable(jnp.zeros(1)), index=nnx.Param(jnp.arange(3)))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: nnx.Linear,
            TypeError,
            "`model` must be an instance, got the class Linear itself",
        ),
        (
            lambda: nn.Dense(2),
            TypeError,
            r"pass ff\.Linen\(module, module\.init\(key, inputs\)\)",
        ),
        (
            lambda: {"a": nnx.Linear(3, 2, rngs=nnx.Rngs(0))},
            TypeError,
            "a dict that holds nnx modules must be a module itself: .* nnx.List or",
        ),
        (dict, ValueError, "type dict has no floating parameters to train"),
        (lambda: None, ValueError, "type NoneType has no floating parameters to train"),
        (
            lambda: (jnp.arange(3), jnp.tanh, 3),
            ValueError,
            "type tuple has no floating parameters to train; pass an nnx.Module, ff",
        ),
        (
            lambda: ff.Linen(nn.Dense(2), {"params": {}, "stats": {"a": jnp.ones(1)}}),
            ValueError,
            "the linen model has no floating parameters to train",
        ),
        (
            _integer_nnx,
            ValueError,
            "the module Dict has no floating parameters to train; no nnx.Param",
        ),
        (
            lambda: {"w": {"z": jnp.ones(2, jnp.complex64)}},
            TypeError,
            r"parameter `w\.z` is complex64, and only real .* real and imaginary parts",
        ),
        (lambda: [1.0, 2.0 + 1j], TypeError, "parameter `1` is complex64"),
        (
            lambda: ff.Linen(
                nn.Dense(2), {"params": {"z": jnp.ones(2, jnp.complex64)}}
            ),
            TypeError,
            "parameter `z` is complex64",
        ),
        (_complex_nnx, TypeError, "parameter `bias` is complex64"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(make, error, message):
    loop = ff.TrainingLoop(lambda model, batch: 0.0, optax.sgd, schedule=0.1)

    with pytest.raises(error, match=message):
        loop.init(make())
