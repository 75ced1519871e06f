"""What a graph and a lazy array refuse, by name, with the graph still usable."""

import threading
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fuelflow as ff

X = np.arange(3, dtype=np.float32)
lnp = ff.lazy(jnp)


def scale_graph(weight: float = 2.0, **options: Any) -> ff.Graph:
    graph = ff.Graph(
        {"w": np.float32(weight)}, apply=lambda m, x: m["w"] * x, **options
    )
    graph.set_optimizer(optax.sgd)
    graph.set_lr(0.1)
    return graph


def weight_of(graph: ff.Graph) -> float:
    return float(graph.state.params["w"])


# Lazy arrays in functions that do not record.


def _linen(x: Any) -> Any:
    module = nn.Dense(2)
    return module.apply(module.init(jax.random.key(0), X), x)


UNWRAPPED: dict[str, Callable[[Any], Any]] = {
    "jnp.sin": jnp.sin,
    "jnp.sum": jnp.sum,
    "jnp.where": lambda x: jnp.where(x > 0, x, 0),
    "jnp.stack": lambda x: jnp.stack([x, x]),
    "jnp.concatenate": lambda x: jnp.concatenate([x, jnp.ones(3)]),
    "jnp.einsum": lambda x: jnp.einsum("i->", x),
    "jnp.asarray": jnp.asarray,
    "jnp.array of a list": lambda x: jnp.array([x[0], x[1]]),
    "jnp.float32": jnp.float32,
    "jnp.linalg.norm": jnp.linalg.norm,
    "method of a jax array": lambda x: jnp.ones(3).dot(x),
    "at of a jax array": lambda x: jnp.ones(3).at[0].set(x[0]),
    "jax.nn.relu": jax.nn.relu,
    "jax.nn.softmax": jax.nn.softmax,
    "jax.nn.one_hot": lambda x: jax.nn.one_hot(x, 3),
    "jax.lax.exp": jax.lax.exp,
    "jax.lax.add": lambda x: jax.lax.add(jnp.ones(3), x),
    "jax.lax.stop_gradient": jax.lax.stop_gradient,
    "jax.lax.scan": lambda x: jax.lax.scan(lambda c, v: (c + v, v), 0.0, x),
    "jax.lax.scan carry": lambda x: jax.lax.scan(
        lambda c, v: (c + v, v), x[0], jnp.ones(3)
    ),
    "jax.lax.cond": lambda x: jax.lax.cond(True, lambda v: v, lambda v: -v, x),
    "jax.lax.fori_loop": lambda x: jax.lax.fori_loop(0, 2, lambda _, v: v + 1, x),
    "jax.jit": jax.jit(lambda v: v + 1),
    "jax.jit by keyword": lambda x: jax.jit(lambda v: v + 1)(v=x),
    "jax.jit closure": lambda x: jax.jit(lambda v: v + x)(jnp.ones(3)),
    "jax.grad": jax.grad(lambda v: (v**2).sum()),
    "jax.grad closure": lambda x: jax.grad(lambda v: (v * x).sum())(jnp.ones(3)),
    "jax.value_and_grad": jax.value_and_grad(lambda v: v.sum()),
    "jax.vmap": jax.vmap(lambda v: v * 2),
    "jax.vjp": lambda x: jax.vjp(lambda v: v * 2, x),
    "jax.checkpoint": jax.checkpoint(lambda v: v * 2),
    "jax.device_put": jax.device_put,
    "optax.l2_loss": optax.l2_loss,
    "optax.huber_loss": optax.huber_loss,
    "optax.softmax_cross_entropy_with_integer_labels": (
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, np.int32(0))
    ),
    "optax.tree.norm": optax.tree.norm,
    "numpy.sin": np.sin,
    "numpy.sum": np.sum,
    "numpy.stack": lambda x: np.stack([x, x]),
    "numpy.maximum": lambda x: np.maximum(x, 0),
    "numpy.add.reduce": np.add.reduce,
    "nnx module": nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
    "nnx.relu": nnx.relu,
    "linen module": _linen,
}


@pytest.mark.parametrize("name", UNWRAPPED)
def test_a_function_that_does_not_record_refuses_a_lazy_array(name: str):
    graph = scale_graph()
    y = graph(X)

    with pytest.raises((ff.NotWrappedError, TypeError)) as info:
        UNWRAPPED[name](y)
    assert isinstance(info.value, ff.NotWrappedError) or "Lazy" in str(info.value)
    assert not y.is_realized
    graph.step(y.sum())
    assert weight_of(graph) == pytest.approx(2 - 0.1 * 3)


def test_the_refusal_names_the_function_and_the_remedy():
    with pytest.raises(
        ff.NotWrappedError, match="passed to `softmax_cross_entropy_with.*: wrap the f"
    ) as info:
        optax.softmax_cross_entropy_with_integer_labels(
            lnp.ones((2, 3)), np.array([0, 1])
        )
    assert info.value.function == "softmax_cross_entropy_with_integer_labels"
    with pytest.raises(ff.NotWrappedError, match=r"`jnp = ff.lazy\(jax.numpy\)`"):
        jnp.sum(lnp.ones(3))


@pytest.mark.filterwarnings("ignore")  # some of the functions are deprecated
@pytest.mark.parametrize(
    "module", [jnp, jax.nn, jax.lax, optax.losses, jax.scipy.special]
)
def test_no_public_function_reads_a_lazy_array_in_silence(module: Any):
    read = []
    for name in dir(module):
        function = getattr(module, name)
        is_type = isinstance(function, type)
        if name.startswith("_") or is_type or not callable(function):
            continue
        for before in (0, 1):
            value = lnp.ones((2, 2)) + 0
            try:
                function(*[jnp.ones((2, 2))] * before, value)
            except Exception:  # noqa: BLE001
                continue
            if value.is_realized:
                read.append(name)

    # A dtype of Python objects, which no gradient could pass anyway.
    assert [name for name in read if name != "object_"] == []


def test_a_lazy_array_is_no_batch_of_a_loop():
    loop = ff.TrainingLoop(lambda m, b: m["w"] * b["x"], optax.sgd, schedule=0.1)

    with pytest.raises((ff.NotWrappedError, TypeError), match="[Ll]azy"):
        loop.step(loop.init({"w": np.float32(1)}), {"x": lnp.ones(3)})


# Values whose parameters have moved on.


def test_stepping_a_loss_twice_is_refused():
    graph = scale_graph()
    loss = graph(X).sum()
    graph.step(loss)

    for call in (graph.step, graph.backward, graph.grads, graph.plan):
        with pytest.raises(
            ff.StaleGraphError,
            match=r"`sum` at test_refusals.py:\d+, belongs to the pa",
        ):
            call(loss)
    assert weight_of(graph) == pytest.approx(2 - 0.1 * 3)
    assert graph.training_step == 1


def test_reading_after_the_step_what_was_never_run_is_refused():
    graph = scale_graph()
    y = graph(X)
    other = y * 2
    graph.step(y.sum())
    here = test_reading_after_the_step_what_was_never_run_is_refused

    for value in (y, other, other + 1):
        with pytest.raises(
            ff.StaleGraphError, match="moved on: record it anew"
        ) as info:
            value.realize()
        assert info.value.step == 0
        with pytest.raises(ff.StaleGraphError):
            graph.step((graph(X) + value).sum())
    assert f"test_refusals.py:{here.__code__.co_firstlineno + 2} bel" in str(info.value)
    assert graph.step(graph(X).sum()).global_step == 2


def test_a_step_that_failed_leaves_the_loss_to_be_stepped():
    graph = ff.Graph({"w": np.float32(2)}, apply=lambda m, x: m["w"] * x)
    loss = graph(X).sum()
    with pytest.raises(ValueError, match="`step` needs an optimizer"):
        graph.step(loss)
    graph.set_optimizer(optax.sgd)
    with pytest.raises(ValueError, match=r"`graph.set_scheduler\(...\)`.*set_lr\(lr\)"):
        graph.step(loss)
    graph.set_lr(0.1)
    graph.step(loss)

    assert weight_of(graph) == pytest.approx(2 - 0.1 * 3)


def test_an_interrupt_while_tracing_leaves_the_graph_usable():
    class Interrupt:
        is_due = False

    def touchy(x: Any) -> Any:
        if Interrupt.is_due:
            raise KeyboardInterrupt
        return x * 2

    graph = scale_graph()
    loss = ff.lazy(touchy)(graph(X)).sum()
    Interrupt.is_due = True
    with pytest.raises(KeyboardInterrupt):
        graph.step(loss)
    Interrupt.is_due = False
    graph.step(loss)

    assert weight_of(graph) == pytest.approx(2 - 0.1 * 6)


# Losses of the wrong kind.


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda y: y.astype(int).sum(), TypeError, r"must be floating, got int32\[\]"),
        (lambda y: y > 1, TypeError, r"the loss must be floating, got bool\[3\]"),
        (lambda y: y + 0j, TypeError, r"the loss must be floating, got complex64\[3\]"),
        (
            lambda y: y[:, None] * y,
            ValueError,
            r"a scalar, a vector .* float32\[3, 3\]",
        ),
        (
            lambda y: 3.0,
            TypeError,
            "the loss must be a lazy array made from .* a float",
        ),
        (lambda y: X, TypeError, "the loss must be a lazy array made .* got a ndarray"),
        (lambda y: (y, {}), TypeError, "the loss must be a lazy array .* got a tuple"),
        (lambda y: ff.Weighted(X, y), TypeError, "the loss must be a lazy array"),
        (
            lambda y: ff.Weighted(y, np.ones(4, np.float32)),
            ValueError,
            r"the weight of the loss must broadcast to its value \[3\], got \[4\]",
        ),
        (
            lambda y: lnp.ones(()),
            ValueError,
            "the loss must depend on this graph's mod",
        ),
        (lambda y: scale_graph()(X).sum(), ValueError, "nothing in it was made by `gr"),
    ],
)
@pytest.mark.parametrize("call", ["step", "backward", "grads", "plan"])
def test_losses_of_the_wrong_form_are_refused(
    call: str, loss: Any, error: type[Exception], message: str
):
    graph = scale_graph()

    with pytest.raises(error, match=message):
        getattr(graph, call)(loss(graph(X)))
    graph.step(graph(X).sum())
    assert weight_of(graph) == pytest.approx(2 - 0.1 * 3)
    assert graph.training_step == 1


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ({"loss": 1}, ValueError, "a metric must not be named `loss`, the name of the"),
        ({"the loss": 1}, ValueError, "must not be named `the loss`"),
        ({3: 1}, TypeError, "a metric's name must be a string, got 3"),
        ({"size": 1.0}, TypeError, "the metric `size` must be a lazy array .* a float"),
    ],
)
def test_metrics_of_the_wrong_form_are_refused(
    metrics: Any, error: type[Exception], message: str
):
    graph = scale_graph()
    y = graph(X)
    metrics = {
        n: y.sum() if v == 1 and type(v) is int else v for n, v in metrics.items()
    }

    with pytest.raises(error, match=message):
        graph.step(y.sum(), metrics=metrics)


@pytest.mark.parametrize("fetch", [3, [3], [X], ["y"], {"y": 1}])
def test_only_lazy_arrays_are_fetched(fetch: Any):
    graph = scale_graph()

    with pytest.raises(TypeError, match=r"`fetch` must hold lazy arrays|not iterable"):
        graph.step(graph(X).sum(), fetch=fetch)


def test_a_value_of_no_graph_or_of_two_has_no_gradient_of_its_own():
    first, second = scale_graph(), scale_graph(3.0)
    both = (first(X) * second(X)).sum()

    with pytest.raises(ValueError, match="this one depends on no graph: use `graph.gr"):
        lnp.ones(()).backward()
    with pytest.raises(ValueError, match="depends on 2 graphs: use `graph.plan"):
        both.plan()
    assert first.grads(both)["w"] == 3 * 5
    assert second.grads(both)["w"] == 2 * 5


# The order of calls.


def test_steps_and_backward_calls_out_of_order_are_refused():
    graph = scale_graph()
    with pytest.raises(
        ValueError, match=r"`graph.step\(\)` needs gradients: give it a"
    ):
        graph.step()
    loss = graph(X).sum()
    graph.backward(loss)
    with pytest.raises(ff.StaleGraphError):
        graph.backward(loss)
    with pytest.raises(RuntimeError, match="are waiting for a step: call `graph.step"):
        graph.step(graph(X).sum())
    for change in (
        lambda: graph.set_optimizer(optax.adam),
        lambda: graph.set_scheduler(0.1),
        lambda: graph.set_trainable("w"),
        lambda: graph.set_lr_groups({"w": 2.0}),
        lambda: setattr(graph, "state", graph.state),
    ):
        with pytest.raises(RuntimeError, match="gradients are waiting for a step"):
            change()
    graph.step()

    assert weight_of(graph) == pytest.approx(2 - 0.1 * 3)


@pytest.mark.parametrize(
    "setting",
    [
        lambda graph: graph.set_scheduler(0.1),
        lambda graph: graph.set_lr(0.1),
        lambda graph: graph.set_lr_scale(0.1),
        lambda graph: graph.backward(graph(X).sum()),
    ],
)
def test_what_needs_an_optimizer_says_so(setting: Callable[[ff.Graph], Any]):
    graph = ff.Graph({"w": np.float32(2)}, apply=lambda m, x: m["w"] * x)

    with pytest.raises(ValueError, match=r"needs an optimizer: `graph.set_optimizer\("):
        setting(graph)


def test_settings_of_the_wrong_kind_change_nothing():
    graph = scale_graph()
    with pytest.raises(TypeError, match="`optimizer` must be an optax"):
        graph.set_optimizer(0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="finite"):
        graph.set_lr(float("nan"))
    with pytest.raises(ValueError, match="no parameter|selects nothing|matches"):
        graph.set_trainable("v")
    graph.set_optimizer(optax.sgd(0.1))
    with pytest.raises(ValueError, match="factory|its own|rate"):
        graph.set_scheduler(0.2)
    with pytest.raises(ValueError, match="factory|its own|rate"):
        graph.set_lr_scale(0.2)
    graph.step(graph(X).sum())

    assert weight_of(graph) == pytest.approx(2 - 0.1 * 3)


def test_models_of_the_wrong_kind_are_refused():
    with pytest.raises(
        TypeError, match="a dict is not callable: say how it is applied"
    ):
        ff.Graph({"w": np.float32(1)})
    with pytest.raises(TypeError, match=r"pass ff.Linen\(module, module"):
        ff.Graph(nn.Dense(2))


def test_a_value_outlives_its_graph_only_if_it_was_run():
    import gc

    def make() -> tuple[Any, Any]:
        graph = scale_graph()
        read, unread = graph(X), graph(X) * 2
        read.realize()
        return read, unread

    read, unread = make()
    gc.collect()

    np.testing.assert_array_equal(read, 2 * X)
    with pytest.raises(ff.StaleGraphError, match="graph that is gone"):
        unread.realize()


def test_the_loop_of_a_graph_asks_for_a_loss_of_its_own():
    graph = scale_graph()

    with pytest.raises(TypeError, match=r"loop = graph.loop.replace\(loss_fn=...\)"):
        graph.loop.step(graph.state, X)


def test_threads_with_a_graph_each_do_not_disturb_each_other():
    graphs = [scale_graph(float(number)) for number in range(4)]
    failures = []

    def train(graph: ff.Graph) -> None:
        try:
            for _ in range(30):
                graph.step((graph(X) * lnp.ones(3)).sum())
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=train, args=(graph,)) for graph in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    for number, graph in enumerate(graphs):
        # Thirty subtractions of 0.3 in float32.
        assert weight_of(graph) == pytest.approx(number - 9, abs=1e-5)
