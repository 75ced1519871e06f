"""What a loop observes of its parameters, as it comes to be in the records of a run."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from rank_problems import small_batch, small_loop, small_model

import fuelflow as ff
from fuelflow.watch import hub

SIZE, NUM_ROWS, EPOCHS, STEPS = 16, 80, 4, 5


def trained(
    monitor: ff.Monitor | None, every_steps: int, **options: Any
) -> ff.TrainedState:
    loop = small_loop(0).replace(
        observe=ff.Observe(
            grad_norm="*", param_histogram="*", every_steps=every_steps, num_bins=6
        )
    )
    loader = ff.DataLoader(small_batch(NUM_ROWS), SIZE, seed=5)
    trainer = ff.Trainer(
        loop, small_model(), loader, epochs=EPOCHS, monitor=monitor, **options
    )
    return trainer.fit()


def observed(monitor: ff.Monitor) -> list[Mapping[str, Any]]:
    return [r for r in monitor.records if "histograms" in r]


@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_the_histograms_of_the_last_step_are_those_of_the_trained_parameters(
    steps_per_call,
):
    with ff.Monitor(display="none") as monitor:
        end = trained(
            monitor, every_steps=EPOCHS * STEPS, steps_per_call=steps_per_call
        )

    (record,) = observed(monitor)
    assert record["step"] == EPOCHS * STEPS
    assert list(record["histograms"]) == [
        f"param_histogram.{name}" for name in end.state.params
    ]
    for name, param in end.state.params.items():
        counts, edges = np.histogram(np.asarray(param, np.float64), bins=6)
        seen = record["histograms"][f"param_histogram.{name}"]
        assert (seen["low"], seen["high"]) == pytest.approx((edges[0], edges[-1]))
        assert sum(seen["counts"]) == sum(counts) == param.size
    assert {f"grad_norm.{name}" for name in end.state.params} <= set(record["metrics"])


def test_an_observed_step_is_seen_though_others_came_after_it(monkeypatch):
    monkeypatch.setattr(hub, "TICK_SECS", 60)  # it looks once, when all is over
    with ff.Monitor(display="none") as monitor:
        trained(monitor, every_steps=EPOCHS * STEPS - 3, steps_per_call=1)

    (record,) = observed(monitor)
    last = [r for r in monitor.records if r.kind == "step"][-1]
    assert record["step"] == EPOCHS * STEPS - 3
    # Of a step that was not observed nothing is said.
    assert last["step"] == EPOCHS * STEPS
    assert not [name for name in last["metrics"] if name.startswith("grad_norm.")]


def test_where_nothing_is_observed_nothing_is_said():
    with ff.Monitor(display="none") as monitor:
        trained(monitor, every_steps=1000)

    assert observed(monitor) == []
    steps = [r for r in monitor.records if r.kind == "step"]
    assert steps
    assert not [n for r in steps for n in r["metrics"] if n.startswith("grad_norm.")]
