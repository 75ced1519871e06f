"""Values taken apart and put together again, so that arrays in them can be replaced."""

import argparse
import copy
import dis
import enum
import functools
import itertools
import types
from collections.abc import Callable, Hashable
from dataclasses import is_dataclass
from typing import Any

import jax

from fuelflow.graph.library import is_library_class, is_library_file

_WHOLE = (int, float, complex, str, bytes, enum.Enum)
_SETTINGS = (types.SimpleNamespace, argparse.Namespace)


class Seen:
    """A value that a function reads where it cannot be replaced, as in a module."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Wrapper:
    """What records calls of a function, or of those of a module.

    Attributes:
        _wrapped: The function or module.
    """

    _wrapped: Any


Parts = tuple[tuple[str, ...], list[Any], Hashable]
"""Names and values of what a value is made of, and what else tells it apart."""


def parts_of(value: Any) -> Parts | None:
    """What a value is made of; None if it is a whole."""
    if isinstance(value, _WHOLE):
        return None
    for kind, take_apart in _TAKE_APART.items():
        if isinstance(value, kind):
            return take_apart(value)
    if not is_dataclass(value):
        if _is_tree(value):
            leaves, treedef = jax.tree.flatten(value)
            return (), leaves, treedef
        if not _is_own_instance(value):
            return None
    names = _attribute_names(value)
    return names, [getattr(value, name) for name in names], None


Assembler = tuple[Callable[[], Any] | None, Callable[..., Any]]
"""What is made first and then given its parts, or None; and how it is given them."""


def assembler_of(value: Any, names: tuple[str, ...]) -> Assembler:
    """How to put parts together to such a value, which is not held for it."""
    if isinstance(value, types.FunctionType):
        return _function_starter(value), functools.partial(_fill_function, names)
    for kind, put_together in _PUT_TOGETHER.items():
        if isinstance(value, kind):
            empty = _empty_dict(value) if kind is dict else type(value)
            return None, functools.partial(put_together, empty, names)
    if not is_dataclass(value) and _is_tree(value):
        return None, jax.tree.structure(value).unflatten
    empty = _fill_instance(names, _copied(value), [None] * len(names))
    return functools.partial(_copied, empty), functools.partial(_fill_instance, names)


def _parts_of_method(method: types.MethodType) -> Parts:
    return ("function", "self"), [method.__func__, method.__self__], None


def _assemble_method(_: Any, __: Any, parts: list[Any]) -> Any:
    return types.MethodType(*parts)


def _parts_of_partial(partial: Any) -> Parts:
    names = tuple(f"keyword {name}" for name in partial.keywords)
    values = [partial.func, partial.args, *partial.keywords.values()]
    return ("function", "arguments", *names), values, None


def _assemble_partial(_: Any, names: tuple[str, ...], parts: list[Any]) -> Any:
    keywords = [name.removeprefix("keyword ") for name in names[2:]]
    named = dict(zip(keywords, parts[2:], strict=True))
    return functools.partial(parts[0], *parts[1], **named)


def _parts_of_slice(value: slice) -> Parts:
    return ("start", "stop", "step"), [value.start, value.stop, value.step], None


def _assemble_slice(_: Any, __: Any, parts: list[Any]) -> Any:
    return slice(*parts)


def _parts_of_sequence(value: tuple[Any, ...] | list[Any]) -> Parts:
    return (), list(value), None


def _assemble_sequence(kind: Any, _: Any, parts: list[Any]) -> Any:
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def _parts_of_dict(value: dict[Any, Any]) -> Parts:
    # With their types: 1 and True are one key, and not the same to a function.
    return (), list(value.values()), tuple([(type(key), key) for key in value])


def _empty_dict(value: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of the same kind and keys without the values."""
    empty = copy.copy(value)
    empty.update(dict.fromkeys(value))
    return empty


def _assemble_dict(empty: Any, _: Any, parts: list[Any]) -> Any:
    made = copy.copy(empty)
    made.update(zip(empty, parts, strict=True))
    return made


def _attribute_names(value: Any) -> tuple[str, ...]:
    """The attributes that an object has of its own, in slots or in its dict."""
    slots = [
        name
        for kind in reversed(type(value).__mro__)
        for name in _as_names(vars(kind).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    ]
    return (*slots, *getattr(value, "__dict__", ()))


def _as_names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _copied(value: Any) -> Any:
    made = copy.copy(value)
    return object.__new__(type(value)) if made is value else made


def _fill_instance(names: tuple[str, ...], made: Any, parts: list[Any]) -> Any:
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


def _parts_of_wrapper(wrapper: Any) -> Parts:
    return ("wrapped",), [wrapper._wrapped], None


def _assemble_wrapper(_: Any, __: Any, parts: list[Any]) -> Any:
    # Inside a program nothing is recorded, so there it is the function itself.
    return parts[0]


def _parts_of_function(function: types.FunctionType) -> Parts:
    code = function.__code__
    cells = {
        f"closure {name}": cell.cell_contents
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
        if not _is_empty(cell)
    }
    # Those of a library stay as they are, and are many.
    is_library = is_library_file(code.co_filename)
    readable = {} if is_library else function.__globals__
    read = {
        f"global {name}": readable[name]
        for name in global_names(code)
        if name in readable
    }
    seen = {
        f"seen {name}.{attribute}": Seen(getattr(readable[name], attribute))
        for name, attribute in _attributes_read(code)
        if _is_own_module(readable.get(name)) and hasattr(readable[name], attribute)
    }
    rest = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}
    named = {**cells, **read, **seen, **rest}
    return tuple(named), list(named.values()), code


def _function_starter(function: types.FunctionType) -> Callable[[], Any]:
    code, globals_, name = function.__code__, function.__globals__, function.__name__

    def start() -> types.FunctionType:
        cells = tuple([types.CellType() for _ in code.co_freevars])
        return types.FunctionType(code, dict(globals_), name, None, cells or None)

    return start


def _fill_function(
    names: tuple[str, ...], new: types.FunctionType, parts: list[Any]
) -> types.FunctionType:
    cells = dict(zip(new.__code__.co_freevars, new.__closure__ or (), strict=True))
    *named, (_, defaults), (_, keywords) = zip(names, parts, strict=True)
    for name, part in named:
        where, _, plain = name.partition(" ")
        if where == "closure":
            cells[plain].cell_contents = part
        elif where == "global":
            new.__globals__[plain] = part
    new.__defaults__, new.__kwdefaults__ = defaults, keywords
    return new


_TAKE_APART: dict[Any, Callable[[Any], Parts]] = {
    types.FunctionType: _parts_of_function,
    types.MethodType: _parts_of_method,
    functools.partial: _parts_of_partial,
    slice: _parts_of_slice,
    (tuple, list): _parts_of_sequence,
    dict: _parts_of_dict,
    Wrapper: _parts_of_wrapper,
}
_PUT_TOGETHER: dict[Any, Callable[[Any, tuple[str, ...], list[Any]], Any]] = {
    types.MethodType: _assemble_method,
    functools.partial: _assemble_partial,
    slice: _assemble_slice,
    (tuple, list): _assemble_sequence,
    dict: _assemble_dict,
    Wrapper: _assemble_wrapper,
}


@functools.lru_cache(maxsize=4096)
def _attributes_read(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """Globals and their attributes that code, or code inside it, reads."""
    instructions = list(dis.get_instructions(code))
    found = [
        (one.argval, other.argval)
        for one, other in itertools.pairwise(instructions)
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        and other.opname in ("LOAD_ATTR", "LOAD_METHOD")
    ]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _attributes_read(constant)
    return tuple(dict.fromkeys(found))


def _is_own_module(value: Any) -> bool:
    file = getattr(value, "__file__", None)
    is_module = isinstance(value, types.ModuleType) and file is not None
    return is_module and not is_library_file(file)


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that code, or code inside it, reads from the globals."""
    names = dict.fromkeys(
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(global_names(constant)))
    return tuple(names)


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _is_own_instance(value: Any) -> bool:
    """Whether it is an object of a class of the user's, or a bag of settings."""
    return isinstance(value, _SETTINGS) or not is_library_class(type(value))


def _is_tree(value: Any) -> bool:
    return not jax.tree_util.all_leaves([value])
