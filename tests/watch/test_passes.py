"""Loops written by hand, watched: what their steps say, and what their records do."""

import gc
import weakref

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


def test_logged_steps_hold_no_histograms_but_the_last():
    loop = small_loop(0).replace(observe=ff.Observe(grad_histogram="*", num_bins=8))
    state, outcome = loop.init(small_model()), None
    asides = []
    with ff.Monitor(display="none") as monitor:
        for batch in monitor.track([small_batch(16)] * 10):
            state, outcome = loop.step(state, batch)
            monitor.log(outcome)
            outcome.realize()
            asides.append(weakref.ref(outcome.aside))
        del outcome, state  # whose flight has those that nobody looked at
        gc.collect()
        held = [aside() is not None for aside in asides]

    assert sum(held) <= 2
