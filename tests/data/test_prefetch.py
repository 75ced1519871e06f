"""Threads make batches ahead, within bounds, and end when nobody wants more."""

import gc
import operator
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from fuelflow.data.loader import DataLoader
from fuelflow.data.prefetch import THREAD_NAME, Prefetch

SOURCE = {"x": np.arange(400).reshape(100, 4)}
SECS = 30  # to give up after; nothing here comes near


def threads():
    return [t for t in threading.enumerate() if t.name.startswith(THREAD_NAME)]


@pytest.fixture(autouse=True)
def no_threads_before_or_after():
    gc.collect()
    assert_all_end(threads())
    yield
    assert_all_end(threads())


def assert_all_end(started):
    for thread in started:
        thread.join(SECS)
    assert not any(thread.is_alive() for thread in started)


def used_up(epoch):
    list(epoch)


def closed(epoch):
    next(epoch)
    epoch.close()
    epoch.close()


def left(epoch):
    with epoch:
        next(epoch)


def forgotten(epoch):
    next(epoch)


def broken_off(epoch):
    for _ in epoch:
        break


def failed(epoch):
    with pytest.raises(KeyError):
        next(map(operator.itemgetter("no such field"), epoch))


def in_a_cycle(epoch):
    next(epoch)
    cycle = [epoch]
    cycle.append(cycle)


@pytest.mark.parametrize(
    "end", [used_up, closed, left, forgotten, broken_off, failed, in_a_cycle]
)
def test_an_abandoned_epoch_leaves_no_thread_and_no_memory(end):
    loader = DataLoader(SOURCE, 4, resident=False, prefetch=6)
    used_up(loader.epoch(0))  # what jax keeps for good
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}

    epoch = loader.epoch(1)
    next(epoch)
    started = threads()
    end(epoch)
    del epoch
    gc.collect()

    assert started
    assert_all_end(started)
    gc.collect()
    assert not [a for a in jax.live_arrays() if id(a) not in before]


def test_a_closed_epoch_is_over():
    loader = DataLoader(SOURCE, 4, resident=False)
    epoch = loader.epoch(0)
    next(epoch)

    epoch.close()

    assert list(epoch) == []
    assert not loader.state()["is_done"]


def test_an_epoch_that_is_not_asked_for_anything_has_no_thread():
    epoch = DataLoader(SOURCE, 4, resident=False).epoch(0)

    assert not threads()
    assert epoch.stretch(1) is None
    assert not threads()


def test_resident_rows_go_with_their_loader():
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    loader = DataLoader(SOURCE, 4, resident=True)
    epoch = loader.epoch(0)
    next(epoch)

    del loader, epoch
    gc.collect()

    assert not [a for a in jax.live_arrays() if id(a) not in before]


class Counted:
    """A transform that counts its calls and can be waited for."""

    def __init__(self):
        self.num_calls = 0
        self.called = threading.Condition()

    def __call__(self, fields):
        with self.called:
            self.num_calls += 1
            self.called.notify_all()
        return fields

    def reaches(self, num_calls):
        with self.called:
            return self.called.wait_for(lambda: self.num_calls >= num_calls, SECS)


@pytest.mark.parametrize("depth", [1, 3, 9])
def test_no_more_than_the_depth_is_made_ahead(depth):
    counted = Counted()
    epoch = DataLoader(SOURCE, 2, transform=counted, prefetch=depth).epoch(0)

    for given in range(1, 21):
        next(epoch)
        assert counted.reaches(given + depth)
        assert counted.num_calls == given + depth
    epoch.close()


def test_the_depth_follows_the_size_of_the_first_batch():
    counted = Counted()
    epoch = DataLoader(SOURCE, 1, transform=counted).epoch(0)

    next(epoch)
    next(epoch)

    # Any machine has room for the most batches of 16 bytes.
    assert counted.reaches(2 + 16)
    assert counted.num_calls == 2 + 16
    epoch.close()


def test_a_map_larger_than_what_is_made_ahead_streams_in_bounded_memory(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(4096, 1024))  # 16 MiB
    loader = DataLoader({"x": mapped}, 32, prefetch=4)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())

    most = 0
    for _ in loader.epoch(0):
        now = sum(array.nbytes for array in jax.live_arrays())
        most = max(most, now - before)

    # 4 made ahead, one with the consumer, one on its way to it.
    assert most <= 6 * 32 * 1024 * 4


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_an_error_comes_where_its_batch_would_have_come(prefetch):
    def failing(fields):
        if 50 in fields["row"]:
            raise OverflowError("too much")
        return fields

    loader = DataLoader(
        {"row": np.arange(100)}, 4, shuffle=False, transform=failing, prefetch=prefetch
    )
    epoch = loader.epoch(0)

    given = []
    with pytest.raises(OverflowError, match="too much") as caught:
        given.extend(epoch)

    assert [batch["row"][0] for batch in given] == list(range(0, 48, 4))
    assert loader.state()["rows"] == 48
    assert caught.value.__notes__ == ["in `transform`, on batch 12"]
    assert list(epoch) == []


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_an_error_of_a_sequence_names_the_row(prefetch):
    class Rows:
        def __len__(self):
            return 30

        def __getitem__(self, number):
            if number == 17:
                raise OSError("unreadable")
            return {"x": number}

    with pytest.raises(OSError, match="unreadable") as caught:
        list(DataLoader(Rows(), 4, prefetch=prefetch))

    assert "while reading row 17 of the source" in caught.value.__notes__


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_an_error_of_a_stream_names_the_row(prefetch):
    def rows():
        yield from ({"x": number} for number in range(9))
        raise OSError("cut off")

    with pytest.raises(OSError, match="cut off") as caught:
        list(DataLoader(rows, 4, shuffle=False, prefetch=prefetch))

    assert caught.value.__notes__ == ["while reading row 9 of the source"]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_a_stopped_transform_is_no_end_of_the_epoch(prefetch):
    def stopping(fields):
        raise StopIteration

    with pytest.raises(RuntimeError, match="source or transform raised StopIteration"):
        list(DataLoader(SOURCE, 4, transform=stopping, prefetch=prefetch))


def test_closing_wakes_a_consumer_in_another_thread():
    release, is_waiting = threading.Event(), threading.Event()

    class Maker:
        def make(self, number):
            is_waiting.set()
            release.wait(SECS)
            return number

        def finish(self, made):
            return made

    prefetch = Prefetch(Maker(), None, depth=3, num_threads=1)
    got = []

    def consume():
        got.append(next(prefetch))
        got.append(next(prefetch, "over"))

    consumer = threading.Thread(target=consume)
    consumer.start()
    is_waiting.wait(SECS)
    prefetch.close()
    release.set()
    consumer.join(SECS)

    assert not consumer.is_alive()
    assert got == [0, "over"]


def test_an_interpreter_with_an_epoch_under_way_ends_its_threads():
    code = """
import atexit, threading

@atexit.register  # the first to register is the last to be called
def report():
    print([thread.name for thread in threading.enumerate()])

import numpy as np
from fuelflow.data.loader import DataLoader

loader = DataLoader({"x": np.zeros((10_000, 100))}, 10, resident=False)
epoch = loader.epoch(0)
print(next(epoch)["x"].shape)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert done.stderr == ""
    assert done.stdout == "(10, 100)\n['MainThread']\n"
    assert done.returncode == 0
