"""How many steps go into a dispatch: tried out, and kept if it pays."""

from typing import Any

import pytest
from metric_records import make_metrics, make_record
from problems import assert_bitwise, host_copy
from rank_problems import small_batch, small_loop, small_model

import fuelflow as ff
from fuelflow.run.tempo import FUSED, Tempo


def epoch_of(step_ms: float, num_steps: int = 100) -> ff.EpochMetrics:
    record = make_record(epoch_ms=step_ms * num_steps)
    return make_metrics([record], num_steps=num_steps)


def choices(tempo: Tempo, *step_ms: float) -> list[int]:
    """The steps per call of one epoch after another."""
    found = [tempo.steps_per_call]
    for each in step_ms:
        tempo.learn(epoch_of(each))
        found.append(tempo.steps_per_call)
    return found


@pytest.mark.parametrize(
    ("step_ms", "expected"),
    [
        ((0.2, 0.1, 0.1, 0.5), [1, FUSED, FUSED, FUSED, FUSED]),  # it pays
        ((0.2, 0.19, 0.1, 0.1), [1, FUSED, 1, 1, 1]),  # too little
        ((0.2, 6.0, 0.2, 0.2), [1, FUSED, 1, 1, 1]),  # as convolutions on a CPU
        ((3.0, 0.1, 0.1, 0.1), [1, 1, 1, 1, 1]),  # not tried, so not seen
    ],
)
def test_several_steps_are_tried_once_where_steps_are_short(
    step_ms: Any, expected: list[int]
):
    assert choices(Tempo(None, 100, 10), *step_ms) == expected
    assert choices(Tempo(None, None, 10), *step_ms) == expected


def test_a_given_number_stays():
    assert choices(Tempo(7, 100, 10), 0.2, 0.1) == [7, 7, 7]
    assert choices(Tempo(1, 100, 10), 0.2, 0.1) == [1, 1, 1]


@pytest.mark.parametrize(
    ("num_steps", "num_epochs"), [(4 * FUSED - 1, 10), (100, 2), (100, 1)]
)
def test_nothing_is_tried_where_there_is_little_to_win(num_steps: int, num_epochs: int):
    assert choices(Tempo(None, num_steps, num_epochs), 0.2, 0.1) == [1, 1, 1]


def test_an_epoch_without_steps_teaches_nothing():
    tempo = Tempo(None, 100, 10)
    tempo.learn(epoch_of(0.0, num_steps=0))

    assert tempo.steps_per_call == 1
    assert choices(tempo, 0.2)[-1] == FUSED


def test_a_trainer_that_tries_it_out_trains_the_same_parameters():
    rows = small_batch(16 * 80)
    loop = small_loop(0)
    loader = ff.DataLoader(rows, 16, resident=True)
    trained = ff.Trainer(loop, small_model(), loader, epochs=3).fit()
    state = loop.init(small_model())
    for epoch in range(3):
        state, _ = loop.run(state, loader.epoch(epoch))

    # Gathered inside a scan, XLA may fuse rows otherwise.
    expected = host_copy(state.params)
    for name, values in host_copy(trained.state.params).items():
        assert values == pytest.approx(expected[name], rel=1e-5)
    assert [metrics.num_steps for metrics in trained.history] == [80] * 3


def test_several_steps_per_call_can_be_asked_for():
    loop = small_loop(0).replace()
    loader = ff.DataLoader(small_batch(16 * 8), 16, resident=True)
    options: dict[str, Any] = {"epochs": 2, "steps_per_call": 4}
    trained = ff.Trainer(loop, small_model(), loader, **options).fit()
    state = loop.init(small_model())
    for epoch in range(2):
        state, _ = loop.run(state, loader.epoch(epoch), steps_per_call=4)

    assert loop.compiles[0].program == "run on resident data, with sums"
    assert_bitwise(host_copy(trained.state.params), host_copy(state.params))
