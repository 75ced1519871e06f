"""What recording keeps alive: nothing of a step that is done."""

import gc
import tracemalloc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import CompileCounter

import fuelflow as ff

lnp = ff.lazy(jnp)


def linear_graph(features: int = 3, **options: Any) -> ff.Graph:
    graph = ff.Graph(
        {"w": np.full(features, 0.5, np.float32)},
        apply=lambda m, x: x @ m["w"],
        **options,
    )
    graph.set_optimizer(optax.adam)
    graph.set_lr(1e-3)
    return graph


def batches(count: int) -> Any:
    for number in range(count):
        yield {
            "x": np.full((4, 3), number % 7, np.float32),
            "y": np.full(4, number % 5, np.float32),
        }


def train(graph: ff.Graph, steps: int) -> Any:
    """Steps with what users write around them: a running sum, a metric, a fetch."""
    total = 0.0
    for batch in batches(steps):
        y = graph(batch["x"])
        loss = ff.lazy(lambda y, t: ((y - t) ** 2).mean())(y, batch["y"])
        graph.step(loss, metrics={"bias": y.mean()}, fetch=y)
        total = total + loss
        float(total)
    return total


@pytest.mark.parametrize("steps", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_steps_compile_once_and_keep_memory_flat(
    steps: int, compile_counter: CompileCounter
):
    graph = linear_graph()
    train(graph, 100)
    gc.collect()
    arrays = len(jax.live_arrays())
    compile_counter.reset()
    tracemalloc.start()
    total = train(graph, steps)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert compile_counter.compiled.count("jit(step)") == 0
    assert graph.training_step == steps + 100
    assert np.isfinite(float(total))
    # The outcomes that the loop has not looked at are at most 64, of some two kilobytes
    # each; every step that was kept would be another, and hold an array.
    assert len(jax.live_arrays()) - arrays < 100
    assert grown < 64 * 3_000 + 20 * steps


@pytest.mark.parametrize("reads", [True, False])
def test_a_batch_is_let_go_of_once_its_step_was_looked_at(reads: bool):
    graph = linear_graph(max_in_flight=2)
    kept, references = [], []
    for _ in range(6):
        x = jnp.ones((4, 3))
        references.append(weakref.ref(x))
        y = graph(x)
        doubled = y * 2
        loss = (doubled**2).mean()
        if reads:
            doubled.realize()
        graph.step(loss, fetch=y)
        kept += [y, loss]  # as a list of losses would keep them
        del x, doubled
        gc.collect()

    # Those of steps that may turn out to have been bad are there to be replayed.
    assert [reference() for reference in references[:-2]] == [None] * 4
    assert np.isfinite(sum(float(value.sum()) for value in kept))


@pytest.mark.parametrize(
    "use",
    [
        lambda x: lnp.sin(x).realize(),
        lambda x: ff.lazy(lambda tree: tree["a"][0] * 2)({"a": [x]}).realize(),
        lambda x: ff.lazy(lambda y: y * x)(np.float32(2)).realize(),
        lambda x: ff.lazy(lambda y, z=x: y * z)(np.float32(2)).realize(),
        lambda x: ff.lazy(lambda y: {"a": y, "b": (y, y)})(x)["b"][0].realize(),
    ],
    ids=["argument", "tree", "closure", "default", "results"],
)
def test_what_is_remembered_of_calls_holds_no_array(use: Any):
    x = jnp.ones(1000)
    reference = weakref.ref(x)
    use(x)
    del x
    gc.collect()

    assert reference() is None


def test_tracing_leaks_no_tracer():
    with jax.checking_leaks():
        graph = linear_graph()
        parts = ff.lazy(lambda y: {"a": y * 2, "b": [y + 1]})(graph(np.ones((4, 3))))
        outcome = graph.step(parts["a"].mean(), fetch=parts["b"])

    assert outcome.loss == pytest.approx(3.0)


def test_reading_without_stepping_keeps_nothing():
    graph = linear_graph()
    x = np.ones((4, 3), np.float32)
    float(graph(x).sum())
    gc.collect()
    tracemalloc.start()
    for _ in range(3000):
        float(graph(x).sum())
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert grown < 100_000  # a weak reference for each would be 200,000


def test_a_graph_that_is_gone_frees_its_arrays():
    graph = linear_graph(12_345)
    graph.step(graph(np.ones((1, 12_345), np.float32)).mean())
    loss = graph(np.ones((1, 12_345), np.float32)).mean()
    graph.step(loss)
    del graph
    gc.collect()

    assert [a.shape for a in jax.live_arrays() if 12_345 in a.shape] == []
    assert np.isfinite(float(loss))
