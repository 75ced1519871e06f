"""Promises: nothing waits unless read, and reading costs one transfer."""

import gc
import logging
import time
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import KINDS, cross_entropy, make_batches, mlp_loss

import fuelflow as ff


def _with_metrics(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    losses = cross_entropy(logits, batch["y"])
    right = logits.argmax(-1) == batch["y"]
    token_weight = jnp.arange(len(batch["y"]))
    return losses, {
        "accuracy": right,
        "scale": jnp.abs(logits).mean(),
        "late": ff.Weighted(right, token_weight),
        "count": right.astype(jnp.int32),
    }


def _slow_loss(params: Any, batch: Any) -> Any:
    """A loss whose step takes the device some tens of milliseconds."""
    order = jnp.sort(jnp.sin(1e3 * batch["x"]))
    return params["w"] + order.mean()


def _slow() -> tuple[ff.TrainingLoop, ff.TrainState, dict[str, Any]]:
    loop = ff.TrainingLoop(_slow_loss, optax.sgd, schedule=1e-3)
    batch = {"x": jnp.linspace(0, 1, 600_000)}
    state, outcome = loop.step(loop.init({"w": np.float32(0.1)}), batch)
    assert np.isfinite(outcome.loss)
    return loop, state, batch


def test_all_fields_equal_numpy():
    batch = make_batches(1)[0]
    model = KINDS[2].make()
    logits = np.asarray(model(batch["x"]))
    loop = ff.TrainingLoop(_with_metrics, optax.adamw, schedule=1e-3)
    _, outcome = loop.step(loop.init(model), batch)
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    right = logits.argmax(-1) == batch["y"]
    weight = np.arange(len(right))

    rows = np.arange(len(right))
    assert outcome.loss == pytest.approx(-log_probs[rows, batch["y"]].mean(), rel=1e-6)
    assert outcome.metrics == pytest.approx(
        {
            "accuracy": right.mean(),
            "scale": np.abs(logits).mean(),
            "late": (right * weight).sum() / weight.sum(),
            "count": right.mean(),
        },
        rel=1e-6,
    )
    assert (outcome.global_step, outcome.finite, outcome.num_skipped) == (1, True, 0)
    assert outcome.lr == np.float32(1e-3)


def test_fields_are_python_numbers_from_a_step_and_arrays_from_a_run():
    loop = ff.TrainingLoop(_with_metrics, optax.adamw, schedule=1e-3)
    state, outcome = loop.step(loop.init(KINDS[2].make()), make_batches(1)[0])
    _, outcomes = loop.run(state, make_batches(4), steps_per_call=2)

    assert [type(outcome.loss), type(outcome.global_step)] == [float, int]
    assert type(outcome.finite) is bool
    assert outcomes.loss.shape == outcomes.metrics["accuracy"].shape == (4,)
    assert outcomes.global_step.tolist() == [2, 3, 4, 5]


def test_reading_every_field_is_one_transfer(monkeypatch: pytest.MonkeyPatch):
    loop = ff.TrainingLoop(_with_metrics, optax.adamw, schedule=1e-3)
    state = loop.init(KINDS[2].make())
    state, _ = loop.step(state, make_batches(1)[0])
    transfers = []
    original = np.asarray

    def counting(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, jax.Array):
            transfers.append(value.shape)
        return original(value, *args, **kwargs)

    monkeypatch.setattr(np, "asarray", counting)
    state, outcome = loop.step(state, make_batches(1)[0])
    assert transfers == []
    _ = outcome.loss, outcome.grad_norm, outcome.lr, outcome.metrics, outcome.finite
    print(outcome)

    assert len(transfers) == 1


def test_a_step_does_not_wait_and_reading_does():
    loop, state, batch = _slow()
    start = time.perf_counter()
    state, outcome = loop.step(state, batch)
    dispatched = time.perf_counter() - start
    was_ready = outcome.is_ready()
    _ = outcome.loss
    read = time.perf_counter() - start

    assert not was_ready
    assert outcome.is_ready()
    assert dispatched < read / 2


def test_a_step_on_device_batches_moves_nothing_from_the_host():
    loop = ff.TrainingLoop(_with_metrics, optax.adamw, schedule=1e-3)
    batch = jax.tree.map(jnp.asarray, make_batches(1)[0])
    state, _ = loop.step(loop.init(KINDS[2].make()), batch)
    with jax.transfer_guard("disallow"):
        outcomes = []
        for _ in range(20):
            state, outcome = loop.step(state, batch)
            outcomes.append(outcome)

    assert outcomes[-1].global_step == 21


def test_the_host_runs_ahead_no_further_than_it_may():
    loop, state, batch = _slow()
    loop = loop.replace(max_in_flight=2)
    outcomes = []
    for _ in range(6):
        state, outcome = loop.step(state, batch)
        outcomes.append(outcome)
        assert sum(not each.is_ready() for each in outcomes) <= 2

    assert outcomes[-1].global_step == 7


def test_ready_optimizers_report_a_rate_only_if_they_keep_one():
    batch = make_batches(1)[0]
    plain = ff.TrainingLoop(mlp_loss(KINDS[2]), optax.adamw(1e-3))
    injected = ff.TrainingLoop(
        mlp_loss(KINDS[2]),
        optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.5, 0, 10)),
    )
    _, without = plain.step(plain.init(KINDS[2].make()), batch)
    _, with_rate = injected.step(injected.init(KINDS[2].make()), batch)

    assert without.lr is None
    assert "lr=" not in repr(without)
    assert with_rate.lr == 0.5


def test_log_records_hold_step_loss_rate_and_norm(caplog: pytest.LogCaptureFixture):
    loop = ff.TrainingLoop(
        mlp_loss(KINDS[2]), optax.adamw, schedule=lambda s: 0.001 * s, log_interval=3
    )
    state = loop.init(KINDS[2].make())
    outcomes = []
    with caplog.at_level(logging.INFO, logger="fuelflow"):
        for batch in make_batches(7):
            state, outcome = loop.step(state, batch)
            outcomes.append(outcome)
        state, stacked = loop.run(state, make_batches(5), steps_per_call=5)
        loop.model(state)

    records = [vars(record) for record in caplog.records]
    assert [record["step"] for record in records] == [3, 6, 9, 12]
    for record, index in zip(records[:2], (2, 5), strict=True):
        for name in ("loss", "lr", "grad_norm"):
            assert record[name] == getattr(outcomes[index], name)
    assert records[2]["loss"] == stacked.loss[1]
    assert caplog.records[0].getMessage().startswith("step 3: loss ")


def test_a_record_that_is_due_is_logged_when_the_run_is_dropped(
    caplog: pytest.LogCaptureFixture,
):
    loop = ff.TrainingLoop(
        mlp_loss(KINDS[2]), optax.adamw, schedule=1e-3, log_interval=1
    )
    with caplog.at_level(logging.INFO, logger="fuelflow"):
        state, outcome = loop.step(loop.init(KINDS[2].make()), make_batches(1)[0])
        del state, outcome
        gc.collect()

    assert [vars(record)["step"] for record in caplog.records] == [1]


def test_a_long_run_keeps_no_outcome_alive():
    loop = ff.TrainingLoop(
        mlp_loss(KINDS[2]), optax.adamw, schedule=1e-3, max_in_flight=4
    )
    state = loop.init(KINDS[2].make())
    alive: list[Any] = []
    batch = make_batches(1)[0]
    for _ in range(30):
        state, outcome = loop.step(state, batch)
        alive.append(weakref.ref(outcome))
        del outcome
    gc.collect()

    assert sum(each() is not None for each in alive) <= 4


def test_metrics_that_differ_within_a_run_are_refused():
    def loss_fn(model: Any, batch: Any) -> Any:
        loss = cross_entropy(model(batch["x"]), batch["y"])
        return loss, {f"rows_{len(batch['y'])}": loss}

    loop = ff.TrainingLoop(loss_fn, optax.adamw, schedule=1e-3)

    batches = [*make_batches(1), *make_batches(1, 8)]
    state, outcome = loop.run(loop.init(KINDS[2].make()), batches)

    assert outcome.loss.shape == (2,)
    with pytest.raises(ValueError, match="the same metrics for every batch of a run"):
        _ = outcome.metrics
    with pytest.raises(ValueError, match="the same metrics for every batch of an eval"):
        loop.evaluate(state, batches, fill_up=False)


def test_an_evaluation_waits_only_when_read_and_for_no_later_step():
    loop, state, batch = _slow()
    evaluation = loop.evaluate(state, [batch])
    assert not evaluation.is_ready()
    outcomes = []
    for _ in range(8):
        state, outcome = loop.step(state, batch)
        outcomes.append(outcome)
    assert np.isfinite(evaluation["loss"])

    assert evaluation.is_ready()
    assert not outcomes[-1].is_ready()


def test_a_host_error_inside_the_program_runs_once_and_is_not_hidden():
    calls = []

    def on_host(x: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise TypeError("of the user's")
        return np.asarray(x)

    def loss_fn(params: Any, batch: Any) -> Any:
        seen = jax.pure_callback(on_host, batch["x"], batch["x"])
        return jax.lax.stop_gradient(seen) * params["w"]

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    batch = {"x": jnp.ones(4)}
    state = loop.init({"w": np.float32(1)})
    for _ in range(2):
        state, outcome = loop.step(state, batch)
        assert outcome.finite

    def step_once_more() -> float:
        _, outcome = loop.step(state, batch)
        return outcome.loss

    with pytest.raises(jax.errors.JaxRuntimeError, match="of the user's"):
        step_once_more()
    assert len(calls) == 3
