"""Numbers recorded by name from inside a model or loss."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from problems import KINDS, Kind, assert_bitwise, make_batches, mlp_loss

import fuelflow as ff

X = np.arange(24, dtype=np.float32).reshape(6, 4) - 7
BATCH = {"x": X}


def _loop(loss_fn: Any, **options: Any) -> ff.TrainingLoop:
    return ff.TrainingLoop(loss_fn, optax.sgd, schedule=1e-3, **options)


def _init(loop: ff.TrainingLoop) -> ff.TrainState:
    return loop.init({"w": jnp.float32(1.0)})


def _through(inside: Callable[[Any], Any]) -> Any:
    """A loss that has its inputs go through a function that records."""

    def loss_fn(params: Any, batch: Any) -> Any:
        return inside(params["w"] * batch["x"]).mean(axis=1)

    return loss_fn


def _recorded(x: Any) -> Any:
    ff.probe("seen", x)
    return x


@jax.custom_vjp
def _own_vjp(x: Any) -> Any:
    return _recorded(x) * 2


_own_vjp.defvjp(lambda x: (_own_vjp(x), None), lambda _, g: (g * 2,))


@jax.custom_jvp
def _own_jvp(x: Any) -> Any:
    return _recorded(x) * 2


@_own_jvp.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _own_jvp(*primals), tangents[0] * 2


def _scanned(x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (_recorded(c), None), x, None, length=3)[0]


def _over_rows(x: Any) -> Any:
    return jax.lax.map(_recorded, x)


def _looped(x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, c: _recorded(c), x)


def _while(x: Any) -> Any:
    """A loop whose number of turns is only known as it runs."""

    def turn(carry: Any) -> Any:
        return carry[0] + 1, _recorded(carry[1])

    fixed = jax.lax.stop_gradient(x)
    _, last = jax.lax.while_loop(lambda c: c[0] < 2 + fixed[0, 0] * 0, turn, (0, fixed))
    return last + x - fixed


def _branched(x: Any) -> Any:
    return jax.lax.cond(x[0, 0] < 0, _recorded, lambda x: x + 0 * _own_jvp(x), x)


def _differentiated(x: Any) -> Any:
    return jax.grad(lambda x: (_recorded(x) ** 2).sum() / 2)(x)


def _nested(x: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        return jax.checkpoint(jax.jit(jax.vmap(_own_vjp)))(carry) / 2, None

    return jax.lax.scan(body, x, None, length=2)[0]


INSIDES = {
    "plain": _recorded,
    "jit": jax.jit(_recorded),
    "scan": _scanned,
    "map": _over_rows,
    "fori": _looped,
    "while": _while,
    "cond": _branched,
    "checkpoint": jax.checkpoint(_recorded),
    "vmap": jax.vmap(_recorded),
    "vmap of scalars": jax.vmap(jax.vmap(_recorded)),
    "custom_vjp": _own_vjp,
    "custom_jvp": _own_jvp,
    "inner grad": _differentiated,
    "nested": _nested,
}


@pytest.mark.parametrize("inside", INSIDES.values(), ids=INSIDES)
def test_a_probe_is_found_at_any_depth(inside: Any):
    loop = _loop(_through(inside))
    state, outcome = loop.step(_init(loop), BATCH)

    assert outcome.metrics == {"seen": X.mean()}
    assert loop.evaluate(state, [BATCH])["seen"] == pytest.approx(X.mean(), rel=0.01)
    # What is left of it would keep each step from its quick dispatch.
    programs: Any = loop._host._programs
    (executable,) = programs.steps(state).step.executables
    assert not executable.traced.jaxpr.effects


@pytest.mark.parametrize("name", INSIDES)
def test_a_probe_changes_no_gradient(name: str):
    loop = _loop(_through(INSIDES[name]))
    grads = loop.grads(_init(loop), BATCH)

    factor = 2 if name.startswith("custom") else 1
    assert float(grads["w"]) == pytest.approx(factor * X.mean(), rel=1e-6)


def test_a_model_without_probes_is_trained_bit_for_bit_as_with_them():
    batches = make_batches(20)
    plain = mlp_loss(KINDS[0])

    def probed(model: Any, batch: Any) -> Any:
        losses = plain(model, batch)
        ff.probe("losses", losses)
        return losses

    states = []
    for loss_fn in (plain, probed):
        loop = ff.TrainingLoop(loss_fn, optax.adamw, schedule=1e-2, max_grad_norm=0.5)
        state, outcome = loop.run(loop.init(KINDS[0].make()), batches)
        states.append(state)

    assert_bitwise(states[1].params, states[0].params)
    np.testing.assert_allclose(outcome.metrics["losses"], outcome.loss, rtol=1e-6)


def test_a_name_recorded_often_is_the_mean_of_all():
    def inside(x: Any) -> Any:
        for factor in (1, 2, 6):
            ff.probe("factor", factor)
            x = jax.lax.scan(_counting, x, jnp.arange(3.0))[0]
        ff.probe("sized", jnp.ones(9))
        ff.probe("sized", 4.0)
        return x

    def _counting(x: Any, index: Any) -> Any:
        ff.probe("index", index)
        return x, None

    loop = _loop(_through(inside))
    _, outcome = loop.step(_init(loop), BATCH)

    assert outcome.metrics == {"factor": 3, "index": 1, "sized": 2.5}


def test_a_weight_leaves_out_what_it_is_0_for():
    def inside(x: Any) -> Any:
        ff.probe("positive", jnp.where(x > 0, x, jnp.nan), x > 0)
        for name, weight in (("first", 1.0), ("none", 0.0)):
            ff.probe(name, x[:, 0], weight)
        for value in (1.0, 4.0):
            ff.probe("heavy", value, value)
        return x

    loop = _loop(_through(inside))
    _, outcome = loop.step(_init(loop), BATCH)

    assert outcome.metrics["positive"] == pytest.approx(X[X > 0].mean())
    assert outcome.metrics["first"] == pytest.approx(X[:, 0].mean())
    assert np.isnan(outcome.metrics["none"])
    assert outcome.metrics["heavy"] == pytest.approx((1 * 1 + 4 * 4) / 5)


def _rows_and_scalars(params: Any, batch: Any) -> Any:
    x = params["w"] * batch["x"]
    ff.probe("rows", x)
    ff.probe("weighted rows", x, jnp.abs(batch["x"]))
    jax.vmap(lambda row: ff.probe("vmapped", row.max()))(batch["x"])
    jax.vmap(lambda head: ff.probe("heads", head * x[:, 0]))(jnp.arange(8.0))
    jax.vmap(lambda column: ff.probe("columns", column), in_axes=1)(x)
    ff.probe("scalar", batch["x"].max())
    return x.mean(axis=1) ** 2


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_rows_that_fill_a_batch_up_are_recorded_nowhere(
    num_ranks: int, accumulate_steps: int
):
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    mesh = ff.mesh(jax.devices()[:num_ranks])
    loop = ff.TrainingLoop(
        _rows_and_scalars,
        optax.sgd,
        schedule=0,
        mesh=mesh,
        accumulate_steps=accumulate_steps,
    )
    loader = ff.DataLoader({"x": x}, batch_size=8, shuffle=False, mesh=mesh)
    trainer = ff.Trainer(
        loop, {"w": np.float32(1)}, loader, epochs=1, eval_data=loader, time_ranks=False
    )
    (metrics,) = trainer.fit().history

    assert [r.program for r in loop.compiles if "step" in r.program] == [
        "step, with sums"
    ]
    # The last batch has 4 rows of 8: with two ranks or microbatches one part is whole.
    size = 8 // num_ranks // accumulate_steps
    parts = [x[i : i + size] for i in range(0, 20 - size + 1, size)]
    expected = {
        "rows": x.mean(),
        "weighted rows": np.average(x, weights=np.abs(x)),
        "vmapped": x.max(axis=1).mean(),
        "heads": 3.5 * x[:, 0].mean(),
        "columns": x.mean(),
        "scalar": np.mean([part.max() for part in parts]),
    }
    assert metrics.scalars == pytest.approx(expected, rel=1e-4)
    del expected["scalar"]
    evaluated = {name: metrics.evaluation[name] for name in expected}
    assert evaluated == pytest.approx(expected, rel=1e-4)


def test_every_road_says_the_same():
    def loss_fn(model: Any, batch: Any) -> Any:
        losses = mlp_loss(KINDS[2])(model, batch)
        ff.probe("loss again", losses)
        return losses

    batches = make_batches(8)
    found = {}
    roads: list[tuple[str, dict[str, Any], int]] = [
        ("step", {}, 1),
        ("run", {}, 4),
        ("accumulated", {"accumulate_steps": 4}, 1),
        ("ranks", {"mesh": ff.mesh()}, 1),
    ]
    for name, options, steps_per_call in roads:
        loop = ff.TrainingLoop(loss_fn, optax.adam, schedule=1e-2, **options)
        state = loop.init(KINDS[2].make())
        _, outcome = loop.run(state, batches, steps_per_call=steps_per_call)
        found[name] = outcome.metrics["loss again"]
        np.testing.assert_allclose(found[name], outcome.loss, rtol=1e-5)

    for values in found.values():
        np.testing.assert_allclose(values, found["step"], rtol=1e-4)


class Scanned(nnx.Module):
    """Layers that share their code, with dropout and statistics of a batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.vmap(in_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(4, 4, rngs=rngs)

        self.layers = make(rngs.split(3))
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            x = layer(x)
            ff.probe("square", x**2)
            return x

        x = self.dropout(self.norm(through(x, self.layers)))
        ff.probe("kept", x != 0)
        return x


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        x = nn.Dense(4)(x)
        ff.probe("square", x**2)
        return x, None


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        axes: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(nn.remat(Block), length=3, **axes)(name="layers")(x, None)
        return x


def _squares(params: Any) -> float:
    x, found = X, []
    for layer in range(3):
        kernel, bias = (np.asarray(params[f"layers.{n}"]) for n in ("kernel", "bias"))
        x = x @ kernel[layer] + bias[layer]
        found.append((x**2).mean())
    return float(np.mean(found))


def test_layers_scanned_by_nnx_are_recorded_and_their_variables_kept():
    loop = _loop(lambda model, batch: (model(batch["x"]) ** 2).mean(axis=1))
    state = loop.init(Scanned(nnx.Rngs(0)))
    expected = _squares(state.params)
    state, outcome = loop.step(state, BATCH)

    assert outcome.metrics["square"] == pytest.approx(expected, rel=1e-4)
    assert 0 < outcome.metrics["kept"] < 1
    assert loop.evaluate(state, [BATCH])["kept"] == 1
    assert np.asarray(state.variables["norm.mean"]).any()


def test_layers_scanned_and_rematerialized_by_linen_are_recorded():
    module = LinenScanned()
    variables = module.init(jax.random.key(0), X)
    loop = _loop(lambda model, batch: (model(batch["x"]) ** 2).mean(axis=1))
    state = loop.init(ff.Linen(module, variables))
    params = {k.replace("Dense_0.", ""): v for k, v in state.params.items()}
    expected = _squares(params)
    _, outcome = loop.step(state, BATCH)

    assert outcome.metrics["square"] == pytest.approx(expected, rel=1e-4)


def test_a_recorded_model_of_a_graph_is_probed_by_its_step():
    graph = ff.Graph(Scanned(nnx.Rngs(0)))
    graph.set_optimizer(optax.sgd)
    graph.set_scheduler(1e-3)
    expected = _squares(graph.state.params)
    outcome = graph.step((graph(X) ** 2).mean())

    assert outcome.metrics["square"] == pytest.approx(expected, rel=1e-4)


def test_outside_of_a_step_a_probe_does_nothing():
    assert ff.probe("seen", 1.0) is None
    np.testing.assert_array_equal(jax.jit(_recorded)(X), X)
    np.testing.assert_array_equal(jax.jit(jax.vmap(_recorded))(X), X)
    assert jax.grad(lambda x: _recorded(x) ** 2)(3.0) == 6


def test_with_jit_disabled_a_probe_is_recorded_too():
    with jax.disable_jit():
        loop = _loop(_through(_scanned))
        state, outcome = loop.step(_init(loop), BATCH)
        evaluation = loop.evaluate(state, [BATCH])

    assert outcome.metrics == {"seen": X.mean()}
    assert evaluation["seen"] == pytest.approx(X.mean(), rel=0.01)


def test_a_probed_loss_is_traced_and_compiled_once(compile_counter: Any):
    traces = [0]

    def loss_fn(params: Any, batch: Any) -> Any:
        traces[0] += 1
        return _through(_nested)(params, batch)

    loop = _loop(loss_fn, strict_compile=True)
    state = _init(loop)
    compile_counter.reset()
    for _ in range(3):
        state, _ = loop.step(state, BATCH)

    assert traces[0] == 1
    assert compile_counter.compiled == ["jit(step)"]


def test_in_a_run_of_a_trainer_a_probe_stands_beside_the_metrics():
    def loss_fn(params: Any, batch: Any) -> Any:
        ff.probe("mean", batch["x"])
        losses = (params["w"] * batch["x"]).mean(axis=1)
        return losses, {"first": batch["x"][:, 0]}

    loader = ff.DataLoader({"x": X}, batch_size=2)
    trainer = ff.Trainer(
        _loop(loss_fn), {"w": np.float32(1)}, loader, epochs=2, steps_per_call=3
    )
    history = trainer.fit().history

    expected = {"first": X[:, 0].mean(), "mean": X.mean()}
    assert history[-1].scalars == pytest.approx(expected)
    assert history.trend("mean").stalled(2, 1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, 1.0), TypeError, "name of a probe must be a string, got 3"),
        (("", 1.0), ValueError, "must not be empty"),
        (("loss", 1.0), ValueError, "must not be .*`loss`.*got 'loss'"),
        (("eval.x", 1.0), ValueError, "nor begin with `eval.`"),
        (("x", "text"), TypeError, "probe `x` must be a real number .*got a str"),
        (("x", 1j), TypeError, "probe `x` must be floating, integer or bool"),
        (("x", np.zeros((0, 3))), ValueError, "at least one value, got float"),
        (("x", X, np.ones(5)), ValueError, r"broadcast to its value \[6, 4\], got"),
        (("x", X, "heavy"), TypeError, "weight of the probe `x`"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(
    arguments: Any, error: Any, message: str
):
    with pytest.raises(error, match=message):
        ff.probe(*arguments)


def test_names_that_clash_are_refused():
    def named_alike(params: Any, batch: Any) -> Any:
        ff.probe("x", batch["x"])
        return params["w"] * batch["x"][:, 0], {"x": batch["x"][:, 0]}

    def both_ways(params: Any, batch: Any) -> Any:
        ff.probe("x", batch["x"])
        ff.probe("x", batch["x"], 1.0)
        return params["w"] * batch["x"][:, 0]

    for loss_fn, message in (
        (named_alike, "must not be named `x`, as a metric"),
        (both_ways, "with a weight everywhere in a pass, or nowhere"),
    ):
        loop = _loop(loss_fn)
        with pytest.raises(ValueError, match=message):
            loop.step(_init(loop), BATCH)
        with pytest.raises(ValueError, match=message):
            loop.evaluate(_init(loop), [BATCH])


def test_where_a_probe_cannot_be_carried_out_of_it_is_refused():
    mesh = jax.make_mesh((1,), ("z",))
    spec = PartitionSpec()

    def mapped(x: Any) -> Any:
        return jax.shard_map(_recorded, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    def asked(x: Any) -> Any:
        fixed = jax.lax.stop_gradient(x)
        done = jax.lax.while_loop(
            lambda c: _recorded(c).sum() < -1e9, lambda c: c + 1, fixed
        )
        return x + 0 * done

    for inside, message in (
        (mapped, "carried out of a `shard_map` .*got `seen`"),
        (asked, "out of the condition of a while loop, got `seen`"),
    ):
        loop = _loop(_through(inside))
        with pytest.raises(ValueError, match=message):
            loop.step(_init(loop), BATCH)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_probe_sees_every_kind_of_model(kind: Kind):
    def loss_fn(model: Any, batch: Any) -> Any:
        logits = kind.forward(model, batch["x"])
        ff.probe("logits", logits)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    batch = make_batches(1)[0]
    loop = ff.TrainingLoop(loss_fn, optax.adam, schedule=1e-2)
    _, outcome = loop.step(loop.init(kind.make()), batch)
    expected = kind.apply(kind.params_of(kind.make()), batch["x"])

    assert outcome.metrics["logits"] == pytest.approx(float(expected.mean()), rel=1e-4)


FIRST = """
import sys
import jax.numpy as jnp, numpy as np, optax
import fuelflow as ff

batch = {"x": np.float32([1, 2]), "y": np.float32([2, 4])}
calls = []

def quiet(params, batch):
    return (params["w"] * batch["x"] - batch["y"]) ** 2

def told(params, batch):
    calls.append(1)
    ff.probe("bias", params["w"] * batch["x"] - batch["y"])
    return quiet(params, batch)

def step(loss_fn):
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    return loop.step(loop.init({"w": jnp.float32(0.0)}), batch)[1].metrics

print(step(quiet), "fuelflow.step.carrying" in sys.modules, "jax.extend" in sys.modules)
print(step(told), len(calls))
print(step(told), len(calls))
"""


def test_who_records_nothing_pays_for_nothing():
    run = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, check=True
    )

    # The pass that records for the first time in a process is begun anew.
    assert run.stdout.splitlines() == [
        "{} False False",
        "{'bias': -3.0} 2",
        "{'bias': -3.0} 3",
    ]
