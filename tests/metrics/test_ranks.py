"""Records of ranks are put together as if all rows had been on one."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metric_records import make_metrics, make_record

from fuelflow.metrics.ranks import reduce_ranks

VALUES = st.floats(-1e6, 1e6)
ROWS = st.lists(
    st.tuples(VALUES, st.sampled_from([0.0, 0.25, 1.0, 3.0])), min_size=1, max_size=40
)


def record_of(device, rows):
    """The record of a rank that had some rows, each a value and its weight."""
    sums = (sum(value * weight for value, weight in rows), sum(w for _, w in rows))
    return make_record(device, samples=len(rows), sums={"loss": sums, "error": sums})


def split(rows, cuts):
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    return [rows[start:stop] for start, stop in pairwise(edges)]


def test_losses_count_by_their_rows():
    metrics = make_metrics(
        [
            make_record(0, samples=60, sums={"loss": (0.5 * 60, 60)}),
            make_record(1, samples=40, sums={"loss": (0.7 * 40, 40)}),
        ]
    )

    assert metrics.avg_loss == pytest.approx(0.58, rel=1e-15)
    assert list(metrics.per_rank_loss) == pytest.approx([0.5, 0.7], rel=1e-15)
    assert list(metrics.per_rank_batch_share) == [0.6, 0.4]


def test_throughput_is_in_samples_per_millisecond_until_the_last_step():
    record = make_record(samples=1920, epoch_ms=1300, share_complete_ms=1000)

    assert list(make_metrics([record]).per_rank_throughput) == [1.92]


@given(rows=ROWS, cuts=st.lists(st.integers(0, 40), max_size=7))
def test_means_are_those_of_all_rows_however_they_were_divided(rows, cuts):
    parts = split(rows, cuts)
    metrics = make_metrics([record_of(rank, part) for rank, part in enumerate(parts)])
    values, weights = np.array(rows).T

    if weights.sum() == 0:
        assert math.isnan(metrics.avg_loss)
        assert metrics.scalars == {}
        return
    expected = np.average(values, weights=weights)
    # Sums of numbers up to 1e6 in float64, in another order.
    assert metrics.avg_loss == pytest.approx(expected, rel=1e-12, abs=1e-8)
    assert metrics.scalars == {"error": metrics.avg_loss}
    for part, loss in zip(parts, metrics.per_rank_loss, strict=True):
        if sum(weight for _, weight in part) == 0:
            assert loss is None
        else:
            own = np.average([v for v, _ in part], weights=[w for _, w in part])
            assert loss == pytest.approx(own, rel=1e-12, abs=1e-8)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=9))
def test_shares_sum_to_one_if_there_were_samples(counts):
    metrics = make_metrics(
        [make_record(i, samples=n, sums={}) for i, n in enumerate(counts)]
    )

    expected = 1.0 if any(counts) else 0.0
    assert sum(metrics.per_rank_batch_share) == pytest.approx(expected, abs=1e-12)
    assert metrics.num_samples == sum(counts)


def test_a_rank_without_rows_has_no_loss_and_no_throughput():
    busy, idle = make_record(0), make_record(1, samples=0, sums={"loss": (0.0, 0.0)})
    metrics = make_metrics([busy, idle])

    assert list(metrics.per_rank_loss) == [0.5, None]
    assert list(metrics.per_rank_throughput) == [0.1, 0.0]
    assert list(metrics.per_rank_batch_share) == [1.0, 0.0]
    assert metrics.avg_loss == 0.5


def test_where_nothing_ran_the_loss_is_no_number():
    record = make_record(samples=0, sums={}, epoch_ms=0, compute_only_ms=0)
    metrics = make_metrics([record], num_steps=0)

    assert math.isnan(metrics.avg_loss)
    assert list(metrics.per_rank_throughput) == [0.0]
    assert str(metrics) == "epoch 0: no step; 0 samples/s, 0 s"


def test_a_metric_is_averaged_over_the_ranks_that_have_it():
    sums = {"loss": (50.0, 100.0), "top5": (8.0, 10.0), "unseen": (0.0, 0.0)}
    metrics = make_metrics([make_record(0), make_record(1, sums=sums)])

    assert metrics.scalars == {"top5": 0.8}
    assert list(metrics.per_rank) == [{}, {"top5": 0.8}]


def test_a_loss_that_is_no_number_stays_one():
    sums = {"loss": (math.nan, 100.0)}
    metrics = make_metrics([make_record(0), make_record(1, sums=sums)])

    assert math.isnan(metrics.avg_loss)
    assert list(metrics.per_rank_loss) == pytest.approx([0.5, math.nan], nan_ok=True)


def test_small_sums_are_not_lost_beside_large_ones():
    sums = [{"loss": (float(total), 1.0)} for total in (2**30, 1)]
    metrics = make_metrics([make_record(i, sums=each) for i, each in enumerate(sums)])

    assert metrics.avg_loss == (2**30 + 1) / 2  # float32 has no 2**30 + 1


def test_times_of_the_whole_epoch_are_the_longest():
    times = {"epoch_ms": 900, "compile_ms": 50, "eval_ms": 7, "callback_ms": 3}
    metrics = make_metrics([make_record(0), make_record(1, **times)])

    assert metrics.epoch_ms == 1000
    assert (metrics.compile_ms, metrics.eval_ms, metrics.callback_ms) == (50, 7, 3)


def test_numbers_of_numpy_become_pythons():
    record = make_record(
        device_index=np.int64(3),
        samples=np.int32(4),
        sums={"loss": (np.float32(0.5), np.float64(2))},
        epoch_ms=np.float32(7),
    )
    metrics = make_metrics([record])

    assert type(metrics.avg_loss) is float
    assert type(metrics.epoch_ms) is float
    assert type(metrics.per_rank_samples[0]) is int
    assert type(metrics.device_indices[0]) is int


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"samples": -1}, ValueError, "`samples` must be at least 0, got -1"),
        ({"samples": 1.5}, TypeError, "`samples` must be an integer, got 1.5"),
        ({"samples": True}, TypeError, "`samples` must be an integer, got True"),
        ({"device_index": -2}, ValueError, "`device_index` must be at least 0, got -2"),
        ({"epoch_ms": -1.0}, ValueError, "`epoch_ms` must be finite and at least 0"),
        ({"epoch_ms": "1"}, TypeError, "`epoch_ms` must be a number, got '1'"),
        (
            {"data_starve_ms": math.nan},
            ValueError,
            "`data_starve_ms` must be finite and at least 0, got nan",
        ),
        (
            {"sums": {"loss": (1.0, -2.0)}},
            ValueError,
            "`weight of loss` must be finite and at least 0, got -2.0",
        ),
        (
            {"sums": {"loss": (1.0, math.inf)}},
            ValueError,
            "`weight of loss` must be finite and at least 0, got inf",
        ),
        (
            {"sums": {"loss": 0.5}},
            TypeError,
            "a weighted sum and its weight for each name, got 0.5 for `loss`",
        ),
        (
            {"samples": 0},
            ValueError,
            "no weight on device 0, which had no samples, got 100.0 for `loss`",
        ),
    ],
)
def test_a_record_that_cannot_be_is_refused(fields, kind, message):
    with pytest.raises(kind, match=message):
        make_record(**fields)


def test_no_record_and_two_of_one_device_are_refused():
    with pytest.raises(ValueError, match="one for each rank, got none"):
        reduce_ranks([], epoch=0, num_steps=0, global_step=0)
    with pytest.raises(ValueError, match="another device, got two of device 4"):
        make_metrics([make_record(4), make_record(1), make_record(4, process=1)])
