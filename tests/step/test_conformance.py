"""The step against a hand-written optax loop, bit for bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
from problems import KINDS, Kind, assert_bitwise, make_batches, mlp_loss, train
from problems import train_by_hand as by_hand

import fuelflow as ff

RATE = 3e-3
EXACT: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "sgd": lambda lr: optax.sgd(lr, momentum=0.9),
    "adam": optax.adam,
    "adamw": optax.adamw,
    "lion": optax.lion,
}
ROUNDED: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "adafactor": optax.adafactor,
    "rmsprop": optax.rmsprop,
}


def _with_clip(
    tx: optax.GradientTransformation, clip: float | None
) -> optax.GradientTransformation:
    return tx if clip is None else optax.chain(optax.clip_by_global_norm(clip), tx)


@pytest.mark.parametrize("steps_per_call", [1, 50])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_two_hundred_steps_equal_the_hand_written_loop_bit_for_bit(
    kind: Kind, name: str, clip: float | None, steps_per_call: int
):
    batches = make_batches(200)
    loop = ff.TrainingLoop(
        mlp_loss(kind), EXACT[name], schedule=RATE, max_grad_norm=clip
    )
    state = loop.init(kind.make())
    state, _ = loop.run(state, batches, steps_per_call=steps_per_call)

    assert_bitwise(
        state.params, by_hand(kind, _with_clip(EXACT[name](RATE), clip), batches)
    )


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_adafactor_and_rmsprop_equal_the_hand_written_loop_to_rounding(
    kind: Kind, name: str, clip: float | None
):
    batches = make_batches(200)
    loop = ff.TrainingLoop(
        mlp_loss(kind), ROUNDED[name], schedule=RATE, max_grad_norm=clip
    )
    state, _ = train(loop, kind.make(), batches)
    expected = by_hand(kind, _with_clip(ROUNDED[name](RATE), clip), batches)

    for param, value in expected.items():
        # The rate is an input here and a constant there, which XLA rounds differently:
        # one part in 2^23 per step, over 200 steps of values of order one.
        np.testing.assert_allclose(state.params[param], value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_ready_transformation_equals_its_factory(kind: Kind):
    batches = make_batches(20)
    ready = ff.TrainingLoop(mlp_loss(kind), optax.adamw(RATE), max_grad_norm=0.5)
    factory = ff.TrainingLoop(
        mlp_loss(kind), optax.adamw, schedule=RATE, max_grad_norm=0.5
    )
    from_ready, _ = train(ready, kind.make(), batches)
    from_factory, _ = train(factory, kind.make(), batches)

    assert_bitwise(from_ready.params, from_factory.params)


def test_a_rate_of_zero_stays_flat():
    batches = make_batches(5)
    loop = ff.TrainingLoop(mlp_loss(KINDS[0]), optax.sgd, schedule=0.0)
    before = loop.init(KINDS[0].make())
    state, _ = train(loop, KINDS[0].make(), batches)

    assert_bitwise(state.params, before.params)


def test_least_squares_follows_its_known_trajectory():
    x = np.arange(10, dtype=np.float32)
    batch = {"x": x, "y": 2 * x + 3}

    def loss_fn(params: dict[str, Any], batch: dict[str, Any]) -> Any:
        return (params["w"] * batch["x"] + params["b"] - batch["y"]) ** 2

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.01)
    model = {"w": np.float32(0.1), "b": np.float32(0.1)}
    state, outcomes = train(loop, model, [batch] * 50)

    # The design's own figures, float32.
    assert outcomes[0].loss == pytest.approx(160.88499, rel=1e-7)
    assert outcomes[49].loss == pytest.approx(1.0661327, rel=1e-6)
    assert float(state.params["w"]) == pytest.approx(2.3042846, rel=1e-6)
    assert float(state.params["b"]) == pytest.approx(1.0919572, rel=1e-6)


def test_the_norm_is_reported_before_the_clip():
    model = {"a": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
    slope = {"a": np.array([3, 4], np.float32), "b": np.array([12], np.float32)}

    def loss_fn(params: dict[str, Any], batch: Any) -> Any:
        return sum((params[name] * slope[name]).sum() for name in slope)

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=1.0, max_grad_norm=6.5)
    state, outcome = loop.step(loop.init(model), {"x": np.zeros(1, np.float32)})

    assert outcome.grad_norm == 13.0
    assert_bitwise(state.params, {"a": [-1.5, -2.0], "b": [-6.0]})


def test_values_are_clipped_after_the_norm():
    model = {"a": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
    slope = {"a": np.array([3, 4], np.float32), "b": np.array([-12], np.float32)}

    def loss_fn(params: dict[str, Any], batch: Any) -> Any:
        return sum((params[name] * slope[name]).sum() for name in slope)

    loop = ff.TrainingLoop(
        loss_fn, optax.sgd, schedule=1.0, max_grad_norm=6.5, max_grad_value=1.75
    )
    state, _ = loop.step(loop.init(model), {"x": np.zeros(1, np.float32)})

    assert_bitwise(state.params, {"a": [-1.5, -1.75], "b": [1.75]})


def test_the_schedule_is_asked_about_the_step_about_to_be_taken():
    loop = ff.TrainingLoop(
        mlp_loss(KINDS[0]), optax.sgd, schedule=lambda step: 0.1 * step
    )
    _, outcomes = train(loop, KINDS[0].make(), make_batches(3))

    assert [outcome.lr for outcome in outcomes] == pytest.approx([0, 0.1, 0.2])
    assert [outcome.global_step for outcome in outcomes] == [1, 2, 3]
