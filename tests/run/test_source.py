"""Whatever batches can be iterated: epoch by epoch, and timed."""

from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import assert_bitwise, host_copy
from rank_problems import mesh_of, small_batch, small_loop, small_model

import fuelflow as ff
from fuelflow.run.source import make_source
from fuelflow.run.timed import Timed

SIZE = 16


def make_trainer(data: Any, *, epochs: int = 2, **options: Any) -> ff.Trainer:
    return ff.Trainer(small_loop(0), small_model(), data, epochs=epochs, **options)


def batches() -> list[dict[str, Any]]:
    return [small_batch(seed=seed) for seed in range(6)]


def trained_by_hand(order: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    loop = small_loop(0)
    state, _ = loop.run(loop.init(small_model()), order)
    return host_copy(state.params)


class LikeTorch:
    """A loader with a length whose every iterator is a new one."""

    def __init__(self, given: list[Any]) -> None:
        self.given = given

    def __len__(self) -> int:
        return len(self.given)

    def __iter__(self) -> Any:
        return iter(self.given)


class WithoutLength:
    def __iter__(self) -> Any:
        yield from batches()


@pytest.mark.parametrize(
    "data", [batches(), tuple(batches()), LikeTorch(batches()), WithoutLength()]
)
def test_what_can_be_iterated_again_is_gone_through_once_an_epoch(data: Any):
    trained = make_trainer(data).fit()

    assert_bitwise(host_copy(trained.state.params), trained_by_hand(2 * batches()))
    assert [metrics.num_steps for metrics in trained.history] == [6, 6]


def test_an_iterator_goes_on_from_epoch_to_epoch():
    ongoing = iter(batches())
    trained = make_trainer(ongoing, epochs=3, steps_per_epoch=2).fit()

    assert_bitwise(host_copy(trained.state.params), trained_by_hand(batches()))
    assert [metrics.num_steps for metrics in trained.history] == [2, 2, 2]
    assert next(ongoing, None) is None


def test_an_iterator_that_ends_too_early_ends_the_run():
    trainer = make_trainer(iter(batches()), epochs=3, steps_per_epoch=4)

    with pytest.raises(ValueError, match="there must be at least one batch"):
        trainer.fit()
    assert [metrics.num_steps for metrics in trainer.history] == [4, 2]


def test_steps_per_epoch_cut_what_does_not_end_by_itself():
    trained = make_trainer(LikeTorch(batches()), steps_per_epoch=4).fit()

    assert_bitwise(host_copy(trained.state.params), trained_by_hand(2 * batches()[:4]))


def test_a_generator_serves_one_epoch_and_is_refused_for_more():
    trained = make_trainer((batch for batch in batches()), epochs=1).fit()

    assert_bitwise(host_copy(trained.state.params), trained_by_hand(batches()))
    with pytest.raises(
        ValueError,
        match="`data` must be iterable more than once for 2 epochs, got an iterator, a "
        "generator: give the iterable it came from, or say with `steps_per_epoch`",
    ):
        make_trainer(batch for batch in batches())
    with pytest.raises(ValueError, match="`eval_data` must be iterable more than once"):
        make_trainer(batches(), eval_data=iter(batches()))


@pytest.mark.parametrize("is_over", [False, True])
def test_an_iterator_of_no_position_is_told_of_when_another_process_goes_on(
    is_over: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def make(epochs: int) -> ff.Trainer:
        ongoing = (batch for batch in 4 * batches())
        checkpointer = ff.Checkpointer(tmp_path)
        options: Any = {"checkpointer": checkpointer, "resume": True}
        return make_trainer(ongoing, epochs=epochs, steps_per_epoch=4, **options)

    make(2).fit()
    make(2 if is_over else 3).fit()

    told = [each.message for each in caplog.records if "goes on with" in each.message]
    assert len(told) == (not is_over)
    assert all("may have been used before" in text for text in told)
    assert all("a generator, cannot be set" in text for text in told)


def grain_data() -> Any:
    rows = small_batch(6 * SIZE)
    source = [{name: rows[name][row] for name in rows} for row in range(6 * SIZE)]
    return grain.MapDataset.source(source).seed(3).shuffle().batch(SIZE)


def test_a_generator_that_was_left_half_way_is_not_taken_for_a_whole_epoch():
    def given():
        for number, batch in enumerate(batches()):
            if number == 2:
                trainer.stop()
            yield batch

    trainer = make_trainer(given(), epochs=1, steps_per_call=1)
    stopped = trainer.fit()

    assert stopped.stopped_by == "stop"
    with pytest.raises(ValueError, match="an iterator, which .* gone through in part"):
        trainer.fit()
    assert trainer.state.step == stopped.state.step < 6


def test_a_grain_data_set_is_as_good_as_a_list():
    order = [grain_data()[index] for index in range(6)]

    for data in (grain_data().to_iter_dataset(), LikeTorch(order)):
        trained = make_trainer(data).fit()
        assert_bitwise(host_copy(trained.state.params), trained_by_hand(2 * order))


def test_a_grain_iterator_goes_on_from_epoch_to_epoch():
    order = [grain_data()[index] for index in range(6)]
    ongoing = iter(grain_data().to_iter_dataset())
    assert hasattr(ongoing, "get_state")
    trained = make_trainer(ongoing, epochs=3, steps_per_epoch=2).fit()

    assert_bitwise(host_copy(trained.state.params), trained_by_hand(order))


def test_a_loader_goes_to_the_mesh_of_its_loop():
    loader = ff.DataLoader(small_batch(40), SIZE)
    source = make_source(
        "data", loader, mesh=mesh_of(8), steps_per_epoch=None, epochs=2
    )
    batch = next(source.epoch(0))

    assert len(batch.rows().fields["x"].devices()) == 8
    assert len(next(loader.epoch(0)).rows().fields["x"].devices()) == 1
    assert source.num_steps == 3


@pytest.mark.parametrize(
    ("data", "num_steps", "steps_per_epoch"),
    [
        (batches(), 6, None),
        (batches(), 4, 4),
        (WithoutLength(), None, None),
        (WithoutLength(), 4, 4),
        (iter(batches()), 3, 3),
    ],
)
def test_the_steps_of_an_epoch_are_told_if_they_are_known(
    data: Any, num_steps: int | None, steps_per_epoch: int | None
):
    source = make_source(
        "data", data, mesh=None, steps_per_epoch=steps_per_epoch, epochs=2
    )

    assert source.num_steps == num_steps
    assert source.facts() == {"batches of an epoch": str(num_steps)}


def test_what_are_no_batches_is_refused():
    for wrong in (small_batch(), 3, ff.Batch(small_batch())):
        with pytest.raises(
            TypeError,
            match="`data` must be a DataLoader or an iterable of batches, got",
        ):
            make_trainer(wrong)
    with pytest.raises(TypeError, match="`eval_data` must be a DataLoader or an"):
        make_trainer(batches(), eval_data=small_batch())
    with pytest.raises(TypeError, match="ndarray, which looks like one batch"):
        make_trainer(small_batch()["x"]).fit()
    loader = ff.DataLoader(small_batch(40), SIZE)
    with pytest.raises(ValueError, match="`steps_per_epoch` must be left out with a"):
        make_trainer(loader, steps_per_epoch=2)


# Time.


def test_compiling_is_no_waiting():
    def compiling() -> Any:
        for number in range(3):
            yield jax.jit(lambda x, n=number: jnp.sin(x) + n)(jnp.ones(3))

    timed = Timed(compiling())
    count = sum(1 for _ in timed)

    assert count == 3
    assert timed.secs_compiling > 0
    assert 0 < timed.secs_waited < timed.secs_compiling


def test_closing_ends_what_gives_the_batches():
    is_closed = []

    def given() -> Any:
        try:
            yield from batches()
        finally:
            is_closed.append(True)

    timed = Timed(given())
    next(timed)
    timed.close()

    assert is_closed == [True]
    assert timed.stretch(2) is None
    Timed(iter(batches())).close()
