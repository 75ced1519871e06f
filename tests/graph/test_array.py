"""Lazy arrays: shapes at once, values when read, and what jax would have given."""

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CompileCounter

import fuelflow as ff

X = np.arange(6, dtype=np.float32).reshape(2, 3)
N = np.arange(6, dtype=np.int32)
lnp = ff.lazy(jnp)


def recorded(array: Any = X) -> Any:
    """The array as a lazy one that has not been run."""
    return lnp.asarray(array) + 0


def assert_same(actual: Any, expected: Any) -> None:
    """A lazy result against jax's own: shape and dtype before the value."""
    assert isinstance(actual, ff.Lazy)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_shape_and_dtype_are_known_without_compiling(compile_counter: CompileCounter):
    y = (recorded() @ np.ones((3, 4), np.float32)).astype("bfloat16")[0, None]

    assert (y.shape, y.ndim, y.size, len(y)) == ((1, 4), 2, 4, 1)
    assert y.dtype == jnp.bfloat16
    assert not y.is_realized
    assert compile_counter.compiles == 0


def test_a_value_is_run_once_by_one_program(compile_counter: CompileCounter):
    y = (recorded() * 3.0 - 1.5).sum()
    compile_counter.reset()
    values = [float(y), y.item(), np.asarray(y).item(), y.realize().item()]

    assert values == [36.0] * 4
    assert compile_counter.compiled == ["jit(run)"]


FLOATS = [
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
]
INTEGERS = ["and_", "or_", "xor", "lshift", "rshift", "floordiv", "mod"]
OTHERS: dict[str, Callable[[Any], Any]] = {
    "a NumPy array": lambda x: np.full(x.shape, 2, x.dtype),
    "a jax array": lambda x: jnp.full(x.shape, 2, x.dtype),
    "a NumPy scalar": lambda x: x.dtype.type(2),
    "a jax scalar": lambda x: jnp.asarray(2, x.dtype),
    "a Python number": lambda x: x.dtype.type(2).item(),
    "a lazy array": lambda x: recorded(np.full(x.shape, 2, x.dtype)),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    ("name", "x"), [(n, X + 1) for n in FLOATS] + [(n, N) for n in INTEGERS]
)
def test_operators_record_with_any_array_on_either_side(
    name: str, x: Any, other: str, side: str
):
    function, two = getattr(operator, name), OTHERS[other](x)
    pair = (recorded(x), two) if side == "left" else (two, recorded(x))
    known = two.realize() if isinstance(two, ff.Lazy) else two
    eager = (jnp.asarray(x), known) if side == "left" else (known, jnp.asarray(x))

    assert_same(function(*pair), function(*eager))


@pytest.mark.parametrize("numpy_side", [np, jnp])
def test_matrix_products_and_divmod_record_on_either_side(numpy_side: Any):
    square = numpy_side.ones((2, 2), np.float32)

    assert_same(square @ recorded(), jnp.asarray(square) @ X)
    assert_same(recorded().T @ square, jnp.asarray(X.T) @ square)
    for actual, expected in zip(
        (*divmod(numpy_side.asarray(N), recorded(N) + 1), *divmod(recorded(N), 4)),
        (*divmod(jnp.asarray(N), jnp.asarray(N) + 1), *divmod(jnp.asarray(N), 4)),
        strict=True,
    ):
        assert_same(actual, expected)


@pytest.mark.parametrize("name", ["neg", "pos", "abs", "invert"])
def test_unary_operators_record(name: str):
    function = getattr(operator, name)

    assert_same(function(recorded(N)), function(jnp.asarray(N)))


METHODS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("all", "any", "argmax", "argmin", "argsort", "conj"), ()),
    **dict.fromkeys(("copy", "cumprod", "cumsum", "flatten", "max", "mean"), ()),
    **dict.fromkeys(("min", "prod", "ptp", "ravel", "round", "sort", "std"), ()),
    **dict.fromkeys(("sum", "trace", "transpose", "var", "diagonal"), ()),
    "astype": (jnp.int32,),
    "clip": (1, 3),
    "dot": (X.T,),
    "repeat": (2,),
    "reshape": (3, 2),
    "searchsorted": (2.0,),
    "squeeze": (),
    "swapaxes": (0, 1),
    "take": (np.array([0, 2]),),
    "view": (jnp.int32,),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_record_what_those_of_jax_compute(name: str):
    x = np.arange(3, dtype=np.float32) if name == "searchsorted" else X
    arguments = METHODS[name]

    assert_same(
        getattr(recorded(x), name)(*arguments),
        getattr(jnp.asarray(x), name)(*arguments),
    )


def test_keywords_of_methods_are_kept():
    assert_same(recorded().sum(axis=1, keepdims=True), jnp.sum(X, 1, keepdims=True))
    assert_same(recorded().mean(0, dtype=jnp.bfloat16), jnp.mean(X, 0, jnp.bfloat16))


@pytest.mark.parametrize("name", ["T", "mT", "real", "imag"])
def test_properties_record(name: str):
    assert_same(getattr(recorded(), name), getattr(jnp.asarray(X), name))


@pytest.mark.parametrize(
    "index",
    [
        *(0, -1, None, ..., slice(1), slice(None, None, -1), (0, 1), (..., None, 0)),
        *(slice(None), np.array([1, 0]), (np.array([0, 1]), np.array([2, 2]))),
        *(np.array([[1], [0]]), (slice(None), slice(0, 2))),
    ],
    ids=str,
)
def test_indexing_selects_as_in_jax(index: Any):
    assert_same(recorded()[index], jnp.asarray(X)[index])


def test_lazy_arrays_index_lazy_arrays_and_follow_their_values():
    x, rows = recorded(), recorded(np.array([1, 0]))

    assert_same(x[rows], X[[1, 0]])
    assert_same(x[rows, 2], X[[1, 0], 2])
    assert_same(x[rows[0], 1:], X[1, 1:])


@pytest.mark.parametrize(
    ("name", "value"),
    [("set", 9.0), ("add", 2.0), ("multiply", 3.0), ("min", 1.0), ("max", 4.0)],
)
def test_updates_by_index_give_a_changed_copy(name: str, value: float):
    x = recorded()

    assert_same(
        getattr(x.at[0, 1:], name)(value),
        getattr(jnp.asarray(X).at[0, 1:], name)(value),
    )
    np.testing.assert_array_equal(x, X)


def test_updates_take_lazy_values_and_indices():
    x = recorded()

    assert_same(x.at[recorded(N)[1]].set(x[0]), jnp.asarray(X).at[1].set(X[0]))
    assert_same(x.at[0, 0].get(), jnp.asarray(X)[0, 0])
    with pytest.raises(AttributeError, match=r"`x.at\[index\]` has no method `put`"):
        x.at[0].put(1)


def test_iteration_gives_the_rows():
    first, second = recorded()

    assert_same(first, X[0])
    assert_same(second, X[1])
    assert [float(v) for v in recorded(N[:3])] == [0.0, 1.0, 2.0]
    with pytest.raises(TypeError, match="iteration over a lazy array without axes"):
        iter(recorded().sum())
    with pytest.raises(TypeError, match=r"len\(\) of a lazy array without axes"):
        len(recorded().sum())


def test_python_and_numpy_read_the_value():
    total = recorded().sum()

    assert (float(total), int(total), complex(total)) == (15.0, 15, 15 + 0j)
    assert f"{recorded().sum():.2f}" == "15.00"
    assert recorded().tolist() == X.tolist()
    assert list(range(10))[recorded(N)[3]] == 3
    assert np.asarray(recorded(), dtype=np.float64).dtype == np.float64
    assert jax.device_get(recorded()).tolist() == X.tolist()


@pytest.mark.parametrize(("low", "high"), [(14.0, 16.0), (16.0, 14.0)])
def test_control_flow_reads_the_value(low: float, high: float):
    total = recorded().sum()
    inside = bool(low < total) and bool(total < high)

    assert inside == (low < 15.0 < high)
    assert total.is_realized is False  # the comparisons were what was read
    with pytest.raises(ValueError, match="truth value of an array"):
        bool(recorded())


def test_repr_shows_the_expression_and_runs_nothing(compile_counter: CompileCounter):
    x = lnp.asarray(X)
    y = (lnp.sin(x) * x).mean(axis=0)

    assert repr(y) == (
        "Lazy(f32[3] = mean((sin(asarray(f32[2,3])) * asarray(f32[2,3]))))"
    )
    assert f"{y}" == str(y) == repr(y)
    assert compile_counter.compiles == 0
    y.realize()
    assert repr(y).endswith(", realized)")


def test_repr_of_a_long_expression_is_cut_short():
    y = recorded()
    for _ in range(100):
        y = y + 1

    assert "…" in repr(y)
    assert len(repr(y)) < 200


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda x: x @ np.ones((2, 2)), "contracting dimension"),
        (lambda x: x + np.ones(4), "(?i)incompatible shapes"),
        (lambda x: x.reshape(5), "reshape"),
        (lambda x: x[0, 0, 0], "Too many indices"),
        (lambda x: lnp.concatenate([x, np.ones((1, 4))]), "concatenate"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_where_they_are_written(
    write: Callable[[Any], Any], message: str
):
    with pytest.raises((TypeError, ValueError, IndexError), match=message):
        write(recorded())


def test_masks_that_would_change_shapes_are_refused_by_jax():
    with pytest.raises(IndexError, match="boolean indices must be concrete"):
        recorded()[recorded() > 2]
    with pytest.raises(IndexError, match="boolean indices must be concrete"):
        recorded()[np.array([True, False])]


def test_a_lazy_array_is_not_assigned_to_copied_or_hashed():
    x = recorded()

    with pytest.raises(TypeError, match=r"use `x.at\[index\].set\(value\)`"):
        x[0] = 1
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="copied or pickled: realize it first"):
            copied(x)
    with pytest.raises(TypeError, match="unhashable"):
        hash(x)
    with pytest.raises(AttributeError, match="no attribute `foo`; `x.realize"):
        _ = x.foo


def test_in_place_operators_rebind_the_name():
    x = recorded()
    y = x
    y += 1

    assert_same(y, X + 1)
    assert_same(x, X)


class Runs:
    """How often the device ran `counted`; a class is not taken apart into arrays."""

    number = 0


def counted(x: Any) -> Any:
    def count() -> None:
        Runs.number += 1

    jax.debug.callback(count)
    return jnp.cumsum(x)


def test_realizing_several_runs_what_they_share_once(compile_counter: CompileCounter):
    Runs.number = 0
    shared = ff.lazy(counted)(X)
    compile_counter.reset()
    first, tree = ff.realize(shared * 2, {"b": (shared + 1, X), "c": 3})
    jax.effects_barrier()

    assert Runs.number == 1
    assert compile_counter.compiled.count("jit(run)") == 1
    np.testing.assert_array_equal(first, np.cumsum(X) * 2)
    np.testing.assert_array_equal(tree["b"][0], np.cumsum(X) + 1)
    assert tree["b"][1] is X
    assert tree["c"] == 3


def test_what_was_realized_is_not_run_again():
    Runs.number = 0
    y = ff.lazy(counted)(X)
    y.realize()
    np.testing.assert_array_equal(y + 1, np.cumsum(X) + 1)
    jax.effects_barrier()

    assert Runs.number == 1


def test_weakly_typed_numbers_promote_as_in_jax():
    half = recorded().astype("bfloat16")

    assert (half * 2.0).dtype == jnp.bfloat16
    assert (half * np.float32(2)).dtype == jnp.float32
    assert (lnp.asarray(2.0) * half).dtype == (jnp.asarray(2.0) * half.realize()).dtype
    assert (recorded(N) / 2).dtype == jnp.float32


def test_float64_arrays_become_what_jax_makes_of_them():
    x = recorded(np.arange(3.0))

    assert x.dtype == jnp.float32
    assert_same(x * np.float64(2), jnp.arange(3.0) * 2)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None, {}])])
def test_arrays_of_no_numbers_are_refused(array: np.ndarray):
    with pytest.raises(TypeError, match="must be numeric, got dtype"):
        lnp.asarray(array)


def test_a_chain_of_thousands_runs_prints_and_is_freed():
    y = recorded()
    for _ in range(5000):
        y = y + 1

    assert "…" in repr(y)
    np.testing.assert_array_equal(y, X + 5000)
    z = recorded()
    for _ in range(50_000):
        z = z + 1
    del z  # not by recursion, which would overflow the stack
