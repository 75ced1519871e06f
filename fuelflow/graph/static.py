"""What a recorded call depends on besides its arrays, as a key that can be compared.

A function is known by its code, its defaults, what its closure holds and the globals it
reads, so a lambda written inside a loop is the same function each time. Arrays found on
the way are data: they are handed out, and put back, traced, when the program is made.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuelflow.graph.library import is_library_function, is_own_class
from fuelflow.graph.parts import Seen, assembler_of, global_names, parts_of
from fuelflow.graph.recent import Recent
from fuelflow.model.linen import Linen
from fuelflow.model.nnx import is_nnx_module

Rebuild = Callable[[Iterator[Any]], Any]
"""Arrays, in the order they were found in, to the value that held them."""

ARRAYS = (jax.Array, np.ndarray, np.generic)
_PLAIN = (bool, int, str, bytes, type(None), type(Ellipsis))
_FIXED = (types.ModuleType, types.BuiltinFunctionType, type, np.dtype, np.ufunc)


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
        return self._read_held(value, kind)

    def _read_held(self, value: Any, kind: type) -> Hashable:
        """A key for what is neither a plain value nor data."""
        if isinstance(value, ARRAYS):  # where it cannot be handed out, its content
            return _content_of(value)
        if isinstance(value, Seen):
            return self._apart(value.value)
        if isinstance(value, type) and is_own_class(value):
            return self._read_class(value)
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
        if kind is types.FunctionType:
            if is_library_function(value):
                return value
            known = known_key(value, 0)
            if known is not None:
                return known
        parts = parts_of(value)
        if parts is not None:
            names, values, token = parts
            head = self._read_class(kind) if is_own_class(kind) else kind
            key = head, token, names, tuple([self.read(part) for part in values])
            if kind is types.FunctionType and not any(
                isinstance(part, Seen) for part in values
            ):
                _remember_key(value, key)
            return key
        if isinstance(value, set | frozenset):
            return kind, frozenset([(type(part), part) for part in value])
        try:
            hash(value)
        except TypeError:
            return _ById(value)
        return kind, value

    def _read_class(self, kind: type) -> Hashable:
        """A class of the user's, by what its attributes and methods are now."""
        if id(kind) in self._open:
            return kind
        self._open.append(id(kind))
        try:
            return kind, tuple(
                [
                    (name, self._apart(attribute))
                    for base in kind.__mro__
                    if is_own_class(base)
                    for name, attribute in vars(base).items()
                    if not name.startswith("__") or name == "__call__"
                ]
            )
        finally:
            self._open.pop()

    def _apart(self, value: Any) -> Hashable:
        """A key for a value whose arrays cannot be replaced, and so belong to it."""
        reader = Reader(_is_never_data)
        reader._open = self._open
        return reader.read(value)


# Keys of functions that hold nothing but what cannot change: reading them again comes
# down to looking whether the same globals are there.
_ABSENT = object()
_NUMBERS = (float, complex)  # and not NumPy's, which are data
_known: Recent[tuple[tuple[tuple[str, Any], ...], Hashable]] = Recent(4096)


def known_key(function: Any, num_args: int) -> Hashable:
    """The key of a function that was read before and is as it was; None if not.

    Args:
        function: The function.
        num_args: How many arguments it is given by position.
    """
    if type(function) is not types.FunctionType or function.__closure__:
        return None
    code = function.__code__
    found = _known.get(code)
    if found is None:
        return None
    # To look at a default is slow where Python tells an audit hook of it, as it must
    # once `filelock` is imported.
    has_all = _is_full(code, num_args)
    if not has_all and (function.__defaults__ or function.__kwdefaults__):
        return None
    reads, key = found
    there = function.__globals__
    for name, value in reads:
        if there.get(name, _ABSENT) is not value:
            return None
    return key


class FunctionKey:
    """The key of one function that is called again and again.

    Args:
        function: The function.
    """

    __slots__ = ("_code", "_function", "_globals", "_key", "_num_args", "_reads")

    def __init__(self, function: Any) -> None:
        self._function = function
        self._code: types.CodeType | None = None
        self._num_args = -1
        self._key: Hashable = None
        self._reads: tuple[tuple[str, Any], ...] = ()
        self._globals: dict[str, Any] = {}

    def find(self, num_args: int) -> Hashable:
        """As `known_key`, looking at no more of the function than may have changed."""
        if num_args == self._num_args and self._function.__code__ is self._code:
            for name, value in self._reads:
                if self._globals.get(name, _ABSENT) is not value:
                    break
            else:
                return self._key
        return self._look(num_args)

    def _look(self, num_args: int) -> Hashable:
        function = self._function
        key = known_key(function, num_args)
        if key is not None and _is_full(function.__code__, num_args):
            self._num_args, self._key = num_args, key
            self._code, self._globals = function.__code__, function.__globals__
            self._reads, _ = _known.get(function.__code__) or ((), None)
        else:
            self._num_args = -1
        return key


def _is_full(code: types.CodeType, num_args: int) -> bool:
    """Whether every parameter is given by position, so that no default is read."""
    return num_args == code.co_argcount and not code.co_kwonlyargcount


def _remember_key(function: types.FunctionType, key: Hashable) -> None:
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
        return
    there = function.__globals__
    reads = [(n, there.get(n, _ABSENT)) for n in global_names(function.__code__)]
    if all(_cannot_change(value) for _, value in reads):
        _known.add(function.__code__, (tuple(reads), key))


def _cannot_change(value: Any) -> bool:
    """Whether a value is the same as long as it is the same object."""
    if isinstance(value, type):
        return not is_own_class(value)
    if value is _ABSENT or type(value) in _NUMBERS or type(value) in _PLAIN_SET:
        return True
    return isinstance(value, _FIXED) or is_library_function(value)


def _is_never_data(value: Any) -> bool:
    del value
    return False


def _content_of(array: Any) -> Hashable:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    values = np.asarray(array)
    return "content", values.shape, values.dtype, values.tobytes()


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
    is_whole = type(value) in _PLAIN_SET or isinstance(value, (float, Seen, *_FIXED))
    is_whole = is_whole or is_library_function(value)
    parts = None if is_whole else parts_of(value)
    if parts is None:
        whole = copy.copy(value) if isinstance(value, set) else value
        return lambda _, __: whole
    makers = [_rebuild(part, is_data, (*above, id(value))) for part in parts[1]]
    start, assemble = assembler_of(value, parts[0])
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


_RECORDERS = "fuelflow.graph.array"


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
