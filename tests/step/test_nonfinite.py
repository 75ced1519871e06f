"""A NaN in the batch: never applied, never lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_bitwise, host_copy

import fuelflow as ff

GOOD = {"x": np.ones((4, 3), np.float32), "scale": np.ones(4, np.float32)}
BAD = {**GOOD, "scale": np.full(4, np.nan, np.float32)}


def _loss(params: Any, batch: Any) -> Any:
    hidden = batch["x"] @ params["first"]
    return (hidden * params["second"] * batch["scale"]) ** 2 + params["third"] ** 2


def _model() -> dict[str, Any]:
    return {
        "first": np.ones(3, np.float32),
        "second": np.float32(1),
        "third": np.ones(()),
    }


def _loop(**options: Any) -> ff.TrainingLoop:
    return ff.TrainingLoop(_loss, optax.adam, schedule=0.1, **options)


def _copy(state: ff.TrainState) -> dict[str, Any]:
    return host_copy((state.params, state.opt_state, state.step))


def test_raise_names_step_and_parameters_when_the_outcome_is_read():
    loop = _loop()
    state, _ = loop.step(loop.init(_model()), GOOD)
    state, outcome = loop.step(state, BAD)

    with pytest.raises(
        ff.NonFiniteError, match="step 2 is not finite: loss nan"
    ) as info:
        _ = outcome.loss
    assert (info.value.step, info.value.names) == (2, ("first", "second"))
    assert np.isnan(info.value.loss)
    assert outcome.finite is False


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_bad_step_leaves_the_state_bit_for_bit(nonfinite: Any):
    loop = _loop(nonfinite=nonfinite)
    state, _ = loop.step(loop.init(_model()), GOOD)
    before = _copy(state)
    state, outcome = loop.step(state, BAD)

    assert_bitwise(_copy(state), before)
    assert int(state.num_skipped) == 1
    assert outcome.finite is False


@pytest.mark.parametrize(("nonfinite", "num_applied"), [("raise", 1), ("skip", 3)])
def test_a_bad_step_is_never_applied_later(nonfinite: Any, num_applied: int):
    loop = _loop(nonfinite=nonfinite)
    with_bad = loop.init(_model())
    for batch in (GOOD, BAD, BAD, GOOD, GOOD):
        with_bad, _ = loop.step(with_bad, batch)
    without = loop.init(_model())
    for _ in range(num_applied):  # to raise is to stop before the first bad one
        without, _ = loop.step(without, GOOD)

    assert_bitwise(_copy(with_bad), _copy(without))


def test_raise_reaches_a_host_that_reads_no_outcome():
    loop = _loop(max_in_flight=4)
    state = loop.init(_model())
    state, _ = loop.step(state, BAD)

    def train_on(state: ff.TrainState) -> ff.TrainState:
        for _ in range(5):
            state, _ = loop.step(state, GOOD)
        return state

    with pytest.raises(ff.NonFiniteError, match="step 1 is not finite"):
        train_on(state)


@pytest.mark.parametrize(
    "look",
    [
        lambda loop, state: loop.model(state),
        lambda loop, state: loop.evaluate(state, [GOOD])["loss"],
    ],
    ids=["model", "evaluate"],
)
def test_raise_reaches_whoever_looks_at_the_end(look: Any):
    loop = _loop()
    state, _ = loop.step(loop.init(_model()), BAD)

    with pytest.raises(ff.NonFiniteError, match="step 1 is not finite"):
        look(loop, state)


def test_an_error_is_raised_once_by_the_run_and_always_by_its_outcome():
    loop = _loop(max_in_flight=1)
    state, outcome = loop.step(loop.init(_model()), BAD)
    for _ in range(2):
        with pytest.raises(ff.NonFiniteError):
            _ = outcome.grad_norm
    state, good = loop.run(state, [GOOD] * 3)

    assert good.global_step.tolist() == [1, 2, 3]


def test_printing_raises_and_repr_does_not():
    loop = _loop()
    _, outcome = loop.step(loop.init(_model()), BAD)

    assert "finite=False" in repr(outcome)
    with pytest.raises(ff.NonFiniteError):
        str(outcome)


def test_skip_counts_and_raises_nowhere():
    loop = _loop(nonfinite="skip", max_in_flight=1)
    state = loop.init(_model())
    for batch in (BAD, GOOD, BAD):
        state, outcome = loop.step(state, batch)

    assert outcome.num_skipped == 2
    assert np.isnan(outcome.loss)
    assert np.isfinite(loop.model(state)["first"]).all()


def test_propagate_applies_only_the_gradients_that_are_bad():
    loop = _loop(nonfinite="propagate", max_grad_norm=1.0)
    state, outcome = loop.step(loop.init(_model()), BAD)

    assert np.isnan(outcome.loss)
    assert np.isnan(state.params["first"]).all()
    assert np.isfinite(state.params["third"])
    assert int(state.step) == 1


def test_a_batch_whose_weights_are_all_zero_is_not_finite():
    def loss_fn(params: Any, batch: Any) -> ff.Weighted:
        return ff.Weighted((params["w"] - batch["x"]) ** 2, batch["weight"])

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1, nonfinite="skip")
    batch = {"x": np.ones(4, np.float32), "weight": np.zeros(4, np.float32)}
    state, outcome = loop.step(loop.init({"w": np.float32(0)}), batch)

    assert outcome.finite is False
    assert float(state.params["w"]) == 0
    raising = loop.replace(nonfinite="raise")
    _, outcome = raising.step(raising.init({"w": np.float32(0)}), batch)
    with pytest.raises(ff.NonFiniteError, match="the weights of its loss sum to 0"):
        _ = outcome.loss


def test_many_bad_parameters_are_counted_and_some_named():
    model = {f"w{index:03}": np.float32(1) for index in range(70)}

    def loss_fn(params: Any, batch: Any) -> Any:
        return sum(params.values()) * batch["x"]

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    _, outcome = loop.step(loop.init(model), {"x": np.array([np.inf], np.float32)})

    with pytest.raises(ff.NonFiniteError, match="`w007` and 62 more") as info:
        _ = outcome.loss
    assert info.value.num_names == 70


def test_selecting_equals_branching(monkeypatch: pytest.MonkeyPatch):
    """What a GPU runs, on this CPU: both results computed and one selected."""
    from fuelflow.step.engine import Engine

    results = []
    original: Any = Engine.__init__
    for can_branch in (True, False):

        def forced(
            self: Any, *args: Any, choice: Any = can_branch, **named: Any
        ) -> None:
            original(self, *args, **{**named, "can_branch": choice})

        monkeypatch.setattr(Engine, "__init__", forced)
        loop = _loop(nonfinite="skip")
        state = loop.init(_model())
        for batch in (GOOD, BAD, GOOD, GOOD):
            state, _ = loop.step(state, batch)
        results.append(state)

    assert int(results[1].num_skipped) == 1
    for name, param in results[0].params.items():
        # Selecting breaks up fused multiply-adds: one rounding per step.
        np.testing.assert_allclose(results[1].params[name], param, rtol=1e-6)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_rate_that_is_not_a_number_is_never_applied(nonfinite: Any):
    def schedule(step: Any) -> Any:
        return jnp.sqrt(0.01 - 0.01 * step)

    loop = ff.TrainingLoop(_loss, optax.sgd, schedule=schedule, nonfinite=nonfinite)
    state = loop.init(_model())
    for _ in range(2):
        state, _ = loop.step(state, GOOD)
    before = _copy(state)
    state, outcome = loop.step(state, GOOD)

    assert outcome.finite is False
    assert_bitwise(_copy(state), before)
    if nonfinite == "raise":
        with pytest.raises(ff.NonFiniteError, match="step 3 .* learning rate nan"):
            _ = outcome.loss


def test_debug_nans_lets_training_start():
    with jax.debug_nans(True):
        loop = _loop()
        state, outcome = loop.step(loop.init(_model()), GOOD)
        evaluation = loop.evaluate(state, [GOOD])

    assert outcome.finite
    assert np.isfinite(evaluation["loss"])
