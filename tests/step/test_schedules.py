import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelflow.step import schedules
from fuelflow.step.schedules import (
    Plateau,
    as_schedule,
    constant,
    cosine,
    cyclic,
    exponential,
    linear_scaling,
    linear_warmup,
    multistep,
    one_cycle,
    polynomial,
    sequential,
    step_decay,
    warmup_linear,
)

# Two roundings of float32, relative to the largest rate of a schedule.
ROUNDING = 2.5e-7

EVERY_KIND = {
    "constant": lambda: constant(0.1),
    "linear_warmup": lambda: linear_warmup(0.1, 41),
    "cosine": lambda: cosine(0.1, 41, 300, 0.01),
    "warmup_linear": lambda: warmup_linear(0.1, 41, 300, 0.01),
    "polynomial": lambda: polynomial(0.1, 0.01, 0.5, 41),
    "step_decay": lambda: step_decay(0.1, 41, 0.5),
    "multistep": lambda: multistep(0.1, [10, 41, 82], 0.1),
    "exponential": lambda: exponential(0.1, 0.98),
    "one_cycle": lambda: one_cycle(0.1, 200),
    "cyclic": lambda: cyclic(0.01, 0.1, 41, 13, mode="triangular2"),
    "sequential": lambda: sequential(linear_warmup(0.1, 41), cosine(0.1, 0, 100), 41),
    "optax": lambda: as_schedule(optax.cosine_decay_schedule(0.1, 100)),
}


@pytest.fixture(params=EVERY_KIND)
def schedule(request):
    return EVERY_KIND[request.param]()


def rates(schedule, num_steps):
    return np.asarray(schedule(jnp.arange(num_steps)))


def torch_rates(num_steps, base, *makers, switch=None):
    """What PyTorch's optimizer is given at each step."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=base, momentum=0.9)
    parts = [maker(torch.optim.lr_scheduler, optimizer) for maker in makers]
    scheduler = parts[0]
    if switch is not None:
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [switch])
    seen = []
    for _ in range(num_steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(seen)


def assert_rates(actual, expected):
    atol = ROUNDING * np.max(expected)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


# The values of a schedule


def test_cosine_has_the_values_of_the_design_page():
    schedule = cosine(1, 10, 100)

    values = [float(schedule(step)) for step in (0, 5, 10, 55, 100, 200)]

    assert values == pytest.approx([0, 0.5, 1, 0.5, 0, 0], rel=0, abs=1e-7)


def test_multistep_has_the_values_of_the_design_page():
    schedule = multistep(1, [10, 20, 30], 0.1)

    values = [float(schedule(step)) for step in (9, 10, 20, 30)]

    assert values == pytest.approx([1, 0.1, 0.01, 0.001], rel=1e-7)


def test_cosine_equals_its_closed_form():
    steps = np.arange(150)
    angle = np.pi * (np.clip(steps, 20, 120) - 20) / 100
    down = 0.05 + (0.3 - 0.05) * (1 + np.cos(angle)) / 2
    expected = np.where(steps < 20, 0.3 * steps / 20, down)

    actual = rates(cosine(0.3, 20, 120, 0.05), 150)

    assert_rates(actual, expected)


def test_warmup_linear_equals_its_closed_form():
    actual = rates(warmup_linear(0.3, 20, 120, 0.05), 150)

    assert_rates(actual, np.interp(np.arange(150), [0, 20, 120], [0, 0.3, 0.05]))


def test_a_warmup_of_no_steps_begins_at_the_base_rate():
    first = [float(make(0.3, 0, 10)(0)) for make in (cosine, warmup_linear)]

    assert [*first, float(linear_warmup(0.3, 0)(0))] == pytest.approx([0.3] * 3)


def test_the_first_steps_of_a_long_warmup_keep_their_digits():
    actual = rates(linear_warmup(1e-3, 1_000_000), 100)

    np.testing.assert_allclose(actual, 1e-9 * np.arange(100), rtol=ROUNDING)


def test_a_long_exponential_keeps_its_digits():
    steps = np.array([1, 1_000, 10_000, 100_000])

    actual = exponential(1.0, 0.9999)(steps)

    # exp2 of -14 in float32 is off by 14 * 6e-8 at most.
    np.testing.assert_allclose(actual, 0.9999**steps, rtol=1e-6)


def test_an_exponential_spreads_gamma_over_its_decay_steps():
    actual = rates(exponential(0.3, 0.1, decay_steps=7), 100)

    assert_rates(actual, 0.3 * 0.1 ** (np.arange(100) / 7))


def test_an_exponential_can_grow():
    actual = rates(exponential(1e-5, 1.1), 100)

    # exp2 of 14 in float32 is off by 14 * 6e-8 at most.
    np.testing.assert_allclose(actual, 1e-5 * 1.1 ** np.arange(100), rtol=1e-6)


@pytest.mark.parametrize("step_size", [1, 3, 41, 47, 55])
def test_a_compiled_step_decay_changes_on_the_very_step(step_size):
    steps = np.arange(6 * step_size)

    actual = jax.jit(step_decay(1.0, step_size, 0.5))(steps)

    np.testing.assert_array_equal(actual, 0.5 ** (steps // step_size))


@given(total_steps=st.integers(1, 3_000), power=st.floats(0.1, 3.0))
@settings(max_examples=25, deadline=None)
def test_a_compiled_polynomial_is_exactly_its_final_rate_at_the_end(total_steps, power):
    schedule = jax.jit(polynomial(1.0, 0.0, power, total_steps))

    assert float(schedule(total_steps)) == 0.0
    assert float(schedule(0)) == 1.0


@pytest.mark.parametrize(
    ("make", "end"),
    [
        (lambda: cosine(0.3, 10, 70, 0.1), 70),
        (lambda: warmup_linear(0.3, 10, 70, 0.1), 70),
        (lambda: polynomial(0.3, 0.1, 2.0, 70), 70),
        (lambda: one_cycle(0.1 * 25e4, 71, div_factor=25, final_div_factor=1e4), 70),
        (lambda: linear_warmup(0.1, 70), 70),
        (lambda: multistep(1.0, [10, 70], math.sqrt(0.1)), 70),
    ],
)
def test_past_its_end_a_schedule_stays_at_its_final_rate(make, end):
    schedule = jax.jit(make())

    held = {float(schedule(step)) for step in (end, end + 1, 10 * end, 2**31 - 1)}

    assert len(held) == 1
    assert held.pop() == pytest.approx(0.1, rel=ROUNDING)


def test_a_rate_of_zero_stays_zero():
    flat = [cosine(0, 5, 50), step_decay(0, 10, 0.5), one_cycle(0, 50), constant(0)]

    assert not np.any([rates(schedule, 100) for schedule in flat])


def test_the_second_of_a_sequence_starts_at_its_own_step_0():
    asked = []

    def second(step):
        jax.debug.callback(lambda value: asked.append(int(value)), step)
        return 1.0 + step

    schedule = sequential(0.5, second, 3)
    asked.clear()

    assert [float(schedule(step)) for step in (0, 2, 3, 4)] == [0.5, 0.5, 1.0, 2.0]
    jax.effects_barrier()
    assert min(asked) == 0


def test_a_sequence_switching_at_step_0_is_the_second_alone():
    actual = rates(sequential(0.5, exponential(1.0, 0.5), 0), 4)

    assert actual.tolist() == [1.0, 0.5, 0.25, 0.125]


def test_linear_scaling_goes_from_none_to_one_base_rate_per_rank():
    factors = [linear_scaling(8, ratio) for ratio in (0, 0.5, 1)]

    assert factors == [1.0, 4.5, 8.0]
    assert linear_scaling(1) == 1.0
    assert isinstance(linear_scaling(2, 1), float)


# Against PyTorch


def test_cosine_without_warmup_equals_pytorch():
    # PyTorch's goes up again after its T_max, which is why only its steps are compared.
    expected = torch_rates(
        121, 0.3, lambda lr, opt: lr.CosineAnnealingLR(opt, 120, eta_min=0.01)
    )

    assert_rates(rates(cosine(0.3, 0, 120, 0.01), 121), expected)


def test_linear_warmup_equals_pytorch():
    # PyTorch cannot begin at 0: its first step is the second of ours.
    expected = torch_rates(
        150, 0.3, lambda lr, opt: lr.LinearLR(opt, 1 / 100, 1.0, total_iters=99)
    )

    assert_rates(rates(linear_warmup(0.3, 100), 151)[1:], expected)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_polynomial_equals_pytorch(power):
    expected = torch_rates(
        150, 0.3, lambda lr, opt: lr.PolynomialLR(opt, total_iters=120, power=power)
    )

    actual = rates(polynomial(0.3, 0.0, power, 120), 150)

    # A square root multiplies the rounding of the way left, at 1 / 120, by 5.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=5 * 0.3 * ROUNDING)


def test_step_decay_equals_pytorch():
    expected = torch_rates(150, 0.3, lambda lr, opt: lr.StepLR(opt, 41, gamma=0.3))

    assert_rates(rates(step_decay(0.3, 41, 0.3), 150), expected)


def test_multistep_equals_pytorch():
    milestones = [1, 30, 31, 90]
    expected = torch_rates(
        150, 0.3, lambda lr, opt: lr.MultiStepLR(opt, milestones, gamma=0.3)
    )

    assert_rates(rates(multistep(0.3, milestones, 0.3), 150), expected)


def test_exponential_equals_pytorch():
    expected = torch_rates(150, 0.3, lambda lr, opt: lr.ExponentialLR(opt, gamma=0.97))

    assert_rates(rates(exponential(0.3, 0.97), 150), expected)


@pytest.mark.parametrize(
    ("total_steps", "options"),
    [
        (100, {}),
        (137, {"pct_start": 0.25}),
        (150, {"pct_start": 0.61, "div_factor": 10.0, "final_div_factor": 100.0}),
    ],
)
def test_one_cycle_equals_pytorch(total_steps, options):
    # PyTorch refuses to be stepped once more than total_steps.
    expected = torch_rates(
        total_steps,
        0.3,
        lambda lr, opt: lr.OneCycleLR(opt, 0.3, total_steps=total_steps, **options),
    )

    assert_rates(rates(one_cycle(0.3, total_steps, **options), total_steps), expected)


@pytest.mark.parametrize(
    ("mode", "gamma"), [("triangular", 1.0), ("triangular2", 1.0), ("exp_range", 0.98)]
)
@pytest.mark.parametrize("down", [None, 1, 23])
def test_cyclic_equals_pytorch(mode, gamma, down):
    expected = torch_rates(
        200,
        0.01,
        lambda lr, opt: lr.CyclicLR(opt, 0.01, 0.3, 17, down, mode=mode, gamma=gamma),
    )

    actual = rates(cyclic(0.01, 0.3, 17, down, mode=mode, gamma=gamma), 200)

    assert_rates(actual, expected)


def test_sequential_equals_pytorch():
    expected = torch_rates(
        150,
        0.3,
        lambda lr, opt: lr.StepLR(opt, 13, gamma=0.5),
        lambda lr, opt: lr.CosineAnnealingLR(opt, 110),
        switch=40,
    )

    actual = rates(sequential(step_decay(0.3, 13, 0.5), cosine(0.3, 0, 110), 40), 150)

    assert_rates(actual, expected)


# How a schedule may be called


def test_a_rate_is_strong_float32_whatever_integer_asks(schedule):
    # 50, since the boundary at 300 of some schedules is 44 as a uint8.
    kinds = [int, np.int64, np.int16, np.uint8, jnp.int32, jnp.uint8, jnp.asarray]
    steps = [kind(50) for kind in kinds]

    answers = [schedule(step) for step in steps]

    assert {(a.dtype.name, a.shape, a.weak_type) for a in answers} == {
        ("float32", (), False)
    }
    assert len({float(a) for a in answers}) == 1


def test_jit_vmap_and_scan_give_the_rates_of_single_calls(schedule):
    steps = jnp.arange(120)
    single = np.array([schedule(step) for step in range(120)])

    mapped = jax.vmap(schedule)(steps)
    compiled = jax.jit(schedule)
    _, scanned = jax.lax.scan(lambda step, _: (step + 1, schedule(step)), 0, steps)

    assert_rates(np.array([compiled(step) for step in range(120)]), single)
    assert_rates(mapped, single)
    assert_rates(scanned, single)
    assert_rates(schedule(steps), single)


@pytest.mark.parametrize("step", [0.5, True, np.float32(1), np.ones(2)])
def test_a_step_that_is_no_integer_is_refused(schedule, step):
    with pytest.raises(
        TypeError, match=r"^`step` must be an integer, got (float|bool)"
    ):
        schedule(step)


def test_no_schedule_makes_a_nan_on_the_way(schedule):
    with jax.debug_nans(True):
        values = [float(schedule(step)) for step in (0, 1, 41, 100, 10_000)]

    assert all(0 <= value <= 0.1 * (1 + ROUNDING) for value in values)


def test_a_second_schedule_undefined_before_its_start_makes_no_nan():
    with jax.debug_nans(True):
        schedule = sequential(0.1, lambda step: 0.1 / jnp.sqrt(step + 1), 10)

        assert float(schedule(0)) == pytest.approx(0.1)


# Numbers and functions as schedules


def test_a_number_is_a_constant_schedule():
    numbers = [1, 0.5, np.float32(0.5), np.int64(1), 0]

    assert [float(as_schedule(n)(3)) for n in numbers] == [1, 0.5, 0.5, 1, 0]


def test_a_function_keeps_its_values_and_becomes_float32():
    schedule = as_schedule(lambda step: jnp.bfloat16(0.5) * step)

    assert schedule(3).dtype == jnp.float32
    assert float(schedule(3)) == 1.5


def test_a_function_of_python_numbers_alone_is_a_schedule():
    assert float(as_schedule(lambda step: 0.25)(3)) == 0.25


def test_a_plateau_is_refused_with_the_call_that_uses_it():
    remedy = (
        r"got a Plateau.*`state = loop\.set_lr\(state, plateau\.update\(metric\)\)`"
    )

    plateau: Any = Plateau(0.1)

    with pytest.raises(TypeError, match=remedy):
        as_schedule(plateau)
    with pytest.raises(TypeError, match=remedy):
        sequential(0.1, plateau, 10)


@pytest.mark.parametrize("schedule", [True, None, "cosine", [0.1], np.array(0.1)])
def test_what_is_neither_number_nor_function_is_no_schedule(schedule):
    with pytest.raises(
        TypeError, match=r"^`schedule` must be a rate or a function of the step, got "
    ):
        as_schedule(schedule)


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf])
def test_a_bad_number_is_no_schedule(rate):
    with pytest.raises(
        ValueError, match=rf"^`schedule` must be finite and at least 0, got {rate}$"
    ):
        as_schedule(rate)


@pytest.mark.parametrize(
    "function",
    [
        lambda step: None,
        lambda step: jnp.ones(2),
        lambda step: (step, step),
        lambda step: step > 1,
        lambda step: 1j * step,
    ],
)
def test_a_function_that_returns_no_rate_is_refused_before_any_step(function):
    with pytest.raises(
        TypeError, match=r"^`schedule` must return one real number for a step, got "
    ):
        as_schedule(function)


def test_a_function_that_cannot_be_traced_is_refused_before_any_step():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        as_schedule(lambda step: 0.1 if step < 10 else 0.01)


# Arguments


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("value", constant),
        ("base", lambda rate: linear_warmup(rate, 1)),
        ("base", lambda rate: cosine(rate, 1, 10)),
        ("final", lambda rate: cosine(1, 1, 10, rate)),
        ("base", lambda rate: warmup_linear(rate, 1, 10)),
        ("final", lambda rate: warmup_linear(1, 1, 10, rate)),
        ("base", lambda rate: polynomial(rate, 0, 1, 10)),
        ("final", lambda rate: polynomial(1, rate, 1, 10)),
        ("base", lambda rate: step_decay(rate, 10, 0.1)),
        ("base", lambda rate: multistep(rate, [10], 0.1)),
        ("base", lambda rate: exponential(rate, 0.1)),
        ("max_rate", lambda rate: one_cycle(rate, 10)),
        ("base", lambda rate: cyclic(rate, 1, 10)),
        ("max_rate", lambda rate: cyclic(1, rate, 10)),
        ("ratio", lambda ratio: linear_scaling(2, ratio)),
    ],
)
def test_a_bad_rate_is_refused_by_name(name, build):
    for rate in (-0.1, math.nan, math.inf):
        with pytest.raises(
            ValueError, match=rf"^`{name}` must be finite and at least 0, got {rate}$"
        ):
            build(rate)
    for rate in (True, "1", None, jnp.ones(2)):
        with pytest.raises(TypeError, match=rf"^`{name}` must be a number, got "):
            build(rate)


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("power", lambda power: polynomial(1, 0, power, 10)),
        ("gamma", lambda gamma: step_decay(1, 10, gamma)),
        ("gamma", lambda gamma: multistep(1, [10], gamma)),
        ("gamma", lambda gamma: exponential(1, gamma)),
        ("gamma", lambda gamma: cyclic(0, 1, 10, mode="exp_range", gamma=gamma)),
        ("pct_start", lambda share: one_cycle(1, 10, share)),
        ("div_factor", lambda factor: one_cycle(1, 10, 0.3, factor)),
        ("final_div_factor", lambda factor: one_cycle(1, 10, 0.3, 25, factor)),
    ],
)
def test_a_factor_that_is_not_positive_is_refused_by_name(name, build):
    for factor in (0, -0.1, math.nan, math.inf):
        with pytest.raises(
            ValueError,
            match=rf"^`{name}` must be finite and more than 0, got {factor}$",
        ):
            build(factor)
    for factor in (True, "1", None):
        with pytest.raises(TypeError, match=rf"^`{name}` must be a number, got "):
            build(factor)


@pytest.mark.parametrize(
    ("name", "least", "build"),
    [
        ("warmup_steps", 0, partial(linear_warmup, 1)),
        ("warmup_steps", 0, lambda count: cosine(1, count, 10)),
        ("total_steps", 1, lambda count: cosine(1, 0, count)),
        ("warmup_steps", 0, lambda count: warmup_linear(1, count, 10)),
        ("total_steps", 1, lambda count: warmup_linear(1, 0, count)),
        ("total_steps", 1, lambda count: polynomial(1, 0, 1, count)),
        ("step_size", 1, lambda count: step_decay(1, count, 0.1)),
        ("milestones", 1, lambda count: multistep(1, [count], 0.1)),
        ("decay_steps", 1, lambda count: exponential(1, 0.1, decay_steps=count)),
        ("total_steps", 1, lambda count: one_cycle(1, count)),
        ("step_size_up", 1, lambda count: cyclic(0, 1, count)),
        ("step_size_down", 1, lambda count: cyclic(0, 1, 10, count)),
        ("switch", 0, lambda count: sequential(1, 2, count)),
        ("world_size", 1, linear_scaling),
    ],
)
def test_a_bad_count_is_refused_by_name(name, least, build):
    with pytest.raises(
        ValueError, match=rf"^`{name}` must be at least {least}, got {least - 1}$"
    ):
        build(least - 1)
    with pytest.raises(
        ValueError, match=rf"^`{name}` must fit in an int32, got {2**31}$"
    ):
        build(2**31)
    for count in (True, 5.0, "5", np.True_):
        with pytest.raises(TypeError, match=rf"^`{name}` must be an integer, got "):
            build(count)


@pytest.mark.parametrize("build", [cosine, warmup_linear])
def test_a_warmup_as_long_as_the_whole_is_refused(build):
    with pytest.raises(
        ValueError,
        match=r"^`warmup_steps` must be less than the `total_steps` of 10, got 10$",
    ):
        build(1, 10, 10)


@pytest.mark.parametrize("milestones", [[20, 10], [10, 10]])
def test_milestones_that_do_not_rise_are_refused(milestones):
    with pytest.raises(
        ValueError, match=r"^`milestones` must rise, got \[[12]0, 10\]$"
    ):
        multistep(1, milestones, 0.1)


def test_milestones_that_are_one_number_are_refused():
    milestones: Any = 10

    with pytest.raises(TypeError, match=r"^`milestones` must be a sequence, got 10$"):
        multistep(1, milestones, 0.1)


def test_no_milestones_leave_the_rate_as_it_is():
    assert float(multistep(0.5, [], 0.1)(100)) == 0.5


def test_a_cycle_without_room_to_rise_or_fall_is_refused():
    with pytest.raises(
        ValueError, match=r"^`pct_start` must be less than 1, got 1\.0$"
    ):
        one_cycle(1, 10, 1.0)
    with pytest.raises(
        ValueError,
        match=r"^`pct_start` must be more than one of the 3 `total_steps`, got 0\.3, "
        r"which is 0\.9$",
    ):
        one_cycle(1, 3)


def test_a_cycle_upside_down_is_refused():
    with pytest.raises(
        ValueError, match=r"^`max_rate` must be at least the `base` of 1\.0, got 0\.5$"
    ):
        cyclic(1, 0.5, 10)


def test_an_unknown_mode_of_a_cycle_is_refused_with_the_known_ones():
    mode: Any = "square"

    with pytest.raises(
        ValueError,
        match=r'^`mode` must be "triangular", "triangular2" or "exp_range", got '
        r"'square'$",
    ):
        cyclic(0, 1, 10, mode=mode)


def test_a_gamma_that_its_mode_would_ignore_is_refused():
    with pytest.raises(
        ValueError, match=r'^`gamma` must be 1 unless `mode` is "exp_range", got 0\.9$'
    ):
        cyclic(0, 1, 10, gamma=0.9)


def test_the_module_lists_every_public_function():
    public = {
        name
        for name, member in vars(schedules).items()
        if getattr(member, "__module__", "").startswith("fuelflow.step")
        and not name.startswith(("_", "checked_"))
    }

    assert set(schedules.__all__) == public - {"between", "elementwise"}
    assert schedules.__all__ == sorted(schedules.__all__)
