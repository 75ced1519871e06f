"""Evaluation: exact means, and a state left as it was."""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from problems import KINDS, assert_bitwise, cross_entropy, host_copy, make_batches

import fuelflow as ff


class Regularized(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(12, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.norm(self.linear(x)))))


class RegularizedLinen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        x = nn.Dense(8)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not training)(x))
        x = nn.Dropout(0.5, deterministic=not training)(x)
        return nn.Dense(5)(x)


def _nnx_loss(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    losses = cross_entropy(logits, batch["y"])
    return losses, {"accuracy": logits.argmax(-1) == batch["y"]}


def _linen_loss(model: Any, batch: Any) -> Any:
    logits = model(batch["x"], training=model.training)
    losses = cross_entropy(logits, batch["y"])
    return losses, {"accuracy": logits.argmax(-1) == batch["y"]}


def _make_linen() -> ff.Linen:
    module = RegularizedLinen()
    x = np.zeros((1, 12), np.float32)
    return ff.Linen(module, module.init(jax.random.key(0), x, training=False))


REGULARIZED = [
    (_nnx_loss, lambda: Regularized(nnx.Rngs(0))),
    (_linen_loss, _make_linen),
]


def _expected(model: Any, batches: list[Any], is_nnx: bool) -> dict[str, float]:
    """Means over all rows, by NumPy, of the model's own inference."""
    x = np.concatenate([batch["x"] for batch in batches])
    y = np.concatenate([batch["y"] for batch in batches])
    if is_nnx:
        model.eval()
    logits = np.asarray(model(x) if is_nnx else model(x, training=False), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return {
        "loss": -log_probs[np.arange(len(y)), y].mean(),
        "accuracy": (logits.argmax(-1) == y).mean(),
    }


@pytest.mark.parametrize(("loss_fn", "make"), REGULARIZED, ids=["nnx", "linen"])
def test_norm_and_dropout_train_and_evaluate_in_their_modes(loss_fn: Any, make: Any):
    loop = ff.TrainingLoop(loss_fn, optax.adamw, schedule=1e-2, strict_compile=True)
    state = loop.init(make(), seed=3)
    first = host_copy(state.variables)
    for batch in make_batches(10):
        state, _ = loop.step(state, batch)
    before = host_copy(state)
    batches = [*make_batches(3, seed=1), *make_batches(1, 7, seed=2)]
    evaluation = loop.evaluate(state, batches)
    expected = _expected(loop.model(state), batches, loss_fn is _nnx_loss)

    assert dict(evaluation) == pytest.approx(expected, rel=1e-5)
    assert evaluation.weight == 3 * 32 + 7
    assert_bitwise(host_copy(state), before)
    mean = next(name for name in first if "mean" in name)
    assert (host_copy(state.variables)[mean] != first[mean]).any()


@pytest.mark.parametrize(("loss_fn", "make"), REGULARIZED, ids=["nnx", "linen"])
def test_a_run_with_dropout_repeats_bit_for_bit_from_its_seed(loss_fn: Any, make: Any):
    def run(seed: int) -> dict[str, Any]:
        loop = ff.TrainingLoop(loss_fn, optax.adamw, schedule=1e-2)
        state = loop.init(make(), seed=seed)
        state, _ = loop.run(state, make_batches(8))
        return dict(state.params)

    assert_bitwise(run(0), run(0))
    if loss_fn is _linen_loss:  # an nnx module draws from its own Rngs
        assert (np.asarray(run(0)["Dense_0.kernel"]) != run(1)["Dense_0.kernel"]).any()


def test_dropout_masks_differ_from_step_to_step():
    loop = ff.TrainingLoop(_nnx_loss, optax.sgd, schedule=0.0)
    state = loop.init(Regularized(nnx.Rngs(0)))
    batch = make_batches(1)[0]
    losses = set()
    for _ in range(4):
        state, outcome = loop.step(state, batch)
        losses.add(outcome.loss)

    assert len(losses) == 4


_LOOP = ff.TrainingLoop(
    lambda params, batch: (
        ff.Weighted((batch["x"] - params["w"]) ** 2, batch["weight"]),
        {"x": batch["x"]},
    ),
    optax.sgd,
    schedule=0.1,
)
_STATE = _LOOP.init({"w": np.float32(0.5)})


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), seed=st.integers(0, 99)
)
def test_any_split_into_batches_gives_the_same_means(sizes: list[int], seed: int):
    random = np.random.default_rng(seed)
    count = sum(sizes)
    x = random.normal(size=count).astype(np.float32)
    weight = random.integers(0, 4, size=count).astype(np.float32)
    weight[0] = 1
    edges = np.cumsum([0, *sizes])
    batches = [
        {"x": x[a:b], "weight": weight[a:b]} for a, b in itertools.pairwise(edges)
    ]
    evaluation = _LOOP.evaluate(_STATE, batches)

    loss = (weight * (x.astype(np.float64) - 0.5) ** 2).sum() / weight.sum()
    assert evaluation["loss"] == pytest.approx(loss, rel=1e-5)
    assert evaluation["x"] == pytest.approx(
        x.mean(dtype=np.float64), rel=1e-4, abs=1e-6
    )
    assert evaluation.weight == weight.sum()


def test_a_smaller_last_batch_compiles_nothing_more():
    loop = ff.TrainingLoop(_nnx_loss, optax.sgd, schedule=0.1, strict_compile=True)
    state = loop.init(KINDS[2].make())
    batches = [*make_batches(2), *make_batches(1, 5), *make_batches(1, 11)]
    loop.evaluate(state, batches)

    assert [record.program for record in loop.compiles] == ["evaluate"]


def test_a_scalar_loss_runs_a_smaller_batch_at_its_own_shape():
    def scalar_loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch["x"]), batch["y"]).mean()

    loop = ff.TrainingLoop(scalar_loss, optax.sgd, schedule=0.1)
    vector = ff.TrainingLoop(_nnx_loss, optax.sgd, schedule=0.1)
    batches = [*make_batches(2), *make_batches(1, 5)]
    evaluation = loop.evaluate(loop.init(KINDS[2].make()), batches)
    expected = vector.evaluate(vector.init(KINDS[2].make()), batches)

    assert evaluation["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert [record.is_first for record in loop.compiles] == [True, False]


def test_eval_fn_replaces_the_loss_and_may_take_a_key():
    def eval_fn(model: Any, batch: Any, key: jax.Array) -> Any:
        noise = jax.random.normal(key)
        return model(batch["x"]).sum(-1) * 0 + 7.0, {"noise": noise, "square": noise**2}

    loop = ff.TrainingLoop(_nnx_loss, optax.sgd, schedule=0.1, eval_fn=eval_fn)
    state = loop.init(KINDS[2].make())
    evaluation = loop.evaluate(state, make_batches(8))
    again = loop.evaluate(state, make_batches(8))

    assert evaluation["loss"] == 7.0
    assert dict(evaluation) == dict(again)
    assert evaluation["square"] - evaluation["noise"] ** 2 > 1e-3


def test_an_evaluation_is_a_mapping_of_means():
    loop = ff.TrainingLoop(_nnx_loss, optax.sgd, schedule=0.1)
    evaluation = loop.evaluate(loop.init(KINDS[2].make()), make_batches(3))

    assert repr(evaluation).startswith("Evaluation(loss=")
    assert list(evaluation) == ["loss", "accuracy"]


def test_rows_that_see_each_other_are_not_filled_up():
    def contrast(params: Any, batch: Any) -> Any:
        similarity = (batch["x"] @ params["w"]) @ (batch["x"] @ params["w"]).T
        return cross_entropy(similarity, jnp.arange(len(batch["x"])))

    random = np.random.default_rng(0)
    loop = ff.TrainingLoop(contrast, optax.sgd, schedule=0.1)
    state = loop.init({"w": random.normal(size=(4, 4)).astype(np.float32)})
    x = random.normal(size=(11, 4)).astype(np.float32)
    batches = [{"x": x[:8]}, {"x": x[8:]}]
    evaluation = loop.evaluate(state, batches, fill_up=False)
    by_hand = [np.asarray(contrast(state.params, batch)) for batch in batches]

    expected = np.concatenate(by_hand).mean()
    assert evaluation["loss"] == pytest.approx(expected, rel=1e-5)
    filled = loop.replace().evaluate(state, batches)
    assert filled["loss"] != pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("batches", [[], iter(())])
def test_no_batches_are_refused(batches: Any):
    loop = ff.TrainingLoop(_nnx_loss, optax.sgd, schedule=0.1)

    with pytest.raises(ValueError, match="there must be at least one batch"):
        loop.evaluate(loop.init(KINDS[2].make()), batches)


def test_one_batch_in_place_of_several_is_refused():
    loop = ff.TrainingLoop(_nnx_loss, optax.sgd, schedule=0.1)

    with pytest.raises(TypeError, match="looks like one batch: put it in a list"):
        loop.evaluate(loop.init(KINDS[2].make()), make_batches(1)[0])
