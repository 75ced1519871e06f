"""A history keeps epochs in order and answers questions about them."""

import json
import math

import pytest
from metric_records import make_metrics, make_record

from fuelflow.metrics.history import History


def make_epoch(epoch, loss, evaluation=None, **sums):
    pairs = {name: (100 * value, 100) for name, value in sums.items()}
    record = make_record(sums={"loss": (loss, 1.0), **pairs})
    return make_metrics([record], epoch=epoch, evaluation=evaluation)


@pytest.fixture
def history():
    """Three epochs, of which the first and the last were evaluated."""
    return History(
        [
            make_epoch(0, 1.0, {"loss": 2.0}, accuracy=0.5),
            make_epoch(1, 0.5, accuracy=0.75),
            make_epoch(2, 0.25, {"loss": 1.0}, accuracy=0.875),
        ]
    )


def test_a_history_is_a_sequence_of_its_epochs(history):
    assert len(history) == 3
    assert [metrics.epoch for metrics in history] == [0, 1, 2]
    assert history[-1].avg_loss == 0.25
    assert history[0] in history
    assert isinstance(history[1:], History)
    assert list(history[1:]) == [history[1], history[2]]
    with pytest.raises(IndexError):
        history[3]


def test_a_slice_does_not_grow_with_the_history(history):
    first = history[:2]
    history.append(make_epoch(3, 0.2))

    assert (len(first), len(history)) == (2, 4)


def test_epochs_may_be_missing_but_must_increase(history):
    history.append(make_epoch(7, 0.2))

    message = "epochs of a history must increase, got epoch 7 after epoch 7; `history"
    with pytest.raises(ValueError, match=message):
        history.append(make_epoch(7, 0.2))
    with pytest.raises(ValueError, match="got epoch 0 after epoch 1"):
        History([make_epoch(1, 1.0), make_epoch(0, 1.0)])
    assert len(history) == 4


def test_a_history_holds_nothing_else(history):
    with pytest.raises(TypeError, match="holds `EpochMetrics`, got a dict"):
        history.append({})


def test_values_are_one_per_epoch_with_none_where_there_is_none(history):
    assert history.values("loss") == (1.0, 0.5, 0.25)
    assert history.values("accuracy") == (0.5, 0.75, 0.875)
    assert history.values("eval.loss") == (2.0, None, 1.0)
    assert history.names == ("loss", "accuracy", "eval.loss")


def test_a_name_of_no_epoch_is_refused_with_those_there_are(history):
    message = "`name` must be one of `loss`, `accuracy`, `eval.loss`, got 'f1'"
    with pytest.raises(ValueError, match=message):
        history.values("f1")
    with pytest.raises(ValueError, match=message):
        history.trend("f1")


def test_before_the_first_epoch_every_trend_is_empty():
    trend = History().trend("accuracy")

    assert len(trend) == 0
    assert not trend.improving(2)


def test_a_trend_goes_over_the_epochs_that_have_the_value(history):
    trend = history.trend("eval.loss")

    assert trend.values == (2.0, 1.0)
    assert trend.slope(2) == pytest.approx(-0.5)  # per epoch, one lying between
    assert trend.improving(2)
    assert history.trend("accuracy", higher_is_better=True).improving(3)
    assert not history.trend("accuracy").improving(3)


def test_a_loss_that_is_no_number_is_a_value(history):
    history.append(make_epoch(3, math.nan))

    assert math.isnan(history.trend("loss").latest)
    assert not history.trend("loss").improving(2)


def test_a_history_comes_back_from_json(history):
    history.append(make_epoch(3, math.nan))
    text = json.dumps(history.to_dict(), allow_nan=False)

    back = History.from_dict(json.loads(text))
    assert back == history
    assert back != history[:3]
    assert back != [*history]
    back.append(make_epoch(4, 0.1))


def test_values_that_no_history_wrote_are_refused(history):
    with pytest.raises(ValueError, match="`History.to_dict` returned, but it lacks"):
        History.from_dict({})
    with pytest.raises(ValueError, match="epochs of a history must increase"):
        History.from_dict({"epochs": history.to_dict()["epochs"][::-1]})


def test_a_history_prints_one_line_per_epoch(history):
    assert str(history).splitlines() == [str(metrics) for metrics in history]
    assert str(History()) == "no epochs"
    assert repr(history) == "History(3 epochs)"


def test_the_table_shows_each_epoch_and_what_it_lacks(history):
    html = history._repr_html_()

    assert html.count("<tr") == 1 + 3
    assert html.count("—") == 1 + 3  # one evaluation, and no rate is known
    assert "eval.loss" in html


def test_a_long_history_shows_its_end():
    history = History(make_epoch(epoch, 1.0) for epoch in range(50))
    html = history._repr_html_()

    assert html.count("<tr") == 1 + 20
    assert "30 earlier epochs are not shown" in html
    assert ">49</td>" in html
    assert ">29</td>" not in html


def test_names_in_the_table_are_text_and_no_markup():
    html = History([make_epoch(0, 1.0, {"<i>": 1.0})])._repr_html_()

    assert "<i>" not in html
    assert "eval.&lt;i&gt;" in html
