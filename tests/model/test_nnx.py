from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fuelflow as ff

BATCH = {
    "x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32),
}
sows = pytest.mark.filterwarnings("ignore:.*sow.*:DeprecationWarning")


def squared_error(output, batch):
    return ((output - batch["y"]) ** 2).mean(-1)


def loss_fn(model, batch):
    return squared_error(model(batch["x"]), batch)


def train(model, num_steps=2, loss=loss_fn, **options):
    loop = ff.TrainingLoop(
        loss, optax.sgd, schedule=0.1, strict_compile=True, **options
    )
    state = loop.init(model)
    for _ in range(num_steps):
        state, _ = loop.step(state, BATCH)
    return loop, state


def arrays(module):
    """All arrays of a module by path, keys as numbers."""
    found = jax.tree_util.tree_flatten_with_path(nnx.state(module))[0]
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for path, leaf in found
    }


def assert_close(actual, expected):
    # What XLA fuses in one program rounds otherwise than operations one by one.
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(
            actual[name], value, rtol=2e-5, atol=1e-6, err_msg=name
        )


class Containers(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.heads = nnx.Dict(a=nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), nnx.tanh))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x)


class Noisy(nnx.Module):
    """Statistics and two layers that draw from streams of their own."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)
        self.first = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.second = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return self.second(self.linear(self.first(self.norm(x))))


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(3, 3, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        outputs: Any = self.rnn(jnp.stack([x, x + 1], axis=1))
        return outputs[:, -1]


class Attending(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(
            3, 3, dropout_rate=0.2, deterministic=False, decode=False, rngs=rngs
        )

    def __call__(self, x):
        return self.attention(x[None])[0]


class Adapted(nnx.Module):
    def __init__(self, rngs):
        base = nnx.Linear(3, 3, rngs=rngs)
        self.adapter = nnx.LoRA(3, 2, 3, base_module=base, rngs=rngs)

    def __call__(self, x):
        return self.adapter(x)


class TiedEmbedding(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.embed.attend(x + self.embed(jnp.array(2)))


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.middle = nnx.Linear(3, 3, rngs=rngs)
        self.last = self.first

    def __call__(self, x):
        return self.last(nnx.tanh(self.middle(self.first(x))))


class Statistic(nnx.Variable):
    """A Variable type of the user's own."""


@pytest.mark.parametrize(
    ("make", "some_params", "num_params", "some_variables"),
    [
        (Containers, {"layers.0.kernel", "heads.a.layers.0.bias"}, 6, set()),
        (Noisy, {"norm.scale"}, 4, {"norm.mean", "first.rngs.count"}),
        (Recurrent, {"rnn.cell.hf.kernel"}, 12, set()),
        (Attending, {"attention.query.kernel"}, 8, {"attention.rngs.count"}),
        (Adapted, {"adapter.lora_a", "adapter.base_module.kernel"}, 4, set()),
        (TiedEmbedding, {"embed.embedding"}, 1, set()),
        (Shared, {"first.kernel", "middle.kernel"}, 4, set()),
    ],
)
def test_every_array_of_every_layer_is_as_a_loop_by_hand_leaves_it(
    make, some_params, num_params, some_variables
):
    expected = make(nnx.Rngs(0))
    optimizer = nnx.Optimizer(expected, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        grads = nnx.grad(lambda module: loss_fn(module, BATCH).mean())(module)
        optimizer.update(module, grads)

    for _ in range(2):
        step(expected, optimizer)
    loop, state = train(make(nnx.Rngs(0)))
    trained = loop.model(state)

    assert type(trained) is make
    assert some_params <= set(state.params)
    assert len(state.params) == num_params
    assert some_variables <= set(state.variables)
    assert_close(arrays(trained), arrays(expected))


class Carrying(nnx.Module):
    """Every kind of array that is carried and not trained."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.powers = nnx.Param(jnp.arange(3))
        self.own = Statistic(jnp.zeros(3))
        self.pair = nnx.Variable({"sum": jnp.zeros(()), "counts": (jnp.int32(0),)})
        self.number = nnx.Variable(0)
        self.raw = jnp.zeros(())
        self.settings = {"scale": 2}

    def __call__(self, x):
        pair = self.pair.get_value()
        self.pair.set_value(
            {"sum": pair["sum"] + x.sum(), "counts": (pair["counts"][0] + 1,)}
        )
        self.own[...] = 0.9 * self.own[...] + x.mean(0)
        self.number.set_value(self.number.get_value() + 1)
        self.raw = self.raw + 1
        return self.linear(x * self.powers[...]) * self.settings["scale"]


def test_arrays_that_are_no_floating_parameters_are_carried_and_updated():
    loop, state = train(Carrying(nnx.Rngs(0)), num_steps=3)
    trained = loop.model(state)
    mean = BATCH["x"].mean(0)

    assert set(state.params) == {"linear.bias", "linear.kernel"}
    assert set(state.variables) == {
        "powers",
        "own",
        "pair.sum",
        "pair.counts.0",
        "number",
        "raw",
    }
    assert isinstance(trained.own, Statistic)
    np.testing.assert_allclose(trained.own[...], mean * (1 + 0.9 + 0.81), rtol=1e-5)
    np.testing.assert_allclose(
        trained.pair.get_value()["sum"], 3 * BATCH["x"].sum(), rtol=1e-5
    )
    assert trained.pair.get_value()["counts"] == (3,)
    assert trained.number.get_value() == 3
    assert trained.raw == 3
    assert trained.powers[...].tolist() == [0, 1, 2]
    assert trained.powers[...].dtype == jnp.int32


def test_a_tied_parameter_is_one_and_has_the_gradient_of_both_uses():
    module = TiedEmbedding(nnx.Rngs(0))
    table = module.embed.embedding[...]

    def by_hand(table):
        return squared_error((BATCH["x"] + table[2]) @ table.T, BATCH).mean()

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    grads = loop.grads(loop.init(module), BATCH)

    assert list(grads) == ["embed.embedding"]
    np.testing.assert_allclose(
        grads["embed.embedding"], jax.grad(by_hand)(table), rtol=1e-5, atol=1e-6
    )


def test_modules_that_were_one_object_are_one_object_again():
    loop, state = train(Shared(nnx.Rngs(0)))
    trained = loop.model(state)

    assert trained.first is trained.last
    assert trained.first is not trained.middle


def test_parameters_are_trained_by_pattern_and_adapters_alone():
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1, trainable="*lora*")
    state = loop.init(Adapted(nnx.Rngs(0)))
    before = jax.tree.map(np.asarray, state.params)

    state, _ = loop.step(state, BATCH)
    moved = {name for name in before if (state.params[name] != before[name]).any()}

    # The second factor starts at zero, so that the first has no gradient yet.
    assert moved == {"adapter.lora_b"}


class Sowing(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        x = self.linear(x)
        self.sow(nnx.Intermediate, "hidden", x)
        self.sow(
            nnx.Intermediate,
            "total",
            x.sum(),
            init_fn=lambda: jnp.zeros(()),
            reduce_fn=lambda total, new: total + new,
        )
        self.created = Statistic(x.max())
        return x


def call_twice(model, batch):
    return squared_error(model(batch["x"]) + model(batch["x"] + 1), batch)


@sows
@pytest.mark.parametrize("was_called", [False, True])
def test_what_the_pass_creates_is_in_sown_and_starts_each_step_empty(was_called):
    module = Sowing(nnx.Rngs(0))
    if was_called:
        module(BATCH["x"])
    linear = nnx.clone(module.linear)

    loop, state = train(module, 1, call_twice)
    first = jax.tree.map(np.asarray, state.sown)
    state, _ = loop.step(state, BATCH)
    x = jnp.asarray(BATCH["x"])
    outputs = [linear(x), linear(x + 1)]

    assert set(state.params) == {"linear.bias", "linear.kernel"}
    assert set(first) == {"hidden.0", "hidden.1", "total", "created"} - (
        {"created"} if was_called else set()
    )
    assert set(state.sown) == set(first)
    np.testing.assert_allclose(first["hidden.1"], outputs[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        first["total"], outputs[0].sum() + outputs[1].sum(), rtol=1e-4, atol=1e-5
    )
    assert hasattr(module, "hidden") == was_called
    assert not hasattr(loop.model(state), "hidden")


@pytest.mark.skipif(not hasattr(nnx, "capture"), reason="came with flax 0.12.2")
def test_captured_values_are_the_losses_own():
    def loss_fn(model, batch):
        output, captured = nnx.capture(model, nnx.Intermediate)(batch["x"])
        return squared_error(output, batch), {"hidden": captured["hidden"][0].mean()}

    class Quiet(Sowing):
        def __call__(self, x):
            x = self.linear(x)
            self.sow(nnx.Intermediate, "hidden", x)
            return x

    module = Quiet(nnx.Rngs(0))
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    state, outcome = loop.step(loop.init(module), BATCH)

    assert state.sown == {}
    assert outcome.metrics["hidden"] == pytest.approx(
        float(module.linear(jnp.asarray(BATCH["x"])).mean()), rel=1e-5
    )


def test_evaluation_is_in_eval_mode_and_leaves_statistics_and_streams_alone():
    loop, state = train(Noisy(nnx.Rngs(0)))
    before = arrays(loop.model(state))
    by_hand = loop.model(state)
    by_hand.eval()
    expected = squared_error(by_hand(BATCH["x"]), BATCH).mean()

    first, second = loop.evaluate(state, [BATCH]), loop.evaluate(state, [BATCH])

    assert first["loss"] == second["loss"] == pytest.approx(float(expected), rel=1e-5)
    after = arrays(loop.model(state))
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_in_training_each_layer_keeps_the_mode_it_came_with():
    module = Noisy(nnx.Rngs(0))
    module.norm.eval()

    loop, state = train(module)

    np.testing.assert_array_equal(state.variables["norm.mean"], np.zeros(3))
    assert state.variables["first.rngs.count"] == 2
    assert loop.model(state).norm.use_running_average


@sows
def test_into_writes_the_trained_arrays_and_keeps_what_was_sown():
    module = Sowing(nnx.Rngs(0))
    module(BATCH["x"])
    hidden = nnx.state(module, nnx.Intermediate)["hidden"]
    loop, state = train(module, 2)

    written = loop.model(state, into=module)

    assert written is module
    assert nnx.state(module, nnx.Intermediate)["hidden"] is hidden
    np.testing.assert_array_equal(
        module.linear.kernel[...], state.params["linear.kernel"]
    )
    # Copies: the next step takes over the state's buffers, and not the module's.
    loop.step(state, BATCH)
    assert module(BATCH["x"]).shape == (8, 3)


def test_into_writes_statistics_and_shared_modules_once():
    class Both(nnx.Module):
        def __init__(self, rngs):
            self.noisy, self.shared = Noisy(rngs), Shared(rngs)

        def __call__(self, x):
            return self.shared(self.noisy(x))

    module = Both(nnx.Rngs(0))
    loop, state = train(module)
    loop.model(state, into=module)

    assert_close(arrays(module), arrays(loop.model(state)))
    assert module.shared.first is module.shared.last


@pytest.mark.parametrize(
    ("into", "error", "message"),
    [
        ({"w": jnp.ones(1)}, TypeError, "`into` must be an nnx.Module, got a dict"),
        (
            nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
            ValueError,
            r"but its `kernel` is \[4, 3\] and the state's is \[3, 3\]",
        ),
        (
            nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(0)),
            ValueError,
            r"but its `bias` is absent and the state's is \[3\]",
        ),
        (
            nnx.LoRA(3, 2, 3, rngs=nnx.Rngs(0)),
            ValueError,
            "`into` must be the module that was trained",
        ),
        (
            nnx.BatchNorm(3, rngs=nnx.Rngs(0)),
            ValueError,
            "but its `kernel` is absent",
        ),
    ],
)
def test_into_refuses_all_but_the_module_that_was_trained(into, error, message):
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    state = loop.init(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))

    with pytest.raises(error, match=message):
        loop.model(state, into=into)


class Offending(nnx.Module):
    def __init__(self, offence):
        self.kernel = nnx.Param(jnp.ones((3, 3)))
        self.last: Any = nnx.Variable(jnp.zeros(3))
        self.pair = nnx.Variable({"a": jnp.zeros(())})
        self.empty = nnx.Variable(None)
        self.count = 0
        self.offence = offence

    def __call__(self, x):
        self.offence(self, x)
        return x @ self.kernel[...]


def _assign_to_a_parameter(module, x):
    module.kernel[...] = module.kernel[...] * 0.9


def _replace_a_parameter(module, x):
    module.kernel = nnx.Param(module.kernel[...] * 0.9)


def _count_in_an_attribute(module, x):
    module.count += 1


def _change_a_shape(module, x):
    module.last.set_value(x)


def _change_a_dtype(module, x):
    module.last.set_value(module.last.get_value().astype(jnp.int32))


def _remove_a_variable(module, x):
    del module.last


def _add_to_a_variable(module, x):
    module.pair.set_value({"a": jnp.zeros(()), "b": x.sum()})


def _fill_an_empty_variable(module, x):
    module.empty.set_value(x.sum())


def _change_a_variable_type(module, x):
    module.last = Statistic(module.last.get_value())


def _replace_a_submodule(module, x):
    module.other = nnx.List([])


@pytest.mark.parametrize(
    ("offence", "message"),
    [
        (_assign_to_a_parameter, "assigns to parameter `kernel`, which only the opt"),
        (_replace_a_parameter, "assigns to parameter `kernel`"),
        (_count_in_an_attribute, "changed a static attribute .* of the Offending"),
        (_change_a_shape, r"of `last`, but turned float32\[3\] into float32\[8, 3\]"),
        (_change_a_dtype, r"of `last`, but turned float32\[3\] into int32\[3\]"),
        (_remove_a_variable, "the forward pass removed `last` from the model"),
        (_add_to_a_variable, r"added the array `pair\.b` to the Offending"),
        (_fill_an_empty_variable, "added the array `empty` to the Offending"),
        (_change_a_variable_type, "changed a static attribute or the structure"),
        (_replace_a_submodule, "changed a static attribute or the structure"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_pass_that_changes_what_a_step_would_lose_is_refused(offence, message):
    with pytest.raises(ValueError, match=message):
        train(Offending(offence))


def test_a_variable_that_holds_a_text_is_refused_by_name():
    module = Offending(None)
    module.last = nnx.Variable("a text")

    with pytest.raises(
        TypeError, match="`last` must be an array or a number, got a str"
    ):
        train(module)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_variable_in_two_places_is_one_parameter_with_both_gradients(is_first):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            if is_first:
                self.embed = nnx.Embed(5, 4, rngs=rngs)
                self.head = nnx.Linear(4, 5, use_bias=False, rngs=rngs)
            else:
                self.a_head = nnx.Linear(4, 5, use_bias=False, rngs=rngs)
                self.embed = nnx.Embed(5, 4, rngs=rngs)
                self.head = self.a_head
            self.head.kernel = self.embed.embedding

        def __call__(self, tokens):
            return self.embed(tokens) @ self.head.kernel[...].T

    tokens = np.array([0, 1, 4])
    model = Tied(nnx.Rngs(0))
    table = np.asarray(model.embed.embedding[...])
    loop = ff.TrainingLoop(
        lambda model, batch: (model(batch["token"]) ** 2).mean(-1),
        optax.sgd,
        schedule=0.1,
    )
    state = loop.init(model)
    (grad,) = loop.grads(state, {"token": tokens}).values()
    state, _ = loop.step(state, {"token": tokens})
    trained = loop.model(state)

    expected = jax.grad(lambda w: ((w[tokens] @ w.T) ** 2).mean())(table)
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-6)
    assert trained.head.kernel is trained.embed.embedding
