"""The log: everything for whoever comes late, in bounded memory."""

import threading
from itertools import pairwise

from fuelflow.watch.record.log import RecordLog
from fuelflow.watch.record.records import folded, thinned


def step(number, **others):
    return {"kind": "step", "time": 0.0, "epoch": 0, "step": number} | others


def epoch(number, **others):
    metrics = {"epoch": number}
    return {"kind": "epoch", "time": 0.0, "metrics": metrics} | others


def run(*, first_epoch=0, after=0):
    return {"kind": "run", "time": 0.0, "epoch": first_epoch, "step": after}


def steps_of(records):
    return [each["step"] for each in records if each["kind"] == "step"]


def test_a_run_that_goes_on_forgets_what_it_does_anew():
    first = [run(), *map(step, range(1, 8)), epoch(0), epoch(1)]
    second = [run(first_epoch=1, after=4), step(5), epoch(1)]

    records = folded([*first, *second])
    assert steps_of(records) == [1, 2, 3, 4, 5]
    epochs = [each["metrics"]["epoch"] for each in records if each["kind"] == "epoch"]
    assert epochs == [0, 1]
    assert records[-1] is second[-1]


def test_a_run_that_begins_anew_forgets_all_steps_and_epochs():
    records = folded([run(), step(1), epoch(0), run()])

    assert [each["kind"] for each in records] == ["run", "run"]


def test_thinned_steps_are_spread_evenly_with_both_ends():
    dense, sparse = range(500), range(500, 10_000, 19)
    kept = steps_of(thinned([step(number) for number in (*dense, *sparse)], 100))

    ways = [later - one for one, later in pairwise(kept)]
    assert len(kept) <= 100
    assert (kept[0], kept[-1]) == (0, sparse[-1])
    assert max(ways) <= 3 * sparse[-1] / 99  # two ways, and a step besides


def test_few_steps_are_all_kept():
    records = [step(number) for number in range(5)]

    assert thinned(records, 5) == records


def test_the_log_thins_steps_alone_and_keeps_the_newest():
    log = RecordLog(max_steps=100)
    log.append(run())
    for number in range(1000):
        log.append(step(number))
        if number % 100 == 0:
            log.append(epoch(number // 100))

    records = [record for _, record in log.since(0)]
    steps = steps_of(records)
    assert len(steps) <= 100
    assert steps[-1] == 999
    assert len([each for each in records if each["kind"] == "epoch"]) == 10
    numbers = [number for number, _ in log.since(0)]
    assert numbers == sorted(set(numbers))
    assert log.newest == numbers[-1] == 1011


def test_since_gives_what_came_after():
    log = RecordLog()
    first, second = log.append(step(1)), log.append(step(2))

    assert [number for number, _ in log.since(first)] == [second]
    assert log.since(second) == []


def test_of_a_phase_only_the_newest_is_kept():
    log = RecordLog()
    for phase in ("compiling", "training", "saving"):
        log.append({"kind": "phase", "time": 0.0, "phase": phase})

    ((number, record),) = log.since()
    assert (number, record["phase"]) == (3, "saving")


def test_old_events_are_dropped_first():
    log = RecordLog(max_events=10)
    for number in range(35):
        log.append({"kind": "event", "time": 0.0, "text": str(number)})

    texts = [record["text"] for _, record in log.since()]
    assert len(texts) <= 10
    assert texts[-1] == "34"


def test_waiting_ends_with_a_record_or_the_end():
    log = RecordLog()
    seen = []
    is_started = threading.Event()

    def read():
        number = 0
        is_started.set()
        while log.wait(number, timeout=60):
            new = log.since(number)
            seen.extend(record["step"] for _, record in new)
            number = new[-1][0]

    thread = threading.Thread(target=read)
    thread.start()
    is_started.wait()
    for number in range(100):
        log.append(step(number))
    log.close()
    thread.join(60)

    assert not thread.is_alive()
    assert seen == list(range(100))
    assert log.is_closed
    assert not log.wait(log.newest, timeout=0)
