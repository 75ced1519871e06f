from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze

import fuelflow as ff

BATCH = {
    "x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(8, 2)).astype(np.float32),
}
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def squared_error(output, batch):
    return ((output - batch["y"]) ** 2).mean(-1)


def loss_fn(model, batch):
    return squared_error(model(batch["x"]), batch)


def make_model(module, **options):
    return ff.Linen(module, module.init(KEYS, BATCH["x"]), **options)


def train(model, num_steps=3, loss=loss_fn, seed=0):
    loop = ff.TrainingLoop(loss, optax.sgd, schedule=0.1, strict_compile=True)
    state = loop.init(model, seed=seed)
    state, outcome = loop.step(state, BATCH)
    for _ in range(num_steps - 1):
        state, outcome = loop.step(state, BATCH)
    return loop, state, outcome


def train_by_hand(module, variables, num_steps=3):
    """A plain loop over all collections, by linen's own means."""
    names = [name for name in variables if name != "params"]

    def objective(params, rest):
        output, changed = module.apply(
            {"params": params, **rest}, BATCH["x"], mutable=names
        )
        return squared_error(output, BATCH).mean(), changed

    find_grads = jax.jit(jax.grad(objective, has_aux=True))
    for _ in range(num_steps):
        params, rest = variables["params"], {name: variables[name] for name in names}
        grads, changed = find_grads(params, rest)
        params = jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads)
        variables = {"params": params, **changed}
    return variables


def assert_close(actual, expected):
    # What XLA fuses in one program rounds otherwise than operations one by one.
    actual, expected = nn.unbox(actual), nn.unbox(expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        actual,
        expected,
    )


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(4)(x))
        return nn.Dense(2)(nn.relu(x))


class Convolved(nn.Module):
    def setup(self):
        self.conv = nn.Conv(2, (2,))
        self.head = nn.Dense(2)

    def __call__(self, x):
        return self.head(self.conv(x[..., None]).reshape(len(x), -1))


class Cell(nn.Module):
    @nn.compact
    def __call__(self, carry, x):
        y = nn.BatchNorm(use_running_average=False)(nn.Dense(3)(carry) + x)
        return nn.tanh(y), y


class Lifted(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Cell),
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = layers(name="layers")(x, jnp.zeros((2, *x.shape)))
        return nn.Dense(2)(x)


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(2, kernel_init=init)(x)


class Counting(nn.Module):
    """A variable and a parameter that are Python numbers."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", lambda _: 2.0)
        count = self.variable("counts", "calls", lambda: 0)
        if not self.is_initializing():
            count.value += 1
        return nn.Dense(2)(x) * scale


class Accumulating(nn.Module):
    """A value sown with a sum of its own, which must be carried."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(2)(x)

        def add(total: Any, new: Any) -> Any:
            return total + new

        self.sow("totals", "mean", x.mean(), init_fn=lambda: 0.0, reduce_fn=add)
        return x


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (Normed(), {"BatchNorm_0.bias", "BatchNorm_0.scale", "Dense_0.kernel"}),
        (Convolved(), {"conv.kernel", "head.bias"}),
        (nn.Sequential([nn.Dense(3), nn.Dense(2)]), {"layers_0.bias", "layers_1.bias"}),
        (Lifted(), {"layers.Dense_0.kernel", "layers.BatchNorm_0.scale"}),
        (Boxed(), {"Dense_0.kernel"}),
        (Counting(), {"scale", "Dense_0.bias"}),
        (Accumulating(), {"Dense_0.kernel"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_parameters_and_all_collections_train_as_in_a_loop_by_hand(module, names):
    model = make_model(module)

    loop, state, _ = train(model)
    trained = loop.model(state)

    assert isinstance(trained, ff.Linen)
    assert names <= set(state.params)
    assert_close(
        dict(trained.variables), dict(train_by_hand(module, dict(model.variables)))
    )


def test_a_trained_model_is_called_without_its_variables():
    loop, state, _ = train(make_model(nn.Dense(2)))

    output = loop.model(state)(BATCH["x"])

    np.testing.assert_allclose(
        output,
        BATCH["x"] @ state.params["kernel"] + state.params["bias"],
        rtol=1e-5,
        atol=1e-6,
    )


def test_boxes_and_frozen_dicts_come_back_around_the_trained_numbers():
    module = Boxed()
    model = ff.Linen(module, freeze(module.init(KEYS, BATCH["x"])))

    loop, state, _ = train(model)
    kernel: Any = loop.model(state).variables["params"]["Dense_0"]["kernel"]

    assert isinstance(kernel, nn.Partitioned)
    assert kernel.names == (None, "model")
    np.testing.assert_array_equal(kernel.value, state.params["Dense_0.kernel"])


def test_variables_are_named_by_collection_and_integers_in_params_are_variables():
    module = Normed()
    variables = module.init(KEYS, BATCH["x"])
    variables["params"]["num_layers"] = jnp.int32(3)

    _, state, _ = train(ff.Linen(module, variables))

    assert set(state.variables) == {
        "batch_stats.BatchNorm_0.mean",
        "batch_stats.BatchNorm_0.var",
        "params.num_layers",
    }
    assert state.variables["params.num_layers"] == 3


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        dropped = nn.Dropout(0.5, deterministic=False)(x)
        noise = jax.random.normal(self.make_rng("noise"), (2,))
        return nn.Dense(2)(dropped) + noise, dropped.sum(), noise.sum()


def read_noise(model, batch):
    output, first_dropped, first_noise = model(batch["x"])
    _, second_dropped, second_noise = model(batch["x"])
    keys = KEYS | {"noise": jax.random.key(2)}
    given = [model(batch["x"], rngs=keys)[2] for _ in range(2)]
    return squared_error(output, batch), {
        "first_dropped": first_dropped,
        "second_dropped": second_dropped,
        "first_noise": first_noise,
        "second_noise": second_noise,
        "given": abs(given[0] - given[1]),
    }


@pytest.mark.parametrize("rngs", [("dropout", "noise"), ("dropout",), ()])
def test_every_call_of_every_step_draws_afresh_from_every_stream(rngs):
    keys = KEYS | {"noise": jax.random.key(2)}
    model = ff.Linen(Noisy(), Noisy().init(keys, BATCH["x"]), rngs=rngs)
    loop = ff.TrainingLoop(read_noise, optax.sgd, schedule=0.0)

    def draws(seed):
        state = loop.init(model, seed=seed)
        found, given = {"dropped": [], "noise": []}, []
        for _ in range(2):
            state, outcome = loop.step(state, BATCH)
            given.append(outcome.metrics["given"])
            for stream, values in found.items():
                values += [
                    outcome.metrics[f"{n}_{stream}"] for n in ("first", "second")
                ]
        return found, given

    (first, given), (other_seed, _), (again, _) = draws(0), draws(1), draws(0)

    assert len({*first["dropped"], *other_seed["dropped"]}) == 8
    assert len({*first["noise"], *other_seed["noise"]}) == 8
    assert first == again
    assert given == [0, 0]  # keys given by the caller are used as they are


def test_two_streams_do_not_share_their_keys():
    class Streams(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.param("w", nn.initializers.ones, (1,))
            return jnp.stack(
                [
                    jax.random.normal(self.make_rng(n), (2,))
                    for n in ("dropout", "noise")
                ]
            )

    keys = KEYS | {"noise": jax.random.key(2)}
    model = ff.Linen(Streams(), Streams().init(keys, 0), rngs=("dropout", "noise"))

    def loss_fn(model, batch):
        first, second = model(batch["x"])
        return model.params["w"].sum(), {"difference": abs(first - second).min()}

    assert train(model, 1, loss_fn)[2].metrics["difference"] > 0


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(2)(x)
        self.sow("intermediates", "hidden", x)
        self.sow("losses", "square", (x**2).mean())
        return x


def with_sown_losses(model, batch):
    loss = loss_fn(model, batch)
    return loss.mean() + sum(jax.tree.leaves(model.variables["losses"]))


def test_sown_values_start_each_step_empty_and_count_in_the_loss():
    module = Sowing()
    model = make_model(module, mutable=("intermediates",))
    assert len(model.variables["losses"]["square"]) == 1

    def apply(params):
        return cast(jax.Array, module.apply({"params": params}, BATCH["x"]))

    def objective(params):
        output = apply(params)
        return squared_error(output, BATCH).mean() + (output**2).mean()

    params = last = model.variables["params"]
    for _ in range(2):
        last = params
        grads = jax.grad(objective)(params)
        params = jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads)
    hidden = apply(last)
    loop, state, _ = train(model, 2, with_sown_losses)
    evaluation = loop.evaluate(state, [BATCH])

    assert set(state.sown) == {"intermediates.hidden.0", "losses.square.0"}
    assert state.variables == {}
    np.testing.assert_allclose(
        state.sown["intermediates.hidden.0"], hidden, rtol=1e-5, atol=1e-6
    )
    assert_close(loop.model(state).variables["params"], params)
    # The collection is not mutable in evaluation, so that nothing is sown there.
    assert evaluation["loss"] == pytest.approx(
        float(squared_error(apply(params), BATCH).mean()), rel=1e-5
    )


def test_two_calls_in_one_loss_sow_two_values_and_both_update_the_statistics():
    class Siamese(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
            self.sow("intermediates", "mean", x.mean())
            return nn.Dense(2)(x)

    model = make_model(Siamese(), mutable=["intermediates"])

    def twice(model, batch):
        return squared_error(model(batch["x"]) - model(batch["x"] + 1), batch)

    _, state, _ = train(model, 1, twice)
    mean = BATCH["x"].mean(0)

    assert set(state.sown) == {"intermediates.mean.0", "intermediates.mean.1"}
    np.testing.assert_allclose(
        state.variables["batch_stats.BatchNorm_0.mean"],
        0.5 * (0.5 * mean) + 0.5 * (mean + 1),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_tuple_held_as_a_variable_fails_where_it_is_read_and_is_not_reset():
    class Recurrent(nn.Module):
        @nn.compact
        def __call__(self, x):
            carry = self.variable("carry", "pair", lambda: (jnp.zeros(2), jnp.zeros(2)))
            first, second = carry.value
            carry.value = (first + 1, second)
            return nn.Dense(2)(x)

    with pytest.raises(ValueError, match="not enough values to unpack"):
        train(make_model(Recurrent()))


class Methods(nn.Module):
    def setup(self):
        self.encoder = nn.Dense(3)
        self.head = nn.Dense(2)

    def __call__(self, x):
        return self.head(self.encoder(x))

    def encode(self, x):
        return self.encoder(x)


@pytest.mark.parametrize("method", ["encode", Methods.encode])
def test_method_selects_another_method_of_the_module(method):
    model = make_model(Methods())

    def loss_fn(model, batch):
        return model(batch["x"], method=method).sum(-1)

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    grads = loop.grads(loop.init(model), BATCH)

    np.testing.assert_allclose(grads["encoder.bias"], np.ones(3), rtol=1e-6)
    assert not grads["head.kernel"].any()


def test_evaluation_says_so_and_leaves_every_collection_alone():
    class Mode(nn.Module):
        @nn.compact
        def __call__(self, x, *, training):
            x = nn.BatchNorm(use_running_average=not training)(x)
            x = nn.Dropout(0.5, deterministic=not training)(x)
            return nn.Dense(2)(x)

    module = Mode()
    model = ff.Linen(module, module.init(KEYS, BATCH["x"], training=False))

    def loss_fn(model, batch):
        output = model(batch["x"], training=model.training)
        return squared_error(output, batch), {"training": jnp.float32(model.training)}

    loop, state, outcome = train(model, 2, loss_fn)
    before = jax.tree.map(np.asarray, state.variables)
    evaluation = loop.evaluate(state, [BATCH])
    output = loop.model(state)(BATCH["x"], training=False)

    assert (outcome.metrics["training"], evaluation["training"]) == (1, 0)
    assert evaluation["loss"] == pytest.approx(
        float(squared_error(output, BATCH).mean()), rel=1e-5
    )
    assert_close(state.variables, before)


def test_the_bound_model_shows_its_module_params_and_variables():
    model = make_model(Normed())

    def loss_fn(bound, batch):
        assert isinstance(bound.module, Normed)
        assert set(bound.variables) == {"params", "batch_stats"}
        kernel = bound.params["Dense_1"]["kernel"]
        return squared_error(bound(batch["x"]), batch).mean() + kernel.sum()

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    grads = loop.grads(loop.init(model), BATCH)
    plain = ff.TrainingLoop(
        lambda m, b: squared_error(m(b["x"]), b), optax.sgd, schedule=0.1
    )
    expected = plain.grads(plain.init(model), BATCH)["Dense_1.kernel"] + 1

    np.testing.assert_allclose(grads["Dense_1.kernel"], expected, rtol=1e-5, atol=1e-6)


def _grow(value):
    return jnp.concatenate([value, value])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _grow,
            r"shape and dtype of `memory.last`, but turned float32\[2\] into .*\[4\]",
        ),
        (lambda value: value.astype(jnp.int32), r"`memory.last`, .* into int32\[2\]"),
    ],
)
def test_a_variable_that_changes_shape_or_dtype_is_refused_by_name(change, message):
    class Changing(nn.Module):
        @nn.compact
        def __call__(self, x):
            last = self.variable("memory", "last", lambda: jnp.zeros(2))
            if not self.is_initializing():
                last.value = change(last.value)
            return nn.Dense(2)(x)

    with pytest.raises(ValueError, match=message):
        train(make_model(Changing()))


VARIABLES = {"params": {"bias": jnp.zeros(2), "kernel": jnp.ones((3, 2))}}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: ff.Linen(nn.Dense(2), VARIABLES["params"]),
            ValueError,
            "must have a collection `params`, got `bias`, `kernel`: pass all that",
        ),
        (
            lambda: ff.Linen(nn.Dense(2), cast(Any, [VARIABLES])),
            TypeError,
            "must be the mapping that module.init returned, got a list",
        ),
        (
            lambda: ff.Linen(VARIABLES, VARIABLES),
            TypeError,
            "`module` must be a flax.linen.Module, got a dict",
        ),
        (
            lambda: ff.Linen(nn.Dense(2), VARIABLES, mutable=cast(Any, "losses")),
            TypeError,
            "`mutable` must be a tuple of names, got the string 'losses'",
        ),
        (
            lambda: ff.Linen(nn.Dense(2), VARIABLES, rngs=cast(Any, "dropout")),
            TypeError,
            "`rngs` must be a tuple of names, got the string 'dropout'",
        ),
        (
            lambda: ff.Linen(nn.Dense, VARIABLES),
            TypeError,
            "`module` must be an instance, got the class Dense itself",
        ),
    ],
)
def test_a_wrongly_made_linen_model_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_mutable_in_a_call_is_refused_with_the_place_where_it_belongs():
    def loss_fn(model, batch):
        return model(batch["x"], mutable=["intermediates"])[0].sum(-1)

    with pytest.raises(
        TypeError, match=r"given once, as ff\.Linen\(.*mutable=\.\.\.\)"
    ):
        train(make_model(nn.Dense(2)), loss=loss_fn)


def test_a_text_among_the_variables_is_refused_by_name():
    variables = {**VARIABLES, "notes": {"author": "text"}}

    with pytest.raises(
        TypeError, match=r"`notes\.author` must be an array or a number"
    ):
        train(ff.Linen(nn.Dense(2), variables))
