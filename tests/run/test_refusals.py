"""What a trainer refuses early, by name, and what it does not lose in silence."""

import logging
import threading

import numpy as np
import optax
import pytest
from rank_problems import mesh_of

import fuelflow as ff

RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 4)).astype(np.float32)


def row_losses(params, batch):
    return (batch["x"] @ params["w"] - 1) ** 2


def make_trainer(loss_fn=row_losses, data=None, num_ranks=None, **options):
    mesh = None if num_ranks is None else mesh_of(num_ranks)
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.01, mesh=mesh)
    data = ff.DataLoader({"x": X}, 16) if data is None else data
    options = {"epochs": 2, **options}
    return ff.Trainer(loop, {"w": np.zeros(4, np.float32)}, data, **options)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda params, batch: row_losses(params, batch).mean(),
        lambda params, batch: (
            row_losses(params, batch),
            {"m": row_losses(params, batch).mean()},
        ),
    ],
)
def test_a_tail_that_ranks_cannot_take_is_refused_before_the_first_step(loss_fn):
    trainer = make_trainer(loss_fn, num_ranks=8)
    with pytest.raises(ValueError, match="every metric return one value for each row"):
        trainer.fit()

    assert int(trainer.state.step) == 0


@pytest.mark.parametrize("name", ["resume", "time_ranks"])
@pytest.mark.parametrize("value", ["no", None, 1])
def test_what_is_neither_true_nor_false_is_refused(name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be True or False, got"):
        make_trainer(**{name: value})


def test_checkpoints_of_an_earlier_run_are_not_written_over(tmp_path):
    make_trainer(checkpointer=ff.Checkpointer(tmp_path)).fit()
    steps = ff.Checkpointer(tmp_path).steps()
    with pytest.raises(ValueError, match="it has some of an earlier run"):
        make_trainer(checkpointer=ff.Checkpointer(tmp_path))

    assert ff.Checkpointer(tmp_path).steps() == steps
    resumed = make_trainer(checkpointer=ff.Checkpointer(tmp_path), resume=True).fit()
    assert len(resumed.history) == 2


def test_a_state_of_a_run_under_way_is_not_lent():
    seen = []

    def look(metrics):
        seen.append(int(trainer.state.step))  # by the run's own thread

    trainer = make_trainer(metrics_fn=look, epochs=3)
    blocked = make_trainer(metrics_fn=lambda _: go_on.acquire(), epochs=1)
    go_on = threading.Semaphore(0)
    handle = blocked.run()
    with pytest.raises(RuntimeError, match="belongs to the run while it is under way"):
        _ = blocked.state
    go_on.release()
    handle.join()
    trainer.fit()

    assert seen == [5, 10, 15]
    assert int(blocked.state.step) == 5


def test_an_epoch_fn_that_returns_no_state_is_logged(caplog):
    with caplog.at_level(logging.ERROR, "fuelflow"):
        trained = make_trainer(epoch_fn=lambda epoch, state: 5).fit()

    assert "must return a TrainState or None, got a int" in caplog.text
    assert len(trained.history) == 2


def test_what_is_no_checkpointer_is_refused():
    with pytest.raises(TypeError, match="must be a Checkpointer, got a str"):
        make_trainer(checkpointer="runs/a")
    with pytest.raises(ValueError, match="`resume` needs a `checkpointer`"):
        make_trainer(resume=True)


@pytest.mark.parametrize("name", ["", "eval.loss"])
def test_names_that_evaluations_have_are_refused_for_metrics(name):
    def loss_fn(params, batch):
        losses = row_losses(params, batch)
        return losses, {name: losses}

    with pytest.raises(ValueError, match="must not be empty, nor begin with `eval"):
        make_trainer(loss_fn).fit()


def test_metrics_that_change_inside_an_epoch_are_refused():
    def loss_fn(params, batch):
        losses = row_losses(params, batch)
        return losses, {"whole" if len(losses) == 16 else "part": losses}

    data = [{"x": X[:16]}, {"x": X[:8]}]
    with pytest.raises(ValueError, match=r"same metrics .* after \['whole'\]"):
        make_trainer(loss_fn, data).fit()


def test_an_infinite_metric_is_infinite_in_the_epochs_mean():
    def loss_fn(params, batch):
        losses = row_losses(params, batch)
        return losses, {"big": losses + np.inf}

    metrics = make_trainer(loss_fn).fit().history[-1]

    assert metrics.value("big") == np.inf
    assert np.isfinite(metrics.avg_loss)


def test_a_result_keeps_its_history_when_the_run_goes_on():
    trainer = make_trainer(stop_when=lambda history: len(history) == 1)
    first = trainer.fit()
    trainer.fit()

    assert first.stopped_by == "stop_when"
    assert (len(first.history), len(trainer.history)) == (1, 2)


def test_a_state_is_usable_after_metrics_that_changed():
    def loss_fn(params, batch):
        losses = row_losses(params, batch)
        return losses, {"whole" if len(losses) == 16 else "part": losses}

    trainer = make_trainer(loss_fn, [{"x": X[:16]}, {"x": X[:8]}])
    with pytest.raises(ValueError, match="the same metrics"):
        trainer.fit()

    assert int(trainer.state.step) == 2
    assert np.isfinite(trainer.state.params["w"]).all()
