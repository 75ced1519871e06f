"""A rank that others wait for in lockstep is found by its own pass."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rank_problems import mesh_of

import fuelflow as ff

SLOW_RANK = 3


def loss_with_a_slow_rank(params, batch):
    """A loss for which one rank multiplies matrices that nobody needs."""
    is_slow = jax.lax.axis_index("data") == SLOW_RANK
    matrix = jnp.full((200, 200), 1e-2)
    work = jax.lax.fori_loop(
        0, jnp.where(is_slow, 30, 0), lambda _, x: jnp.tanh(x @ x), matrix
    )
    nothing = jax.lax.stop_gradient(work).sum() * 0
    return (batch["x"] @ params["w"] + nothing - batch["y"]) ** 2


def train(loss_fn, **options):
    x = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)
    loader = ff.DataLoader({"x": x, "y": x.sum(-1)}, batch_size=64)
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.01, mesh=mesh_of(8))
    params = {"w": np.zeros(8, np.float32)}
    return ff.Trainer(loop, params, loader, epochs=3, **options).fit().history


def test_a_rank_that_takes_long_is_named_with_how_long():
    history = train(loss_with_a_slow_rank)

    for metrics in history:
        passes = np.array(metrics.per_rank_pass_ms)
        assert passes.argmax() == SLOW_RANK
        assert passes[SLOW_RANK] > 1.3 * np.median(passes)
    # A moment in which the machine is busy with other things may hide it in one epoch.
    kinds = [(m.bottleneck.kind, m.bottleneck.rank) for m in history]
    assert ("rank", SLOW_RANK) in kinds


def test_with_ranks_not_timed_no_pass_is_timed_and_nothing_more_compiled():
    history = train(loss_with_a_slow_rank, time_ranks=False)

    assert set(history[-1].per_rank_pass_ms) == {0.0}


def test_a_single_rank_is_not_timed_alone():
    x = np.ones((8, 2), np.float32)
    loop = ff.TrainingLoop(lambda p, b: b["x"] @ p["w"], optax.sgd, schedule=0.1)
    loader = ff.DataLoader({"x": x}, batch_size=4)
    trainer = ff.Trainer(loop, {"w": np.ones(2, np.float32)}, loader, epochs=2)
    metrics = trainer.fit().history[-1]

    assert list(metrics.per_rank_pass_ms) == [0.0]
    assert [record.program for record in loop.compiles] == ["step, with sums"]
