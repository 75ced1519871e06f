"""Several steps in one dispatch: the numbers of as many calls of step."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import (
    KINDS,
    assert_bitwise,
    forever,
    host_copy,
    make_batches,
    mlp_loss,
    train,
)

import fuelflow as ff


def _loop(**options: Any) -> ff.TrainingLoop:
    return ff.TrainingLoop(
        mlp_loss(KINDS[2]),
        optax.adamw,
        schedule=ff.schedules.cosine(1e-2, 10, 103),
        max_grad_norm=0.5,
        **options,
    )


@pytest.mark.parametrize(
    ("steps_per_call", "programs"),
    [(1, ["step"]), (7, ["run", "step"]), (50, ["run", "step"]), (103, ["run"])],
)
def test_a_hundred_and_three_batches_equal_as_many_steps(
    steps_per_call: int, programs: list[str]
):
    batches = make_batches(103)
    expected, outcomes = train(_loop(), KINDS[2].make(), batches)
    loop = _loop(strict_compile=True)
    state = loop.init(KINDS[2].make())
    state, outcome = loop.run(state, batches, steps_per_call=steps_per_call)

    assert_bitwise(host_copy(state), host_copy(expected))
    for name in ("loss", "grad_norm", "lr", "global_step", "finite"):
        one_by_one = [getattr(single, name) for single in outcomes]
        np.testing.assert_array_equal(getattr(outcome, name), one_by_one)
    assert [record.program for record in loop.compiles] == programs


def test_a_generator_of_device_batches_runs_like_a_list():
    batches = make_batches(10)
    loop = _loop()
    state, _ = loop.run(loop.init(KINDS[2].make()), batches, steps_per_call=4)
    on_device = ({k: jnp.asarray(v) for k, v in batch.items()} for batch in batches)
    other, _ = loop.run(loop.init(KINDS[2].make()), on_device, steps_per_call=4)

    assert_bitwise(other.params, state.params)


def test_a_smaller_last_batch_runs_at_its_own_shape():
    batches = [*make_batches(5), *make_batches(1, 17)]
    loop = _loop()
    state, outcome = loop.run(loop.init(KINDS[2].make()), batches, steps_per_call=2)
    expected, _ = train(_loop(), KINDS[2].make(), batches)

    assert_bitwise(state.params, expected.params)
    assert outcome.loss.shape == (6,)
    assert [record.reason for record in loop.compiles] == [
        "first compilation",
        "first compilation",
        'batch["x"]: f32[32,12] → f32[17,12]; batch["y"]: i32[32] → i32[17]',
    ]


def test_a_bad_step_ends_the_run_early_with_a_usable_state():
    bad = {**make_batches(1)[0], "x": np.full((32, 12), np.nan, np.float32)}
    loop = _loop(max_in_flight=2)
    state = loop.init(KINDS[2].make())
    state, outcome = loop.run(state, forever(bad), steps_per_call=3)

    with pytest.raises(ff.NonFiniteError, match="step 1 is not finite"):
        _ = outcome.loss
    state, good = loop.step(state, make_batches(1)[0])
    assert good.global_step == 1


@pytest.mark.parametrize("steps_per_call", [0, -1])
def test_steps_per_call_below_one_is_refused(steps_per_call: int):
    loop = _loop()

    with pytest.raises(ValueError, match="`steps_per_call` must be at least 1, got"):
        loop.run(loop.init(KINDS[2].make()), [], steps_per_call=steps_per_call)


def test_no_batches_are_refused():
    loop = _loop()
    used_up = iter(make_batches(1))
    next(used_up)

    with pytest.raises(ValueError, match="there must be at least one batch"):
        loop.run(loop.init(KINDS[2].make()), used_up)


def test_one_batch_in_place_of_several_is_refused():
    loop = _loop()

    with pytest.raises(TypeError, match="looks like one batch: put it in a list"):
        loop.run(loop.init(KINDS[2].make()), make_batches(1)[0])


def test_a_bad_step_before_a_run_is_raised_by_its_outcomes():
    bad = {**make_batches(1)[0], "x": np.full((32, 12), np.nan, np.float32)}
    loop = _loop(max_in_flight=4)
    state, _ = loop.step(loop.init(KINDS[2].make()), bad)
    state, outcome = loop.run(state, make_batches(20))

    with pytest.raises(ff.NonFiniteError, match="step 1 is not finite"):
        _ = outcome.loss
    _, outcome = loop.step(state, make_batches(1)[0])
    assert outcome.finite


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_an_error_in_the_middle_of_a_run_hands_back_the_state(error: BaseException):
    def batches() -> Any:
        yield from make_batches(5)
        raise error

    loop = _loop()
    with pytest.raises(type(error)) as info:
        loop.run(loop.init(KINDS[2].make()), batches(), steps_per_call=2)
    caught: Any = info.value
    expected, _ = train(_loop(), KINDS[2].make(), make_batches(4))

    assert_bitwise(caught.state.params, expected.params)
    assert caught.outcome.global_step.tolist() == [1, 2, 3, 4]
    assert "go on with the `.state`" in caught.__notes__[0]
    _, outcome = loop.step(caught.state, make_batches(1)[0])
    assert outcome.global_step == 5


def test_a_ragged_tail_in_strict_mode_loses_no_step():
    loop = _loop(strict_compile=True)
    with pytest.raises(ff.RecompileError) as info:
        loop.run(loop.init(KINDS[2].make()), [*make_batches(5), *make_batches(1, 17)])
    caught: Any = info.value

    assert int(caught.state.step) == 5
