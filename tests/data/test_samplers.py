"""Samplers choose rows, and wrong choices are refused by name."""

import numpy as np
import pytest

from fuelflow.data.loader import DataLoader
from fuelflow.data.samplers import (
    Sampler,
    SequentialSampler,
    ShuffledSampler,
    WeightedSampler,
)


class Fixed:
    def __init__(self, rows, promised=None):
        self.rows = rows
        self.promised = len(rows) if promised is None else promised

    def num_samples(self, num_rows):
        return self.promised

    def indices(self, num_rows, rng):
        return self.rows


def seen(loader):
    return np.concatenate([np.asarray(batch["x"]) for batch in loader]).tolist()


SOURCE = {"x": np.arange(6)}


@pytest.mark.parametrize("resident", [True, False])
def test_a_sampler_of_ones_own_chooses_the_rows(resident):
    rows = np.array([5, 0, 0, 3, 2, 1, 1], np.uint8)
    loader = DataLoader(SOURCE, 3, sampler=Fixed(rows), resident=resident)

    assert isinstance(loader._sampler, Sampler)
    assert seen(loader) == rows.tolist()
    assert len(loader) == 3


def test_the_samplers_that_shuffle_stands_for():
    shuffled = DataLoader(SOURCE, 3, sampler=ShuffledSampler())
    in_order = DataLoader(SOURCE, 3, sampler=SequentialSampler())

    assert seen(shuffled) == seen(DataLoader(SOURCE, 3, shuffle=True))
    assert seen(in_order) == list(range(6))


def test_rows_are_drawn_by_their_weights():
    weights = np.array([0.0, 1.0, 3.0, 0.0, 4.0, 0.0])
    sampler = WeightedSampler(weights, num_samples=20_000)
    loader = DataLoader(SOURCE, 1000, sampler=sampler)

    counts = np.bincount(seen(loader), minlength=6)

    # Four standard deviations of a count of 20,000 draws are 283 at most.
    np.testing.assert_allclose(counts, 20_000 * weights / 8, atol=283)
    assert counts[weights == 0].sum() == 0


def test_rows_drawn_without_replacement_come_once():
    sampler = WeightedSampler([1, 2, 3, 0, 4, 5], 5, replacement=False)

    rows = seen(DataLoader(SOURCE, 5, sampler=sampler))

    assert sorted(rows) == [0, 1, 2, 4, 5]


def test_as_many_rows_are_drawn_as_there_are():
    loader = DataLoader(SOURCE, 4, sampler=WeightedSampler(np.ones(6)))

    assert len(seen(loader)) == 6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[1.0]],), ValueError, r"one weight for each row, got shape \(1, 1\)"),
        (([1.0, -2.0],), ValueError, r"finite and not negative, got -2.0 for row 1"),
        (([np.nan],), ValueError, "finite and not negative, got nan for row 0"),
        (([0.0, 0.0],), ValueError, "`weights` must not all be 0"),
        (([1.0], 0), ValueError, "`num_samples` must be at least 1, got 0"),
        (([1.0], 1.5), TypeError, "`num_samples` must be an integer, got 1.5"),
    ],
)
def test_wrong_weights_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        WeightedSampler(*arguments)


def test_more_draws_than_rows_need_replacement():
    with pytest.raises(ValueError, match="number of positive weights, 1, got 2"):
        WeightedSampler([1.0, 0.0], 2, replacement=False)


def test_weights_must_fit_the_rows():
    with pytest.raises(ValueError, match="each of the 6 rows, got 2"):
        DataLoader(SOURCE, 3, sampler=WeightedSampler([1.0, 1.0]))


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        (
            Fixed(np.array([0, 6, -1, 2, 9, 7])),
            ValueError,
            r"must be from 0 to 5, got 4 out of range: 6 at 1, -1 at 2, 9 at 4$",
        ),
        (
            Fixed(np.array([0, 1]), 3),
            ValueError,
            r"must have shape \(3,\), as its `num_samples` promises, got \(2,\)",
        ),
        (Fixed(np.array([[0, 1]]), 1), ValueError, r"got \(1, 2\)"),
        (Fixed(np.array([0.0, 1.0])), TypeError, "must be integers, got dtype float64"),
        (Fixed(np.array([True])), TypeError, "a mask is turned into indices by"),
    ],
)
def test_wrong_indices_are_refused(sampler, error, message):
    loader = DataLoader(SOURCE, 1, sampler=sampler)

    with pytest.raises(error, match=message):
        loader.epoch(0)
