"""lazy: functions whose calls are recorded."""

import functools
import types
from collections.abc import Callable
from typing import Any

from fuelflow.graph.array import call
from fuelflow.graph.library import is_library_function
from fuelflow.graph.parts import Wrapper
from fuelflow.graph.static import FunctionKey
from fuelflow.model.linen import Linen
from fuelflow.model.nnx import is_nnx_module


def lazy(target: Any) -> Any:
    """A function whose calls are recorded, or a module of such functions.

    The function is given arrays and static values, as `jax.jit` would give them to it:
    it must be pure. It is told apart by its code, its arguments that are no arrays, and
    what its closure and globals hold, so a lambda written inside a loop is one
    function; arrays there are data, as arguments are. A Python number is part of the
    program: one that changes at every step compiles at every step, so make it an array.
    Keys, dicts, tuples and dataclasses may hold arrays, as arguments and as results.

    Args:
        target: A function, or a module such as ``jax.numpy``.

    Returns:
        A function of the same signature, whose results have `Lazy` for arrays; or an
        object with such functions for attributes. What is no function, such as
        ``jax.numpy.pi``, is found there as it is.

    Raises:
        TypeError: If ``target`` is neither, or a model: call that through a `Graph`.

    Example:
        >>> import fuelflow as ff, jax.numpy, optax
        >>> jnp = ff.lazy(jax.numpy)
        >>> loss = ff.lazy(optax.l2_loss)(jnp.arange(3.0)).mean()
        >>> loss.shape, round(float(loss), 4)
        ((), 0.8333)
    """
    if isinstance(target, types.ModuleType):
        return LazyModule(target)
    if isinstance(target, LazyFunction | LazyModule):
        return target
    if is_nnx_module(target) or isinstance(target, Linen):
        raise TypeError(
            f"`lazy` takes functions, got a {type(target).__name__}: a model's calls "
            "are recorded by its graph, `graph = ff.Graph(model)`"
        )
    if not callable(target):
        raise TypeError(
            f"`lazy` takes a function or a module, got a {type(target).__name__}"
        )
    return LazyFunction(target)


class LazyFunction(Wrapper):
    """A function whose calls are recorded."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._wrapped = function
        # A library's function holds nothing that could change, and is its own key.
        is_fixed = is_library_function(function)
        self._key = function if is_fixed else FunctionKey(function)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Records a call."""
        return call(self._wrapped, self._key, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A method of the instance, whose calls are recorded."""
        if instance is None:
            return self
        return LazyFunction(types.MethodType(self._wrapped, instance))

    def __repr__(self) -> str:
        return f"lazy({self._wrapped!r})"


class LazyModule(Wrapper):
    """A module whose functions record their calls."""

    def __init__(self, module: types.ModuleType) -> None:
        self._wrapped = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if isinstance(found, types.ModuleType):
            found = LazyModule(found)
        elif callable(found) and not isinstance(found, type):
            found = found if _is_scalar_type(found) else LazyFunction(found)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return dir(self._wrapped)

    def __repr__(self) -> str:
        return f"lazy({self._wrapped!r})"


def _is_scalar_type(value: Any) -> bool:
    """Whether it names a dtype, as ``jax.numpy.float32`` does."""
    return hasattr(value, "dtype") and not hasattr(value, "__code__")
