"""Long runs in few numbers, of which none that matters is lost."""

import json
import random

import numpy as np
import pytest
from watch_records import (
    epoch_record,
    event_record,
    make_run,
    run_record,
    step_record,
)

from fuelflow.watch.pages import digest
from fuelflow.watch.pages.bins import MAX_EPOCHS, MAX_RANKS, RankBins
from fuelflow.watch.pages.columns import columns, thin
from fuelflow.watch.pages.digest import MAX_ROWS, Digest
from fuelflow.watch.pages.page import plain_json


def test_thinned_rows_keep_every_extreme_and_the_ends():
    draw = random.Random(0)
    rows = [
        {"step": step, "loss": draw.random(), "norm": draw.random()}
        for step in range(5000)
    ]
    rows[1234]["loss"] = 50.0
    rows[4321]["norm"] = -50.0
    rows[2500]["loss"] = "NaN"
    rows[3333]["rare"] = 1.0

    kept = thin(rows, "step", 200)

    assert len(kept) <= 400
    assert [kept[0], kept[-1]] == [rows[0], rows[-1]]
    assert [row["step"] for row in kept] == sorted(row["step"] for row in kept)
    for step in (1234, 4321, 2500, 3333):
        assert rows[step] in kept


def test_thinning_spreads_what_it_keeps():
    rows = [{"step": step, "loss": step % 7} for step in range(10_000)]
    rows = [row for row in rows if row["step"] < 100 or row["step"] % 50 == 0]

    kept = [row["step"] for row in thin(rows, "step", 64)]

    # Half of the rows are in the first hundredth of the way.
    assert sum(step < 100 for step in kept) < 10
    assert max(np.diff(kept)) <= 10_000 / 64 * 4


def test_columns_are_rounded_but_for_times_and_whole_numbers():
    got = columns([{"step": 123456789, "time": 1780000000.1234567, "loss": 1 / 3}])

    assert got == {"step": [123456789], "time": [1780000000.123], "loss": [0.3333333]}


def test_a_long_run_has_a_bounded_number_of_rows(monkeypatch):
    monkeypatch.setattr(digest, "MAX_ROWS", 300)
    whole = Digest([run_record(epochs=None)])
    for step in range(1, 3001):
        whole.add(step_record(step, loss=7.0 if step == 1717 else 1.0))

    steps = whole.to_dict()["steps"]

    assert len(steps["step"]) < 600
    assert steps["step"][-1] == 3000
    assert 7.0 in steps["loss"]
    assert MAX_ROWS > 300


def test_a_run_that_goes_on_forgets_what_it_does_anew():
    records = make_run(4, 2)
    again = run_record(epochs=4, epoch=2, step=45)

    got = Digest([*records, again]).to_dict()

    assert got["steps"]["step"][-1] == 45
    assert got["epochs"]["epoch"] == [0, 1]
    assert got["ranks"]["last"] == [0, 1]
    assert got["end"] is None


def test_events_are_counted_beyond_those_that_are_kept():
    events = [event_record("sink", text=str(number)) for number in range(1000)]

    got = Digest([run_record(), *events]).to_dict()

    assert got["num_events"] == 1000
    assert len(got["events"]) == digest.MAX_EVENTS
    assert got["events"][-1]["text"] == "999"


def test_checkpoints_in_a_row_are_one_event_with_their_count():
    saves = [event_record(text="saved: every_steps", step=at) for at in range(500)]
    resumed = event_record("resumed", "resumed from step 0")

    got = Digest([run_record(), resumed, *saves, event_record("skipped")]).to_dict()

    assert got["num_events"] == 502
    assert [(each["what"], each.get("count")) for each in got["events"]] == [
        ("resumed", None),
        ("checkpoint", 500),
        ("skipped", None),
    ]
    assert got["events"][1]["step"] == 499


def test_events_that_a_person_must_know_of_are_kept_longest():
    resumed = event_record("resumed", "resumed from step 0")
    warned = event_record("skipped", level="warning")
    others = [event_record("note", text=str(number)) for number in range(1000)]

    got = Digest([run_record(), resumed, warned, *others]).to_dict()["events"]

    assert [each["what"] for each in got[:3]] == ["resumed", "skipped", "note"]
    assert got[-1]["text"] == "999"
    assert len(got) == digest.MAX_EVENTS


def test_steps_left_out_count_as_steps_taken():
    digest_of = [run_record(epochs=3), *left_out_steps()]

    got = Digest(digest_of).to_dict()

    assert got["steps"]["step"] == [1] * 60
    assert got["steps"]["taken"] == list(range(1, 61))
    assert got["epochs"]["taken"] == [20, 40, 60]


def test_a_run_that_goes_on_knows_how_many_steps_it_left_out():
    again = run_record(epochs=3, epoch=1, step=1)
    first, rest = left_out_steps()[:21], left_out_steps()[21:]

    got = Digest([run_record(epochs=3), *first, again, *rest]).to_dict()

    assert got["epochs"]["taken"] == [20, 40, 60]


def left_out_steps():
    """Three epochs of 20 steps of which the first alone was no step in vain."""
    records = []
    for step in range(1, 61):
        skipped = {"step": 1, "num_skipped": step - 1, "loss": "NaN"}
        records.append(step_record(step) | (skipped if step > 1 else {}))
        if step % 20 == 0:
            num = 20 if step > 20 else 19
            found = {"global_step": 1, "num_skipped": num}
            records.append(epoch_record(step // 20 - 1, **found))
    return records


def test_a_rank_that_lags_once_is_seen_among_many_epochs_and_ranks():
    bins = RankBins()
    for epoch in range(300):
        slow = 401 if epoch == 133 else None
        bins.add(epoch_record(epoch, num_ranks=520, slow_rank=slow)["metrics"])

    got = bins.to_dict()

    starve = np.array(got["measures"]["starve"], dtype=float)
    assert starve.shape[0] < 2 * MAX_EPOCHS
    assert starve.shape[1] <= MAX_RANKS
    ((epoch, group),) = np.argwhere(starve > 0.3)
    assert got["first"][epoch] <= 133 <= got["last"][epoch]
    assert group == 401 // 3
    # All epochs, each in one cell, and as many in each.
    assert len(got["first"]) == 150
    assert got["first"][0] == 0
    assert got["last"][-1] == 299
    assert got["first"][1:] == [last + 1 for last in got["last"][:-1]]


def test_absent_losses_stay_absent_and_others_keep_their_words():
    metrics = epoch_record(0, num_ranks=3)["metrics"]
    metrics["per_rank_loss"] = [None, "Infinity", 0.25]

    bins = RankBins()
    bins.add(metrics)

    got = bins.to_dict()
    assert got["measures"]["loss"] == [[None, None, 0.25]]
    assert got["bad"] == [{"1": "Infinity"}]


def test_metrics_of_another_version_lack_only_what_held_them_back():
    record = epoch_record(0)
    del record["metrics"]["process_indices"]
    record["metrics"]["new_field"] = 1

    got = Digest([run_record(), record]).to_dict()

    assert "held" not in got["epochs"]
    assert got["epochs"]["loss"]


@pytest.mark.parametrize("text", ["</script>", "<!--", "\u2028\u2029", "\ud800", "&"])
def test_json_in_a_page_ends_neither_its_element_nor_a_line(text):
    written = plain_json({"name": text})

    assert not set(written) & set("<>&\u2028\u2029\ud800")
    assert json.loads(written) == {"name": text.replace("\ud800", "\ufffd")}
