"""Accumulation: the whole batch's gradient in the memory of one microbatch."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import KINDS, Kind, cross_entropy, make_batches, mlp_loss, train

import fuelflow as ff


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("accumulate_steps", [2, 4, 8])
def test_accumulation_equals_the_whole_batch(kind: Kind, accumulate_steps: int):
    batches = make_batches(30)
    whole = ff.TrainingLoop(
        mlp_loss(kind), optax.adamw, schedule=1e-3, max_grad_norm=0.5
    )
    parts = whole.replace(accumulate_steps=accumulate_steps)
    expected, outcomes = train(whole, kind.make(), batches)
    state, from_parts = train(parts, kind.make(), batches)

    for name, param in expected.params.items():
        # The same sums in another order: a few roundings a step, which Adam's division
        # by small second moments can widen.
        np.testing.assert_allclose(state.params[name], param, rtol=1e-4, atol=1e-5)
    for one, other in zip(outcomes, from_parts, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert from_parts[-1].global_step == 30


def _token_loss(params: Any, batch: Any) -> Any:
    error = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return ff.Weighted(error, batch["mask"]), {
        "error": ff.Weighted(error, batch["mask"])
    }


def _tokens(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    mask = (random.random((16, 6)) < np.linspace(0, 1, 16)[:, None]).astype(np.float32)
    return {
        "x": random.normal(size=(16, 6, 3)).astype(np.float32),
        "y": random.normal(size=(16, 6)).astype(np.float32),
        "mask": mask,
    }


@pytest.mark.parametrize("accumulate_steps", [1, 2, 4, 8, 16])
def test_masked_tokens_count_the_same_in_whatever_microbatch(accumulate_steps: int):
    batch = _tokens(0)
    w = np.array([0.5, -1.0, 2.0], np.float32)

    def by_hand(w: Any) -> Any:
        error = (batch["x"] @ w - batch["y"]) ** 2
        return (error * batch["mask"]).sum() / batch["mask"].sum()

    loop = ff.TrainingLoop(
        _token_loss, optax.sgd, schedule=0.1, accumulate_steps=accumulate_steps
    )
    state = loop.init({"w": w})
    grads = loop.grads(state, batch)
    _, outcome = loop.step(state, batch)

    # The first microbatch of sixteen has no token at all.
    assert accumulate_steps < 16 or batch["mask"][0].sum() == 0
    np.testing.assert_allclose(grads["w"], jax.grad(by_hand)(w), rtol=1e-5)
    assert outcome.loss == pytest.approx(float(by_hand(w)), rel=1e-6)
    assert outcome.metrics["error"] == pytest.approx(float(by_hand(w)), rel=1e-6)


def test_a_mean_of_means_would_be_seen_to_differ():
    batch = _tokens(0)

    def mean_of_means(params: Any, batch: Any) -> Any:
        weighted, _ = _token_loss(params, batch)
        return (weighted.value * weighted.weight).sum() / weighted.weight.sum()

    exact = ff.TrainingLoop(_token_loss, optax.sgd, schedule=0.1, accumulate_steps=8)
    biased = ff.TrainingLoop(mean_of_means, optax.sgd, schedule=0.1, accumulate_steps=8)
    model = {"w": np.array([0.5, -1.0, 2.0], np.float32)}
    gradient = exact.grads(exact.init(model), batch)["w"]
    difference = biased.grads(biased.init(model), batch)["w"] - gradient

    assert np.linalg.norm(difference) > 0.04 * np.linalg.norm(gradient)


def test_batch_statistics_are_carried_through_the_microbatches():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
            return nn.BatchNorm(use_running_average=not training, momentum=0.5)(x)

    module = Normed()
    x = np.random.default_rng(0).normal(2, 3, size=(8, 3)).astype(np.float32)
    model = ff.Linen(module, module.init(jax.random.key(0), x, training=False))

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(batch["x"], training=model.training).mean(-1)

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.0, accumulate_steps=2)
    state, _ = loop.step(loop.init(model), {"x": x})
    mean = np.zeros(3)
    for half in (x[:4], x[4:]):
        mean = 0.5 * mean + 0.5 * half.mean(0)

    np.testing.assert_allclose(
        state.variables["batch_stats.BatchNorm_0.mean"], mean, rtol=1e-5
    )


def test_microbatches_draw_different_keys():
    def loss_fn(params: Any, batch: Any, key: jax.Array) -> Any:
        noise = jax.random.normal(key)
        return batch["x"] * params["w"], {"noise": noise, "square": noise**2}

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1, accumulate_steps=4)
    _, outcome = loop.step(loop.init({"w": np.float32(1)}), {"x": np.ones(8, "f4")})

    assert outcome.metrics["square"] - outcome.metrics["noise"] ** 2 > 1e-3


def test_half_precision_gradients_are_summed_in_float32():
    def loss_fn(params: Any, batch: Any) -> Any:
        return params["w"].astype(jnp.float32) * batch["x"]

    x = np.array([1024] + [1] * 15, np.float32)
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=1.0, accumulate_steps=16)
    state = loop.init({"w": jnp.zeros((), jnp.bfloat16)})
    grads = loop.grads(state, {"x": x})

    # In bfloat16 every 1 added to 1024 would be lost.
    assert grads["w"].dtype == jnp.bfloat16
    assert float(grads["w"]) == float(jnp.bfloat16(x.mean()))


def test_sixteen_microbatches_need_the_temporary_memory_of_one():
    def loss_fn(params: Any, batch: Any) -> Any:
        return cross_entropy(
            jnp.tanh(batch["x"] @ params["a"]) @ params["b"], batch["y"]
        )

    model = {"a": np.ones((32, 256), np.float32), "b": np.ones((256, 10), np.float32)}
    batch = {"x": np.ones((4096, 32), np.float32), "y": np.zeros(4096, np.int32)}
    whole = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    parts = whole.replace(accumulate_steps=16)
    needs = [
        loop.plan(loop.init(model), batch).temporary_bytes for loop in (whole, parts)
    ]

    assert None not in needs
    assert needs[1] < needs[0] / 8  # pyright: ignore[reportOptionalOperand]


def test_microbatches_that_do_not_divide_the_batch_are_refused():
    loop = ff.TrainingLoop(
        mlp_loss(KINDS[0]), optax.sgd, schedule=0.1, accumulate_steps=5
    )

    with pytest.raises(
        ValueError, match="`accumulate_steps` must divide the batch, got 5 .* 32 rows"
    ):
        loop.step(loop.init(KINDS[0].make()), make_batches(1)[0])
