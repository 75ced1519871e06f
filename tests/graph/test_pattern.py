"""Losses that are recorded again: recognised when they are the same, and only then."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import fuelflow as ff
from fuelflow.graph import steps as steps_module
from fuelflow.graph.pattern import Pattern
from fuelflow.graph.realize import forward_of, pass_of
from fuelflow.graph.structure import Recipe, Structure

lnp = ff.lazy(jnp)
X: Any = np.array([1.0, 2.0, 3.0], np.float32)


def linear_graph(weight: float = 1.5) -> ff.Graph:
    graph = ff.Graph({"w": np.float32(weight)}, apply=lambda m, x: m["w"] * x)
    graph.set_optimizer(optax.sgd)
    graph.set_lr(0.01)
    return graph


def step_on_mean(graph: ff.Graph, value: Any, **options: Any) -> ff.StepOutcome:
    """A step from one and the same line, whatever the value is made of."""
    return graph.step(value.mean(), **options)


@pytest.fixture
def forget_structures(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes reading a structure an error from the call on."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the structure was read again")

    return lambda: monkeypatch.setattr(steps_module, "Structure", refuse)


def test_a_loss_that_comes_again_is_recognised(forget_structures: Any):
    graph = linear_graph()
    for number in range(4):
        if number == 1:
            forget_structures()
        y = graph(X + number)
        step_on_mean(graph, (y - 1.0) ** 2 + y, metrics={"y": y.sum()}, fetch=y)

    assert graph.training_step == 4


def test_losses_that_take_turns_are_recognised(forget_structures: Any):
    graph, other = linear_graph(), linear_graph(0.5)
    for number in range(4):
        if number == 1:
            forget_structures()
        graph.step((graph(X) ** 2).mean())
        graph.step(lnp.abs(graph(X) - other(X)).mean())
        other.step((other(graph(X)) ** 2).mean())

    assert (graph.training_step, other.training_step) == (8, 4)


def test_the_last_loss_of_a_line_is_recognised_beside_those_before():
    graph = linear_graph()
    expected = 1.5
    for power in (1, 2, 1, 1, 2):
        outcome = step_on_mean(graph, lnp.power(graph(X), power))
        assert outcome.loss == pytest.approx((expected * X) ** power @ np.ones(3) / 3)
        slope = np.mean(power * (expected * X) ** (power - 1) * X)
        expected -= 0.01 * float(slope)

    assert len(graph.compiles) == 2


class Counting(nnx.Module):
    """A model that counts its calls, and gives the count."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.float32(1))
        self.count = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] += 1
        return self.weight * x + self.count


COUNTING = ff.Graph(Counting())


Picks = list[tuple[str, int, int]]
PICKS = st.lists(
    st.tuples(st.sampled_from(["add", "multiply", "divmod"]), *[st.integers(0, 9)] * 2),
    min_size=1,
    max_size=5,
)


def record_picks(picks: Picks, graph: ff.Graph) -> Any:
    """A value made of two calls of a model and an array, each used or not."""
    values: list[Any] = [graph(X), lnp.asarray(X + 1), graph(2 * X)]
    for name, one, other in picks:
        pair = [values[place % len(values)] for place in (one, other)]
        result = getattr(lnp, name)(*pair)
        values += result if name == "divmod" else [result]
    return values[-1]


def run_by(key: Any, leaves: list[Any], stamps: list[Any]) -> np.ndarray:
    """What a recipe gives without being compiled."""
    forwards = [forward_of(s.graph.definition, pass_of(s)) for s in stamps]
    return np.asarray(Recipe(key).run(leaves, forwards)[0])


@settings(max_examples=100, deadline=None)
@given(PICKS, PICKS)
def test_a_pattern_knows_its_structure_from_every_other(one: Picks, other: Picks):
    first = Structure([record_picks(one, COUNTING)])
    for picks in (one, other):
        value = record_picks(picks, COUNTING)
        second = Structure([value])
        matched = Pattern(first.key).match([value], None)

        assert (first.key == second.key) <= (matched is not None)
        if matched is not None:
            expected = run_by(second.key, second.leaves, second.stamps)
            np.testing.assert_array_equal(run_by(first.key, *matched), expected)


def test_one_call_used_twice_is_not_taken_for_two_calls():
    graph = ff.Graph(Counting())
    graph.set_optimizer(optax.sgd)
    graph.set_lr(0.0)

    def sum_of(one: Any, other: Any) -> float:
        return float(step_on_mean(graph, one + other).loss)

    for first in (0, 3, 6):
        assert sum_of(graph(X), graph(X)) == 4 + (first + 1) + (first + 2)
        once = graph(X)
        assert sum_of(once, once) == 4 + 2 * (first + 3)


def test_calls_that_change_places_are_told_apart():
    graph = ff.Graph(Counting())
    graph.set_optimizer(optax.sgd)
    graph.set_lr(0.0)
    losses = []
    for swapped in (False, True, False):
        one, other = graph(X), graph(X)
        if swapped:
            one, other = other, one
        losses.append(step_on_mean(graph, one - 2 * other).loss)

    # Means of x + n - 2 (x + n + 1) and of x + n + 1 - 2 (x + n), for n = 1, 3, 5.
    assert losses == [-5.0, -4.0, -9.0]


def test_one_call_is_not_taken_for_two_that_a_backward_pass_parts():
    def losses(order: tuple[bool, ...], backward: Callable[..., None]) -> list[float]:
        graph = ff.Graph(Counting())
        graph.set_optimizer(optax.sgd)
        graph.set_lr(0.0)
        found = []
        for is_parted in order:
            one = graph(X)
            graph.backward(graph(X + 1).mean())
            loss = (one + (graph(X) if is_parted else one)).mean()
            backward(graph, loss)
            graph.step()
            found.append(float(loss))
        return found

    def at_one_line(graph: ff.Graph, loss: Any) -> None:
        graph.backward(loss)

    once = losses((False,), at_one_line)
    twice = losses((True,), at_one_line)
    later = losses((True, False), at_one_line)[1] - losses((True, True), at_one_line)[1]

    assert later == once[0] - twice[0] != 0


def test_the_results_of_one_call_are_told_apart():
    graph = linear_graph(2.0)
    graph.set_lr(0.0)
    losses = [
        step_on_mean(graph, lnp.divmod(graph(X), 4.0)[place]).loss
        for place in (0, 1, 0)
    ]

    # Of 2, 4 and 6: quotients 0, 1 and 1, remainders 2, 0 and 2.
    assert losses == pytest.approx([2 / 3, 4 / 3, 2 / 3])


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_a_value_that_is_known_is_told_from_one_to_be_run(order: tuple[bool, bool]):
    graph = linear_graph()
    losses = []
    for is_known in order:
        graph.state = linear_graph().state
        scale = lnp.sum(X)
        if is_known:
            scale.realize()
        losses.append(step_on_mean(graph, graph(X) * scale).loss)

    assert losses == [18.0, 18.0]


def test_losses_of_earlier_steps_may_stand_where_arrays_stood():
    graph = linear_graph()
    graph.set_lr(0.0)
    last: Any = jnp.float32(2)
    losses = []
    for _ in range(3):
        loss = (graph(X) + last).mean()
        losses.append(graph.step(loss))
        last = loss  # which nobody has read, here or below

    assert [outcome.loss for outcome in losses] == [5.0, 8.0, 11.0]


def test_what_moved_on_is_refused_from_a_line_that_is_known():
    graph = linear_graph()
    step_on_mean(graph, graph(X))
    y = graph(X)
    step_on_mean(graph, y)
    with pytest.raises(ff.StaleGraphError, match="recorded at test_pattern.py"):
        step_on_mean(graph, graph(X) + y)
    mixed = graph(X)
    step_on_mean(graph, mixed)

    assert graph.training_step == 3


def test_what_moved_on_is_refused_behind_another_graph_too():
    graph, other = linear_graph(), linear_graph()
    y = graph(X)
    graph.step(y.mean())
    loss = other(y).mean()
    with pytest.raises(ff.StaleGraphError):
        graph.step(loss)
    step_on_mean(other, other(graph(X)))
    y = graph(X)
    graph.step(graph(X).mean())
    with pytest.raises(ff.StaleGraphError):
        step_on_mean(other, other(y))
    again = other(linear_graph()(X)).mean()
    gc.collect()
    with pytest.raises(ff.StaleGraphError, match="a graph that is gone"):
        other.step(again)


def test_an_error_half_way_leaves_the_next_loss_alone(forget_structures: Any):
    graph = linear_graph()
    step_on_mean(graph, graph(X) * 2)
    forget_structures()
    y = graph(X)
    with pytest.raises(TypeError, match="incompatible shapes"):
        _ = y + jnp.ones(7)
    with pytest.raises(ZeroDivisionError):
        step_on_mean(graph, graph(X) * (1 // 0))
    step_on_mean(graph, graph(X) * 2)

    assert graph.training_step == 2


def test_another_graph_in_the_place_of_one_is_run_with_its_own_arrays():
    graph = linear_graph()
    losses = []
    for weight in (1.0, 3.0, 5.0):
        other = linear_graph(weight)
        graph.state = linear_graph().state
        losses.append(step_on_mean(graph, graph(other(X))).loss)

    assert losses == [3.0, 9.0, 15.0]


def test_arrays_of_other_kinds_are_one_type_if_they_are_alike():
    graph = linear_graph()
    for x in (X, jnp.asarray(X), lnp.asarray(X).realize(), X[::1]):
        step_on_mean(graph, graph(x))
    assert len(graph.compiles) == 1
    dtypes = [lnp.negative(x).dtype for x in (X, X.astype(np.int32))]
    assert dtypes == [np.float32, np.int32]
    for x in (np.arange(3), jnp.ones(4), jnp.ones((1, 3))):
        step_on_mean(graph, graph(x))

    assert len(graph.compiles) == 4


def test_defaults_count_where_no_argument_stands_for_them():
    def scaled_by(factor: Any, given: tuple[Any, ...]) -> float:
        scale = lambda x, by=factor: x * by  # noqa: E731
        return float(ff.lazy(scale)(X, *given).sum())

    plain = lambda x, by: x * by  # noqa: E731
    plain.__code__ = next(
        c for c in scaled_by.__code__.co_consts if hasattr(c, "co_code")
    )

    assert float(ff.lazy(plain)(X, 2).sum()) == 12
    assert float(ff.lazy(plain)(X, 2).sum()) == 12
    assert [scaled_by(factor, ()) for factor in (3, 4, 3)] == [18, 24, 18]
    assert [scaled_by(factor, (5,)) for factor in (3, 4)] == [30, 30]
    plain.__defaults__ = (7,)
    assert float(ff.lazy(plain)(X).sum()) == 42
    plain.__defaults__ = (8,)
    assert float(ff.lazy(plain)(X).sum()) == 48


def test_threads_with_a_graph_each_do_not_disturb_one_another():
    def run(weight: float, found: dict[float, float]) -> None:
        graph = linear_graph(weight)
        for _ in range(50):
            step_on_mean(graph, (graph(X) - 1.0) ** 2)
        found[weight] = float(graph.state.params["w"])

    alone: dict[float, float] = {}
    together: dict[float, float] = {}
    weights = (0.5, 1.5, 2.5, 3.5)
    for weight in weights:
        run(weight, alone)
    threads = [threading.Thread(target=run, args=(w, together)) for w in weights]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert together == alone
