"""Seeing when devices are done, without making them wait."""

import functools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuelflow.run.observer import INTERVAL_SECS, SHORT_INTERVAL_SECS, Observer


@functools.cache
def slow_work() -> Any:
    """A compiled program that takes some tens of milliseconds, and what it takes."""
    given = jnp.linspace(0, 1, 600_000)
    work = jax.jit(lambda x: jnp.sort(jnp.sin(1e3 * x)).mean()).lower(given).compile()
    return work, jax.block_until_ready(given)


def start_work() -> Any:
    """The output of a dispatch that the device is at work on."""
    work, given = slow_work()
    return work(given)


class Failed:
    """What jax gives for work that failed on the device, as far as it is looked at."""

    def __init__(self, device: Any) -> None:
        self.device, self.data = device, self
        self.addressable_shards = [self]

    def block_until_ready(self) -> None:
        raise jax.errors.JaxRuntimeError("on the device")


class Done:
    """What jax gives for work that is done, and how often it was looked at."""

    def __init__(self, device: Any) -> None:
        self.device, self.data = device, self
        self.addressable_shards = [self]
        self.num_looks = 0

    def block_until_ready(self) -> None:
        self.num_looks += 1


@pytest.fixture
def observer():
    seen = Observer(jax.devices()[:1])
    yield seen
    seen.close()
    assert not [t for t in threading.enumerate() if t.name == "fuelflow observer"]


def test_a_device_is_busy_from_its_dispatch_until_it_is_done(observer: Observer):
    slow_work()
    start = time.perf_counter()
    output = start_work()
    observer.note(output, start)
    was_ready = output.is_ready()
    noted = time.perf_counter()
    seen = observer.finish()
    end = time.perf_counter()

    (device,) = output.devices()
    assert not was_ready  # noting waits for nothing, and finishing does
    assert output.is_ready()
    assert noted < seen.done[device] <= end
    assert seen.busy[device] == pytest.approx(seen.done[device] - start)


def test_work_that_waits_for_earlier_work_is_counted_from_its_end(observer: Observer):
    slow_work()
    start = time.perf_counter()
    # The second is dispatched while the device is at work on the first.
    outputs = [start_work(), start_work()]
    observer.note(outputs[0], start)
    observer.note(outputs[1], start + 2 * INTERVAL_SECS)
    seen = observer.finish()

    (device,) = outputs[0].devices()
    assert seen.busy[device] == pytest.approx(seen.done[device] - start)


def test_idle_time_between_dispatches_is_not_counted(observer: Observer):
    done = jax.block_until_ready(start_work())
    (device,) = done.devices()
    observer.note(done, time.perf_counter())
    first = observer.finish().busy[device]
    idle = time.perf_counter()
    jax.block_until_ready(start_work())  # which nobody tells the observer of
    idle = time.perf_counter() - idle
    observer.note(done, time.perf_counter())
    seen = observer.finish()

    assert 0 < seen.busy[device] - first < idle


def test_dispatches_close_to_each_other_are_seen_as_one(observer: Observer):
    done = jax.block_until_ready(start_work())
    (device,) = done.devices()
    start = time.perf_counter()
    for index in range(10):
        observer.note(done, start + index * INTERVAL_SECS / 100)
    last = start_work()
    observer.note(last, start + INTERVAL_SECS / 2)
    seen = observer.finish()

    # From the first of them, and the last is waited for.
    assert last.is_ready()
    assert seen.busy[device] == pytest.approx(seen.done[device] - start)


@pytest.mark.parametrize(("share_waited", "num_looks"), [(0.5, 20), (0.05, 5)])
def test_dispatches_that_waited_for_data_are_looked_at_one_by_one(
    observer: Observer, share_waited: float, num_looks: int
):
    """Else the time in which a device had nothing to do would count as work."""
    output: Any = Done(jax.devices()[0])
    gap = 2.1 * SHORT_INTERVAL_SECS
    start = time.perf_counter()
    for index in range(1, 21):
        waited = share_waited * index * gap
        observer.note(output, start + index * gap, waited=waited)
    observer.finish()

    assert output.num_looks == pytest.approx(num_looks, abs=1)


def test_a_device_that_fails_is_left_to_who_reads(observer: Observer):
    (device,) = jax.devices()[:1]
    failed: Any = Failed(device)
    observer.note(failed, time.perf_counter())
    seen = observer.finish()

    assert seen.done[device] > 0


def test_an_epoch_begins_with_nothing_seen(observer: Observer):
    (device,) = jax.devices()[:1]
    observer.note(jax.device_put(np.float32(1), device), time.perf_counter() - 1)
    observer.finish()
    observer.begin()

    assert observer.finish().busy == {device: 0.0}


def test_every_device_is_seen():
    devices = jax.devices()
    observer = Observer(devices)
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    start = time.perf_counter()
    observer.note(jax.device_put(np.float32(1), whole), start)
    seen = observer.finish()
    observer.close()

    assert set(seen.done) == set(seen.busy) == set(devices)
    assert all(done >= start for done in seen.done.values())
