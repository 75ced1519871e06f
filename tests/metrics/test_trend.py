"""A trend tells whether a value still gets better."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelflow.metrics.trend import Trend

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30)
nan, inf = math.nan, math.inf


@given(VALUES, st.integers(2, 30), st.data())
def test_the_slope_is_that_of_a_fitted_line(values, n, data):
    gaps = data.draw(st.lists(st.integers(1, 9), min_size=len(values)))
    epochs = np.cumsum(gaps[: len(values)]).tolist()
    trend = Trend(values, epochs=epochs)

    if n > len(values):
        assert math.isnan(trend.slope(n))
    else:
        expected = np.polyfit(epochs[-n:], values[-n:], 1)[0]
        # polyfit solves by SVD, whose error grows with the values.
        assert trend.slope(n) == pytest.approx(expected, rel=1e-9, abs=1e-7)


@given(VALUES, st.integers(2, 30))
def test_the_variance_is_that_of_a_population(values, n):
    variance = Trend(values).variance(n)

    if n > len(values):
        assert math.isnan(variance)
    else:
        expected = statistics.pvariance(values[-n:])
        assert variance == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(VALUES)
def test_the_mean_is_over_all_values(values):
    trend = Trend(values)

    assert trend.mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-9)
    assert trend.latest == values[-1]


def test_a_small_slope_on_large_values_is_seen():
    trend = Trend([2.0**41 + epoch / 1024 for epoch in range(8)])

    assert trend.slope(8) == 1 / 1024  # float64 holds these values exactly


def test_a_falling_loss_improves():
    trend = Trend([1.0, 0.8, 0.7, 0.75])

    assert trend.improving(4)
    assert not trend.stalled(4, 0.05)
    assert not trend.improving(2)


def test_a_rising_accuracy_improves_where_higher_is_better():
    values = [0.5, 0.7, 0.8]

    assert Trend(values, higher_is_better=True).improving(3)
    assert not Trend(values[::-1], higher_is_better=True).improving(3)
    assert not Trend(values).improving(3)


def test_a_constant_neither_improves_nor_worsens():
    for higher_is_better in (False, True):
        trend = Trend([0.5] * 4, higher_is_better=higher_is_better)

        assert not trend.improving(4)
        assert trend.stalled(4, 1e-12)
        assert trend.converged(4, 1e-12)


def test_noise_about_a_level_is_stalled_and_not_converged():
    trend = Trend([1.0, 3.0, 3.0, 1.0])

    assert trend.slope(4) == 0
    assert trend.stalled(4, 0.01)
    assert not trend.converged(4, 0.99)
    assert trend.converged(4, 1.01)


def test_only_the_last_values_count():
    trend = Trend([nan, 100.0, 2.0, 1.0, 0.0])

    assert trend.slope(3) == -1
    assert trend.variance(3) == pytest.approx(2 / 3)


def test_a_slope_is_per_epoch_also_where_epochs_are_left_out():
    assert Trend([4.0, 2.0], epochs=[0, 10]).slope(2) == pytest.approx(-0.2)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, nan], [nan, 1.0], [1.0, inf]])
def test_on_too_little_or_broken_data_nothing_holds(values):
    for higher_is_better in (False, True):
        trend = Trend(values, higher_is_better=higher_is_better)

        assert math.isnan(trend.slope(2))
        assert math.isnan(trend.variance(2))
        assert not trend.improving(2)
        assert not trend.stalled(2, 1e9)
        assert not trend.converged(2, 1e9)


def test_without_values_there_is_no_latest_and_no_mean():
    assert math.isnan(Trend([]).latest)
    assert math.isnan(Trend([]).mean)
    assert repr(Trend([])) == "Trend(0 values)"


def test_numbers_near_the_largest_give_no_warning():
    trend = Trend([1e308, 1e308, -1e308])

    assert trend.mean == math.inf
    assert not trend.converged(3, 1.0)
    assert not trend.stalled(3, 1.0)


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (lambda t: t.slope(1), ValueError, "`n` must be at least 2, got 1"),
        (lambda t: t.improving(2.0), TypeError, "`n` must be an integer, got 2.0"),
        (lambda t: t.stalled(2, 0), ValueError, "`tol` must be finite and more than 0"),
        (lambda t: t.converged(2, nan), ValueError, "`tol` must be .*, got nan"),
    ],
)
def test_questions_without_an_answer_are_refused(ask, kind, message):
    with pytest.raises(kind, match=message):
        ask(Trend([]))


def test_epochs_must_be_as_many_as_values_and_increase():
    with pytest.raises(ValueError, match="as many as the 2 values, got 1"):
        Trend([1.0, 2.0], epochs=[0])
    with pytest.raises(ValueError, match=r"must increase, got \[1, 1\]"):
        Trend([1.0, 2.0], epochs=[1, 1])
    with pytest.raises(TypeError, match="`values` must be a number, got None"):
        Trend([1.0, None])  # pyright: ignore[reportArgumentType]
