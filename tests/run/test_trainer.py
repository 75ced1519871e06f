"""The trainer: what its loop does by hand, with an account of every epoch."""

import logging
import math
import threading
import time
from typing import Any

import jax
import numpy as np
import optax
import pytest
from problems import assert_bitwise, host_copy
from rank_problems import (
    mesh_of,
    small_batch,
    small_loop,
    small_model,
    token_loss,
    token_model,
    tokens,
)

import fuelflow as ff

SIZE, NUM_ROWS = 16, 67  # four full batches, and three rows
EPOCHS = 3


def make_loader(num_rows: int = NUM_ROWS, **options: Any) -> ff.DataLoader:
    return ff.DataLoader(small_batch(num_rows), SIZE, seed=5, **options)


def make_valid(**options: Any) -> ff.DataLoader:
    return ff.DataLoader(small_batch(37, seed=1), 32, shuffle=False, **options)


def make_trainer(
    num_ranks: int = 0, data: Any = None, *, epochs: int = EPOCHS, **options: Any
) -> ff.Trainer:
    data = make_loader() if data is None else data
    return ff.Trainer(
        small_loop(num_ranks), small_model(), data, epochs=epochs, **options
    )


def arrays_of(state: ff.TrainState) -> dict[str, np.ndarray]:
    """What of a state must go on bit for bit."""
    return host_copy((state.params, state.opt_state, state.step, state.key))


def untimed(metrics: ff.EpochMetrics) -> dict[str, Any]:
    """The fields of an epoch that no clock has a part in."""
    return {
        name: value
        for name, value in metrics.to_dict().items()
        if not name.endswith("_ms") and name != "per_rank_throughput"
    }


def by_hand(num_ranks: int, steps_per_call: int) -> Any:
    """The same epochs with the loop alone: the state, the outcomes, the evaluations."""
    loop, mesh = small_loop(num_ranks), mesh_of(num_ranks)
    loader, valid = make_loader(mesh=mesh), make_valid(mesh=mesh)
    state, outcomes, evaluations = loop.init(small_model()), [], []
    for epoch in range(EPOCHS):
        state, outcome = loop.run(
            state, loader.epoch(epoch), steps_per_call=steps_per_call
        )
        outcomes.append(outcome)
        evaluations.append(dict(loop.evaluate(state, valid.epoch(0))))
    return state, outcomes, evaluations


@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize("num_ranks", [0, 8])
def test_a_trainer_does_what_its_loop_does_by_hand(num_ranks: int, steps_per_call: int):
    state, outcomes, evaluations = by_hand(num_ranks, steps_per_call)
    trainer = make_trainer(
        num_ranks, eval_data=make_valid(), steps_per_call=steps_per_call
    )

    trained = trainer.fit()

    assert_bitwise(arrays_of(trained.state), arrays_of(state))
    np.testing.assert_array_equal(trained.model["w"], state.params["w"])
    assert [metrics.epoch for metrics in trained.history] == [0, 1, 2]
    rows = [SIZE] * 4 + [3]
    for metrics, outcome, evaluation in zip(
        trained.history, outcomes, evaluations, strict=True
    ):
        assert metrics.avg_loss == pytest.approx(
            np.average(outcome.loss, weights=rows), rel=1e-6
        )
        assert metrics.scalars == pytest.approx(
            {"absolute": np.average(outcome.metrics["absolute"], weights=rows)},
            rel=1e-6,
        )
        assert metrics.evaluation == evaluation
        assert metrics.global_step == outcome.global_step[-1]
        assert metrics.lr == outcome.lr[-1]
        assert (metrics.num_steps, metrics.num_skipped) == (5, 0)
        assert metrics.num_samples == NUM_ROWS


def test_streaming_and_resident_data_give_the_same_account():
    resident, streamed = (
        make_trainer(8, make_loader(resident=each)).fit() for each in (True, False)
    )

    assert_bitwise(arrays_of(streamed.state), arrays_of(resident.state))
    for one, other in zip(streamed.history, resident.history, strict=True):
        assert untimed(one) == untimed(other)


def test_each_rank_is_told_of_its_own_rows():
    loop = small_loop(8).replace(schedule=0.0)
    rows, w = small_batch(NUM_ROWS), small_model()["w"]
    loader = make_loader(shuffle=False)
    metrics = ff.Trainer(loop, small_model(), loader, epochs=1).fit().history[0]

    # The tail of three rows gives two to rank 0 and one to rank 1.
    padded = np.append((rows["x"] @ w - rows["y"]) ** 2, np.zeros(13))
    sums = padded.reshape(5, 8, 2).sum(axis=(0, 2))
    counts = np.array([10, 9, 8, 8, 8, 8, 8, 8])
    losses = np.array(metrics.per_rank_loss, float)
    assert list(metrics.per_rank_samples) == counts.tolist()
    np.testing.assert_allclose(losses, sums / counts, rtol=1e-6)
    assert metrics.avg_loss == pytest.approx(sums.sum() / NUM_ROWS, rel=1e-6)
    assert np.average(losses, weights=counts) == pytest.approx(metrics.avg_loss)
    absolute = [own["absolute"] for own in metrics.per_rank]
    assert np.average(absolute, weights=counts) == pytest.approx(
        metrics.scalars["absolute"]
    )
    assert list(metrics.per_rank_batch_share) == pytest.approx(counts / NUM_ROWS)
    assert math.fsum(metrics.per_rank_batch_share) == pytest.approx(1)
    assert list(metrics.device_indices) == [d.id for d in jax.devices()]
    assert set(metrics.process_indices) == {0}


def test_a_rank_without_rows_has_none_and_not_zero():
    metrics = make_trainer(8, make_loader(5), epochs=1).fit().history[0]

    assert list(metrics.per_rank_samples) == [1, 1, 1, 1, 1, 0, 0, 0]
    assert [loss is None for loss in metrics.per_rank_loss] == [False] * 5 + [True] * 3
    assert [dict(own) for own in metrics.per_rank[5:]] == [{}] * 3
    assert list(metrics.per_rank_throughput[5:]) == [0.0] * 3
    assert np.isfinite(metrics.avg_loss)


def test_tokens_weigh_in_every_mean():
    loop = ff.TrainingLoop(token_loss, optax.sgd, schedule=0.0, mesh=mesh_of(8))
    batches = [tokens(seed) for seed in range(3)]
    metrics = ff.Trainer(loop, token_model(), batches, epochs=1).fit().history[0]

    x, y, mask = (
        np.concatenate([batch[name] for batch in batches])
        for name in ("x", "y", "mask")
    )
    model = token_model()
    error = (x @ model["w"] + model["b"] - y) ** 2
    assert metrics.avg_loss == pytest.approx(np.average(error, weights=mask), rel=1e-6)
    assert metrics.scalars == pytest.approx(
        {"error": metrics.avg_loss, "first": error[:, 0].mean()}, rel=1e-6
    )
    assert metrics.per_rank_loss[0] is None  # it has rows, of which no token counts
    assert list(metrics.per_rank_samples) == [6] * 8


def test_more_metrics_than_there_was_room_for_are_all_there():
    def many(params: Any, batch: Any) -> Any:
        error = batch["x"] @ params["w"] - batch["y"]
        return error**2, {f"m{i}": error * i for i in range(40)}

    loop = ff.TrainingLoop(many, optax.sgd, schedule=0.0)
    trained = ff.Trainer(loop, small_model(), make_loader(), epochs=2).fit()
    error = small_batch(NUM_ROWS)["x"] @ small_model()["w"] - small_batch(NUM_ROWS)["y"]

    for metrics in trained.history:
        assert metrics.scalars == pytest.approx(
            {f"m{i}": i * error.mean() for i in range(40)}, rel=1e-4
        )


def test_skipped_steps_are_counted_and_in_no_mean():
    rows = small_batch(64)
    rows["x"][20] = np.nan  # in the second of four batches
    loader = ff.DataLoader(rows, SIZE, shuffle=False)
    loop = small_loop(8, nonfinite="skip")
    history = ff.Trainer(loop, small_model(), loader, epochs=2).fit().history

    assert [metrics.num_skipped for metrics in history] == [1, 1]
    assert [metrics.num_steps for metrics in history] == [4, 4]
    assert [metrics.global_step for metrics in history] == [3, 6]
    assert list(history[0].per_rank_samples) == [8] * 8
    assert np.isfinite(history[0].avg_loss)


def test_the_count_of_updates_leaves_out_a_last_step_that_was_skipped():
    bad = small_batch()
    bad["x"][0] = np.nan
    batches = [small_batch(), bad]
    loop = small_loop(0, nonfinite="skip")
    trained = ff.Trainer(loop, small_model(), batches, epochs=2).fit()

    assert [metrics.num_steps for metrics in trained.history] == [2, 2]
    assert [metrics.global_step for metrics in trained.history] == [1, 2]
    assert int(trained.state.step) == 2


# Callbacks.


def test_epoch_fn_may_change_the_state_before_each_epoch():
    loop = ff.TrainingLoop(small_loop(0).loss_fn, optax.sgd)
    seen = []

    def epoch_fn(epoch: int, state: ff.TrainState) -> ff.TrainState | None:
        seen.append((epoch, int(state.step)))
        return loop.set_lr(state, 0.1 * 2**-epoch) if epoch < 2 else None

    trained = ff.Trainer(
        loop, small_model(), make_loader(), epochs=3, epoch_fn=epoch_fn
    ).fit()

    assert seen == [(0, 0), (1, 5), (2, 10)]
    assert [m.lr for m in trained.history] == pytest.approx([0.1, 0.05, 0.05])


def test_training_ends_when_a_trend_says_so():
    trainer = make_trainer(
        epochs=10, stop_when=lambda history: history.trend("loss").latest < 1e9
    )
    trained = trainer.fit()

    assert len(trained.history) == 1
    assert int(trained.state.step) == 5


@pytest.mark.parametrize("name", ["metrics_fn", "epoch_fn", "stop_when"])
def test_a_failing_callback_is_logged_and_stops_nothing(
    name: str, caplog: pytest.LogCaptureFixture
):
    def fail(*_: Any) -> None:
        raise LookupError("in the user's callback")

    options: dict[str, Any] = {name: fail}
    with caplog.at_level(logging.ERROR, "fuelflow"):
        trained = make_trainer(**options).fit()
    expected = make_trainer().fit()

    records = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [f"`{name}` failed" in record.getMessage() for record in records] == [
        True
    ] * 3
    assert all(record.exc_info for record in records)
    assert "LookupError: in the user's callback" in caplog.text
    assert "in fail" in caplog.text
    assert_bitwise(arrays_of(trained.state), arrays_of(expected.state))


# Errors that end a run.


def test_an_error_of_the_loss_ends_the_run():
    def loss_fn(params: Any, batch: Any) -> Any:
        raise ArithmeticError("in the loss")

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)

    with pytest.raises(ArithmeticError, match="in the loss"):
        ff.Trainer(loop, small_model(), make_loader(), epochs=1).fit()


@pytest.mark.parametrize("num_ranks", [0, 8])
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_step_that_is_not_finite_ends_the_run_in_its_own_epoch(
    num_ranks: int, epochs: int
):
    rows = small_batch(64)
    rows["x"][20] = np.nan
    loader = ff.DataLoader(rows, SIZE, shuffle=False)
    trainer = make_trainer(num_ranks, loader, epochs=epochs)

    with pytest.raises(ff.NonFiniteError, match="step 2 is not finite: loss nan"):
        trainer.fit()
    assert len(trainer.history) == 0
    assert np.isfinite(trainer.state.params["w"]).all()


def test_a_step_that_fails_on_the_device_ends_the_run():
    def on_host(x: Any) -> Any:
        raise OSError("on the device")

    def loss_fn(params: Any, batch: Any) -> Any:
        return params["w"].sum() * jax.pure_callback(on_host, batch["y"], batch["y"])

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    trainer = ff.Trainer(loop, small_model(), make_loader(), epochs=2)

    with pytest.raises(jax.errors.JaxRuntimeError, match="on the device"):
        trainer.fit()


def test_evaluation_data_that_fails_ends_the_run():
    def transform(fields: Any) -> Any:
        raise OSError("no such file")

    valid = make_valid(transform=transform)

    with pytest.raises(OSError, match="no such file"):
        make_trainer(eval_data=valid).fit()


def test_data_without_a_batch_ends_the_run():
    with pytest.raises(ValueError, match="there must be at least one batch"):
        make_trainer(data=[]).fit()


# What it costs.


def test_fitting_again_compiles_nothing(compile_counter: Any):
    loop = small_loop(8)
    model, train, valid = small_model(), make_loader(), make_valid()

    def cell() -> ff.TrainedState:
        trainer = ff.Trainer(loop, model, train, epochs=2, eval_data=valid)
        return trainer.fit()

    first = cell()
    compile_counter.reset()
    second = cell()

    assert compile_counter.compiled == []
    assert_bitwise(arrays_of(second.state), arrays_of(first.state))


def test_a_state_can_be_trained_on(compile_counter: Any):
    whole = make_trainer(epochs=2).fit()
    first = make_trainer(epochs=1).fit()
    loader = make_loader()
    list(loader.epoch(0))
    second = ff.Trainer(small_loop(0), first.state, [*loader.epoch(1)], epochs=1).fit()

    assert_bitwise(arrays_of(second.state), arrays_of(whole.state))
    assert [metrics.epoch for metrics in second.history] == [0]
    with pytest.raises(ff.UsedStateError, match="used up"):
        small_loop(0).step(first.state, small_batch())


@pytest.mark.parametrize("num_ranks", [0, 8])
def test_nothing_is_read_from_the_devices_inside_an_epoch(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
):
    loop = small_loop(num_ranks).replace(max_in_flight=1000)
    events: list[str] = []

    class Noted:
        """Batches that say when they are asked for."""

        def __init__(self) -> None:
            self.batches = list(make_loader(mesh=mesh_of(num_ranks)).epoch(0))

        def __iter__(self) -> Any:
            for batch in self.batches:
                events.append("batch")
                yield batch
            events.append("end")

    trainer = ff.Trainer(
        loop, small_model(), Noted(), epochs=3, time_ranks=False, steps_per_call=1
    )
    array = type(jax.numpy.zeros(()))
    original: Any = vars(array)["_value"]

    as_array = np.asarray

    def read(self: Any) -> Any:
        events.append("read")
        return original.fget(self)

    def asarray(value: Any, *args: Any, **options: Any) -> Any:
        events.extend(["read"] * isinstance(value, jax.Array))
        return as_array(value, *args, **options)

    # Which of the two is asked depends on the number of devices.
    monkeypatch.setattr(array, "_value", property(read))
    monkeypatch.setattr(np, "asarray", asarray)
    trainer.fit()

    assert "read" in events  # at the boundaries, so it would be seen
    text = " ".join(events)
    assert text.count("batch batch batch batch batch end") == 3
    assert len(events) - text.count("read") == 3 * 6


# What held an epoch back. Waiting cannot be avoided here, and is kept short.


def test_a_slow_loader_is_the_bottleneck():
    def slow(fields: Any) -> Any:
        time.sleep(0.02)
        return fields

    loader = make_loader(transform=slow, prefetch=0)
    metrics = make_trainer(0, loader, epochs=2).fit().history[1]

    assert metrics.bottleneck.kind == "input"
    assert metrics.per_rank_data_starve_ms[0] >= 5 * 20
    assert metrics.epoch_ms >= 5 * 20
    share = metrics.per_rank_data_starve_ms[0] / metrics.epoch_ms
    assert metrics.bottleneck.share == pytest.approx(share, abs=0.1)
    assert share > 0.5
    assert sum(metrics.per_rank_compute_only_ms) <= 0.6 * metrics.epoch_ms


@pytest.mark.parametrize("num_ranks", [0, 8])
def test_no_part_of_an_epoch_is_longer_than_the_whole(num_ranks: int):
    metrics = make_trainer(num_ranks).fit().history[2]

    assert metrics.epoch_ms > 0
    assert min(metrics.per_rank_compute_only_ms) > 0
    assert max(metrics.per_rank_compute_only_ms) <= metrics.epoch_ms + 1e-6
    assert metrics.per_rank_data_starve_ms[0] <= metrics.epoch_ms
    assert max(metrics.per_rank_share_complete_ms) <= metrics.epoch_ms + 1e-6
    for rank, complete in enumerate(metrics.per_rank_share_complete_ms):
        throughput = metrics.per_rank_samples[rank] / complete
        assert metrics.per_rank_throughput[rank] == pytest.approx(throughput)


def test_a_slow_callback_is_the_bottleneck_of_the_next_epoch():
    metrics = make_trainer(epochs=2, metrics_fn=lambda _: time.sleep(0.2)).fit()
    first, second = metrics.history

    assert first.callback_ms < 100 < 200 <= second.callback_ms
    assert second.bottleneck.kind == "callback"
    whole = second.epoch_ms + second.eval_ms + second.callback_ms
    assert second.bottleneck.share == pytest.approx(second.callback_ms / whole)
    assert second.bottleneck.share > 0.5


def test_compiling_is_in_no_other_time():
    def slow_to_trace(params: Any, batch: Any) -> Any:
        time.sleep(0.3)
        return (batch["x"] @ params["w"] - batch["y"]) ** 2

    loop = ff.TrainingLoop(slow_to_trace, optax.sgd, schedule=0.1)
    loader = make_loader(64)
    first, second = ff.Trainer(loop, small_model(), loader, epochs=2).fit().history

    assert first.compile_ms >= 300
    assert second.compile_ms == 0
    assert first.epoch_ms < 200
    assert first.per_rank_compute_only_ms[0] <= first.epoch_ms


# Refusals.


def test_a_slow_trace_is_taken_off_an_epoch_once():
    def slow(params: Any, batch: Any) -> Any:
        threading.Event().wait(0.2)  # as it is traced
        return (params["w"].sum() * batch["x"].sum(-1)) ** 2

    loop = ff.TrainingLoop(slow, optax.sgd, schedule=1e-3, mesh=mesh_of(4))
    loader = ff.DataLoader(small_batch(SIZE + 2), SIZE, mesh=mesh_of(4))
    model = {"w": np.ones(3, np.float32)}
    (metrics,) = ff.Trainer(loop, model, loader, epochs=1).fit().history

    assert metrics.num_steps == 2  # the tail, for which it is traced before all
    assert metrics.epoch_ms > 0
    assert metrics.compile_ms > 400


def test_what_is_no_loop_or_callback_is_refused():
    wrong: Any = "no such thing"

    with pytest.raises(TypeError, match="`loop` must be a TrainingLoop, got a str"):
        ff.Trainer(wrong, small_model(), make_loader(), epochs=1)
    for name in ("metrics_fn", "epoch_fn", "stop_when"):
        options: dict[str, Any] = {name: wrong}
        with pytest.raises(TypeError, match=f"`{name}` must be a function, got a str"):
            make_trainer(**options)


@pytest.mark.parametrize("name", ["epochs", "steps_per_epoch", "steps_per_call"])
def test_counts_below_one_are_refused(name: str):
    options: dict[str, Any] = {name: 0}

    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        make_trainer(data=[small_batch()], **options)


def test_a_loader_whose_batches_the_ranks_do_not_divide_is_refused_at_once():
    loader = ff.DataLoader(small_batch(40), 20)

    with pytest.raises(ValueError, match="`batch_size` must divide by the 8 ranks"):
        make_trainer(8, loader)
    with pytest.raises(ValueError, match="`batch_size` must divide by the 8 ranks"):
        make_trainer(8, eval_data=loader)


def test_batches_of_no_loader_are_spread_over_the_ranks():
    batches = [small_batch(seed=seed) for seed in range(4)]
    one, ranks = (make_trainer(n, batches).fit() for n in (0, 8))

    np.testing.assert_allclose(ranks.model["w"], one.model["w"], rtol=1e-5)
    for of_ranks, of_one in zip(ranks.history, one.history, strict=True):
        assert of_ranks.avg_loss == pytest.approx(of_one.avg_loss, rel=1e-5)
        assert list(of_ranks.per_rank_samples) == [8] * 8


def test_a_trained_state_says_what_it_is():
    trained = make_trainer(epochs=2).fit()

    assert repr(trained) == (
        "TrainedState(TrainState(Pytree model, 1 parameters, 3 values), 2 epochs)"
    )
    assert trained.model is trained.model
    assert trained.history[-1].epoch == 1
