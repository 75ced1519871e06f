"""Recording a call: which operation it is, what it runs on, and where it is written."""

import sys
import types
from collections.abc import Hashable
from enum import Enum
from functools import partial
from typing import Any

import jax
import numpy as np

from fuelflow.graph.expression import (
    Operation,
    Ref,
    Site,
    Stamp,
    Use,
    is_data,
    type_of_data,
)
from fuelflow.graph.recent import Recent
from fuelflow.graph.static import (
    FunctionKey,
    Reader,
    known_key,
    make_rebuild,
    name_of,
    text_of,
)
from fuelflow.graph.type import Type, known_types, type_of_array
from fuelflow.step.spec import leaf_text

MAX_OPERATIONS = 4096
"""Operations remembered. One that is found anew is another to every program."""

_operations: Recent[Operation] = Recent(MAX_OPERATIONS)
Recorded = tuple[Operation, tuple[Any, ...], tuple[Stamp, ...]]
"""An operation, its inputs, and the parameters that its results depend on."""


def record(
    function: Any,
    function_key: Hashable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use: Use | None = None,
) -> Recorded:
    """The operation of a call, what it runs on, and the parameters it depends on.

    Args:
        function: What is called.
        function_key: A key for it, such as itself, if it holds nothing that changes; or
            who finds it, or None.
        args: Its arguments: arrays, lazy or not, static values, and trees of them.
        kwargs: Its keyword arguments.
        use: Of a model, if the function is given that first.

    Raises:
        TypeError: If an argument is an array of no numbers, or a model.
    """
    model = None if use is None else use.model
    reader = None
    if type(function_key) is FunctionKey:
        function_key = function_key.find(len(args) + (model is not None))
    elif function_key is None:
        function_key = known_key(function, len(args) + (model is not None))
    if function_key is None:
        reader = Reader(is_data)
        function_key = reader.read(function)
    glimpse = None if reader and reader.data else _glance(args, kwargs)
    if glimpse is not None:
        kinds, inputs, stamps = glimpse
        key = (function_key, model, *kwargs, *kinds)
    else:
        reader = reader or Reader(is_data)
        key = (_CLOSE, function_key, model, *_read(reader, args, kwargs))
        inputs = tuple(reader.data)
        stamps = _stamps_of(inputs)
    operation = _operations.get(key)
    if operation is None:
        call = (function, args, kwargs)
        operation = _make_operation(call, inputs, model, function_key)
        _operations.add(key, operation)
    if use is not None and use.stamp not in stamps:
        stamps = (*stamps, use.stamp) if stamps else use.stamp.alone
    return operation, inputs, stamps


class _Look(Enum):
    """What of an argument tells a call apart."""

    LAZY = "the type that it knows"
    JAX = "the type that JAX knows"
    NUMPY = "its shape and dtype"
    STATIC = "its class and value"
    FLOAT = "the same, unless it is 0 or no number"
    CLOSE = "what a `Reader` finds in it"


# As names of the module: to look up members of an enumeration is slow.
_LAZY, _JAX, _NUMPY, _STATIC, _FLOAT, _CLOSE = _Look
_looks: dict[type, _Look] = {
    **dict.fromkeys((bool, int, str, type(None)), _STATIC),
    **dict.fromkeys((tuple, list, dict, slice), _CLOSE),
    float: _FLOAT,
    np.ndarray: _NUMPY,
}


def _glance(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Hashable], tuple[Any, ...], tuple[Stamp, ...]] | None:
    """What tells arguments apart, the arrays in them, and the parameters these need.

    None if one of them is neither an array nor plain.
    """
    values = (*args, *kwargs.values()) if kwargs else args
    kinds: list[Hashable] = []
    stamps: tuple[Stamp, ...] = ()
    has_static = False
    for value in values:
        look = _looks.get(type(value)) or _look_at(type(value))
        if look is _LAZY:
            kinds.append(value._type)
            more = value._node.stamps
            if more is not stamps:
                stamps = _joined(stamps, more)
        elif look is _JAX:
            kinds.append(known_types.get(value.aval) or _type_by_aval(value))
        elif look is _NUMPY:
            kind = (value.shape, value.dtype, False)
            kinds.append(known_types.get(kind) or type_of_array(value))
        elif look is _STATIC or (look is _FLOAT and value and value == value):
            kinds.append((type(value), value))
            has_static = True
        else:
            return None
    return kinds, tuple(filter(is_data, values)) if has_static else values, stamps


def _look_at(kind: type) -> _Look:
    """How to look at a class that was not seen before."""
    if issubclass(kind, Ref):
        look = _LAZY
    elif issubclass(kind, jax.Array):
        look = _JAX
    elif issubclass(kind, np.generic):
        look = _NUMPY
    else:
        return _CLOSE  # not kept: it may be a class of the moment
    _looks[kind] = look
    return look


def _type_by_aval(array: Any) -> Type:
    found = known_types[array.aval] = type_of_array(array)
    return found


def _stamps_of(inputs: tuple[Any, ...]) -> tuple[Stamp, ...]:
    """The parameters that inputs depend on, each once."""
    stamps: tuple[Stamp, ...] = ()
    for value in inputs:
        if isinstance(value, Ref):
            stamps = _joined(stamps, value._node.stamps)
    return stamps


def _joined(stamps: tuple[Stamp, ...], more: tuple[Stamp, ...]) -> tuple[Stamp, ...]:
    """The parameters in either.

    Of parameters that have moved on only the last are kept, so that a sum over all
    steps does not carry all of them along.
    """
    if not stamps or more is stamps:
        return more
    if not more:
        return stamps
    every = (*stamps, *[stamp for stamp in more if stamp not in stamps])
    return tuple([stamp for stamp in every if not stamp.is_stale]) or every[-1:]


def _read(
    reader: Reader, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Hashable, ...]:
    """What tells arguments apart, whatever they are; the reader has their arrays."""
    read = reader.read
    return (
        tuple([read(value) for value in args]),
        tuple([(name, read(value)) for name, value in kwargs.items()]),
        tuple([type_of_data(value) for value in reader.data]),
    )


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
    code = frame.f_code
    while code.co_filename.startswith(_FOLDER):
        frame = frame.f_back
        code = frame.f_code
    return code, frame.f_lasti


_FOLDER = caller.__code__.co_filename.removesuffix("recording.py")
