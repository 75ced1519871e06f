"""Functions that record: arguments and results, and how calls are told apart."""

import argparse
import dataclasses
import enum
import functools
import logging
import math
import types
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import CompileCounter

import fuelflow as ff
from fuelflow.graph import realize
from fuelflow.graph.recent import Recent

X = np.arange(3, dtype=np.float32)
lnp = ff.lazy(jnp)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Plain:
    array: Any
    factor: float = 2.0

    def __post_init__(self):
        self.table = np.ones(3, np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Registered:
    array: Any
    factor: float = dataclasses.field(default=2.0, metadata={"static": True})


class Slotted:
    __slots__ = ("array", "factor")

    def __init__(self, array: Any, factor: float):
        self.array = array
        self.factor = factor


class Holder:
    def __init__(self, array: Any, factor: float = 2.0):
        self.array = array
        self.factor = factor

    def scaled(self, x: Any) -> Any:
        return x * self.array * self.factor


# Arguments and results.


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: (a, [b]),
        lambda a, b: {"a": a, "b": {"c": b}},
        Pair,
        lambda a, b: OrderedDict(z=a, a=b),
        lambda a, b: Pair(Registered(a), {"b": Registered(b)}),
    ],
    ids=["tuple", "dict", "namedtuple", "ordered dict", "registered dataclass"],
)
def test_trees_of_lazy_arrays_are_arguments_and_results(make: Any):
    double = ff.lazy(lambda tree: jax.tree.map(lambda x: x * 2, tree))
    result = double(make(lnp.asarray(X), lnp.asarray(X) + 1))
    expected = make(X * 2, (X + 1) * 2)

    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for one, other in zip(
        jax.tree.leaves(ff.realize(result)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_plain_dataclasses_are_arguments_and_results():
    result = ff.lazy(lambda p: Plain(p.array * p.factor, 3.0))(Plain(lnp.asarray(X)))

    assert (type(result), result.factor) == (Plain, 3.0)
    np.testing.assert_array_equal(result.array, X * 2)


def test_results_may_hold_static_values_beside_arrays():
    result = ff.lazy(lambda x: {"array": x * 2, "name": "double", "none": None})(X)

    assert (result["name"], result["none"]) == ("double", None)
    np.testing.assert_array_equal(result["array"], X * 2)


def test_random_keys_are_arguments_and_results():
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        first, second = ff.lazy(jax.random.split)(key)
        draw = ff.lazy(jax.random.normal)(second, (4,))

        expected = jax.random.normal(jax.random.split(key)[1], (4,))
        np.testing.assert_array_equal(draw, expected)
        assert first.realize().dtype == key.dtype


def test_a_batch_of_fields_is_an_argument():
    batch = ff.Batch({"x": X, "y": X + 1})

    assert float(ff.lazy(lambda b: (b["x"] * b["y"]).sum())(batch)) == 8.0


def test_a_module_gives_its_functions_constants_and_submodules():
    assert float(lnp.linalg.norm(X)) == pytest.approx(math.sqrt(5))
    assert lnp.pi == math.pi
    assert lnp.float32 is jnp.float32
    assert lnp.newaxis is None
    assert isinstance(X, lnp.ndarray) is isinstance(X, jnp.ndarray)
    assert "sin" in dir(lnp)
    assert lnp.sin is lnp.sin
    assert float(ff.lazy(jax).nn.relu(-lnp.ones(()))) == 0.0
    with pytest.raises(AttributeError, match="no attribute 'sinus'"):
        _ = lnp.sinus


def test_lazy_functions_inside_a_lazy_function_are_the_functions_themselves():
    double = ff.lazy(lambda x: x * 2)
    outer = ff.lazy(lambda x: lnp.sin(double(x)).sum())

    np.testing.assert_allclose(float(outer(X)), np.sin(X * 2).sum(), rtol=1e-6)


def test_a_lazy_method_knows_its_instance():
    class Scale:
        factor = 3.0

        @ff.lazy
        def times(self, x: Any) -> Any:
            """What is multiplied."""
            return x * self.factor

    assert float(Scale().times(X).sum()) == 9.0
    assert Scale.times.__doc__ == "What is multiplied."


@pytest.mark.parametrize("target", [3, "sin", None])
def test_what_is_no_function_is_refused(target: Any):
    with pytest.raises(TypeError, match="`lazy` takes a function or a module, got a"):
        ff.lazy(target)


# One program for one structure.


def test_a_lambda_written_in_the_loop_compiles_once(compile_counter: CompileCounter):
    totals = []
    for step in range(20):
        x = lnp.asarray(X) + np.float32(step)
        totals.append(float(ff.lazy(lambda x: (x * 2).sum())(x)))

    assert totals == [(X + step).sum() * 2 for step in range(20)]
    assert compile_counter.compiled.count("jit(run)") == 1


def test_functions_made_anew_by_jax_compile_once(compile_counter: CompileCounter):
    for step in range(5):
        square = jax.vmap(lambda v: v**2)
        slope = jax.grad(lambda v: (v**3).sum())
        y = ff.lazy(square)(X + step) + ff.lazy(slope)(X + step)
        np.testing.assert_allclose(y, (X + step) ** 2 + 3 * (X + step) ** 2)

    assert compile_counter.compiled.count("jit(run)") == 1


def test_a_decorated_function_made_anew_compiles_once(compile_counter: CompileCounter):
    def twice(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(x: Any) -> Any:
            return function(function(x))

        return wrapper

    for factor in (2.0, 2.0, 3.0):
        y = ff.lazy(twice(lambda x: x * factor))(X)  # noqa: B023
        np.testing.assert_array_equal(y, X * factor**2)

    assert compile_counter.compiled.count("jit(run)") == 2


def test_a_closure_value_that_changes_is_another_program_and_named(
    caplog: pytest.LogCaptureFixture,
):
    def run(factor: float) -> float:
        return float(ff.lazy(lambda x: (x * factor).sum())(X))

    with caplog.at_level(logging.WARNING, "fuelflow"):
        totals = [run(2.0), run(5.0), run(2.0)]

    assert totals == [6.0, 15.0, 6.0]
    line = run.__code__.co_firstlineno + 1
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert f"`realize (test_wrap.py:{line})` again" in message
    assert "<lambda> with factor=2.0(f32[3]) → <lambda> with factor=5.0(f32[3])" in (
        message
    )


GLOBAL_FACTOR = 2.0
GLOBAL_ARRAY = np.ones(3, np.float32)


def through_helper(x: Any) -> Any:
    return helper(x) + GLOBAL_ARRAY


def helper(x: Any) -> Any:
    return jax.vmap(lambda v: v * GLOBAL_FACTOR)(x)


def test_globals_that_change_are_noticed_also_in_helpers(
    monkeypatch: pytest.MonkeyPatch,
):
    function = ff.lazy(through_helper)
    first = function(X).realize()
    monkeypatch.setitem(globals(), "GLOBAL_FACTOR", 3.0)
    second = function(X).realize()
    monkeypatch.setitem(globals(), "GLOBAL_ARRAY", np.zeros(3, np.float32))
    third = function(X).realize()
    monkeypatch.setitem(globals(), "helper", lambda x: x - 1)

    np.testing.assert_array_equal(first, X * 2 + 1)
    np.testing.assert_array_equal(second, X * 3 + 1)
    np.testing.assert_array_equal(third, X * 3)
    np.testing.assert_array_equal(function(X), X - 1)


def test_a_function_defined_anew_is_another():
    space: dict[str, Any] = {"ff": ff}
    cell = "def loss(x):\n    return x {} 2\nwrapped = ff.lazy(loss)"
    exec(cell.format("*"), space)
    first = space["wrapped"](X).realize()
    exec(cell.format("+"), space)

    np.testing.assert_array_equal(first, X * 2)
    np.testing.assert_array_equal(space["wrapped"](X), X + 2)


def reader_of(holder: Any) -> Any:
    return lambda x: x * holder.array * holder.factor


def nested(array: Any) -> Any:
    def function(x: Any) -> Any:
        def inner(y: Any) -> Any:
            return y * array

        return inner(x) * 2.0

    return function


def through_method(holder: Holder) -> Any:
    return lambda x: holder.scaled(x) + 0


def through_containers(table: dict[str, Any]) -> Any:
    return lambda x: x * table["a"][0] * 2.0


HOLDERS: dict[str, Any] = {
    "closure": lambda array: lambda x: x * array * 2.0,
    "default": lambda array: lambda x, a=array: x * a * 2.0,
    "keyword default": lambda array: lambda x, *, a=array: x * a * 2.0,
    "partial": lambda array: functools.partial(lambda x, a: x * a * 2.0, a=array),
    "nested function": nested,
    "method": lambda array: Holder(array).scaled,
    "object": lambda array: through_method(Holder(array)),
    "slots": lambda array: reader_of(Slotted(array, 2.0)),
    "dataclass": lambda array: reader_of(Plain(array)),
    "registered": lambda array: reader_of(Registered(array)),
    "namespace": lambda array: reader_of(
        types.SimpleNamespace(array=array, factor=2.0)
    ),
    "list in dict": lambda array: through_containers({"a": [array]}),
    "vmap": lambda array: jax.vmap(lambda x, a=array: x * a[0] * 2.0),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_arrays_that_functions_hold_are_data_and_may_be_mutated(
    kind: str, compile_counter: CompileCounter
):
    array = np.ones(3, np.float32)
    values = []
    for number in range(4):
        array[:] = number  # in place, as for running statistics
        values.append(ff.lazy(HOLDERS[kind](array))(X).tolist())
    other = ff.lazy(HOLDERS[kind](np.full(3, 9, np.float32)))(X)

    assert values == [(X * number * 2).tolist() for number in range(4)]
    np.testing.assert_array_equal(other, X * 18)
    assert compile_counter.compiled.count("jit(run)") == 1


def test_arrays_beside_the_fields_of_a_dataclass_are_data():
    plain = Plain(X)
    function = ff.lazy(lambda x: x + plain.table)
    first = function(X).realize()
    plain.table[:] = 5

    np.testing.assert_array_equal(first, X + 1)
    np.testing.assert_array_equal(function(X), X + 5)


@pytest.mark.parametrize(
    "settings",
    [
        types.SimpleNamespace(factor=1.0),
        argparse.Namespace(factor=1.0),
        Slotted(None, 1.0),
        Holder(None, 1.0),
        Plain(None, 1.0),
    ],
    ids=lambda settings: type(settings).__name__,
)
def test_settings_that_change_are_noticed(settings: Any):
    function = ff.lazy(lambda x: x * settings.factor)
    first = function(X).realize()
    settings.factor = 7.0

    np.testing.assert_array_equal(first, X)
    np.testing.assert_array_equal(function(X), X * 7)


def test_lists_dicts_and_sets_that_change_are_noticed():
    numbers, table, names = [1.0], {"a": 1.0}, {"a"}
    function = ff.lazy(lambda x: x * (sum(numbers) + sum(table.values()) + len(names)))
    first = function(X).realize()
    numbers.append(2.0)
    table["b"] = 3.0
    names.add("b")

    np.testing.assert_array_equal(first, X * 3)
    np.testing.assert_array_equal(function(X), X * 9)


def test_a_lazy_array_held_by_a_function_has_a_gradient():
    graph = ff.Graph({"w": np.float32(2)}, apply=lambda m, x: m["w"] * x)
    y = graph(X)
    loss = ff.lazy(lambda x: (x * y).sum())(X)

    assert loss.backward()["w"] == pytest.approx((X * X).sum())


def recursive(x: Any, depth: int) -> Any:
    return x if depth == 0 else recursive(x + RECURSIVE_ARRAY, depth - 1)


RECURSIVE_ARRAY = np.ones(3, np.float32)


def even(x: Any, depth: int) -> Any:
    return x if depth == 0 else odd(x * RECURSIVE_ARRAY, depth - 1)


def odd(x: Any, depth: int) -> Any:
    return even(x + RECURSIVE_ARRAY, depth - 1)


def test_functions_that_call_themselves_see_arrays_as_data():
    local = np.ones(3, np.float32)

    def inner(x: Any, depth: int) -> Any:
        return x if depth == 0 else inner(x + local, depth - 1)

    for value in (1.0, 10.0):
        RECURSIVE_ARRAY[:] = local[:] = value
        np.testing.assert_array_equal(ff.lazy(recursive)(X, 3), X + 3 * value)
        np.testing.assert_array_equal(ff.lazy(inner)(X, 3), X + 3 * value)
        np.testing.assert_array_equal(ff.lazy(even)(X, 2), X * value + value)


# Static arguments.


class Mode(enum.Enum):
    ADD = 1
    SUBTRACT = 2


def test_static_arguments_that_compare_equal_are_told_apart():
    seen = ff.lazy(lambda x, c: x + {bool: 10, int: 20, float: 30, str: 40}[type(c)])
    inside = ff.lazy(
        lambda x, c: x + {bool: 10, int: 20, float: 30}[type(next(iter(c)))]
    )

    assert [float(seen(X, c)[0]) for c in (True, 1, 1.0, "1")] == [10, 20, 30, 40]
    for kind in (tuple, list, frozenset, dict.fromkeys):
        numbers = [float(inside(X, kind([c]))[0]) for c in (True, 1, 1.0)]
        assert numbers == [10, 20, 30], kind


def test_zero_and_minus_zero_and_nan_are_told_apart():
    angle = ff.lazy(lambda c: jnp.arctan2(jnp.float32(c), -1.0))
    imaginary = ff.lazy(lambda c: jnp.arctan2(jnp.float32(c.imag), -1.0))

    assert float(angle(0.0)) == pytest.approx(math.pi)
    assert float(angle(-0.0)) == pytest.approx(-math.pi)
    assert math.isnan(float(angle(math.nan)))
    assert float(imaginary(complex(1, 0.0))) == pytest.approx(math.pi)
    assert float(imaginary(complex(1, -0.0))) == pytest.approx(-math.pi)


def test_enumerations_strings_ranges_and_slices_are_static():
    def apply(x: Any, mode: Mode, name: str, numbers: range, part: slice) -> Any:
        x = x + 1 if mode is Mode.ADD else x - 1
        return (x * len(name) + sum(numbers))[part]

    function = ff.lazy(apply)

    assert function(X, Mode.ADD, "ab", range(3), slice(2)).tolist() == [5.0, 7.0]
    assert function(X, Mode.SUBTRACT, "abc", range(2), slice(1, None)).tolist() == [
        1,
        4,
    ]
    assert Mode(1) is Mode.ADD
    assert (Mode.ADD.name, Mode.ADD.value) == ("ADD", 1)


def test_subclasses_of_plain_values_keep_their_value():
    class Name(str):
        pass

    function = ff.lazy(lambda x, name: x * len(name))

    assert float(function(X, Name("ab"))[1]) == 2.0
    assert float(function(X, Name("abc"))[1]) == 3.0


def test_keywords_may_come_in_any_order_and_be_left_to_their_defaults():
    function = ff.lazy(lambda x, *, a=1.0, b=2.0: x * a - b)

    np.testing.assert_array_equal(function(X, a=3.0, b=4.0), X * 3 - 4)
    np.testing.assert_array_equal(function(X, b=4.0, a=3.0), X * 3 - 4)
    np.testing.assert_array_equal(function(X, b=X), X - X)
    np.testing.assert_array_equal(function(x=X), X - 2)


def test_a_dict_written_to_after_a_call_does_not_reach_into_it():
    total = ff.lazy(lambda x, table: sum(x * value for value in table.values()))
    table = {"a": 1.0}
    first = total(X, table)
    table["b"] = 5.0

    np.testing.assert_array_equal(first, X)
    np.testing.assert_array_equal(total(X, {"a": 1.0}), X)
    np.testing.assert_array_equal(total(X, table), X * 6)


def test_functions_may_be_static_arguments():
    function = ff.lazy(lambda f, x: f(x))

    for factor in (2.0, 3.0):
        np.testing.assert_array_equal(function(lambda x: x * factor, X), X * factor)  # noqa: B023
    np.testing.assert_array_equal(function(jnp.sin, X), jnp.sin(X))


def test_a_model_of_its_own_is_refused():
    from flax import nnx

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    for function in (
        lambda x: model(x) + 0,
        functools.partial(lambda m, x: m(x), model),
    ):
        with pytest.raises(TypeError, match="must not use a model of its own, got a L"):
            ff.lazy(function)(X)
    with pytest.raises(TypeError, match="takes functions, got a Linear: a model's"):
        ff.lazy(model)


def test_only_so_many_programs_are_kept(
    monkeypatch: pytest.MonkeyPatch, compile_counter: CompileCounter
):
    monkeypatch.setattr(realize, "_programs", Recent(4))
    steady = [float(lnp.asarray(X)[1] + 0.5)]
    for number in range(10):
        assert float(lnp.asarray(X)[1] + float(number)) == number + 1
        steady.append(float(lnp.asarray(X)[1] + 0.5))

    assert len(realize._programs) == 4
    assert steady == [1.5] * 11
    assert compile_counter.compiled.count("jit(run)") == 11


def test_optax_losses_record():
    logits, labels = np.eye(3, dtype=np.float32), np.array([0, 1, 1])
    cross_entropy = ff.lazy(optax.softmax_cross_entropy_with_integer_labels)

    np.testing.assert_array_equal(
        cross_entropy(lnp.asarray(logits), labels),
        jax.jit(optax.softmax_cross_entropy_with_integer_labels)(logits, labels),
    )
