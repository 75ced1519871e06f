"""The graph's step: the numbers of TrainingLoop and of loops written by hand."""

import gc
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import CompileCounter
from flax import nnx
from problems import (
    CLASSES,
    FEATURES,
    HIDDEN,
    KINDS,
    Kind,
    assert_bitwise,
    cross_entropy,
    host_copy,
    make_batches,
    mlp_loss,
    named,
    train,
    train_by_hand,
)

import fuelflow as ff

RATE = 3e-3
lazy_cross_entropy = ff.lazy(cross_entropy)
lnp = ff.lazy(jnp)
OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "sgd": lambda lr: optax.sgd(lr, momentum=0.9),
    "adam": optax.adam,
    "adamw": optax.adamw,
}


def make_graph(kind: Kind, **options: Any) -> ff.Graph:
    apply = kind.apply if kind.name == "dict" else None
    graph = ff.Graph(kind.make(), apply=apply, **options)
    graph.set_optimizer(optax.sgd)
    graph.set_scheduler(RATE)
    return graph


def scale_graph(weight: float = 2.0, **options: Any) -> ff.Graph:
    """One weight times the input, stepped by plain gradient descent at rate 0.1."""
    graph = ff.Graph(
        {"w": np.float32(weight)}, apply=lambda m, x: m["w"] * x, **options
    )
    graph.set_optimizer(optax.sgd)
    graph.set_lr(0.1)
    return graph


def weight_of(graph: ff.Graph) -> float:
    return float(graph.state.params["w"])


X = np.arange(3, dtype=np.float32)

# The same numbers.


@pytest.mark.parametrize("clip", [0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_fifty_steps_equal_the_loop_and_the_hand_written_one_bit_for_bit(
    kind: Kind, name: str, clip: float | None
):
    schedule = ff.schedules.cosine(RATE, 10, 50)
    batches = make_batches(50)
    loop = ff.TrainingLoop(
        mlp_loss(kind), OPTIMIZERS[name], schedule=schedule, max_grad_norm=clip
    )
    state, outcomes = train(loop, kind.make(), batches)
    graph = make_graph(kind, max_grad_norm=clip)
    graph.set_optimizer(OPTIMIZERS[name])
    graph.set_scheduler(schedule)
    seen = []
    for batch in batches:
        loss = lazy_cross_entropy(graph(batch["x"]), batch["y"])
        seen.append(graph.step(loss))

    assert_bitwise(graph.state.params, state.params)
    assert_bitwise(host_copy(graph.state.opt_state), host_copy(state.opt_state))
    assert [o.loss for o in seen] == [o.loss for o in outcomes]
    assert [o.grad_norm for o in seen] == [o.grad_norm for o in outcomes]
    assert [o.lr for o in seen] == [o.lr for o in outcomes]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_scalar_loss_equals_the_hand_written_loop_bit_for_bit(
    kind: Kind, clip: float | None
):
    batches = make_batches(50)
    tx = optax.adam(RATE)
    if clip is not None:
        tx = optax.chain(optax.clip_by_global_norm(clip), tx)
    graph = make_graph(kind, max_grad_norm=clip)
    graph.set_optimizer(optax.adam)
    for batch in batches:
        graph.step(lazy_cross_entropy(graph(batch["x"]), batch["y"]).mean())

    assert_bitwise(graph.state.params, train_by_hand(kind, tx, batches))


def test_weighted_losses_and_metrics_equal_the_loops():
    kind, batches = KINDS[0], make_batches(5)
    weights = [np.linspace(0, 1, 32, dtype=np.float32) * (n + 1) for n in range(5)]

    def loss_fn(model: Any, batch: Any) -> Any:
        logits = kind.forward(model, batch["x"])
        losses = cross_entropy(logits, batch["y"])
        hits = logits.argmax(-1) == batch["y"]
        return ff.Weighted(losses, batch["w"]), {
            "accuracy": ff.Weighted(hits, batch["w"]),
            "hits": hits,
            "largest": losses.max(),
        }

    loop = ff.TrainingLoop(loss_fn, optax.adam, schedule=RATE)
    weighted = [{**b, "w": w} for b, w in zip(batches, weights, strict=True)]
    state, outcomes = train(loop, kind.make(), weighted)
    graph = make_graph(kind)
    graph.set_optimizer(optax.adam)
    for batch, expected in zip(weighted, outcomes, strict=True):
        logits = graph(batch["x"])
        losses = lazy_cross_entropy(logits, batch["y"])
        hits = logits.argmax(-1) == batch["y"]
        outcome = graph.step(
            ff.Weighted(losses, batch["w"]),
            metrics={
                "accuracy": ff.Weighted(hits, lnp.asarray(batch["w"])),
                "hits": hits,
                "largest": losses.max(),
            },
        )
        assert outcome.loss == expected.loss
        assert outcome.metrics == expected.metrics

    assert_bitwise(graph.state.params, state.params)


def test_gradients_equal_those_of_jax():
    kind, batch = KINDS[0], make_batches(1)[0]
    params = kind.make()

    def by_hand(params: Any) -> Any:
        losses = cross_entropy(kind.apply(params, batch["x"]), batch["y"])
        return losses.mean() + 0.1 * (params["first"]["kernel"] ** 2).sum()

    graph = make_graph(kind)
    penalty = graph.record(lambda m: (m["first"]["kernel"] ** 2).sum())
    loss = lazy_cross_entropy(graph(batch["x"]), batch["y"]).mean() + 0.1 * penalty

    expected = named(jax.jit(jax.grad(by_hand))(params))
    for found in (loss.backward(), graph.grads(loss)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            # Not the same program, so one rounding of a sum of 32 may differ.
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7)
    assert graph.training_step == 0


@pytest.mark.parametrize("read", ["nothing", "logits", "half", "loss", "all"])
def test_a_value_read_before_the_step_cuts_no_gradient(read: str):
    graph = scale_graph()
    y = graph(X)
    half = y * 0.5
    loss = (half * y + half).sum()
    for value in {"logits": [y], "half": [half], "loss": [loss]}.get(
        read, [y, half, loss] if read == "all" else []
    ):
        value.realize()
    outcome = graph.step(loss, fetch=(half, y))

    # loss = sum(0.5 w² x² + 0.5 w x), its slope sum(w x² + 0.5 x)
    assert outcome.loss == 0.5 * 4 * 5 + 0.5 * 2 * 3
    assert weight_of(graph) == pytest.approx(2 - 0.1 * (2 * 5 + 0.5 * 3))
    np.testing.assert_array_equal(half, X)


def test_values_of_earlier_steps_are_constants_in_later_losses():
    graph = scale_graph()
    first = graph(X)
    graph.step(first.sum(), fetch=first)
    after = weight_of(graph)
    second = graph(X)
    graph.step((first * second).sum())

    assert after == pytest.approx(2 - 0.1 * 3)
    assert weight_of(graph) == pytest.approx(after - 0.1 * float((2 * X * X).sum()))


def test_fetched_values_are_read_without_running(compile_counter: CompileCounter):
    graph = scale_graph()
    y = graph(X)
    named_parts = ff.lazy(lambda y: {"double": y * 2, "sum": y.sum()})(y)
    graph.step((y**2).mean(), fetch=[named_parts["double"]])
    compile_counter.reset()

    np.testing.assert_array_equal(named_parts["double"], 4 * X)
    assert compile_counter.compiles == 0
    with pytest.raises(ff.StaleGraphError, match="recorded at test_graph.py"):
        named_parts["sum"].realize()


def test_the_loss_is_readable_after_its_step_and_before():
    for reads_first in (False, True):
        graph = scale_graph()
        loss = (graph(X) ** 2).mean()
        before = float(loss) if reads_first else None
        outcome = graph.step(loss)

        assert float(loss) == outcome.loss == pytest.approx(20 / 3)
        assert before in (None, outcome.loss)
        assert loss.is_realized


def test_a_running_mean_of_losses_is_readable_at_any_time():
    graph = scale_graph()
    by_hand, before, after, w = [], 0.0, 0.0, 2.0
    for _ in range(8):
        loss = (graph(X) ** 2).mean()
        before = before + loss
        graph.step(loss)
        after = after + loss
        by_hand.append(w * w * 5 / 3)
        w -= 0.1 * 2 * w * 5 / 3

    assert float(before) / 8 == pytest.approx(np.mean(by_hand), rel=1e-5)
    assert float(after) / 8 == pytest.approx(np.mean(by_hand), rel=1e-5)


# One compile.


def test_a_loop_with_its_loss_written_inline_compiles_once(
    compile_counter: CompileCounter,
):
    graph = make_graph(KINDS[2])
    batches = make_batches(30)
    compile_counter.reset()
    for step, batch in enumerate(batches):
        logits = graph(batch["x"])
        smooth = ff.lazy(lambda logits, labels: cross_entropy(logits, labels) * 0.5)
        loss = smooth(logits, batch["y"]).mean()
        graph.step(loss, fetch=logits)
        graph.set_lr_scale(1 / (step + 1))

    here = test_a_loop_with_its_loss_written_inline_compiles_once
    assert [r.program for r in graph.compiles] == [
        f"step (test_graph.py:{line_of(here, 10)})"
    ]
    assert compile_counter.compiled.count("jit(step)") == 1


def line_of(test: Any, offset: int) -> int:
    return test.__code__.co_firstlineno + offset


def test_a_python_number_that_changes_recompiles_and_names_its_line():
    graph = scale_graph()
    for step in range(3):
        y = graph(X)
        y = y * (1.0 + step)
        graph.step(y.sum())
    here = test_a_python_number_that_changes_recompiles_and_names_its_line

    assert [record.is_first for record in graph.compiles] == [True, False, False]
    assert graph.compiles[2].changes == (
        f"mul (test_graph.py:{line_of(here, 4)}): mul(f32[3], 2.0) → mul(f32[3], 3.0)",
    )


def test_strict_graphs_refuse_to_compile_a_line_again_and_stay_usable():
    graph = scale_graph(strict_compile=True)

    def step(x: Any) -> Any:
        return graph.step((graph(x) ** 2).mean())

    step(X)
    with pytest.raises(ff.RecompileError, match=r"f32\[3\]\) → .*f32\[4\]\)"):
        step(np.ones(4, np.float32))
    assert step(X).global_step == 2


# Models that change.


class NNXNoisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


class LinenNoisy(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(HIDDEN)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(CLASSES)(x)


def make_noisy(kind: str) -> Any:
    if kind == "nnx":
        return NNXNoisy(nnx.Rngs(0))
    module = LinenNoisy()
    variables = module.init(jax.random.key(0), jnp.zeros((1, FEATURES)), False)
    return ff.Linen(module, variables)


def call_noisy(kind: str, model: Any, x: Any, *, train: bool = True) -> Any:
    return model(x) if kind == "nnx" else model(x, train=train)


def noisy_graph(kind: str) -> ff.Graph:
    graph = ff.Graph(make_noisy(kind), seed=1)
    graph.set_optimizer(optax.adam)
    graph.set_scheduler(RATE)
    return graph


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_statistics_and_dropout_are_those_of_the_loop(kind: str, calls: int):
    batches = make_batches(6)

    def loss_fn(model: Any, batch: Any) -> Any:
        first = cross_entropy(call_noisy(kind, model, batch["x"]), batch["y"])
        if calls == 1:
            return first
        second = cross_entropy(call_noisy(kind, model, -batch["x"]), batch["y"])
        return first + second

    loop = ff.TrainingLoop(loss_fn, optax.adam, schedule=RATE)
    state = loop.init(make_noisy(kind), seed=1)
    graph = noisy_graph(kind)
    for batch in batches:
        state, _ = loop.step(state, batch)
        loss = lazy_cross_entropy(graph(batch["x"]), batch["y"])
        if calls == 2:
            loss = loss + lazy_cross_entropy(graph(-batch["x"]), batch["y"])
        graph.step(loss)

    assert state.variables
    assert_bitwise(host_copy(graph.state.variables), host_copy(state.variables))
    assert_bitwise(graph.state.params, state.params)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_reading_changes_no_state_and_shows_what_the_step_fetches(kind: str):
    batch = make_batches(1)[0]
    graph = noisy_graph(kind)
    logits = graph(batch["x"])
    again = graph(batch["x"])
    before = host_copy(graph.state.variables)
    read = np.asarray(logits), np.asarray(again)
    after = host_copy(graph.state.variables)
    both = (logits, again)
    losses = [lazy_cross_entropy(each, batch["y"]) for each in both]
    fetched = graph.step(losses[0] + losses[1], fetch=both)

    assert_bitwise(after, before)
    assert (read[0] != read[1]).any()  # another key for each call
    np.testing.assert_array_equal(read[0], logits)
    np.testing.assert_array_equal(read[1], again)
    assert fetched.finite
    stepped = host_copy(graph.state.variables)
    assert any((stepped[name] != value).any() for name, value in before.items())


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_eval_mode_equals_the_model_after_training(kind: str):
    batches = make_batches(4)
    graph = noisy_graph(kind)
    for batch in batches[:3]:
        graph.step(lazy_cross_entropy(graph(batch["x"]), batch["y"]))
    x = batches[3]["x"]
    trained = graph.model
    if kind == "nnx":
        trained.eval()
    before = host_copy(graph.state.variables)
    logits = graph.eval()(x)
    expected = call_noisy(kind, trained, x, train=False)

    # Compiled here and run call by call there: float32 rounding over two layers.
    np.testing.assert_allclose(logits, expected, rtol=2e-5, atol=2e-6)
    graph.step(lazy_cross_entropy(graph(x), batches[3]["y"]))
    assert_bitwise(host_copy(graph.state.variables), before)
    assert graph.train() is graph
    assert graph.training


@pytest.mark.parametrize(
    ("name", "when_training"),
    [
        *(("train", True), ("training", True), ("is_training", True)),
        *(("deterministic", False), ("inference", False)),
    ],
)
def test_inputs_that_say_the_mode_are_told_it(name: str, when_training: bool):
    space: dict[str, Any] = {}
    exec(f"def apply(m, x, {name}): return m['w'] * x * (3 if {name} else 5)", space)
    graph = ff.Graph({"w": np.float32(1)}, apply=space["apply"])
    factors = (3, 5) if when_training else (5, 3)

    assert float(graph(X).sum()) == 3 * factors[0]
    assert float(graph.eval()(X).sum()) == 3 * factors[1]
    assert float(graph(X, **{name: when_training}).sum()) == 3 * factors[0]


def test_another_method_and_a_penalty_are_recorded_with_the_model():
    model = NNXNoisy(nnx.Rngs(0))
    graph = ff.Graph(model)
    hidden = graph.record(lambda m, x: m.first(x), np.ones((2, FEATURES), np.float32))
    penalty = graph.record(lambda m: jnp.sum(m.first.kernel[...] ** 2))

    kernel = np.asarray(model.first.kernel[...])
    # Sums of twelve and of 192 terms in another order: float32 rounding.
    np.testing.assert_allclose(hidden[0], kernel.sum(0), rtol=1e-5, atol=1e-6)
    assert float(penalty) == pytest.approx((kernel**2).sum(), rel=1e-5)
    np.testing.assert_allclose(
        penalty.backward()["first.kernel"], 2 * kernel, rtol=1e-6
    )


# What is set on the way.


def test_setting_the_optimizer_the_schedule_and_the_rates_keeps_the_count():
    graph = scale_graph()
    rates = []

    def step() -> None:
        rates.append(graph.step((graph(X) ** 2).mean()).lr)

    step()
    graph.set_scheduler(lambda step: 0.01 * step)
    step()
    graph.set_optimizer(optax.adam)
    step()
    graph.set_lr(0.5)  # the scheduler wins
    step()
    graph.set_lr_scale(0.5)
    step()
    graph.set_scheduler(None)  # the scale has no effect without one
    step()
    graph.set_lr_scale(0.25)
    step()
    graph.set_scheduler(0.1)
    step()

    assert rates == pytest.approx([0.1, 0.01, 0.02, 0.03, 0.02, 0.5, 0.5, 0.025])
    assert graph.training_step == int(graph.state.step) == 8
    assert len(graph.compiles) >= 5


def test_a_schedule_set_on_the_way_keeps_the_moments():
    batches = make_batches(6)
    kind = KINDS[0]
    graph = make_graph(kind)
    graph.set_optimizer(optax.adam)
    for number, batch in enumerate(batches):
        if number == 3:
            graph.set_scheduler(2 * RATE)
        graph.step(lazy_cross_entropy(graph(batch["x"]), batch["y"]).mean())

    rates = jnp.asarray([RATE] * 3 + [2 * RATE] * 3)
    expected = train_by_hand(kind, optax.adam(lambda step: rates[step]), batches)
    for name, value in expected.items():
        # The rate is an input here and looked up there, which XLA rounds differently.
        np.testing.assert_allclose(
            graph.state.params[name], value, rtol=1e-5, atol=1e-7
        )


def test_freezing_and_rates_by_pattern_may_change_on_the_way():
    batches = make_batches(4)
    graph = make_graph(KINDS[0])
    graph.set_optimizer(optax.adam)

    def step(batch: Any) -> dict[str, np.ndarray]:
        before = {n: np.asarray(p) for n, p in graph.state.params.items()}
        graph.step(lazy_cross_entropy(graph(batch["x"]), batch["y"]))
        return {n: np.asarray(p) - before[n] for n, p in graph.state.params.items()}

    step(batches[0])
    moments = host_copy(graph.state.opt_state)
    graph.set_trainable("!first")
    kept = host_copy(graph.state.opt_state)
    frozen = step(batches[1])
    graph.set_trainable("*")
    graph.set_lr_groups({"second": 0.0})
    still = step(batches[2])

    assert kept.items() != {}
    assert all("first" not in name for name in kept)
    assert_bitwise(kept, {name: moments[name] for name in kept})
    assert not frozen["first.kernel"].any()
    assert frozen["second.kernel"].any()
    assert still["first.kernel"].any()
    assert not still["second.kernel"].any()


# Gradients that add up.


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_backward_calls_add_up_to_the_gradient_of_the_sum(kind: Kind):
    batches = make_batches(6)
    graph = make_graph(kind, max_grad_norm=1.0)
    for start in (0, 3):
        for batch in batches[start : start + 3]:
            graph.backward(lazy_cross_entropy(graph(batch["x"]), batch["y"]).mean() / 3)
        outcome = graph.step()
    params = kind.params_of(kind.make())

    @jax.jit
    def step(params: Any, *batches: Any) -> Any:
        def total(params: Any) -> Any:
            losses = [
                cross_entropy(kind.apply(params, b["x"]), b["y"]).mean() / 3
                for b in batches
            ]
            return losses[0] + losses[1] + losses[2]

        loss, grads = jax.value_and_grad(total)(params)
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE))
        updates, _ = tx.update(grads, tx.init(params))
        return loss, optax.apply_updates(params, updates)

    for start in (0, 3):
        loss, params = step(params, *batches[start : start + 3])
    # Three programs here and one there: float32 rounding of the sums.
    assert outcome.loss == pytest.approx(float(loss), rel=1e-6)
    for name, value in named(params).items():
        np.testing.assert_allclose(
            graph.state.params[name], value, rtol=1e-5, atol=1e-7
        )
    assert graph.training_step == 2
    assert len([r for r in graph.compiles if not r.is_first]) == 0


def test_backward_of_losses_that_share_a_forward_pass_adds_up():
    graph = scale_graph()
    y = graph(X)
    total, squares = ff.lazy(lambda y: (y.sum(), (y**2).sum()))(y)
    graph.backward(total)
    graph.backward(squares)
    outcome = graph.step()

    assert outcome.loss == 6 + 20
    assert weight_of(graph) == pytest.approx(2 - 0.1 * (3 + 2 * 2 * 5))


def test_what_backward_fetched_may_be_used_in_a_further_loss():
    graph = scale_graph()
    y = graph(X)
    graph.backward(y.sum(), fetch=y)
    total = float(y.sum())
    graph.backward((y**2).sum())
    graph.step()

    assert total == 6
    assert weight_of(graph) == pytest.approx(2 - 0.1 * (3 + 2 * 2 * 5))


def test_backward_carries_statistics_from_pass_to_pass():
    batches = make_batches(2)
    graph = noisy_graph("linen")
    for batch in batches:
        graph.backward(lazy_cross_entropy(graph(batch["x"]), batch["y"]).mean())
    graph.step()
    variables = make_noisy("linen").variables
    mean = np.zeros(HIDDEN, np.float32)
    for batch in batches:
        dense = variables["params"]["Dense_0"]
        mean = 0.99 * mean + 0.01 * (batch["x"] @ dense["kernel"] + dense["bias"]).mean(
            0
        )

    # The module's own way to take the mean of 32 rows: float32 rounding.
    np.testing.assert_allclose(
        graph.state.variables["batch_stats.BatchNorm_0.mean"],
        mean,
        rtol=1e-4,
        atol=1e-7,
    )


def test_an_error_between_backward_calls_loses_no_gradient():
    graph = scale_graph()
    graph.backward(graph(X).sum())
    with pytest.raises(TypeError, match="the loss must be floating"):
        graph.backward(graph(X).astype(int).sum())
    graph.backward((graph(X) ** 2).sum())
    graph.step()

    assert weight_of(graph) == pytest.approx(2 - 0.1 * (3 + 2 * 2 * 5))


# Several graphs.


def test_alternating_losses_of_two_graphs_equal_those_by_hand(
    compile_counter: CompileCounter,
):
    real = np.random.default_rng(0).normal(3, 1, (5, 16)).astype(np.float32)
    noise = np.random.default_rng(1).normal(0, 1, (5, 2, 16)).astype(np.float32)

    def generate(m: Any, z: Any) -> Any:
        return m["scale"] * z + m["shift"]

    def judge(m: Any, x: Any) -> Any:
        return jnp.tanh(m["slope"] * x + m["bias"])

    first = {"scale": np.float32(1), "shift": np.float32(0)}
    second = {"slope": np.float32(0.5), "bias": np.float32(0.1)}
    generator = ff.Graph(first, apply=generate)
    judging = ff.Graph(second, apply=judge)
    for graph, tx in ((generator, optax.adam), (judging, optax.sgd)):
        graph.set_optimizer(tx)
        graph.set_scheduler(0.05)
    compile_counter.reset()
    losses = []
    for x, z in zip(real, noise, strict=True):
        judged = judging(generator(z[0])) - judging(x)
        one = judging.step(judged.mean())
        other = generator.step(-judging(generator(z[1])).mean())
        losses.append((one.loss, other.loss))
    compiled = compile_counter.compiled.count("jit(step)")

    @jax.jit
    def by_hand(g: Any, d: Any, g_state: Any, x: Any, z: Any) -> Any:
        def judge_loss(d: Any) -> Any:
            return (judge(d, generate(g, z[0])) - judge(d, x)).mean()

        d_loss, slope = jax.value_and_grad(judge_loss)(d)
        d = jax.tree.map(lambda p, s: p - 0.05 * s, d, slope)
        g_loss, slope = jax.value_and_grad(
            lambda g: -judge(d, generate(g, z[1])).mean()
        )(g)
        updates, g_state = optax.adam(0.05).update(slope, g_state)
        return optax.apply_updates(g, updates), d, g_state, (d_loss, g_loss)

    g, d = jax.tree.map(jnp.asarray, (first, second))
    g_state = optax.adam(0.05).init(g)
    expected = []
    for x, z in zip(real, noise, strict=True):
        g, d, g_state, pair = by_hand(g, d, g_state, x, z)
        expected.append(tuple(map(float, pair)))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for graph, params in ((generator, g), (judging, d)):
        for name, value in params.items():
            np.testing.assert_allclose(graph.state.params[name], value, rtol=1e-5)
    assert compiled == 2
    assert [len(graph.compiles) for graph in (generator, judging)] == [1, 1]


def test_several_losses_on_one_graph_have_a_program_each():
    graph = scale_graph()
    for _ in range(4):
        for scale in (1.0, 2.0):
            y = graph(X)
            loss = y.sum() * 0.1 if scale == 1.0 else (y**2).mean()
            graph.step(loss)
    w = 2.0
    for _ in range(4):
        w -= 0.1 * 0.3
        w -= 0.1 * 2 * w * 5 / 3

    assert weight_of(graph) == pytest.approx(w, rel=1e-5)
    assert len(graph.compiles) == 2


def test_two_graphs_of_different_models_are_not_mixed_up():
    for width in range(2, 30):
        model = {"w": np.ones((3, width), np.float32)}
        graph = ff.Graph(model, apply=lambda m, x: x @ m["w"])
        y = graph(np.ones((2, 3), np.float32))
        assert y.shape == (2, width)
        assert float(y.sum()) == 6 * width
        del graph, y
        gc.collect()  # so that the next may get the same address


# From one face to the other.


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_run_goes_from_face_to_face_bit_for_bit(kind: Kind):
    batches = make_batches(12)
    loop = ff.TrainingLoop(mlp_loss(kind), optax.adam, schedule=RATE)
    expected, _ = train(loop, kind.make(), batches)

    graph = make_graph(kind)
    graph.set_optimizer(optax.adam)

    def steps(part: list[Any]) -> None:
        for batch in part:
            graph.step(lazy_cross_entropy(graph(batch["x"]), batch["y"]))

    steps(batches[:4])
    state, own = graph.state, graph.loop.replace(loss_fn=mlp_loss(kind))
    for batch in batches[4:8]:
        state, _ = own.step(state, batch)
    graph.state = state
    assert graph.training_step == 8
    steps(batches[8:])

    assert_bitwise(graph.state.params, expected.params)
    assert int(graph.state.step) == graph.training_step == 12
    trained = named(kind.params_of(graph.model))
    assert_bitwise(trained, graph.state.params)


def test_a_scale_set_in_the_loop_stays_when_the_schedule_is_replaced():
    graph = scale_graph()
    graph.set_scheduler(0.1)
    graph.state = graph.loop.set_lr_scale(graph.state, 0.5)
    graph.set_scheduler(0.2)

    assert graph.step(graph(X).sum()).lr == pytest.approx(0.1)


def test_a_state_that_a_step_took_over_says_so():
    graph = scale_graph()
    held = graph.state
    graph.step(graph(X).sum())

    with pytest.raises(ff.UsedStateError, match="has been used up"):
        graph.state = held
    loop = graph.loop.replace(loss_fn=lambda m, b: m["w"] * b)
    loop.step(graph.state, X)
    with pytest.raises(ff.UsedStateError, match="has been used up"):
        graph.step(graph(X).sum())


def test_setting_a_state_makes_what_was_recorded_stale():
    graph = scale_graph()
    y = graph(X)
    graph.state = jax.tree.map(jnp.copy, graph.state)

    with pytest.raises(ff.StaleGraphError, match="recorded at test_graph.py"):
        y.realize()
    assert float(graph(X).sum()) == 6.0


def test_the_plan_of_a_loss_counts_its_parameters_and_runs_nothing():
    graph = make_graph(KINDS[0])
    batch = make_batches(1)[0]
    loss = lazy_cross_entropy(graph(batch["x"]), batch["y"]).mean()
    plan = loss.plan()
    outcome = graph.step(loss)

    assert [param.name for param in plan.params] == list(graph.state.params)
    assert outcome.global_step == 1
    assert len(graph.compiles) == 1


# Steps that are not finite.


@pytest.mark.parametrize("policy", ["raise", "skip", "propagate"])
def test_steps_that_are_not_finite_follow_the_policy(policy: Any):
    graph = scale_graph(nonfinite=policy)
    graph.step((graph(X) ** 2).mean())
    before = weight_of(graph)
    bad = (graph(X * np.float32(np.nan)) ** 2).mean()
    outcome = graph.step(bad)

    if policy == "raise":
        with pytest.raises(ff.NonFiniteError, match="step 2 is not finite"):
            _ = outcome.loss
    else:
        assert np.isnan(float(bad))
    if policy == "propagate":
        assert np.isnan(weight_of(graph))
    else:
        assert weight_of(graph) == before
        assert graph.step((graph(X) ** 2).mean()).finite
    assert graph.training_step == (2 if policy == "propagate" else 3)
