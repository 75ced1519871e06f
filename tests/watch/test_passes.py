"""Loops written by hand, watched: what their steps say, and what their records do."""

import numpy as np
from rank_problems import small_batch, small_loop, small_model

import fuelflow as ff


def test_histograms_of_a_loop_written_by_hand_are_in_its_records():
    loop = small_loop(0).replace(observe=ff.Observe(grad_histogram="*", num_bins=8))
    state = loop.init(small_model())
    with ff.Monitor(display="none") as monitor:
        (batch,) = monitor.track([small_batch(16)])
        _, outcome = loop.step(state, batch)
        monitor.log(outcome)

    (step,) = [record for record in monitor.records if record.kind == "step"]
    assert set(step["histograms"]) == set(outcome.histograms) != set()
    for name, found in outcome.histograms.items():
        assert step["histograms"][name]["counts"] == found.counts.tolist()
        np.testing.assert_allclose(step["histograms"][name]["low"], found.low)
