"""Recorded calls: operations, the nodes they make, and their results as lazy arrays."""

import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fuelflow.graph.static import ARRAYS, Reader, make_rebuild
from fuelflow.graph.type import Type, type_of, type_of_array
from fuelflow.step.outcome import StepOutcome

_serials = itertools.count()


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


Site = tuple[types.CodeType, int]
"""A place in the user's code: code, and an instruction in it."""


def site_text(site: Site) -> str:
    """File and line of a place."""
    code, instruction = site
    line = list(code.co_positions())[instruction // 2][0] or code.co_firstlineno
    return f"{_file_name(code.co_filename)}:{line}"


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


class Use:
    """That a recorded call is one of a model.

    Attributes:
        model: The `ModelCall`: which model, in which mode.
        stamp: The parameters that are used.
        previous: The call that changed the model's variables before this one.
    """

    __slots__ = ("model", "previous", "stamp")

    def __init__(self, model: Any, stamp: Stamp) -> None:
        self.model = model
        self.stamp = stamp
        self.previous = stamp.last_call if model.training else None


class Node:
    """A recorded call.

    Attributes:
        operation: What is called.
        inputs: Lazy arrays and arrays; None once they are let go.
        stamps: The parameters that the results depend on.
        site: Where it was recorded.
        use: Of a model, if it is a call of one and its inputs are held.
        serial: Its place in the order of recording.
        values: Results that are known, by index.
        used: Results whose gradient has been taken for a step, by index.
    """

    __slots__ = (
        *("__weakref__", "inputs", "operation", "serial", "site", "stamps", "use"),
        *("used", "values"),
    )

    def __init__(
        self,
        operation: Operation,
        inputs: tuple[Any, ...],
        stamps: tuple[Stamp, ...],
        site: Site,
        use: Use | None = None,
    ) -> None:
        self.operation = operation
        self.inputs: tuple[Any, ...] | None = inputs
        self.stamps = stamps
        self.site = site
        self.use = use
        self.serial = next(_serials)
        self.values: dict[int, Any] = {}
        self.used: tuple[int, ...] = ()

    def release(self) -> None:
        """Lets go of what it came from, which nothing can need any more."""
        self.inputs = self.use = None

    def release_if_known(self) -> None:
        """Lets go of what it came from if every result is known."""
        if len(self.values) == len(self.operation.types):
            self.inputs = self.use = None


class Ref:
    """One result of a node: what a lazy array is underneath."""

    __slots__ = ("__weakref__", "_index", "_node", "_type")

    def __init__(self, node: Node, index: int) -> None:
        self._node = node
        self._index = index
        self._type = node.operation.types[index]


class Promise:
    """The loss of a step, which its outcome has."""

    def __init__(self, outcome: StepOutcome, dtype: Any) -> None:
        self._outcome = outcome
        self._dtype = dtype

    def value(self) -> jax.Array:
        """The loss as an array, once the step is done."""
        return jnp.asarray(self._outcome.loss, self._dtype)


def value_of(ref: Ref) -> Any:
    """The value of a result that is known; that of a step's loss is waited for."""
    values = ref._node.values
    value = values[ref._index]
    if isinstance(value, Promise):
        value = values[ref._index] = value.value()
    return value


DATA = (Ref, *ARRAYS)


def is_data(value: Any) -> bool:
    """Whether a value is an array, lazy or not: an input, and no part of a key."""
    return isinstance(value, DATA)


def type_of_data(value: Any) -> Type:
    """The type of an array, lazy or not.

    Raises:
        TypeError: If it is no array of numbers.
    """
    return value._type if isinstance(value, Ref) else type_of_array(value)
