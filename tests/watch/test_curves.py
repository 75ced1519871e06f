"""Curves of a run, in few points and in letters."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from watched_stories import records_of, run_record, step_record, story_of

from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.curves import Curve, Curves, scale_of
from fuelflow.watch.screens.spark import dotted, sparkline

VALUES = st.lists(st.floats(), min_size=1, max_size=100)


def curve_of(values):
    return Curve(range(len(values)), values)


@given(VALUES, st.integers(1, 40), st.integers(1, 6))
def test_any_values_can_be_drawn_in_the_room_there_is(values, width, rows):
    curve = curve_of(values)

    assert len(sparkline(curve, width)) == min(width, len(values))
    assert sparkline(curve, width, is_ascii=True).isascii()
    lines = dotted(curve, width, rows)
    assert [len(line) for line in lines] == [width] * rows


def test_a_thinned_curve_has_the_means_of_equal_stretches():
    values = np.random.default_rng(0).normal(size=100)

    thin = curve_of(values.tolist()).thinned(10)

    # The steps 0 to 99 in ten stretches of 9.9 each.
    places = np.minimum(np.arange(100) / 9.9, 9).astype(int)
    expected = [values[places == place].mean() for place in range(10)]
    np.testing.assert_allclose(thin.values, expected, rtol=1e-12)
    assert thin.steps[-1] == 99


def test_a_stretch_with_a_nan_has_none_but_its_neighbours_do():
    values = [1.0] * 100
    values[55] = math.nan

    thin = curve_of(values).thinned(10)

    # The steps from 49.5 to 59.4 are the sixth stretch.
    assert [at for at, value in enumerate(thin.values) if math.isnan(value)] == [5]


def test_what_falls_by_magnitudes_is_drawn_by_its_logarithm():
    assert sparkline(curve_of([1000.0, 100.0, 10.0, 1.0]), 4) == "█▆▃▁"
    # These are drawn as they are.
    assert sparkline(curve_of([9.0, 6.4, 3.6, 1.0]), 4) == "█▆▃▁"
    assert sparkline(curve_of([0.01, 0.34, 0.67, 1.0]), 4) == "▁▃▆█"


def test_no_value_that_is_finite_has_no_scale():
    assert scale_of([math.nan, math.inf]) is None


def test_a_straight_line_is_drawn_without_holes():
    rows = dotted(curve_of([0.0, 1.0]), 4, 2)

    # Eight dots across, eight up: one in each column, and all other dots empty.
    dots = sum((ord(letter) - 0x2800).bit_count() for row in rows for letter in row)
    assert dots == 8


@pytest.mark.parametrize("name", ["loss", "lr", "grad_norm", "accuracy"])
def test_what_is_read_bit_by_bit_is_what_is_read_at_once(name):
    curves, story = Curves(), Story()
    for record in records_of(30, every=1, epochs=40):  # so many that steps are thinned
        story.add(record)
        if len(story.steps) % 7 == 0:
            curves.of(story).steps(name)
            curves.epochs(name)

    bit_by_bit, at_once = curves.of(story), Curves().of(story)
    assert len(story.steps) < 3033
    assert bit_by_bit.steps(name) == at_once.steps(name)
    assert bit_by_bit.epochs(name) == at_once.epochs(name)
    assert bit_by_bit.evals(name) == at_once.evals(name)


def test_steps_that_are_done_anew_are_forgotten():
    curves = Curves()
    story = story_of([run_record(), *(step_record(0, i, i) for i in (10, 20, 30))])
    assert list(curves.of(story).steps("loss").steps) == [10, 20, 30]

    story.add(run_record(step=10))
    for step in (15, 25):
        story.add(step_record(0, step, step))

    assert list(curves.of(story).steps("loss").steps) == [10, 15, 25]
