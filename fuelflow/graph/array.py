"""Lazy: an array that is recorded, and run when it is read."""

import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np

from fuelflow._errors import NotWrappedError
from fuelflow.graph.explain import expression_text
from fuelflow.graph.expression import Node, Ref, Use
from fuelflow.graph.library import is_library_file
from fuelflow.graph.realize import realize_all
from fuelflow.graph.recording import caller, record
from fuelflow.step.spec import leaf_text


class Lazy(Ref):
    """An array that has been recorded and not run.

    Its shape and dtype are known at once. It has the operators, indexing and methods of
    a `jax.Array`, which record further. `realize`, ``numpy.asarray``, ``float``,
    ``print`` of a formatted number, and control flow (``if loss > 1:``) run what is
    needed as one program and wait for it.

    A value that depends on a `Graph` belongs to the parameters it was recorded with:
    once they have moved on, it can be read only if it has been run or fetched before.

    Raises:
        NotWrappedError: On being passed to a function that is not wrapped by `lazy`,
            which would cut its gradient.
        StaleGraphError: On being run after the parameters moved on.

    Example:
        >>> import fuelflow as ff, jax.numpy as jnp
        >>> x = ff.lazy(jnp.arange)(4)
        >>> y = (x * 2.0).sum()
        >>> y.shape, y.dtype, float(y)
        ((), dtype('float32'), 12.0)
    """

    __slots__ = ()
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, known without running it."""
        return self._type.shape

    @property
    def dtype(self) -> Any:
        """Its dtype, known without running it."""
        return self._type.dtype

    @property
    def ndim(self) -> int:
        """The number of its axes."""
        return len(self._type.shape)

    @property
    def size(self) -> int:
        """The number of its entries."""
        return int(np.prod(self._type.shape))

    @property
    def is_realized(self) -> bool:
        """Whether its value is known, so that reading it runs nothing."""
        return self._index in self._node.values

    def realize(self) -> jax.Array:
        """Its value, run now if it has not been, together with all that it needs.

        Raises:
            StaleGraphError: If it was recorded with parameters that have moved on.
        """
        return realize_all([self])[0]

    def backward(self) -> dict[str, jax.Array]:
        """Its gradient by parameter name, for the graph it depends on.

        Nothing is updated. To add up gradients for a later step, see `Graph.backward`.

        Raises:
            StaleGraphError: If it was recorded with parameters that have moved on.
            ValueError: If it depends on no graph, or on several: see `Graph.grads`.
        """
        return self._one_graph("backward").grads(self)

    def plan(self) -> Any:
        """The step that would minimise it, before it runs: see `TrainingLoop.plan`.

        Raises:
            ValueError: If it depends on no graph, or on several: see `Graph.plan`.
        """
        return self._one_graph("plan").plan(self)

    def _one_graph(self, method: str) -> Any:
        graphs = {id(stamp.graph): stamp.graph for stamp in self._node.stamps}
        if len(graphs) != 1:
            listed = f"on {len(graphs)} graphs" if graphs else "on no graph"
            name = "grads" if method == "backward" else method
            raise ValueError(
                f"`{method}` needs a value that depends on one graph, but this one "
                f"depends {listed}: use `graph.{name}(value)`"
            )
        return next(iter(graphs.values()))

    # What runs it.

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        value = np.asarray(self.realize())
        if dtype is not None and value.dtype != dtype:
            return value.astype(dtype)
        return value.copy() if copy else value

    def __float__(self) -> float:
        return float(self.realize())

    def __int__(self) -> int:
        return int(self.realize())

    def __index__(self) -> int:
        return operator.index(self.realize())

    def __complex__(self) -> complex:
        return complex(self.realize())

    def __bool__(self) -> bool:
        return bool(self.realize())

    def __format__(self, spec: str) -> str:
        return format(self.realize(), spec) if spec else str(self)

    def item(self, *args: Any) -> Any:
        """Its one entry as a Python number, run now."""
        return self.realize().item(*args)

    def tolist(self) -> Any:
        """Its entries as nested lists of Python numbers, run now."""
        return self.realize().tolist()

    def block_until_ready(self) -> "Lazy":
        """Runs it, waits, and returns it."""
        jax.block_until_ready(self.realize())
        return self

    def __repr__(self) -> str:
        text = f"Lazy({leaf_text(self)} = {expression_text(self)})"
        if self.is_realized:
            return f"{text[:-1]}, realized)"
        return text

    # What NumPy and JAX ask of strangers.

    @property
    def __jax_array__(self) -> Any:
        # An operator of a jax.Array asks too, and leaves to us what it does not know.
        if _asked_by_operator():
            raise AttributeError("__jax_array__")
        raise NotWrappedError(_unwrapped_function())

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any
    ) -> Any:
        if method == "__call__" and ufunc in _UFUNCS and not kwargs:
            function = _UFUNCS[ufunc]
            return call(function, function, inputs, {})
        raise NotWrappedError(f"numpy.{ufunc.__name__}")

    def __array_function__(self, function: Any, *_: Any) -> NoReturn:
        raise NotWrappedError(f"numpy.{function.__name__}")

    # What records further.

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a lazy array without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator["Lazy"]:
        if not self.shape:
            raise TypeError("iteration over a lazy array without axes")
        return (self[index] for index in range(self.shape[0]))

    def __getitem__(self, index: Any) -> "Lazy":
        return call(operator.getitem, operator.getitem, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(
            "a lazy array cannot be assigned to: use `x.at[index].set(value)`"
        )

    @property
    def at(self) -> "At":
        """Updates by index, as `jax.Array.at`: ``x.at[index].set(value)``."""
        return At(self)

    def __getattr__(self, name: str) -> Any:
        if name in _PROPERTIES:
            return call(_READERS[name], _READERS[name], (self,), {})
        raise AttributeError(
            f"a lazy array has no attribute `{name}`; `x.realize()` is the array itself"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a lazy array cannot be copied or pickled: realize it first")


class At:
    """An array whose entries are to be updated: ``x.at[index]``."""

    __slots__ = ("_array",)

    def __init__(self, array: Lazy) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> "AtIndex":
        return AtIndex(self._array, index)


class AtIndex:
    """Entries of an array that a method is to update."""

    __slots__ = ("_array", "_index")

    def __init__(self, array: Lazy, index: Any) -> None:
        self._array = array
        self._index = index

    def __getattr__(self, name: str) -> Callable[..., Lazy]:
        if name not in _UPDATES:
            raise AttributeError(f"`x.at[index]` has no method `{name}`")

        def record_update(*args: Any, **kwargs: Any) -> Lazy:
            function = _UPDATE_FUNCTIONS[name]
            inputs = (self._array, self._index, *args)
            return call(function, function, inputs, kwargs)

        return record_update


def _asked_by_operator() -> bool:
    """Whether the operator of a `jax.Array` is what asks."""
    name = sys._getframe(2).f_code.co_name
    return name.startswith(("_operator_", "deferring_binary_op"))


def _unwrapped_function() -> str:
    """The function of a library that was called with a lazy array."""
    frame: Any = sys._getframe(2)
    name = "a jitted function"
    while frame.f_back is not None and is_library_file(frame.f_code.co_filename):
        if frame.f_code.co_name not in _UNTELLING:
            name = frame.f_code.co_qualname
        frame = frame.f_back
    return name.rpartition("<locals>.")[2]


_UNTELLING = frozenset(
    {
        "<lambda>",
        "_infer_input_type",
        "_infer_params",
        "shaped_abstractify",
        "cache_miss",
        "reraise_with_filtered_traceback",
    }
)


def call(
    function: Any,
    function_key: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use: Use | None = None,
) -> Any:
    """Records a call, and gives its results as the function does, with lazy arrays.

    To be called by the method that the user calls.

    Args:
        function: What is called.
        function_key: As `record` takes it.
        args: Its arguments.
        kwargs: Its keyword arguments.
        use: Of a model, if the function is given that first.
    """
    operation, inputs, stamps = record(function, function_key, args, kwargs, use)
    node = Node(operation, inputs, stamps, caller(3), use)
    if use is not None and operation.moves:
        use.stamp.last_call = node
    if operation.is_single:
        return Lazy(node, 0)
    return operation.arrange(iter([Lazy(node, i) for i in range(len(operation.types))]))


_PROPERTIES = frozenset({"T", "mT", "real", "imag"})
_UPDATES = frozenset(
    {"set", "add", "subtract", "multiply", "mul", "divide", "power", "min", "max"}
    | {"apply", "get"}
)
_METHODS = (
    *("all", "any", "argmax", "argmin", "argsort", "astype", "clip", "compress"),
    *("conj", "conjugate", "copy", "cumprod", "cumsum", "diagonal", "dot", "flatten"),
    *("max", "mean", "min", "nonzero", "prod", "ptp", "ravel", "repeat", "reshape"),
    *("round", "searchsorted", "sort", "squeeze", "std", "sum", "swapaxes", "take"),
    *("trace", "transpose", "var", "view"),
)
_BINARY = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift", "divmod"),
)
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = ("neg", "pos", "abs", "invert", "round")


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    function.__qualname__ = name
    return function


def _method_caller(name: str) -> Callable[..., Any]:
    def method(array: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(array, name)(*args, **kwargs)

    return _named(name, method)


def _make_reader(name: str) -> Callable[..., Any]:
    return _named(name, lambda array: getattr(array, name))


_READERS = {name: _make_reader(name) for name in _PROPERTIES}


def _make_update(name: str) -> Callable[..., Any]:
    def update(array: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
        import jax.numpy as jnp

        return getattr(jnp.asarray(array).at[index], name)(*args, **kwargs)

    return _named(f"at.{name}", update)


_UPDATE_FUNCTIONS = {name: _make_update(name) for name in _UPDATES}


def _add_methods() -> None:
    for name in _METHODS:
        setattr(Lazy, name, _recorder(name, _method_caller(name)))
    for name in (*_BINARY, *_COMPARISONS):
        function = divmod if name == "divmod" else getattr(operator, f"__{name}__")
        setattr(Lazy, f"__{name}__", _recorder(name, function))
        if name in _BINARY:
            setattr(Lazy, f"__r{name}__", _reflected(name, function))
    for name in _UNARY:
        function = round if name == "round" else getattr(operator, f"__{name}__")
        setattr(Lazy, f"__{name}__", _recorder(name, function))


def _recorder(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def record_method(self: Lazy, *args: Any, **kwargs: Any) -> Any:
        return call(function, function, (self, *args), kwargs)

    return _named(name, record_method)


def _reflected(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def record_reflected(self: Lazy, other: Any) -> Any:
        return call(function, function, (other, self), {})

    return _named(f"r{name}", record_reflected)


_UFUNCS: dict[Any, Any] = {
    getattr(np, numpy_name): divmod
    if name == "divmod"
    else getattr(operator, f"__{name}__")
    for name, numpy_name in (
        *(("add", "add"), ("sub", "subtract"), ("mul", "multiply")),
        *(("truediv", "divide"), ("floordiv", "floor_divide"), ("mod", "remainder")),
        *(("pow", "power"), ("matmul", "matmul"), ("and", "bitwise_and")),
        *(("or", "bitwise_or"), ("xor", "bitwise_xor"), ("lt", "less")),
        *(("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal")),
        *(("eq", "equal"), ("ne", "not_equal"), ("lshift", "left_shift")),
        *(("rshift", "right_shift"), ("divmod", "divmod")),
    )
}
_add_methods()
