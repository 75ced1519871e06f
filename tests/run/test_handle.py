"""The handle of a run: its news in order, its errors to everybody, its end."""

import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from problems import assert_bitwise, host_copy
from rank_problems import small_batch, small_loop, small_model

import fuelflow as ff

SECS = 30  # to give up after; nothing here comes near
SIZE, NUM_ROWS, EPOCHS = 16, 67, 3


def make_loader(**options: Any) -> ff.DataLoader:
    return ff.DataLoader(small_batch(NUM_ROWS), SIZE, **options)


def make_trainer(
    data: Any = None, *, epochs: int = EPOCHS, num_ranks: int = 0, **options: Any
) -> ff.Trainer:
    data = make_loader() if data is None else data
    return ff.Trainer(
        small_loop(num_ranks), small_model(), data, epochs=epochs, **options
    )


def arrays_of(state: ff.TrainState) -> dict[str, np.ndarray]:
    return host_copy((state.params, state.opt_state, state.step, state.key))


def untimed(metrics: ff.EpochMetrics) -> dict[str, Any]:
    return {
        name: value
        for name, value in metrics.to_dict().items()
        if not name.endswith("_ms") and name != "per_rank_throughput"
    }


class Gated:
    """Batches of which the third of each epoch comes when it is let through."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.gate = threading.Event()
        self.is_asked = threading.Event()
        self.error = error

    def __iter__(self) -> Any:
        for index in range(4):
            if index == 2:
                self.is_asked.set()
                assert self.gate.wait(SECS)
                if self.error is not None:
                    raise self.error
            yield small_batch(seed=index)


@pytest.fixture(autouse=True)
def no_threads_afterwards():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if "fuelflow" in thread.name:
            thread.join(SECS)
            assert not thread.is_alive(), thread.name


def test_the_callback_is_told_before_the_queue_in_order_and_of_the_same():
    told: list[ff.EpochMetrics] = []
    handle = make_trainer(metrics_fn=told.append).run()
    for count, metrics in enumerate(handle, start=1):
        # It was told of this one already, however fast it went on.
        assert told[count - 1] is metrics
    trained = handle.join()

    assert [metrics.epoch for metrics in told] == [0, 1, 2]
    assert all(a is b for a, b in zip(told, trained.history, strict=True))


def test_each_epoch_is_given_once_by_whoever_asks_first():
    trainer = make_trainer(epochs=4)
    handle = trainer.run()
    first = handle.next_metrics(SECS)
    handle.join()
    second = next(iter(handle))
    rest = handle.poll_metrics()

    assert first is not None
    assert [m.epoch for m in (first, second, *rest)] == [0, 1, 2, 3]
    assert handle.poll_metrics() == []
    assert handle.next_metrics() is None
    assert list(handle) == []
    assert len(handle.join().history) == 4


def test_waiting_ends_after_the_timeout_and_the_run_goes_on():
    data = Gated()
    handle = make_trainer(data).run()
    assert data.is_asked.wait(SECS)

    assert handle.poll_metrics() == []
    with pytest.raises(TimeoutError, match="nothing came within 0.01 s"):
        handle.next_metrics(timeout=0.01)
    with pytest.raises(TimeoutError, match="nothing came within 0.01 s"):
        handle.join(timeout=0.01)
    data.gate.set()
    assert len(handle.join(SECS).history) == EPOCHS


def test_a_trainer_runs_once_at_a_time():
    data = Gated()
    trainer = make_trainer(data, epochs=1)
    handle = trainer.run()
    assert data.is_asked.wait(SECS)

    with pytest.raises(RuntimeError, match="running already: wait .* `handle.stop"):
        trainer.run()
    data.gate.set()
    handle.join()


class SlowToGo:
    """What keeps the thread that has it for a moment longer."""

    def __del__(self) -> None:
        time.sleep(0.05)


def test_a_trainer_can_be_run_as_soon_as_it_was_joined():
    own = threading.local()

    def epoch_fn(epoch: int, state: ff.TrainState) -> None:
        own.slow = SlowToGo()

    trainer = make_trainer(
        epochs=2, epoch_fn=epoch_fn, metrics_fn=lambda _: trainer.stop()
    )

    assert len(trainer.run().join().history) == 1
    assert len(trainer.run().join().history) == 2


# Errors.


class BadRow:
    """Rows of which one fails in the second epoch."""

    def __init__(self) -> None:
        self.rows = small_batch(NUM_ROWS)
        self.num_read = 0

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        if self.num_read > NUM_ROWS + 40:
            raise OSError("row is gone")
        return {name: values[index] for name, values in self.rows.items()}


def _bad_transform() -> Any:
    num_calls = 0

    def transform(fields: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 7:
            raise OSError("row is gone")
        return fields

    return transform


class BadBatches:
    """Batches that end with an error in the second epoch."""

    num_passes = 0

    def __iter__(self) -> Any:
        self.num_passes += 1
        yield small_batch()
        yield small_batch()
        if self.num_passes == 2:
            raise OSError("row is gone")


FAILING = {
    "a row": lambda: ff.DataLoader(BadRow(), SIZE, prefetch=1),
    "a transform": lambda: make_loader(transform=_bad_transform(), prefetch=1),
    "a transform, at once": lambda: make_loader(transform=_bad_transform(), prefetch=0),
    "batches": BadBatches,
}


@pytest.mark.parametrize("what", FAILING)
def test_failing_data_reaches_everybody_after_the_epochs_before(what: str):
    trainer = make_trainer(FAILING[what]())
    handle = trainer.run()
    with pytest.raises(OSError, match="row is gone") as joined:
        handle.join(SECS)

    given = []
    with pytest.raises(OSError, match="row is gone") as iterated:
        given.extend(handle)
    assert [metrics.epoch for metrics in given] == [0]
    with pytest.raises(OSError, match="row is gone") as asked:
        handle.next_metrics()
    assert joined.value is iterated.value is asked.value
    assert [metrics.epoch for metrics in trainer.history] == [0]
    _, outcome = small_loop(0).step(trainer.state, small_batch())
    assert np.isfinite(outcome.loss)


def test_an_error_comes_after_the_metrics_of_the_epochs_before():
    handle = make_trainer(BadBatches()).run()
    first = handle.next_metrics(SECS)

    assert first is not None
    assert first.epoch == 0
    with pytest.raises(OSError, match="row is gone"):
        handle.next_metrics(SECS)


def test_an_error_wakes_every_reader():
    data = Gated(OSError("row is gone"))
    handle = make_trainer(data, epochs=1).run()
    assert data.is_asked.wait(SECS)
    errors: list[BaseException] = []

    def read(wait: Any) -> None:
        try:
            wait(SECS)
        except OSError as error:
            errors.append(error)

    readers = [
        threading.Thread(target=read, args=(wait,), name="fuelflow test reader")
        for wait in (handle.join, handle.next_metrics, handle.next_metrics)
    ]
    for reader in readers:
        reader.start()
    data.gate.set()
    for reader in readers:
        reader.join(SECS)

    assert errors == [data.error] * 3


# Stopping.


@pytest.mark.parametrize("num_ranks", [0, 8])
def test_a_run_stopped_by_a_callback_goes_on_as_if_it_had_not_been(num_ranks: int):
    expected = make_trainer(num_ranks=num_ranks).fit()
    trainer = make_trainer(num_ranks=num_ranks, metrics_fn=lambda _: trainer.stop())
    counts = [len(trainer.fit().history) for _ in range(EPOCHS)]
    trained = trainer.fit()  # which finds nothing left to do

    assert counts == [1, 2, 3]
    assert_bitwise(arrays_of(trained.state), arrays_of(expected.state))
    for one, other in zip(trained.history, expected.history, strict=True):
        assert untimed(one) == untimed(other)


def test_stop_from_another_thread_ends_after_the_step_with_a_usable_state():
    data = Gated()
    trainer = make_trainer(data)
    handle = trainer.run()
    assert data.is_asked.wait(SECS)
    handle.stop()
    data.gate.set()
    trained = handle.join(SECS)

    assert len(trained.history) == 0
    assert int(trained.state.step) == 3
    assert trained.state.sums is None
    _, outcome = small_loop(0).step(trained.state, small_batch())
    assert outcome.global_step == 4


class StoppedInside:
    """Batches that stop their trainer at the third of the second epoch, once."""

    trainer: ff.Trainer
    num_given = 0

    def __init__(self) -> None:
        self.batches = [small_batch(seed=seed) for seed in range(5)]

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        for batch in self.batches:
            self.note()
            yield batch

    def note(self, fields: Any = None) -> Any:
        self.num_given += 1
        if self.num_given == 5 + 3:
            self.trainer.stop()
        return fields


@pytest.mark.parametrize("is_loader", [True, False])
def test_a_run_stopped_inside_an_epoch_goes_on_as_if_it_had_not_been(is_loader: bool):
    def make_data(stopped: StoppedInside) -> Any:
        return make_loader(transform=stopped.note, prefetch=0) if is_loader else stopped

    stopped, never = StoppedInside(), StoppedInside()
    trainer = stopped.trainer = make_trainer(make_data(stopped))
    never.trainer = make_trainer()
    expected = make_trainer(make_data(never)).fit()
    first = trainer.fit()
    assert (len(first.history), int(first.state.step)) == (1, 5 + 3)
    trained = trainer.fit()

    assert_bitwise(arrays_of(trained.state), arrays_of(expected.state))
    for one, other in zip(trained.history, expected.history, strict=True):
        assert untimed(one) == untimed(other)


def test_an_interrupted_fit_leaves_a_usable_state_and_can_go_on():
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(metrics: ff.EpochMetrics) -> None:
        if metrics.epoch == 0:
            signal.pthread_kill(main, signal.SIGINT)

    trainer = make_trainer(epochs=200, metrics_fn=interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()

    assert 1 <= len(trainer.history) < 200
    assert np.isfinite(small_loop(0).model(trainer.state)["w"]).all()
    assert int(trainer.state.step) >= 5
    assert len(trainer.fit().history) == 200
