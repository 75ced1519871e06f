"""Runs over all devices of all processes, and what each process can tell of them."""

import functools
from typing import Any

import jax
import numpy as np
import optax
from rank_problems import least_squares, small_batch, small_model

import fuelflow as ff

ROADS = {"resident": {"resident": True}, "streaming": {"resident": False}}
EPOCHS = 3


def noisy_least_squares(params: Any, batch: Any, key: jax.Array) -> Any:
    """Least squares over rows that each rank adds its own noise to."""
    noise = 0.1 * jax.random.normal(key, batch["y"].shape)
    return least_squares(params, {**batch, "y": batch["y"] + noise})


@functools.cache
def make_loop() -> ff.TrainingLoop:
    """A loop over every device, whose programs all runs share."""
    return ff.TrainingLoop(
        noisy_least_squares,
        optax.adam,
        schedule=0.05,
        max_grad_norm=1.0,
        eval_fn=least_squares,
        mesh=ff.mesh(),
    )


def make_trainer(*, metrics_fn: Any = None, **options: Any) -> ff.Trainer:
    """A run over every device, with tails and an evaluation."""
    train = ff.DataLoader(small_batch(197), 32, seed=3, **options)
    valid = ff.DataLoader(small_batch(37, seed=1), 32, shuffle=False, **options)
    return ff.Trainer(
        make_loop(),
        small_model(),
        train,
        epochs=EPOCHS,
        eval_data=valid,
        metrics_fn=metrics_fn,
    )


def whole_run(**options: Any) -> dict[str, Any]:
    """The history of a run, and the parameters it led to."""
    trained = make_trainer(**options).fit()
    return {"history": trained.history.to_dict(), "w": trained.model["w"].tolist()}


def faces_of_the_loop() -> dict[str, Any]:
    """The loop alone, every process giving the whole of each batch."""
    loop = make_loop()
    state = loop.init(small_model())
    grads = loop.grads(state, small_batch())
    state, outcome = loop.step(state, small_batch())
    state, outcomes = loop.run(state, [small_batch()] * 4, steps_per_call=2)
    means = loop.evaluate(state, [small_batch(), small_batch(5)])
    return {
        "gradient": np.asarray(grads["w"]).tolist(),
        "losses": [outcome.loss, *outcomes.loss.tolist()],
        "means": [*means.values(), means.weight],
        "num_devices": len(loop.model(state)["w"].devices()),
    }


def stopped_by_the_last() -> list[int]:
    """A run that the last process alone has end after its first epoch."""
    is_last = jax.process_index() == jax.process_count() - 1
    trainer = make_trainer(metrics_fn=lambda _: is_last and trainer.stop())
    trained = trainer.fit()
    return [len(trained.history), int(trained.state.step)]


def everything() -> dict[str, Any]:
    """What there is to tell, in types that any JSON has."""
    runs = {road: whole_run(**options) for road, options in ROADS.items()}
    return {
        **runs,
        "faces": faces_of_the_loop(),
        "stopped": stopped_by_the_last(),
    }
