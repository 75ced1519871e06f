"""What belongs to Python and installed packages, and so holds nothing that changes."""

import functools
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

_LIBRARIES = (
    *{
        sysconfig.get_paths()[name]
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    },
    str(Path(__file__).parents[1]),
)


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
def is_library_class(kind: type) -> bool:
    """Whether a class belongs to Python or an installed package."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    is_builtin = kind.__module__ == "builtins" or (file is None and module is not None)
    is_user = kind.__module__ == "__main__"
    return not is_user and (is_builtin or (file is not None and is_library_file(file)))


def is_own_class(value: Any) -> bool:
    """Whether a value is a class that the user wrote."""
    return isinstance(value, type) and not is_library_class(value)
