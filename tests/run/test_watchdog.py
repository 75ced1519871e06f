"""A run that hangs says where; one that does not, nothing."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from rank_problems import least_squares, small_batch, small_loop, small_model

import fuelflow as ff

NUM_BATCHES = 4
HANG_SECS = 0.5
DEADLINE_SECS = 60


class Alarm(logging.Handler):
    """Lets go of what hangs as soon as the watchdog has said so."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.is_up = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "has not got on" in record.getMessage():
            self.texts.append(record.getMessage())
            self.is_up.set()

    def hang(self) -> None:
        """Waits for the watchdog, and after that for what must not be told again."""
        assert self.is_up.wait(DEADLINE_SECS)
        threading.Event().wait(2 * HANG_SECS)
        self.is_up.clear()


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = Alarm()
    logger = logging.getLogger("fuelflow")
    logger.addHandler(alarm)
    yield alarm
    logger.removeHandler(alarm)


class Batches:
    """Batches, before some of which something is done."""

    def __init__(self, at: dict[int, Any]) -> None:
        self._at = at
        self._count = 0

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self) -> Any:
        for seed in range(NUM_BATCHES):
            self._at.get(self._count, lambda: None)()
            self._count += 1
            yield small_batch(seed=seed)


def fit(data: Any, loop: ff.TrainingLoop | None = None, **options: Any) -> Any:
    return ff.Trainer(
        small_loop(0) if loop is None else loop,
        small_model(),
        data,
        **{"epochs": 1, "hang_after": HANG_SECS, "steps_per_call": 1, **options},
    ).fit()


def test_waiting_for_data_is_told_once_with_every_stack(alarm: Alarm):
    trained = fit(Batches({2: alarm.hang}))

    assert int(trained.state.step) == NUM_BATCHES
    (text,) = alarm.texts
    assert "the last step done is 2, and the epoch is 0" in text
    assert "it is waiting for data. It goes on waiting" in text
    assert "thread 'MainThread', most recent call last:" in text
    assert "thread 'fuelflow trainer', most recent call last:" in text
    assert "in hang" in text
    assert "fuelflow watchdog" not in text


def test_another_hang_is_told_too(alarm: Alarm):
    fit(Batches({1: alarm.hang, 3: alarm.hang}))

    assert ["step done is 1" in text for text in alarm.texts] == [True, False]
    assert "step done is 3" in alarm.texts[1]


def test_an_evaluation_that_hangs_is_told(alarm: Alarm):
    fit(Batches({}), eval_data=Batches({1: alarm.hang}))

    (text,) = alarm.texts
    assert "it is evaluating, waiting for data" in text
    assert f"the last step done is {NUM_BATCHES}, and the epoch is 0" in text


def test_a_callback_that_hangs_is_told(alarm: Alarm):
    fit(Batches({}), metrics_fn=lambda metrics: alarm.hang())

    (text,) = alarm.texts
    assert "it is in a callback" in text


def test_a_step_that_hangs_is_told(alarm: Alarm):
    def loss_fn(params: Any, batch: Any) -> Any:
        jax.debug.callback(lambda count: count == 2 and alarm.hang(), batch["count"][0])
        return least_squares(params, batch)

    batches = [
        {**small_batch(), "count": jax.numpy.full(16, count)} for count in range(6)
    ]
    fit(batches, small_loop(0).replace(loss_fn=loss_fn, max_in_flight=2))

    text, *_ = alarm.texts
    assert "the last step done is 2, and the epoch is 0" in text
    # How far a CPU lets the host run ahead differs from one jax to the next.
    assert "a step. It goes on" in text or "a step to be done. It goes on" in text


def test_a_save_that_hangs_is_told(alarm: Alarm, tmp_path: Any):
    checkpointer = ff.Checkpointer(tmp_path, every_steps=1)
    writer: Any = checkpointer._writer
    write, held = writer.write, iter([alarm.hang])

    def slow(*arguments: Any) -> None:
        next(held, lambda: None)()
        write(*arguments)

    writer.write = slow
    fit(Batches({}), checkpointer=checkpointer)

    text, *_ = alarm.texts
    assert "it is saving, waiting for a save" in text
    assert "thread 'fuelflow checkpointer of" in text


def test_compiling_is_no_hang(alarm: Alarm):
    traced = []

    def loss_fn(params: Any, batch: Any) -> Any:
        if not traced:
            threading.Event().wait(3 * HANG_SECS)
        traced.append(True)
        return least_squares(params, batch)

    fit(Batches({}), small_loop(0).replace(loss_fn=loss_fn))

    assert traced
    assert alarm.texts == []


def test_a_run_that_gets_on_is_let_alone(alarm: Alarm):
    def wait() -> None:
        threading.Event().wait(HANG_SECS)

    fit(Batches(dict.fromkeys(range(NUM_BATCHES), wait)), hang_after=3 * HANG_SECS)

    assert alarm.texts == []


def test_without_a_time_nothing_watches():
    names = []

    def look() -> None:
        names.extend(thread.name for thread in threading.enumerate())

    fit(Batches({0: look}), hang_after=None)
    assert "fuelflow trainer" in names
    assert "fuelflow watchdog" not in names

    fit(Batches({0: look}))
    assert "fuelflow watchdog" in names


def test_a_watch_ends_with_its_run():
    fit(Batches({}))

    assert "fuelflow watchdog" not in [t.name for t in threading.enumerate()]


@pytest.mark.parametrize("secs", [0, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused(secs: float):
    with pytest.raises(ValueError, match="`hang_after` must be finite and more than 0"):
        fit(Batches({}), hang_after=secs)
