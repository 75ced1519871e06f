"""The plan: figures that add up, before anything runs."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from problems import KINDS, make_batches, mlp_loss

import fuelflow as ff

BATCH = {"x": np.ones((64, 32), np.float32)}
MODEL = {"w": np.ones((32, 16), np.float32), "b": np.ones(16, np.float32)}


def _loss(params: Any, batch: Any) -> Any:
    return ((batch["x"] @ params["w"] + params["b"]) ** 2).mean(-1)


def _plan(loss_fn: Any = _loss, **options: Any) -> ff.StepPlan:
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1, **options)
    return loop.plan(loop.init(MODEL), BATCH)


def test_parameters_are_listed_as_they_are_treated():
    plan = _plan(trainable="w", lr_groups={"w": 0.5})

    assert [
        (param.name, param.kind, param.is_trained, param.lr_multiplier)
        for param in plan.params
    ] == [("b", "f32[16]", False, 1.0), ("w", "f32[32,16]", True, 0.5)]
    assert (plan.num_params, plan.num_trained) == (32 * 16 + 16, 32 * 16)
    assert "frozen" in repr(plan)
    assert "lr × 0.5" in repr(plan)


def test_a_plan_shares_the_steps_program():
    loop = ff.TrainingLoop(_loss, optax.sgd, schedule=0.1, strict_compile=True)
    state = loop.init(MODEL)
    plan = loop.plan(state, BATCH)
    assert [record.program for record in loop.compiles] == ["step"]
    loop.step(state, BATCH)

    assert len(loop.compiles) == 1
    assert plan.text
    assert "dot_general" in str(plan.jaxpr)


def test_flops_are_about_those_of_the_matrix_products():
    # Forward, and the gradient of the kernel: 2 * 64 * 32 * 16 each.
    products = 2 * 2 * 64 * 32 * 16

    assert products <= (_plan().flops or 0) < 1.5 * products


@pytest.mark.parametrize("length", [4, 16])
def test_a_scans_body_is_counted_as_often_as_it_runs(length: int):
    def scanned(params: Any, batch: Any) -> Any:
        def body(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return jax.numpy.tanh(x @ params["w"] @ params["w"].T), None

        x, _ = jax.lax.scan(body, batch["x"], None, length=length)
        return (x**2).mean(-1)

    def unrolled(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for _ in range(length):
            x = jax.numpy.tanh(x @ params["w"] @ params["w"].T)
        return (x**2).mean(-1)

    assert _plan(scanned).flops == pytest.approx(_plan(unrolled).flops, rel=0.1)


def test_microbatches_do_the_arithmetic_of_the_whole_batch():
    whole, parts = _plan(), _plan(accumulate_steps=16)

    assert parts.flops == pytest.approx(whole.flops, rel=0.25)


def test_flops_of_a_loop_of_unknown_length_are_not_guessed():
    def loss_fn(params: Any, batch: Any) -> Any:
        limit = jax.lax.stop_gradient(batch["x"].sum()).astype(int)
        count = jax.lax.while_loop(lambda i: i < limit, lambda i: i + 1, 0)
        return _loss(params, batch) + count

    plan = _plan(loss_fn)
    assert plan.flops is None
    assert "arithmetic         not given by this backend" in repr(plan)


def test_memory_figures_add_up():
    plan = _plan()
    state_bytes = 4 * (32 * 16 + 16)

    assert plan.argument_bytes is not None
    assert plan.argument_bytes >= state_bytes + 4 * 64 * 32
    assert plan.aliased_bytes is not None
    assert plan.aliased_bytes >= state_bytes
    assert plan.temporary_bytes is not None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_step_needs_no_more_memory_than_the_hand_written_one(kind: Any):
    batch = make_batches(1, 256)[0]
    loop = ff.TrainingLoop(mlp_loss(kind), optax.adamw, schedule=1e-3)
    plan = loop.plan(loop.init(kind.make()), batch)
    params = KINDS[0].make()
    tx = optax.adamw(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return mlp_loss(KINDS[0])(params, batch).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1))
    compiled = jitted.lower(params, tx.init(params), batch).compile()
    by_hand: Any = compiled.memory_analysis()

    assert plan.temporary_bytes is not None
    # The counters, key and outcome of a step, and how XLA rounds up each of them.
    assert plan.temporary_bytes <= by_hand.temp_size_in_bytes + 1024
