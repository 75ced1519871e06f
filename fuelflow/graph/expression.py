"""Recorded calls: operations, the nodes they make, and their results as lazy arrays."""

import itertools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fuelflow.graph.recent import Recent
from fuelflow.graph.static import ARRAYS, Reader, make_rebuild, name_of, text_of
from fuelflow.step.spec import leaf_text, require_array

MAX_OPERATIONS = 4096
"""Operations remembered. One that is found anew is another to every program."""

_serials = itertools.count()


class Type:
    """Shape, dtype and weakness of an array; one object for all that are alike."""

    __slots__ = ("__weakref__", "dtype", "shape", "weak")

    def __init__(self, shape: tuple[int, ...], dtype: Any, *, weak: bool) -> None:
        self.shape = shape
        self.dtype = dtype
        self.weak = weak

    def struct(self) -> jax.ShapeDtypeStruct:
        """The same, for tracing."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak)


_types: dict[Hashable, Type] = {}


def type_of(shape: tuple[int, ...], dtype: Any, weak: bool) -> Type:  # noqa: FBT001
    """The type with these properties."""
    found = _types.get((shape, dtype, weak))
    if found is None:
        if not jnp.issubdtype(dtype, jax.dtypes.extended):
            canonical = jax.dtypes.canonicalize_dtype(dtype)
            if canonical != dtype:
                found = type_of(shape, canonical, weak)
        found = found or Type(shape, dtype, weak=weak)
        _types[shape, dtype, weak] = found
    return found


class Stamp:
    """One set of parameters of one graph: what was recorded with them belongs to it."""

    __slots__ = (
        *("__weakref__", "_graph", "alone", "is_stale"),
        *("_looked", "last_call", "step"),
    )

    def __init__(self, graph: Any, step: int) -> None:
        self._graph = weakref.ref(graph)
        self.step = step
        self.is_stale = False
        # Nodes realized under it, which may let go of their inputs once it is stale.
        self._looked: weakref.WeakSet[Node] | None = None
        # The last call that changed the model's variables, which the next comes after.
        self.last_call: Node | None = None
        self.alone: tuple[Stamp, ...] = (self,)

    @property
    def graph(self) -> Any:
        """The graph; None if it is gone."""
        return self._graph()

    def expire(self) -> None:
        """The parameters have moved on."""
        self.is_stale = True
        self.last_call = None
        self.alone = ()
        for node in self._looked or ():
            node.release()
        self._looked = None

    def look(self, nodes: Iterable["Node"]) -> None:
        """Takes note of nodes that were realized under these parameters."""
        if self._looked is None:  # most steps need none
            self._looked = weakref.WeakSet()
        self._looked.update(nodes)


class Site(NamedTuple):
    """A place in the user's code."""

    code: types.CodeType
    instruction: int

    def __str__(self) -> str:
        positions = list(self.code.co_positions())
        line = positions[self.instruction // 2][0] or self.code.co_firstlineno
        return f"{_file_name(self.code.co_filename)}:{line}"


def _file_name(path: str) -> str:
    """A file without its folders; a notebook's cell by its number."""
    name = path.replace("\\", "/").rpartition("/")[2]
    if "ipykernel" not in path:
        return name
    # Each run of a cell has a temporary file of its own, which IPython knows.
    ipython: Any = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"In [{numbers[path]}]" if path in numbers else f"cell {name}"


class Operation:
    """A function with its static arguments, for inputs of certain types.

    Attributes:
        name: The function's name.
        text: Name and arguments, for explanations.
        types: The type of each array in its results.
        is_single: Whether its result is one array.
        moves: Whether later calls of the same model depend on it.
        arrange: Arrays to results that hold them.
    """

    __slots__ = ("_prepare", "arrange", "is_single", "moves", "name", "text", "types")

    def __init__(self, name: str, text: str, prepare: Callable[[Any], Any]) -> None:
        self.name = name
        self.text = text
        self._prepare = prepare
        self.arrange: Callable[[Any], Any] = next
        self.is_single = True
        self.moves = False
        self.types: list[Type] = []

    def infer(self, trace: Callable[[Callable[..., Any]], Any]) -> None:
        """Finds the types of the results, by tracing the function without running it.

        Args:
            trace: Calls a function with traced arguments, and gives the shapes and
                dtypes of what it returned, and whether later calls depend on it.
        """
        shapes, self.moves = trace(self.results)
        self.types = [
            type_of(x.shape, x.dtype, bool(getattr(x, "weak_type", False)))
            for x in shapes
        ]

    def results(self, values: Sequence[Any], *first: Any) -> list[Any]:
        """The arrays in the results, for traced inputs.

        Args:
            values: The arrays in the arguments.
            *first: What stands before the arguments, such as the model.
        """
        function, args, kwargs = self._prepare(iter(values))
        results = function(*first, *args, **kwargs)
        self.is_single = is_data(results)
        if self.is_single:
            return [results]
        reader = Reader(is_data)
        reader.read(results)
        self.arrange = make_rebuild(results, is_data)
        return reader.data


class Node:
    """A recorded call.

    Attributes:
        operation: What is called.
        inputs: Lazy arrays and arrays; None once they are let go.
        stamps: The parameters that the results depend on.
        call_stamp: The parameters of a call of a model; None for other calls.
        previous: The call of the same model that changed its variables before this one.
        training: Whether a call of a model is in training mode.
        site: Where it was recorded.
        serial: Its place in the order of recording.
        values: Results that are known, by index.
        used: Results whose gradient has been taken for a step, by index.
    """

    __slots__ = (
        "__weakref__",
        "call_stamp",
        "inputs",
        "operation",
        "previous",
        "serial",
        "site",
        "stamps",
        "training",
        "used",
        "values",
    )

    def __init__(
        self,
        operation: Operation,
        inputs: tuple[Any, ...],
        stamps: tuple[Stamp, ...],
        site: Site,
        *,
        call_stamp: Stamp | None = None,
        previous: "Node | None" = None,
        training: bool = True,
    ) -> None:
        self.operation = operation
        self.inputs: tuple[Any, ...] | None = inputs
        self.stamps = stamps
        self.site = site
        self.call_stamp = call_stamp
        self.previous = previous
        self.training = training
        self.serial = next(_serials)
        self.values: dict[int, Any] = {}
        self.used: set[int] = set()

    def release(self) -> None:
        """Lets go of the inputs, which nothing can need any more."""
        self.inputs = None
        self.previous = None

    def release_if_known(self) -> None:
        """Lets go of the inputs if every result is known."""
        if len(self.values) == len(self.operation.types):
            self.release()


class Ref:
    """One result of a node: what a lazy array is underneath."""

    __slots__ = ("__weakref__", "_index", "_node", "_type")

    def __init__(self, node: Node, index: int) -> None:
        self._node = node
        self._index = index
        self._type = node.operation.types[index]


_operations: Recent[Operation] = Recent(MAX_OPERATIONS)
DATA = (Ref, *ARRAYS)


def is_data(value: Any) -> bool:
    """Whether a value is an array, lazy or not: an input, and no part of a key."""
    return isinstance(value, DATA)


def type_of_data(value: Any) -> Type:
    """The type of an array, lazy or not.

    Raises:
        TypeError: If it is no array of numbers.
    """
    if isinstance(value, Ref):
        return value._type
    kind = (value.shape, value.dtype, getattr(value, "weak_type", False))
    found = _types.get(kind)
    if found is None or type(value) is np.ma.MaskedArray:
        require_array("an argument of a lazy function", value)
        found = type_of(*kind)
    return found


def record(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    function_key: Hashable = None,
    model: Any = None,
) -> tuple[Operation, tuple[Any, ...]]:
    """The operation of a call, and its inputs.

    Args:
        function: What is called.
        args: Its arguments: arrays, lazy or not, static values, and trees of them.
        kwargs: Its keyword arguments.
        function_key: A key for the function if it is known and holds no array.
        model: A `ModelCall` if the function is given a model first.

    Raises:
        TypeError: If an argument is an array of no numbers, or a model.
    """
    reader = None
    if function_key is None:
        reader = Reader(is_data)
        function_key = reader.read(function)
    quick = None if kwargs or (reader and reader.data) else _quick_key(args)
    if quick is not None:
        kinds, inputs = quick
        key: Hashable = (function_key, model and model.key, kinds)
    else:
        reader = reader or Reader(is_data)
        read = reader.read
        key = (
            function_key,
            model and model.key,
            tuple([read(value) for value in args]),
            tuple([(name, read(value)) for name, value in kwargs.items()]),
            tuple([type_of_data(value) for value in reader.data]),
        )
        inputs = tuple(reader.data)
    operation = _operations.get(key)
    if operation is None:
        operation = _make_operation(
            (function, args, kwargs), inputs, model, function_key
        )
        _operations.add(key, operation)
    return operation, inputs


def _quick_key(args: tuple[Any, ...]) -> tuple[Hashable, tuple[Any, ...]] | None:
    """A key and the inputs, if all arguments are arrays, names, integers and None."""
    parts: list[Hashable] = []
    inputs = []
    for value in args:
        kind = type(value)
        is_array_kind = _array_kinds.get(kind)
        if is_array_kind is None:
            # One look at each class: JAX's own look at an instance is slow.
            is_array_kind = _array_kinds[kind] = issubclass(kind, DATA)
        if is_array_kind:
            inputs.append(value)
            parts.append(type_of_data(value))
        elif kind in _QUICK_STATIC:
            parts.append((kind, value))
        else:
            return None
    return tuple(parts), tuple(inputs)


_array_kinds: dict[type, bool] = {}
_QUICK_STATIC = frozenset({bool, int, str, type(None)})


def _make_operation(
    call: tuple[Any, tuple[Any, ...], dict[str, Any]],
    inputs: tuple[Any, ...],
    model: Any,
    head: Hashable,
) -> Operation:
    function, args, kwargs = call
    # A function that holds arrays is made anew around them, traced.
    known = function if isinstance(head, types.FunctionType) else None
    make = make_rebuild((None if known else function, args, kwargs), is_data)

    def prepare(found: Any) -> Any:
        new, args, kwargs = make(found)
        return known or new, args, kwargs

    kinds = [type_of_data(value) for value in inputs]
    structs = [kind.struct() for kind in kinds]

    def trace(results: Any) -> Any:
        return jax.eval_shape(results, structs), False

    text = _call_text(function, args, kwargs)
    operation = Operation(name_of(function), text, prepare)
    operation.infer(trace if model is None else partial(model.trace, structs))
    return operation


def _call_text(function: Any, args: Any, kwargs: Any) -> str:
    def show(value: Any) -> str:
        if is_data(value):
            return leaf_text(type_of_data(value))
        if type(value) in (tuple, list, dict):
            leaves = jax.tree.leaves(value, is_leaf=is_data)
            return "(" + ", ".join(show(leaf) for leaf in leaves) + ")"
        return text_of(value, is_data)

    shown = [show(value) for value in args]
    shown += [f"{name}={show(value)}" for name, value in kwargs.items()]
    return f"{text_of(function, is_data)}({', '.join(shown)})"


def caller(depth: int) -> Site:
    """The first place outside of this package, ``depth`` frames up or more."""
    frame: Any = sys._getframe(depth)
    while frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return Site(frame.f_code, frame.f_lasti)


_PACKAGE = __name__.rpartition(".")[0]
