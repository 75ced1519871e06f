"""Norms, ratios and histograms of single parameters, every so many steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import (
    KINDS,
    Kind,
    assert_bitwise,
    host_copy,
    make_batches,
    mlp_loss,
    train,
)

import fuelflow as ff
from fuelflow.step.engine import Engine

EVERYTHING = ff.Observe(
    grad_norm="*",
    update_ratio="*",
    grad_histogram="*",
    param_histogram="*",
    update_histogram="*",
    every_steps=3,
    num_bins=8,
)
NAMES = ("first.bias", "first.kernel", "second.bias", "second.kernel")


def _loop(**options: Any) -> ff.TrainingLoop:
    chosen = {"schedule": 1e-2, "max_grad_norm": 0.3, **options}
    return ff.TrainingLoop(mlp_loss(KINDS[0]), optax.adamw, **chosen)


def _by_hand(batches: list[Any]) -> list[dict[str, Any]]:
    """Params before, params after and gradients of each step of `_loop()`."""
    loop = _loop()
    state = loop.init(KINDS[0].make())
    found = []
    for batch in batches:
        before = host_copy(state.params)
        grads = host_copy(loop.grads(state, batch))
        state, _ = loop.step(state, batch)
        found.append(
            {"before": before, "after": host_copy(state.params), "grads": grads}
        )
    return [
        {what: {n: tree[f"['{n}']"] for n in NAMES} for what, tree in step.items()}
        for step in found
    ]


@pytest.mark.parametrize("steps_per_call", [1, 10])
@pytest.mark.parametrize(
    ("kind", "nonfinite"),
    [(KINDS[0], "raise"), (KINDS[1], "skip"), (KINDS[2], "propagate")],
    ids=lambda each: getattr(each, "name", each),
)
def test_observing_changes_no_bit_of_a_run(
    kind: Kind, nonfinite: Any, steps_per_call: int
):
    batches = make_batches(40)
    loop = ff.TrainingLoop(
        mlp_loss(kind),
        optax.adamw,
        schedule=1e-2,
        max_grad_norm=0.3,
        nonfinite=nonfinite,
    )
    states = []
    for each in (loop, loop.replace(observe=EVERYTHING)):
        state = each.init(kind.make())
        state, _ = each.run(state, batches, steps_per_call=steps_per_call)
        states.append(host_copy((state.params, state.opt_state, state.step)))

    assert_bitwise(states[1], states[0])


def test_norms_and_ratios_are_those_of_the_steps_that_are_due():
    batches = make_batches(7)
    _, outcomes = train(_loop(observe=EVERYTHING), KINDS[0].make(), batches)

    for number, (outcome, step) in enumerate(
        zip(outcomes, _by_hand(batches), strict=True), start=1
    ):
        for name in NAMES:
            norm = outcome.metrics[f"grad_norm.{name}"]
            ratio = outcome.metrics[f"update_ratio.{name}"]
            if number % 3:
                assert np.isnan([norm, ratio]).all()
                continue
            before = step["before"][name].astype(np.float64)
            after = step["after"][name].astype(np.float64)
            assert norm == pytest.approx(np.linalg.norm(step["grads"][name]), rel=1e-5)
            expected = np.linalg.norm(after - before) / np.linalg.norm(before)
            assert ratio == pytest.approx(expected, rel=1e-4)


def test_histograms_are_those_of_numpy():
    batches = make_batches(6)
    _, outcomes = train(_loop(observe=EVERYTHING), KINDS[0].make(), batches)
    steps = _by_hand(batches)

    assert [bool(o.histograms) for o in outcomes] == [False, False, True] * 2
    found = outcomes[5].histograms
    assert len(found) == 3 * len(NAMES)
    before, after, grads = (steps[5][what] for what in ("before", "after", "grads"))
    for name in NAMES:
        for what, values in (
            ("grad", grads[name]),
            ("param", after[name]),
            ("update", after[name] - before[name]),
        ):
            histogram = found[f"{what}_histogram.{name}"]
            _assert_numpys(histogram, values)
            assert histogram.step == 6


def _assert_numpys(histogram: ff.Histogram, values: np.ndarray) -> None:
    counts, edges = np.histogram(values, bins=8)
    # Values are float32, and one beside an edge may fall on the other side of it.
    np.testing.assert_allclose(histogram.edges, edges, rtol=1e-3, atol=1e-7)
    assert histogram.counts.sum() == values.size
    assert np.abs(np.cumsum(histogram.counts - counts)).max() <= 1


def test_a_run_has_an_entry_for_each_observed_step():
    batches = make_batches(10)
    single = _loop(observe=EVERYTHING)
    _, outcomes = train(single, KINDS[0].make(), batches)
    loop = _loop(observe=EVERYTHING)
    _, outcome = loop.run(loop.init(KINDS[0].make()), batches, steps_per_call=4)

    name = "update_histogram.first.kernel"
    histogram = outcome.histograms[name]
    assert histogram.step.tolist() == [3, 6, 9]
    assert histogram.counts.shape == (3, 8)
    assert histogram.edges.shape == (3, 9)
    for index, step in enumerate((2, 5, 8)):
        alone = outcomes[step].histograms[name]
        np.testing.assert_array_equal(histogram.counts[index], alone.counts)
        assert histogram.low[index] == pytest.approx(alone.low)
    norms = outcome.metrics["grad_norm.first.kernel"]
    assert np.isfinite(norms).tolist() == [False, False, True] * 3 + [False]


def test_a_run_without_an_observed_step_has_no_entries():
    loop = _loop(observe=EVERYTHING)
    state = loop.init(KINDS[0].make())

    _, outcome = loop.run(state, make_batches(2), steps_per_call=2)

    found = outcome.histograms["param_histogram.first.kernel"]
    assert found.step.shape == found.low.shape == (0,)
    assert found.counts.shape == (0, 8)
    assert np.isnan(outcome.metrics["grad_norm.first.kernel"]).all()


def test_values_that_are_not_finite_are_in_no_bin():
    def loss_fn(params: Any, batch: Any) -> Any:
        return (params["w"] * batch["x"]).sum(axis=1)

    loop = ff.TrainingLoop(
        loss_fn,
        optax.sgd,
        schedule=1.0,
        nonfinite="propagate",
        observe=ff.Observe(grad_histogram="w", update_histogram="same", num_bins=4),
    )
    model = {"w": jnp.ones(5), "same": jnp.ones(3)}
    x = np.array([[1, 2, 4, np.nan, np.inf]], np.float32)
    _, outcome = loop.step(loop.init(model), {"x": x})

    grads = outcome.histograms["grad_histogram.w"]
    assert (grads.low, grads.high, grads.counts.tolist()) == (1, 4, [1, 1, 0, 1])
    same = outcome.histograms["update_histogram.same"]
    assert (same.low, same.high, same.counts.tolist()) == (0, 0, [3, 0, 0, 0])


def test_a_step_that_is_left_out_says_nothing_of_its_update():
    loop = _loop(
        nonfinite="skip",
        observe=ff.Observe(grad_norm="*", update_ratio="*", param_histogram="*"),
    )
    batch = make_batches(1)[0]
    state, _ = loop.step(loop.init(KINDS[0].make()), batch)
    before = host_copy(state.params)
    bad = {**batch, "x": np.full_like(batch["x"], np.nan)}
    state, outcome = loop.step(state, bad)

    assert_bitwise(host_copy(state.params), before)
    assert not outcome.finite
    assert outcome.histograms == {}
    assert np.isnan(outcome.metrics["update_ratio.first.kernel"])


def test_selecting_observes_what_branching_does(monkeypatch: pytest.MonkeyPatch):
    """What a GPU runs, on this CPU: everything computed and one selected."""
    batches = make_batches(6)
    found = []
    original: Any = Engine.__init__
    for can_branch in (True, False):

        def forced(
            self: Any, *args: Any, choice: Any = can_branch, **named: Any
        ) -> None:
            original(self, *args, **{**named, "can_branch": choice})

        monkeypatch.setattr(Engine, "__init__", forced)
        loop = _loop(observe=EVERYTHING, nonfinite="skip")
        found.append(train(loop, KINDS[0].make(), batches)[1])

    for one, other in zip(*found, strict=True):
        assert one.metrics.keys() == other.metrics.keys()
        np.testing.assert_allclose(
            list(one.metrics.values()), list(other.metrics.values()), rtol=1e-3
        )
        assert one.histograms.keys() == other.histograms.keys()


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_an_epoch_has_the_mean_over_its_observed_steps(num_ranks: int):
    (rows,) = make_batches(1, 232)
    mesh = ff.mesh(jax.devices()[:num_ranks])
    loop = _loop(
        observe=ff.Observe(grad_norm="*", update_ratio="second", every_steps=2),
        mesh=mesh,
    )
    loader = ff.DataLoader(rows, batch_size=32, shuffle=False, mesh=mesh)
    trainer = ff.Trainer(loop, KINDS[0].make(), loader, epochs=1, time_ranks=False)
    (metrics,) = trainer.fit().history

    parts = [{n: x[i : i + 32] for n, x in rows.items()} for i in range(0, 232, 32)]
    # The last of them has rows for one rank alone, and counts like the others.
    steps = _by_hand(parts)[1::2]
    for name in NAMES:
        norms = [np.linalg.norm(step["grads"][name]) for step in steps]
        expected = pytest.approx(np.mean(norms), rel=1e-3)
        assert metrics.value(f"grad_norm.{name}") == expected
    assert {n for n in metrics.scalars if n.startswith("update")} == {
        "update_ratio.second.bias",
        "update_ratio.second.kernel",
    }


def test_a_parameter_that_is_all_zeros_has_no_ratio():
    loop = _loop(observe=ff.Observe(update_ratio="*.bias"))
    model: Any = KINDS[0].make()
    model["first"]["bias"] = np.zeros_like(model["first"]["bias"])
    batch = make_batches(1)[0]
    trainer = ff.Trainer(loop, model, [batch], epochs=1)
    (first,) = trainer.fit().history

    assert "update_ratio.first.bias" not in first.scalars


def test_observing_compiles_once_and_brings_histograms_only_when_asked(
    compile_counter: Any,
):
    loop = _loop(observe=EVERYTHING, strict_compile=True)
    state = loop.init(KINDS[0].make())
    compile_counter.reset()
    outputs = []
    for batch in make_batches(7):
        state, outcome = loop.step(state, batch)
        outputs.append(outcome.output.shape)

    assert compile_counter.compiled == ["jit(step)"]
    # Scalars, a square of each gradient and eight observed ones: no histogram.
    assert outputs == [(6 + 4 + 8,)] * 7


def test_the_step_of_a_graph_is_observed():
    graph = ff.Graph(KINDS[2].make())
    graph.set_optimizer(optax.adamw)
    graph.set_scheduler(1e-2)
    graph._steps.change(observe=ff.Observe(grad_norm="first", param_histogram="*"))
    outcome = graph.step((graph(make_batches(1)[0]["x"]) ** 2).mean())

    norms = [outcome.metrics[f"grad_norm.first.{n}"] for n in ("bias", "kernel")]
    assert 0 < np.linalg.norm(norms) < outcome.grad_norm
    assert len(outcome.histograms) == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "patterns for at least one of `grad_norm`, `update_ratio`"),
        ({"grad_norm": 3}, TypeError, "`observe.grad_norm` must be a pattern .*int"),
        (
            {"grad_norm": "*", "every_steps": 0},
            ValueError,
            "`observe.every_steps` must",
        ),
        ({"grad_norm": "*", "num_bins": 2.5}, TypeError, "`observe.num_bins` must be"),
    ],
)
def test_options_that_observe_nothing_are_refused(
    options: Any, error: Any, message: str
):
    with pytest.raises(error, match=message):
        ff.Observe(**options)


def test_patterns_that_select_nothing_are_refused_with_close_names():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"grad_norm": "secnod"}, "`observe.grad_norm` pattern `secnod` .*`second`"),
        (
            {"update_ratio": "first"},
            "`observe.update_ratio` pattern `first` selects no",
        ),
    ]
    for options, message in cases:
        loop = _loop(observe=ff.Observe(**options), trainable="second")
        with pytest.raises(ValueError, match=message):
            loop.init(KINDS[0].make())
    frozen = _loop(observe=ff.Observe(param_histogram="first"), trainable="second")
    frozen.init(KINDS[0].make())
    with pytest.raises(TypeError, match="`observe` must be an ff.Observe.*got a str"):
        _loop(observe="*")


def test_a_metric_named_like_an_observation_is_refused():
    def loss_fn(params: Any, batch: Any) -> Any:
        return params["w"] * batch["x"], {"grad_norm.w": batch["x"]}

    loop = ff.TrainingLoop(
        loss_fn, optax.sgd, schedule=0.1, observe=ff.Observe(grad_norm="*")
    )
    with pytest.raises(ValueError, match="must not be named `grad_norm.w`"):
        loop.step(loop.init({"w": jnp.float32(1)}), {"x": np.ones(2, np.float32)})
