"""An epoch's metrics can be read by name, written, shown and kept."""

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metric_records import make_metrics, make_record

from fuelflow.metrics.epoch import EpochMetrics

TIMES = st.floats(0, 1e12)
SUMS = st.tuples(st.floats(), st.floats(0, 1e9))
RECORDS = st.lists(
    st.builds(
        dict,
        process=st.integers(0, 3),
        samples=st.integers(1, 2**40),
        sums=st.dictionaries(st.sampled_from(["loss", "acc", "é\n"]), SUMS),
        epoch_ms=TIMES,
        share_complete_ms=TIMES,
        compute_only_ms=TIMES,
        data_starve_ms=TIMES,
        compile_ms=TIMES,
        eval_ms=TIMES,
        callback_ms=TIMES,
    ),
    min_size=1,
    max_size=6,
).map(lambda each: [make_record(i, **record) for i, record in enumerate(each)])
EPOCHS = st.builds(
    make_metrics,
    RECORDS,
    epoch=st.integers(0, 10**6),
    lr=st.none() | st.floats(),
    evaluation=st.dictionaries(st.text(), st.floats()),
)


def busy_metrics(num_ranks=8):
    sums = {"loss": (58.12, 100.0), "accuracy": (93.12, 100.0)}
    evaluation = {"loss": 0.60213, "accuracy": 0.91342}
    times = {"compute_only_ms": 380, "data_starve_ms": 620}
    records = [make_record(i, sums=sums, **times) for i in range(num_ranks)]
    return make_metrics(records, epoch=3, evaluation=evaluation, lr=0.001)


def test_the_design_s_fields_are_there():
    names = {each.name for each in fields(EpochMetrics)}

    assert names >= {
        *("epoch", "scalars", "per_rank", "avg_loss", "per_rank_loss"),
        *("per_rank_samples", "epoch_ms", "per_rank_share_complete_ms"),
        *("per_rank_throughput", "per_rank_batch_share", "per_rank_compute_only_ms"),
        *("per_rank_data_starve_ms", "device_indices", "compile_ms"),
    }


def test_every_field_says_how_it_is_measured():
    described = EpochMetrics.__doc__ or ""

    for each in fields(EpochMetrics):
        assert f"\n        {each.name}: " in described


def test_means_are_read_by_name():
    metrics = busy_metrics()

    assert metrics.value("loss") == metrics.avg_loss == pytest.approx(0.5812)
    assert metrics.value("accuracy") == metrics.scalars["accuracy"]
    assert metrics.value("eval.loss") == 0.60213
    assert metrics.names == ("loss", "accuracy", "eval.loss", "eval.accuracy")


def test_a_name_that_there_is_not_is_refused_with_those_there_are():
    message = "one of `loss`, `accuracy`, `eval.loss`, `eval.accuracy`, got 'acuracy'"
    with pytest.raises(ValueError, match=message):
        busy_metrics().value("acuracy")


def test_a_metric_that_the_user_named_like_an_evaluation_is_the_user_s():
    record = make_record(sums={"loss": (1, 1), "eval.loss": (2, 1)})
    metrics = make_metrics([record], evaluation={"loss": 3.0})

    assert metrics.value("eval.loss") == 2
    assert metrics.names == ("loss", "eval.loss")


@given(EPOCHS)
def test_metrics_come_back_from_json_to_the_last_bit(metrics):
    text = json.dumps(metrics.to_dict(), allow_nan=False)

    back = EpochMetrics.from_dict(json.loads(text))
    assert back == metrics
    assert repr(back) == repr(metrics)  # types, order and signs of zeros too
    assert back.bottleneck == metrics.bottleneck
    assert str(back) == str(metrics)


@given(EPOCHS)
def test_whatever_was_measured_can_be_shown_and_explained(metrics):
    found = metrics.bottleneck

    assert 0 <= found.share <= 1
    assert "\n" not in str(found)
    assert str(metrics).startswith(f"epoch {metrics.epoch}: ")
    assert "<table" in metrics._repr_html_()


def test_what_json_lacks_is_written_in_words():
    sums = [{"loss": (total, 1.0)} for total in (math.nan, math.inf, -math.inf)]
    records = [make_record(i, sums=each) for i, each in enumerate(sums)]
    records.append(make_record(3, samples=0, sums={}))
    values = make_metrics(records).to_dict()

    assert values["per_rank_loss"] == ["NaN", "Infinity", "-Infinity", None]
    assert values["avg_loss"] == "NaN"
    assert values["lr"] is None


def test_equal_metrics_are_equal_also_where_they_are_no_numbers():
    record = make_record(sums={"loss": (math.nan, 1.0)})
    metrics, same = make_metrics([record]), make_metrics([record])

    assert metrics == same
    assert hash(metrics) == hash(same)
    assert metrics != make_metrics([make_record()])
    assert metrics != "epoch 0"


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda v: v.pop("lr"), ValueError, "returned, but it lacks `lr`$"),
        (lambda v: v.update(x=1), ValueError, "returned, but it has an unknown `x`$"),
        (
            lambda v: v.update(x=v.pop("lr")),
            ValueError,
            "it lacks `lr` and it has an unknown `x`",
        ),
        (
            lambda v: v.update(avg_loss="high"),
            ValueError,
            "`avg_loss` must hold numbers, or one of the words .*, got 'high'",
        ),
        (
            lambda v: v["per_rank_loss"].append(1.0),
            ValueError,
            "one entry for each of at least one rank, got .*`per_rank_loss` 2",
        ),
    ],
)
def test_values_that_no_epoch_wrote_are_refused(change, kind, message):
    values = make_metrics().to_dict()
    change(values)

    with pytest.raises(kind, match=message):
        EpochMetrics.from_dict(values)


def test_what_is_no_mapping_is_refused():
    with pytest.raises(TypeError, match="`EpochMetrics.to_dict` returned, got a list"):
        EpochMetrics.from_dict([])  # pyright: ignore[reportArgumentType]


def test_metrics_keep_what_they_were_given():
    evaluation = {"loss": 1.0}
    metrics = make_metrics(evaluation=evaluation)
    evaluation["loss"] = 2.0

    assert metrics.value("eval.loss") == 1.0
    with pytest.raises(FrozenInstanceError):
        metrics.epoch = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_metrics_can_be_copied_pickled_and_changed():
    metrics = busy_metrics()

    assert copy.deepcopy(metrics) == metrics
    assert pickle.loads(pickle.dumps(metrics)) == metrics
    assert replace(metrics, epoch=4).epoch == 4


def test_an_epoch_prints_as_one_line_however_many_ranks_there_are():
    line = str(busy_metrics())

    assert line == (
        "epoch 3: loss 0.5812, accuracy 0.9312; eval loss 0.6021, accuracy 0.9134; "
        "800 samples/s, 1 s, 8 ranks; 62 % lost to input"
    )


def test_the_line_tells_of_compiling_and_of_skipped_steps():
    record = make_record(epoch_ms=1_250_000, compile_ms=9540)
    line = str(make_metrics([record], num_skipped=2))

    assert line == (
        "epoch 0: loss 0.5; 0.08 samples/s, 1250 s, 9.54 s compiling; 2 skipped"
    )


@pytest.mark.parametrize(
    ("slow", "words"),
    [
        (
            {"data_starve_ms": 400, "compute_only_ms": 600},
            "40 % lost to input of rank 1",
        ),
        ({"compute_only_ms": 610}, "36 % lost to rank 1"),
        ({"callback_ms": 1000}, "50 % lost to callbacks"),
    ],
)
def test_the_line_names_what_held_the_epoch_back(slow, words):
    metrics = make_metrics([make_record(0), make_record(1, process=1, **slow)])

    assert words in str(metrics)


class Cells(HTMLParser):
    """The text of each row's cells, and every tag met."""

    def __init__(self, html):
        super().__init__()
        self.rows, self.tags, self.open = [], set(), []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data


def test_the_table_has_a_row_for_each_rank_and_one_for_all():
    absent = make_record(5, process=1, samples=0, sums={})
    sums = {"loss": (50, 100), "accuracy": (90, 100)}
    table = Cells(make_metrics([make_record(4, sums=sums), absent])._repr_html_())

    assert table.open == []
    assert table.rows == [
        [
            *("rank", "device", "process", "loss", "accuracy", "samples", "share"),
            *("samples/s", "done after", "time"),
        ],
        ["0", "4", "0", "0.5", "0.9", "100", "100 %", "100", "1 s", ""],
        ["1", "5", "1", "—", "—", "0", "0 %", "0", "1 s", ""],
        ["all", "", "", "0.5", "0.9", "100", "", "100", "1 s", ""],
    ]


def test_names_in_the_table_are_text_and_no_markup():
    name = "<script>alert('&')</script>"
    sums = {"loss": (1, 1), name: (1, 1)}
    metrics = make_metrics([make_record(sums=sums)], evaluation={"<b>": 1.0})
    table = Cells(metrics._repr_html_())

    assert table.rows[0][3] == name
    assert table.tags <= {
        *("div", "b", "table", "thead", "tbody", "tr", "th", "td", "span")
    }
    assert "eval.<b>" not in metrics._repr_html_()


def test_a_table_of_very_many_ranks_is_cut_and_says_so():
    table = busy_metrics(num_ranks=100)._repr_html_()

    assert len(Cells(table).rows) == 1 + 64 + 1
    assert "and 36 more ranks" in table


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("epoch", -1, ValueError, "`epoch` must be at least 0, got -1"),
        ("num_steps", 2.5, TypeError, "`num_steps` must be an integer, got 2.5"),
        ("num_steps", True, TypeError, "`num_steps` must be an integer, got True"),
        ("global_step", "7", TypeError, "`global_step` must be an integer, got '7'"),
        ("avg_loss", None, TypeError, "`avg_loss` must be a number, got None"),
        ("epoch_ms", -1.0, ValueError, "`epoch_ms` must be at least 0, got -1.0"),
        ("lr", "fast", TypeError, "`lr` must be a number, got 'fast'"),
        ("per_rank_samples", (-5,), ValueError, r"`per_rank_samples\[0\]` must be at"),
        ("per_rank_loss", ("x",), TypeError, r"`per_rank_loss\[0\]` must be a number"),
        ("per_rank", 3, TypeError, "`per_rank` must have an entry for each rank"),
        ("scalars", [1.0], TypeError, "`scalars` must map names to numbers"),
        ("evaluation", {"loss": "x"}, TypeError, r"`evaluation\['loss'\]` must be a"),
    ],
)
def test_what_a_field_is_not_for_is_refused(name, value, error, text):
    stored = make_metrics()

    with pytest.raises(error, match=text):
        replace(stored, **{name: value})
    assert EpochMetrics.from_dict(stored.to_dict()) == stored
