"""The running sums of a run that goes on with another number of ranks."""

import numpy as np

from fuelflow.step.tally import Tally


def resized(tally: Tally, num_ranks: int) -> Tally:
    """A tally of NumPy arrays for another number of ranks, with the same totals.

    With as many ranks as before it stays as it is. Else nobody can say any more which
    rank did what, so each is given the same part of every sum, and of the rows as
    nearly as they can be dealt out. Totals are kept to the precision of a tally.
    """
    if tally.num_ranks == num_ranks:
        return tally
    exact = np.float64(tally.sums) - np.float64(tally.errors)
    part = exact.sum(axis=0, keepdims=True) / num_ranks
    part = np.repeat(part, num_ranks, axis=0)
    sums = part.astype(np.float32)
    errors = (np.float64(sums) - part).astype(np.float32)
    each, more = divmod(int(np.sum(tally.num_rows)), num_ranks)
    num_rows = np.full(num_ranks, each, np.int32)
    num_rows[:more] += 1
    return Tally.of(sums, errors, num_rows)
