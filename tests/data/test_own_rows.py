"""What one of several processes makes of a batch: its own rows, and no other's."""

from functools import partial

import numpy as np
import pytest

from fuelflow.data.placement import OverRanks
from fuelflow.data.seeds import batch_rng
from fuelflow.data.streaming import Packing
from fuelflow.data.transforms import HostTransform
from fuelflow.devices.ranks import mesh

HELD = 8


class Half(OverRanks):
    """A placement as the first or second of two processes has it."""

    first: int

    def __init__(self, first):
        super().__init__(mesh())
        object.__setattr__(self, "first", first)

    def own_rows(self, held):
        assert held == HELD
        return np.arange(self.first, self.first + HELD // 2)


def make_packing(first, transform=None):
    return Packing(
        transform=None if transform is None else HostTransform.of(transform),
        make_rng=partial(batch_rng, 0, 0),
        held=HELD,
        fills_here=True,
        is_numbered=False,
        placement=Half(first),
    )


def packed(size, transform=None):
    """The rows of both processes, one after the other."""
    rows = {"x": np.arange(10.0, 10 + size)}
    halves = []
    for first in (0, HELD // 2):
        packing = make_packing(first, transform)
        own = {name: values[packing.own_rows(size)] for name, values in rows.items()}
        halves.append(packing.pack(own, size, 3).fields["x"])
    return halves


@pytest.mark.parametrize("size", range(1, HELD + 1))
def test_processes_together_make_the_batch_that_one_makes(size):
    expected = np.arange(10.0, 10 + HELD)
    expected[size:] = expected[size - 1]  # the last row fills it up

    assert np.concatenate(packed(size)).tolist() == expected.tolist()


def test_processes_transform_their_own_rows_with_random_numbers_of_their_own():
    seen = []

    def transform(fields, rng):
        seen.append(len(fields["x"]))
        return {"x": fields["x"] * 0 + rng.random(len(fields["x"]))}

    first, second = packed(6, transform)

    assert seen == [4, 2]  # true rows alone
    assert not set(first) & set(second)
    again = packed(6, transform)
    assert [half.tolist() for half in again] == [first.tolist(), second.tolist()]
