"""Runs that are steered by the trend of what they record: the README's examples."""

from typing import Any

import numpy as np
import optax
import pytest
from problems import KINDS, make_batches, mlp_loss

import fuelflow as ff

(ROWS,) = make_batches(1, 256)


def _loss(model: Any, batch: Any) -> Any:
    losses = mlp_loss(KINDS[2])(model, batch)
    ff.probe("share_of_large", losses > 1)
    return losses


def _loader() -> ff.DataLoader:
    return ff.DataLoader(ROWS, batch_size=32)


def test_a_run_stops_when_what_it_records_has_stalled():
    loop = ff.TrainingLoop(_loss, optax.adam, schedule=3e-2)
    trained = ff.Trainer(
        loop,
        KINDS[2].make(),
        _loader(),
        epochs=200,
        stop_when=lambda history: history.trend("share_of_large").stalled(5, 1e-3),
    ).fit()

    shares = [metrics.scalars["share_of_large"] for metrics in trained.history]
    slopes = [
        np.polyfit(range(5), shares[end - 5 : end], 1)[0]
        for end in range(5, len(shares) + 1)
    ]
    assert trained.stopped_by == "stop_when"
    assert abs(slopes[-1]) < 1e-3
    assert all(abs(slope) >= 1e-3 for slope in slopes[:-1])


def test_the_rate_is_lowered_when_the_loss_no_longer_falls():
    loop = ff.TrainingLoop(_loss, optax.sgd, schedule=0.5)
    history, scales = ff.History(), [1.0]

    def lower_rate(epoch: int, state: ff.TrainState) -> ff.TrainState:
        since = epoch - lowered[-1]
        if since >= 4 and not history.trend("loss").improving(3):
            lowered.append(epoch)
            scales.append(scales[-1] / 2)
        return loop.set_lr_scale(state, scales[-1])

    lowered = [0]
    # Rows whose labels are drawn anew: a loss that soon goes up and down.
    random = np.random.default_rng(0)
    labels = random.integers(0, 5, len(ROWS["y"])).astype(np.int32)
    loader = ff.DataLoader({**ROWS, "y": labels}, batch_size=32)
    trained = ff.Trainer(
        loop,
        KINDS[2].make(),
        loader,
        epochs=40,
        epoch_fn=lower_rate,
        metrics_fn=history.append,
    ).fit()

    assert len(lowered) > 1
    rates = [metrics.lr for metrics in trained.history]
    assert rates[-1] == pytest.approx(0.5 * scales[-1])
    for epoch, scale in zip(lowered[1:], scales[1:], strict=True):
        past = [metrics.avg_loss for metrics in trained.history[epoch - 3 : epoch]]
        assert np.polyfit(range(3), past, 1)[0] >= 0
        assert rates[epoch] == pytest.approx(0.5 * scale)


def test_frozen_layers_thaw_when_the_head_has_stalled():
    head = ff.TrainingLoop(_loss, optax.adam, schedule=1e-2, trainable="second")
    model = KINDS[2].make()
    first = ff.Trainer(
        head,
        model,
        _loader(),
        epochs=60,
        stop_when=lambda history: history.trend("loss").stalled(3, 5e-3),
    ).fit()
    step, stalled_at = int(first.state.step), first.history[-1].avg_loss
    mu = {n: np.asarray(m) for n, m in first.state.opt_state[0].mu.items()}

    whole = head.replace(trainable="*", lr_groups={"first": 0.3})
    state = whole.adopt(first.state)
    moments = state.opt_state[0]
    assert (int(state.step), int(moments.count)) == (step, step)
    for name, moment in moments.mu.items():
        np.testing.assert_array_equal(moment, mu.get(name, np.zeros_like(moment)))
    second = ff.Trainer(whole, state, _loader(), epochs=10).fit()

    assert first.stopped_by == "stop_when"
    assert int(second.state.step) == step + 10 * 8
    assert second.history[-1].avg_loss < 0.8 * stalled_at


def test_adopting_a_state_keeps_its_numbers_and_goes_on_as_if_nothing_was():
    batches = make_batches(6)
    loop = ff.TrainingLoop(_loss, optax.adamw, schedule=1e-2)
    expected, _ = loop.run(loop.init(KINDS[2].make()), batches)
    state, _ = loop.run(loop.init(KINDS[2].make()), batches[:3])
    other = loop.replace(max_grad_norm=1e9)
    state, _ = other.run(other.adopt(state), batches[3:])

    for name, param in expected.params.items():
        np.testing.assert_allclose(state.params[name], param, rtol=1e-5, atol=1e-7)


def test_a_state_used_up_is_not_adopted():
    loop = ff.TrainingLoop(_loss, optax.adam, schedule=1e-2)
    state = loop.init(KINDS[2].make())
    loop.step(state, make_batches(1)[0])

    with pytest.raises(ff.UsedStateError, match="this state has been used up"):
        loop.adopt(state)


def test_a_state_of_fewer_trained_parameters_is_refused_until_adopted():
    head = ff.TrainingLoop(_loss, optax.adam, schedule=1e-2, trainable="second")
    state = head.init(KINDS[2].make())
    whole = head.replace(trainable="*")

    with pytest.raises(ff.StateMismatchError, match="missing .*first.kernel"):
        whole.step(state, make_batches(1)[0])
    whole.step(whole.adopt(state), make_batches(1)[0])


@pytest.mark.parametrize("wrong", [3, None, {}])
def test_what_is_no_state_is_not_adopted(wrong: Any):
    loop = ff.TrainingLoop(lambda p, b: p["w"] * b["x"], optax.sgd, schedule=0.1)

    with pytest.raises(TypeError, match="`state` must be a TrainState .* got a"):
        loop.adopt(wrong)
