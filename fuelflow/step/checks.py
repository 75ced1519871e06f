"""Arguments checked before work starts, and refused by name."""

import math
from numbers import Integral, Real

import numpy as np

_LARGEST_INT32 = 2**31 - 1
_LARGEST_FLOAT32 = 3.4028234663852886e38


def checked_number(name: str, value: object) -> float:
    """The value as a float, refused by name if it is not a real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"`{name}` must be a number, got {value!r} of type {type(value).__name__}"
        )
    return float(value)


def checked_rate(name: str, value: object) -> float:
    """The value as a float, refused by name if it is negative or not finite."""
    number = checked_number(name, value)
    if not 0 <= number <= _LARGEST_FLOAT32:
        raise ValueError(f"`{name}` must be finite and at least 0, got {value}")
    return number


def checked_positive(name: str, value: object) -> float:
    """The value as a float, refused by name if it is not positive or not finite."""
    number = checked_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"`{name}` must be finite and more than 0, got {value}")
    return number


def checked_count(name: str, value: object, *, least: int) -> int:
    """The value as an int, refused by name if it is none, too small or no int32."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"`{name}` must be an integer, got {value!r} of type {type(value).__name__}"
        )
    count = int(value)
    if count < least:
        raise ValueError(f"`{name}` must be at least {least}, got {count}")
    if count > _LARGEST_INT32:
        raise ValueError(f"`{name}` must fit in an int32, got {count}")
    return count


def checked_flag(name: str, value: object) -> bool:
    """The value, refused by name if it is neither true nor false."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be True or False, got {value!r}")
    return bool(value)


def checked_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """The value, refused by name if it is none of the choices."""
    if value not in choices:
        listed = ", ".join(f'"{choice}"' for choice in choices[:-1])
        raise ValueError(f'`{name}` must be {listed} or "{choices[-1]}", got {value!r}')
    return value
