"""What a recorded call depends on besides its arrays, as a key that can be compared.

A function is known by its code, its defaults, what its closure holds and the globals it
reads, so a lambda written inside a loop is the same function each time. Arrays found on
the way are data: they are handed out, and put back, traced, when the program is made.
"""

import argparse
import copy
import dis
import enum
import functools
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Hashable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fuelflow.model.linen import Linen
from fuelflow.model.nnx import is_nnx_module

Rebuild = Callable[[Iterator[Any]], Any]
"""Arrays, in the order they were found in, to the value that held them."""

ARRAYS = (jax.Array, np.ndarray, np.generic)
_PLAIN = (bool, int, str, bytes, type(None), type(Ellipsis))
_FIXED = (types.ModuleType, types.BuiltinFunctionType, type, np.dtype, np.ufunc)
_WHOLE = (int, float, complex, str, bytes, enum.Enum)
_SETTINGS = (types.SimpleNamespace, argparse.Namespace)
_LIBRARIES = (
    *{
        sysconfig.get_paths()[name]
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    },
    str(Path(__file__).parents[1]),
)


class Wrapper:
    """What records calls of a function, or of those of a module.

    Attributes:
        _wrapped: The function or module.
    """

    _wrapped: Any


class Reader:
    """Reads values into keys, collecting the arrays in them.

    Args:
        is_data: Whether a value is an array that must not be part of a key.
    """

    def __init__(self, is_data: Callable[[Any], bool]) -> None:
        self._is_data = is_data
        self.data: list[Any] = []
        self._open: list[int] = []

    def read(self, value: Any) -> Hashable:
        """A key for a value; its arrays are appended to ``data``.

        Raises:
            TypeError: If it is a model, which must be called through its graph.
        """
        kind = type(value)
        if kind in _PLAIN_SET or (kind is float and value == value and value):
            return kind, value
        if kind is float or kind is complex:  # 0 and -0, and nan, by their texts
            return kind, repr(value)
        if self._is_data(value):
            self.data.append(value)
            return _DATA
        if isinstance(value, _FIXED):
            return value
        if id(value) in self._open:  # a function that calls itself
            return "itself", self._open.index(id(value))
        _refuse_model(value)
        self._open.append(id(value))
        try:
            return self._read_compound(value, kind)
        finally:
            self._open.pop()

    def _read_compound(self, value: Any, kind: type) -> Hashable:
        if is_library_function(value):
            return value
        parts = parts_of(value)
        if parts is not None:
            names, values, token = parts
            return kind, token, names, tuple([self.read(part) for part in values])
        if isinstance(value, set | frozenset):
            return kind, frozenset([(type(part), part) for part in value])
        try:
            hash(value)
        except TypeError:
            return _ById(value)
        return kind, value


class _ById:
    """An object known by its identity, kept alive so that no other can have it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


_PLAIN_SET = frozenset(_PLAIN)
_DATA = "an array"


def make_rebuild(value: Any, is_data: Callable[[Any], bool]) -> Rebuild:
    """How to make a value anew around other arrays; it is as the value is now.

    Of the value only what is no array is held.
    """
    make = _rebuild(value, is_data, ())
    return lambda found: make(found, {})


_Make = Callable[[Iterator[Any], dict[int, Any]], Any]
"""A `Rebuild` that is also given what is being made around it, by identity."""


def _rebuild(
    value: Any, is_data: Callable[[Any], bool], above: tuple[int, ...]
) -> _Make:
    if is_data(value):
        return lambda found, _: next(found)
    if id(value) in above:  # a function that calls itself
        return functools.partial(_being_made, id(value), value)
    is_whole = type(value) in _PLAIN_SET or isinstance(value, (float, *_FIXED))
    is_whole = is_whole or is_library_function(value)
    parts = None if is_whole else parts_of(value)
    if parts is None:
        whole = copy.copy(value) if isinstance(value, set) else value
        return lambda _, __: whole
    makers = [_rebuild(part, is_data, (*above, id(value))) for part in parts[1]]
    start, assemble = _assembler(value, parts[0])
    number = id(value)

    def make(found: Iterator[Any], open_: dict[int, Any]) -> Any:
        if start is None:
            return assemble([maker(found, open_) for maker in makers])
        made = open_[number] = start()
        return assemble(made, [maker(found, open_) for maker in makers])

    return make


def _being_made(
    number: int, value: Any, _: Iterator[Any], open_: dict[int, Any]
) -> Any:
    return open_.get(number, value)


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


_Assembler = tuple[Callable[[], Any] | None, Callable[..., Any]]
"""What is made first and then given its parts, or None; and how it is given them."""


def _assembler(value: Any, names: tuple[str, ...]) -> _Assembler:
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
        for name in _global_names(code)
        if name in readable
    }
    rest = {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}
    named = {**cells, **read, **rest}
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
        else:
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
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that code, or code inside it, reads from the globals."""
    names = dict.fromkeys(
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return tuple(names)


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def is_library_function(value: Any) -> bool:
    """Whether it is a function of an installed package that closes over nothing."""
    return (
        isinstance(value, types.FunctionType)
        and value.__closure__ is None
        and is_library_file(value.__code__.co_filename)
    )


@functools.lru_cache(maxsize=4096)
def is_library_file(path: str) -> bool:
    """Whether a file belongs to Python, an installed package, or fuelflow."""
    return path.startswith(_LIBRARIES) or path.startswith("<frozen")


@functools.lru_cache(maxsize=4096)
def _is_library_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    is_builtin = kind.__module__ == "builtins" or (file is None and module is not None)
    is_user = kind.__module__ == "__main__"
    return not is_user and (is_builtin or (file is not None and is_library_file(file)))


def _is_own_instance(value: Any) -> bool:
    """Whether it is an object of a class of the user's, or a bag of settings."""
    return isinstance(value, _SETTINGS) or not _is_library_class(type(value))


def _is_tree(value: Any) -> bool:
    return not jax.tree_util.all_leaves([value])


def _refuse_model(value: Any) -> None:
    if is_nnx_module(value) or isinstance(value, Linen):
        raise TypeError(
            f"a lazy function must not use a model of its own, got a "
            f"{type(value).__name__}, whose parameters would be constants without a "
            "gradient: call the model through its graph, `graph(...)`, or have it "
            "passed in by `graph.record(function, ...)`"
        )


def name_of(function: Any) -> str:
    """What to call a function in texts."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__name__", None)
    return name or type(function).__name__


def text_of(
    value: Any, is_data: Callable[[Any], bool], above: tuple[int, ...] = ()
) -> str:
    """A static value in short, for explanations.

    Args:
        value: The value.
        is_data: Whether a value is an array.
        above: Functions that it is a part of, by identity.
    """
    if is_data(value):
        return "array"
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        if id(value) in above or getattr(value, "__module__", None) == _RECORDERS:
            return name_of(value)
        settings = _settings_text(value, is_data, (*above, id(value)))
        return name_of(value) + (f" with {settings}" if settings else "")
    if isinstance(value, types.BuiltinFunctionType):
        return value.__name__
    if inspect.ismodule(value) or inspect.isclass(value):
        return value.__name__
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


_RECORDERS = "fuelflow.lazy.array"


def _settings_text(
    function: Any, is_data: Callable[[Any], bool], above: tuple[int, ...]
) -> str:
    names, values, _ = parts_of(function) or ((), [], None)
    return ", ".join(
        f"{name.partition(' ')[2]}={text_of(part, is_data, above)}"
        for name, part in zip(names, values, strict=True)
        if name.startswith(("closure ", "global ", "keyword "))
        and not isinstance(part, _FIXED)
        and not is_library_function(part)
    )
