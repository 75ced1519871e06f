import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelflow.step.plateau import Plateau

METRICS = [1.0, 0.9, 0.95, 0.91, 0.93, 0.5, 0.6, 0.6, 0.6, 0.6, 0.7, 0.49, 0.6, 0.6]


def torch_rates(base, metrics, min_rate=0.0, **options):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=base)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, min_lr=min_rate, **options
    )
    seen = []
    for metric in metrics:
        scheduler.step(metric)
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def own_rates(base, metrics, **options):
    plateau = Plateau(base, **options)
    return [plateau.update(metric) for metric in metrics]


def test_the_rate_is_cut_after_more_bad_metrics_than_patience():
    rates = own_rates(1.0, [3, 2, 2, 2, 2, 2, 1], factor=0.5, patience=1)

    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize("cooldown", [0, 3])
@pytest.mark.parametrize("patience", [0, 2])
def test_every_rate_of_a_noisy_run_equals_pytorch(
    mode, threshold_mode, cooldown, patience
):
    options = {
        "factor": 0.7,
        "patience": patience,
        "mode": mode,
        "threshold": 0.03,
        "threshold_mode": threshold_mode,
        "cooldown": cooldown,
        "min_rate": 1e-3,
    }
    noise = np.random.default_rng(0).normal(size=(5, 200))
    trend = np.exp(np.linspace(0, -2, 200))
    runs = trend + 0.2 * noise if mode == "min" else -trend + 0.2 * noise

    for metrics in runs:
        expected = torch_rates(0.3, metrics, **options)

        assert own_rates(0.3, metrics, **options) == expected
        assert len(set(expected)) > 2  # or there was nothing to compare


@given(
    metrics=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60),
    base=st.sampled_from([1.0, 1e-7, 1e-8]),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 3),
    mode=st.sampled_from(["min", "max"]),
)
@settings(max_examples=60, deadline=None)
def test_any_metrics_give_the_rates_of_pytorch(metrics, base, patience, cooldown, mode):
    options = {"patience": patience, "cooldown": cooldown, "mode": mode}

    assert own_rates(base, metrics, **options) == torch_rates(base, metrics, **options)


def test_the_defaults_are_those_of_pytorch():
    metrics = [1.0] * 100

    assert own_rates(0.3, metrics) == torch_rates(0.3, metrics)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_nan_metric_is_a_bad_one_and_never_the_best(mode):
    plateau = Plateau(1.0, factor=0.5, patience=1, mode=mode)

    rates = [plateau.update(metric) for metric in (math.nan, math.nan, 0.5, math.nan)]

    assert rates == [1.0, 0.5, 0.5, 0.5]
    assert plateau.state_dict()["best"] == 0.5


def test_bad_metrics_during_cooldown_are_not_counted():
    rates = own_rates(1.0, [1, 1, 1, 1, 1], factor=0.5, patience=0, cooldown=2)

    assert rates == [1.0, 0.5, 0.5, 0.5, 0.25]


def test_the_rate_never_falls_below_its_minimum():
    rates = own_rates(1.0, [1] * 9, factor=0.1, patience=0, min_rate=0.05)

    assert rates == [1.0, 0.1, *[0.05] * 7]


def test_the_rate_attribute_is_what_update_returned_last():
    plateau = Plateau(0.5, patience=0)
    assert plateau.rate == 0.5

    last = [plateau.update(metric) for metric in (1.0, 1.0)][-1]

    assert plateau.rate == last == 0.05
    assert isinstance(last, float)


@pytest.mark.parametrize("kind", [np.float32, np.array, jnp.asarray, jnp.float32])
def test_a_metric_may_be_an_array_of_no_axes(kind):
    plateau = Plateau(1.0, patience=0)

    assert [plateau.update(kind(metric)) for metric in (1, 2)] == [1.0, 0.1]
    assert json.dumps(plateau.state_dict()["best"]) == "1.0"


@pytest.mark.parametrize("metric", [True, None, "0.5", {"loss": 0.5}, [0.5]])
def test_a_metric_that_is_no_number_is_refused_and_changes_nothing(metric):
    plateau = Plateau(1.0)

    with pytest.raises(
        TypeError, match=r"^`metric` must be a number or an array of sh"
    ):
        plateau.update(metric)
    assert plateau.state_dict() == Plateau(1.0).state_dict()


@pytest.mark.parametrize("metric", [np.ones(1), jnp.ones((2, 3))])
def test_a_metric_with_axes_is_refused_by_its_shape(metric):
    with pytest.raises(
        TypeError, match=r"array of shape \[\], got shape \[(1|2, 3)\]$"
    ):
        Plateau(1.0).update(metric)


@pytest.mark.parametrize("stop", range(len(METRICS) + 1))
def test_a_resumed_plateau_goes_on_bit_for_bit(stop):
    options = {"factor": 0.7, "patience": 1, "cooldown": 2}
    whole, first = Plateau(0.3, **options), Plateau(0.3, **options)
    expected = [whole.update(metric) for metric in METRICS]
    for metric in METRICS[:stop]:
        first.update(metric)

    second = Plateau(0.3, **options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))

    assert [second.update(metric) for metric in METRICS[stop:]] == expected[stop:]
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"rate": -1.0}, ValueError, "`rate` must be finite and at least 0, got -1.0"),
        ({"best": None}, TypeError, "`best` must be a number, got None"),
        ({"num_bad": 1.5}, TypeError, "`num_bad` must be an integer, got 1.5"),
        (
            {"cooldown_left": -1},
            ValueError,
            "`cooldown_left` must be at least 0, got -1",
        ),
        (
            {"epoch": 1},
            ValueError,
            "must have the keys rate, best, num_bad, cooldown_l",
        ),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change, error, text):
    plateau = Plateau(0.1)
    good = {"rate": 0.05, "best": 1.0, "num_bad": 1, "cooldown_left": 0}

    with pytest.raises(error, match=text):
        plateau.load_state_dict({**good, **change})
    assert plateau.state_dict() == Plateau(0.1).state_dict()


def test_an_incomplete_state_is_refused_with_the_keys_there_are():
    with pytest.raises(ValueError, match=r"cooldown_left, got none$"):
        Plateau(0.1).load_state_dict({})
    with pytest.raises(ValueError, match=r"cooldown_left, got rate$"):
        Plateau(0.1).load_state_dict({"rate": 0.1})


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"base": -1}, ValueError, "`base` must be finite and at least 0, got -1"),
        ({"base": math.nan}, ValueError, "`base` must be finite and at least 0, got n"),
        ({"base": True}, TypeError, "`base` must be a number, got True of type bool"),
        (
            {"factor": 1.0},
            ValueError,
            "`factor` must be between 0 and 1, both excluded",
        ),
        (
            {"factor": 0},
            ValueError,
            "`factor` must be between 0 and 1, both excluded, ",
        ),
        (
            {"factor": math.nan},
            ValueError,
            "`factor` must be between 0 and 1, both exc",
        ),
        ({"factor": "1"}, TypeError, "`factor` must be a number, got '1' of type str"),
        ({"patience": -1}, ValueError, "`patience` must be at least 0, got -1"),
        (
            {"patience": 1.0},
            TypeError,
            "`patience` must be an integer, got 1.0 of type",
        ),
        ({"cooldown": -1}, ValueError, "`cooldown` must be at least 0, got -1"),
        (
            {"cooldown": True},
            TypeError,
            "`cooldown` must be an integer, got True of ty",
        ),
        ({"mode": "low"}, ValueError, '`mode` must be "min" or "max", got \'low\''),
        (
            {"threshold_mode": 1},
            ValueError,
            '`threshold_mode` must be "rel" or "abs", ',
        ),
        (
            {"threshold": -1},
            ValueError,
            "`threshold` must be finite and at least 0, go",
        ),
        (
            {"threshold": 1},
            ValueError,
            "`threshold` must be less than 1 where it is re",
        ),
        (
            {"min_rate": -1},
            ValueError,
            "`min_rate` must be finite and at least 0, got ",
        ),
        (
            {"min_rate": 2},
            ValueError,
            "`min_rate` must be at most the `base` of 1.0, g",
        ),
    ],
)
def test_a_bad_argument_is_refused_by_name(options, error, text):
    with pytest.raises(error, match=f"^{text}"):
        Plateau(**{"base": 1.0, **options})


def test_a_large_threshold_is_fine_where_metrics_can_still_improve():
    assert Plateau(1.0, threshold=2, threshold_mode="abs").update(5.0) == 1.0
    assert own_rates(1.0, [1, 2.5, 3.5], patience=0, mode="max", threshold=1) == [
        1.0,
        1.0,
        0.1,
    ]
