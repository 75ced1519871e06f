"""Settings that recorded functions read where they cannot be handed out as data."""

import sys
import types
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import fuelflow as ff

X = np.ones(2, np.float32)
SCALE = 2.0


class Settings:
    scale = 1.0
    shift: Any = np.array([1, 2], np.float32)


class Scaler:
    def outer(self, x):
        return self.inner(x)

    def inner(self, x):
        return x * SCALE


def test_an_attribute_of_a_class_is_read_anew(monkeypatch):
    def scaled(x):
        return x * Settings.scale + Settings.shift

    lazily = ff.lazy(scaled)
    first = lazily(X).tolist()
    monkeypatch.setattr(Settings, "scale", 5.0)
    second = lazily(X).tolist()
    monkeypatch.setattr(Settings, "shift", np.array([0, 0], np.float32))
    third = lazily(X).tolist()

    assert (first, second, third) == ([2, 3], [6, 7], [5, 5])


def test_an_array_of_a_class_that_is_written_into_is_noticed():
    class Table:
        values: Any = np.array([1, 2], np.float32)

    lazily = ff.lazy(lambda x: x + Table.values)
    before = lazily(X).tolist()
    Table.values[0] = 9
    after = lazily(X).tolist()

    assert (before, after) == ([2, 3], [10, 3])


def test_a_global_that_a_method_reads_is_noticed(monkeypatch):
    lazily = ff.lazy(Scaler().outer)
    before = lazily(X).tolist()
    monkeypatch.setitem(globals(), "SCALE", 7.0)
    after = lazily(X).tolist()

    assert (before, after) == ([2, 2], [7, 7])


def test_an_attribute_of_a_module_of_ones_own_is_noticed(tmp_path, monkeypatch):
    module = types.ModuleType("own_settings")
    module.__file__ = str(tmp_path / "own_settings.py")
    vars(module)["scale"] = 1.0
    monkeypatch.setitem(sys.modules, "own_settings", module)
    monkeypatch.setitem(globals(), "own_settings", module)
    lazily = ff.lazy(lambda x: x * own_settings.scale)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    before = lazily(X).tolist()
    vars(module)["scale"] = 3.0
    after = lazily(X).tolist()

    assert (before, after) == ([1, 1], [3, 3])


def test_looking_without_a_step_compiles_once_for_a_model_at_rest(compile_counter):
    module = nn.Dense(2)
    graph = ff.Graph(ff.Linen(module, module.init(jax.random.key(0), X)))
    float(graph(X).sum())
    compile_counter.reset()
    for _ in range(3):
        float(graph(X).sum())

    assert compile_counter.compiled == []


def test_a_skipped_step_leaves_the_statistics_of_other_graphs():
    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    head = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    below, above = ff.Graph(norm), ff.Graph(head, nonfinite="skip")
    above.set_optimizer(optax.sgd)
    above.set_lr(0.1)
    before = {name: np.asarray(v) for name, v in below.state.variables.items()}
    rows = np.ones((4, 2), np.float32)
    rows[0, 0] = np.nan

    outcome = above.step(above(below(rows)).mean())

    assert not outcome.finite
    for name, value in before.items():
        np.testing.assert_array_equal(below.state.variables[name], value)


def test_a_model_of_any_inputs_takes_the_entry_by_position():
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    graph = ff.Graph(model)
    graph.set_data_loader(
        ff.DataLoader({"rows": np.ones((4, 2), np.float32)}, 2), "rows"
    )

    batch = next(graph.epoch(0))

    assert graph.forward_batch(batch).shape == (2, 3)


@pytest.mark.parametrize("other", [True, False])
def test_two_losses_through_one_helper_are_two_programs(other):
    graph = ff.Graph({"w": X}, apply=lambda m, x: m["w"] * x, strict_compile=True)
    graph.set_optimizer(optax.sgd)
    graph.set_lr(0.1)

    def square(values):
        return (values**2).mean()

    for _ in range(2):
        graph.step(square(graph(X)))
        if other:
            graph.step(square(graph(X) - 1.0))

    assert len(graph.compiles) == (2 if other else 1)


class Sower(nn.Module):
    @nn.compact
    def __call__(self, x, sows):
        if sows:
            self.sow("intermediates", "seen", x)
        return nn.Dense(1)(x)


def test_gradients_add_up_over_losses_that_sow_other_things():
    x = np.ones((4, 2), np.float32)
    variables = Sower().init(jax.random.key(0), x, sows=False)
    graph = ff.Graph(ff.Linen(Sower(), variables, mutable=("intermediates",)))
    graph.set_optimizer(optax.sgd)
    graph.set_lr(0.1)

    steps = []
    for passes in ((False, True), (True, False), (False, False)):
        for sows in passes:
            graph.backward(graph(x, sows=sows).mean())
        steps.append(graph.step().global_step)

    assert steps == [1, 2, 3]


def test_a_masked_array_is_refused_even_if_its_kind_is_known():
    double = ff.lazy(lambda x: x * 2)
    assert double(X).tolist() == [2, 2]

    with pytest.raises(TypeError, match="must have no mask"):
        double(np.ma.masked_array(X, [True, False]))


def test_a_function_that_is_remembered_is_read_again_if_its_globals_change(monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 2)
    lazily = ff.lazy(scaled_by_factor)
    results = [lazily(X).tolist(), lazily(X).tolist()]
    for factor in (3, np.float64(4), np.array([5, 6], np.float32), 2):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        results.append(lazily(X).tolist())
    monkeypatch.setitem(globals(), "abs", lambda x: x * 0)
    results.append(lazily(X).tolist())

    assert results == [[2, 2], [2, 2], [3, 3], [4, 4], [5, 6], [2, 2], [0, 0]]


def scaled_by_factor(x):
    return abs(x) * FACTOR  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


def test_one_array_in_two_places_is_no_other_program(compile_counter):
    total = ff.lazy(lambda x, y: x * y)
    float(total(X, X + 0).sum())
    compile_counter.reset()
    results = [float(total(*pair).sum()) for pair in ((X, X + 1), (X, X))]

    assert results == [4, 2]
    assert compile_counter.compiled == []


def test_a_function_that_is_called_again_is_looked_at_again(monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 2.0)

    def scaled(array, shift):
        return array * SCALE + shift

    def other(array, shift):
        return array - shift

    # Its key is kept once it is known, as it is from the second call on.
    lazily = ff.lazy(scaled)
    known = [float(lazily(X, 1.0)[1]) for _ in range(3)]
    monkeypatch.setitem(globals(), "SCALE", 7.0)
    with_global = [float(lazily(X, 1.0)[1]) for _ in range(3)]
    scaled.__code__ = other.__code__  # as IPython's autoreload does
    with_code = [float(lazily(X, 1.0)[1]) for _ in range(3)]

    assert known == [X[1] * 2 + 1] * 3
    assert with_global == [X[1] * 7 + 1] * 3
    assert with_code == [X[1] - 1] * 3
