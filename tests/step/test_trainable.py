"""Freezing and rates by pattern."""

from typing import Any, cast

import jax
import numpy as np
import optax
import pytest
from problems import KINDS, Kind, assert_bitwise, make_batches, mlp_loss, train

import fuelflow as ff


def _loop(kind: Kind, **options: Any) -> ff.TrainingLoop:
    return ff.TrainingLoop(
        mlp_loss(kind),
        lambda lr: optax.adamw(lr, weight_decay=0.1),
        schedule=1e-2,
        **options,
    )


@pytest.mark.parametrize("trainable", ["second", ["!first"], "second.*", ["s*", "!f*"]])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_frozen_parameters_stay_bit_for_bit(kind: Kind, trainable: Any):
    loop = _loop(kind, trainable=trainable, max_grad_norm=0.1)
    before = {name: np.array(p) for name, p in loop.init(kind.make()).params.items()}
    state, _ = train(loop, kind.make(), make_batches(20))

    for name, param in state.params.items():
        changed = bool((np.asarray(param) != before[name]).any())
        assert changed == name.startswith("second")


def test_frozen_parameters_have_no_gradient_and_no_optimizer_memory():
    loop = _loop(KINDS[0], trainable="second")
    state = loop.init(KINDS[0].make())

    assert set(loop.grads(state, make_batches(1)[0])) == {
        "second.bias",
        "second.kernel",
    }
    names = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(state.opt_state)[0]
    ]
    assert any("second.kernel" in name for name in names)
    assert not any("first" in name for name in names)


def test_the_norm_covers_the_trained_parameters_only():
    batch = make_batches(1)[0]
    loop = _loop(KINDS[0], trainable="second", max_grad_norm=0.1)
    everything = _loop(KINDS[0])
    state = loop.init(KINDS[0].make())
    grads = everything.grads(everything.init(KINDS[0].make()), batch)
    _, outcome = loop.step(state, batch)
    squares = [
        (np.asarray(grad, np.float64) ** 2).sum()
        for name, grad in grads.items()
        if name.startswith("second")
    ]

    assert outcome.grad_norm == pytest.approx(np.sqrt(sum(squares)), rel=1e-6)


def test_training_a_part_equals_training_it_alone():
    batches = make_batches(30)
    loop = _loop(KINDS[0], trainable="second", max_grad_norm=0.1)
    state, _ = train(loop, KINDS[0].make(), batches)
    fixed = KINDS[0].make()

    def loss_fn(second: Any, batch: Any) -> Any:
        model = {"first": fixed["first"], "second": second}
        return mlp_loss(KINDS[0])(model, batch)

    alone = ff.TrainingLoop(
        loss_fn,
        lambda lr: optax.adamw(lr, weight_decay=0.1),
        schedule=1e-2,
        max_grad_norm=0.1,
    )
    expected, _ = train(alone, fixed["second"], batches)

    for name, param in expected.params.items():
        # The frozen half is an argument here and a constant there.
        np.testing.assert_allclose(state.params[f"second.{name}"], param, rtol=1e-5)


def test_rate_groups_equal_optax_with_a_rate_for_each():
    batches = make_batches(50)
    loop = _loop(KINDS[0], lr_groups={"first": 0.1, "*.bias": 2.0, "second.kernel": 0})
    with pytest.raises(ValueError, match="`first.bias` is selected by both"):
        loop.init(KINDS[0].make())
    loop = _loop(KINDS[0], lr_groups={"first": 0.1, "second.kernel": 0})
    state, _ = train(loop, KINDS[0].make(), batches)

    def adamw(rate: float) -> optax.GradientTransformation:
        return optax.adamw(rate, weight_decay=0.1)

    params: Any = KINDS[0].make()
    labels = {
        "first": {"bias": "slow", "kernel": "slow"},
        "second": {"bias": "normal", "kernel": "fixed"},
    }
    tx = optax.partition(
        {"slow": adamw(1e-3), "normal": adamw(1e-2), "fixed": adamw(0.0)}, labels
    )
    opt_state = tx.init(params)
    for batch in batches:
        grads = jax.grad(lambda p, b=batch: mlp_loss(KINDS[0])(p, b).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = cast(Any, optax.apply_updates(params, updates))

    for name, param in state.params.items():
        first, second = name.split(".")
        # Adam widens the last bit of a jitted against an eager gradient.
        np.testing.assert_allclose(param, params[first][second], rtol=1e-4, atol=1e-6)
    before = KINDS[0].make()
    assert_bitwise(
        {"second.kernel": state.params["second.kernel"]},
        {"second.kernel": before["second"]["kernel"]},
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainable": "frist"}, "`trainable` pattern `frist` selects no.*`first`"),
        ({"trainable": []}, "`trainable` must hold at least one pattern"),
        ({"trainable": ["first", "!*"]}, "`trainable` must leave at least one"),
        ({"lr_groups": {"third": 1.0}}, "`lr_groups` pattern `third` selects no"),
        (
            {"lr_groups": {"first": -1.0}},
            "first.* must be finite and at least 0, got -1",
        ),
        (
            {"lr_groups": {"first": float("nan")}},
            "must be finite and at least 0, got nan",
        ),
        (
            {"trainable": "second", "lr_groups": {"first": 0.5}},
            "`lr_groups` pattern `first` selects only frozen parameters",
        ),
        (
            {"lr_groups": {"first": 0.5, "first.kernel": 2.0}},
            "must not overlap, but `first.kernel` is selected by both",
        ),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(options: Any, message: str):
    with pytest.raises(ValueError, match=message):
        _loop(KINDS[0], **options).init(KINDS[0].make())
