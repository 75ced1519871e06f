"""A graph's numbers: those of the loop, of JAX by hand, and of its own other faces."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import (
    FEATURES,
    KINDS,
    apply_dict,
    assert_bitwise,
    cross_entropy,
    make_batches,
    mlp_loss,
    named,
    train_by_hand,
)

import fuelflow as ff

KIND_IDS = [kind.name for kind in KINDS]
SCHEDULE = ff.schedules.cosine(1e-2, 3, 20)
lazy_cross_entropy = ff.lazy(cross_entropy)


def make_graph(model, optimizer=optax.adamw, schedule: Any = 1e-2, **options):
    apply = apply_dict if isinstance(model, dict) else None
    graph = ff.Graph(model, apply=apply, **options)
    graph.set_optimizer(optimizer)
    if schedule is not None:
        graph.set_scheduler(schedule)
    return graph


def record_loss(graph, batch):
    return lazy_cross_entropy(graph(batch["x"]), batch["y"])


def plain(tree):
    """Arrays by name, keys as their raw data."""
    return {
        name: np.asarray(
            jax.random.key_data(value)
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            else value
        )
        for name, value in tree.items()
    }


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("optimizer", [optax.sgd, optax.adam, optax.adamw])
def test_steps_equal_those_of_the_loop_bit_for_bit(kind, optimizer):
    batches = make_batches(20)
    loop = ff.TrainingLoop(
        mlp_loss(kind), optimizer, schedule=SCHEDULE, max_grad_norm=0.5
    )
    state = loop.init(kind.make())
    said = []
    for batch in batches:
        state, outcome = loop.step(state, batch)
        said.append((outcome.loss, outcome.grad_norm, outcome.lr, outcome.global_step))

    graph = make_graph(kind.make(), optimizer, SCHEDULE, max_grad_norm=0.5)
    heard = []
    for batch in batches:
        outcome = graph.step(record_loss(graph, batch))
        heard.append((outcome.loss, outcome.grad_norm, outcome.lr, outcome.global_step))

    assert heard == said
    assert_bitwise(graph.state.params, state.params)


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_steps_equal_a_loop_written_by_hand(kind):
    batches = make_batches(20)
    expected = train_by_hand(kind, optax.adam(1e-2), batches)

    graph = make_graph(kind.make(), optax.adam)
    for batch in batches:
        graph.step(record_loss(graph, batch).mean())

    assert_bitwise(graph.state.params, expected)


def test_a_weighted_loss_is_the_weighted_mean():
    batch = make_batches(1)[0]
    weight = np.random.default_rng(0).uniform(size=32).astype(np.float32)
    graph = make_graph(KINDS[0].make())

    def by_hand(params):
        losses = cross_entropy(apply_dict(params, batch["x"]), batch["y"])
        return (losses * weight).sum() / weight.sum()

    expected = named(jax.grad(by_hand)(KINDS[0].make()))
    grads = graph.grads(ff.Weighted(record_loss(graph, batch), weight))

    for name, grad in expected.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-5, atol=1e-7)


def test_backward_gives_the_gradient_by_name():
    batch = make_batches(1)[0]
    graph = make_graph(KINDS[2].make())
    loss = record_loss(graph, batch).mean() * 3.0

    def by_hand(params):
        return 3.0 * cross_entropy(apply_dict(params, batch["x"]), batch["y"]).mean()

    nested = {"first": {}, "second": {}}
    for name, value in graph.state.params.items():
        layer, part = name.split(".")
        nested[layer][part] = value
    expected = named(jax.grad(by_hand)(nested))
    grads = loss.backward()

    assert set(grads) == set(expected)
    for name, grad in expected.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-5, atol=1e-7)
    assert graph.training_step == 0


@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_several_backwards_are_one_step_along_the_sum(kind):
    first, second, third = make_batches(3)
    whole, parts = (
        make_graph(kind.make(), optax.sgd),
        make_graph(kind.make(), optax.sgd),
    )
    total = sum(record_loss(whole, b).mean() for b in (first, second, third))
    expected = whole.step(total)

    for batch in (first, second, third):
        parts.backward(record_loss(parts, batch).mean())
    outcome = parts.step()

    assert outcome.global_step == 1
    np.testing.assert_allclose(outcome.loss, expected.loss, rtol=1e-6)
    np.testing.assert_allclose(outcome.grad_norm, expected.grad_norm, rtol=1e-5)
    for name, param in whole.state.params.items():
        np.testing.assert_allclose(
            parts.state.params[name], param, rtol=1e-5, atol=1e-7
        )


def test_a_step_with_metrics_and_fetched_values_has_their_numbers():
    batch = make_batches(1)[0]
    graph = make_graph(KINDS[0].make())
    expected = apply_dict(KINDS[0].make(), batch["x"])
    logits = graph(batch["x"])
    right = logits.argmax(-1) == batch["y"]

    outcome = graph.step(
        lazy_cross_entropy(logits, batch["y"]).mean(),
        metrics={"right": right},
        fetch=(logits, right),
    )

    np.testing.assert_allclose(np.asarray(logits), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        outcome.metrics["right"], (expected.argmax(-1) == batch["y"]).mean(), rtol=1e-6
    )
    assert np.asarray(right).mean() == pytest.approx(outcome.metrics["right"])


class Net(nnx.Module):
    """A net with statistics that move and noise of its own."""

    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.4, rngs=rngs)
        self.second = nnx.Linear(16, 5, rngs=rngs)

    def __call__(self, x):
        return self.second(self.drop(nnx.relu(self.norm(self.first(x)))))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x)))
        return nn.Dense(5)(nn.Dropout(0.4, deterministic=not train)(x))


def linen_net():
    variables = LinenNet().init(jax.random.key(1), np.zeros((1, FEATURES)), train=False)
    return ff.Linen(LinenNet(), variables)


def nnx_forward(model, x):
    return model(x)


def linen_forward(model, x):
    return model(x, train=model.training)


MOVING = [
    pytest.param(lambda: Net(nnx.Rngs(0)), nnx_forward, id="nnx"),
    pytest.param(linen_net, linen_forward, id="linen"),
]


@pytest.mark.parametrize(("make", "forward"), MOVING)
def test_statistics_and_noise_are_carried_as_in_the_loop(make, forward):
    def loss_fn(model, batch):
        return cross_entropy(forward(model, batch["x"]), batch["y"])

    batches = make_batches(6)
    loop = ff.TrainingLoop(loss_fn, optax.adam, schedule=1e-2)
    state = loop.init(make())
    for batch in batches:
        state, _ = loop.step(state, batch)

    graph = make_graph(make(), optax.adam)
    for batch in batches:
        graph.step(record_loss(graph, batch))

    assert_bitwise(graph.state.params, state.params)
    assert_bitwise(plain(graph.state.variables), plain(state.variables))


@pytest.mark.parametrize(("make", "forward"), MOVING)
def test_two_calls_in_one_loss_come_in_the_order_of_recording(make, forward):
    one, two = make_batches(2)

    def loss_fn(model, batch):
        a = cross_entropy(forward(model, batch["one"]["x"]), batch["one"]["y"])
        b = cross_entropy(forward(model, batch["two"]["x"]), batch["two"]["y"])
        return (b + 2 * a).mean()

    loop = ff.TrainingLoop(loss_fn, optax.adam, schedule=1e-2)
    state, _ = loop.step(loop.init(make()), {"one": one, "two": two})

    graph = make_graph(make(), optax.adam)
    a = record_loss(graph, one)
    b = record_loss(graph, two)
    graph.step((b + 2 * a).mean())

    assert_bitwise(graph.state.params, state.params)
    assert_bitwise(plain(graph.state.variables), plain(state.variables))


@pytest.mark.parametrize(("make", "forward"), MOVING)
def test_looking_at_a_value_changes_nothing_and_sees_the_steps_own(make, forward):
    del forward
    batch = make_batches(1)[0]
    graph = make_graph(make(), optax.adam)
    before = plain(graph.state.variables)
    logits = graph(batch["x"])
    seen = np.asarray(logits)
    loss = lazy_cross_entropy(logits, batch["y"]).mean()
    early = float(loss)
    assert_bitwise(plain(graph.state.variables), before)
    again = graph(batch["x"])  # after the first call, as in a plain script

    graph.step(loss + 0.0 * again.sum(), fetch=(logits,))

    assert float(lazy_cross_entropy(seen, batch["y"]).mean()) == pytest.approx(early)
    assert any(
        (plain(graph.state.variables)[name] != value).any()
        for name, value in before.items()
    )


def test_a_second_look_at_a_later_call_has_other_noise():
    batch = make_batches(1)[0]
    graph = make_graph(Net(nnx.Rngs(0)))

    first, second = graph(batch["x"]), graph(batch["x"])

    assert (np.asarray(first) != np.asarray(second)).any()


@pytest.mark.parametrize(("make", "forward"), MOVING)
def test_eval_mode_is_at_rest(make, forward):
    batch = make_batches(1)[0]
    graph = make_graph(make()).eval()
    loop = ff.TrainingLoop(
        lambda model, batch: cross_entropy(forward(model, batch["x"]), batch["y"]),
        optax.adam,
        schedule=1e-2,
    )
    expected = loop.evaluate(loop.init(make()), [batch])

    loss = record_loss(graph, batch).mean()

    assert float(loss) == pytest.approx(expected["loss"], rel=1e-6)
    before = plain(graph.state.variables)
    graph.step(record_loss(graph, batch).mean())
    assert_bitwise(plain(graph.state.variables), before)


def test_two_graphs_play_against_each_other():
    random = np.random.default_rng(0)
    noise = random.normal(size=(6, 16, 3)).astype(np.float32)
    real = random.normal(size=(6, 16, 2)).astype(np.float32) + 2
    maker = {"w": jnp.asarray(random.normal(size=(3, 2)), jnp.float32)}
    judge = {"w": jnp.asarray(random.normal(size=(2, 1)), jnp.float32)}

    def make(params, z):
        return jnp.tanh(z @ params["w"])

    def judged(params, x):
        return (x @ params["w"])[:, 0]

    def by_hand():
        g, d = maker, judge
        for z, x in zip(noise, real, strict=True):

            def d_loss(d, g=g, z=z, x=x):
                fake, true = judged(d, make(g, z)), judged(d, x)
                return (jax.nn.softplus(fake) + jax.nn.softplus(-true)).mean()

            d = jax.tree.map(lambda p, s: p - 0.1 * s, d, jax.grad(d_loss)(d))

            def g_loss(g, d=d, z=z):
                return jax.nn.softplus(-judged(d, make(g, z))).mean()

            g = jax.tree.map(lambda p, s: p - 0.1 * s, g, jax.grad(g_loss)(g))
        return g["w"], d["w"]

    expected = by_hand()
    softplus = ff.lazy(jax.nn.softplus)
    makers, judges = (
        ff.Graph(params, apply=apply)
        for params, apply in ((maker, make), (judge, judged))
    )
    for graph in (makers, judges):
        graph.set_optimizer(optax.sgd)
        graph.set_lr(0.1)
    for z, x in zip(noise, real, strict=True):
        fake = makers(z)
        judges.step((softplus(judges(fake)) + softplus(-judges(x))).mean())
        makers.step(softplus(-judges(fake)).mean())

    np.testing.assert_allclose(makers.state.params["w"], expected[0], rtol=1e-5)
    np.testing.assert_allclose(judges.state.params["w"], expected[1], rtol=1e-5)
    assert len(makers.compiles) == len(judges.compiles) == 1


def test_the_statistics_of_another_graph_move_when_it_is_run_through():
    batch = make_batches(1)[0]
    inner, outer = make_graph(Net(nnx.Rngs(0))), make_graph(Net(nnx.Rngs(1)))
    before = plain(inner.state.variables)

    outer.step((outer(batch["x"]) * inner(batch["x"])).mean())

    after = plain(inner.state.variables)
    assert any((after[name] != value).any() for name, value in before.items())
    assert np.isfinite(float((inner(batch["x"]) ** 2).mean()))


def test_a_penalty_on_the_parameters_is_recorded_from_the_model():
    batch = make_batches(1)[0]
    graph = make_graph(KINDS[0].make())
    penalty = graph.record(
        lambda params: sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
    )

    def by_hand(params):
        loss = cross_entropy(apply_dict(params, batch["x"]), batch["y"]).mean()
        return loss + 0.1 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))

    expected = named(jax.grad(by_hand)(KINDS[0].make()))
    grads = (record_loss(graph, batch).mean() + 0.1 * penalty).backward()

    for name, grad in expected.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-5, atol=1e-7)


def test_a_run_goes_from_graph_to_loop_and_back():
    kind = KINDS[2]
    batches = make_batches(9)
    straight = make_graph(kind.make(), schedule=SCHEDULE)
    for batch in batches:
        straight.step(record_loss(straight, batch))

    graph = make_graph(kind.make(), schedule=SCHEDULE)
    for batch in batches[:3]:
        graph.step(record_loss(graph, batch))
    loop = graph.loop.replace(loss_fn=mlp_loss(kind))
    state = graph.state
    for batch in batches[3:6]:
        state, _ = loop.step(state, batch)
    graph.state = state
    steps = [graph.step(record_loss(graph, b)).global_step for b in batches[6:]]

    assert steps == [7, 8, 9]
    assert graph.training_step == 9
    assert_bitwise(graph.state.params, straight.state.params)


def test_frozen_parameters_stay_and_thawed_ones_move():
    batches = make_batches(4)
    graph = make_graph(KINDS[2].make(), trainable="!first")
    start = {name: np.asarray(p) for name, p in graph.state.params.items()}
    for batch in batches[:2]:
        graph.step(record_loss(graph, batch))
    frozen = {name: np.asarray(p) for name, p in graph.state.params.items()}
    graph.set_trainable("*")
    steps = [graph.step(record_loss(graph, b)).global_step for b in batches[2:]]

    moved = {name for name in start if (frozen[name] != start[name]).any()}
    assert moved == {"second.kernel", "second.bias"}
    assert (
        np.asarray(graph.state.params["first.kernel"]) != start["first.kernel"]
    ).any()
    assert steps == [3, 4]


def test_setters_keep_the_count_and_the_scheduler_wins():
    batches = make_batches(6)
    graph = make_graph(KINDS[0].make(), optax.sgd, schedule=None)
    graph.set_lr(0.5)
    graph.set_lr_scale(0.1)  # no effect without a scheduler
    rates = [graph.step(record_loss(graph, batches[0])).lr]
    graph.set_scheduler(lambda step: 0.1 * (step + 1))
    rates.append(graph.step(record_loss(graph, batches[1])).lr)
    graph.set_lr(0.7)
    graph.set_optimizer(optax.adam)
    rates.append(graph.step(record_loss(graph, batches[2])).lr)
    graph.set_scheduler(None)
    outcome = graph.step(record_loss(graph, batches[3]))
    rates.append(outcome.lr)

    np.testing.assert_allclose(rates, [0.5, 0.02, 0.03, 0.7], rtol=1e-6)
    assert outcome.global_step == graph.training_step == 4


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_bad_step_leaves_the_state(nonfinite):
    batch = make_batches(1)[0]
    graph = make_graph(KINDS[0].make(), nonfinite=nonfinite)
    before = {name: np.asarray(p) for name, p in graph.state.params.items()}

    outcome = graph.step(record_loss(graph, batch).mean() * np.float32(np.nan))

    if nonfinite == "raise":
        with pytest.raises(ff.NonFiniteError, match="step 1 is not finite"):
            outcome.loss  # noqa: B018
    assert not outcome.finite
    assert_bitwise(graph.state.params, before)
    assert graph.step(record_loss(graph, batch)).global_step == 1
