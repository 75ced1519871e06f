"""Host values as plain ones that any JSON has, and back."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_plain(value: Any) -> Any:
    """A value as JSON has it: dicts, lists, numbers, strings and None.

    JSON has no NaN and no infinities: they become the strings ``"NaN"``,
    ``"Infinity"`` and ``"-Infinity"``, JavaScript's words for them. None, which means
    absent, stays None. NumPy's numbers become Python's.

    Raises:
        TypeError: If it is nothing of that kind.

    Example:
        >>> to_plain({"loss": (0.5, None, float("nan"))})
        {'loss': [0.5, None, 'NaN']}
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Mapping):
        return {name: to_plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(part) for part in value]
    raise TypeError(f"JSON has no {type(value).__name__}, got {value!r}")


def from_plain(name: str, value: Any) -> Any:
    """The value that `to_plain` was given, lists as tuples.

    Args:
        name: What an error calls it.
        value: What `to_plain` returned.

    Raises:
        ValueError: If there is a string in it that stands for no number.

    Example:
        >>> from_plain("per_rank", [{"loss": 0.5}, {"loss": "NaN"}])
        ({'loss': 0.5}, {'loss': nan})
    """
    if isinstance(value, Mapping):
        return {key: from_plain(name, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(from_plain(name, part) for part in value)
    if isinstance(value, str):
        if value not in _WORDS:
            raise ValueError(
                f"`{name}` must hold numbers, or one of the words "
                f"{', '.join(_WORDS)} for one, got {value!r}"
            )
        return _WORDS[value]
    return value


def require_names(kind: str, got: Any, names: tuple[str, ...]) -> None:
    """Refuses what is not a mapping with exactly some names.

    Args:
        kind: The class whose ``to_dict`` makes such mappings.
        got: What was given.
        names: The names it must have.

    Raises:
        TypeError: If it is no mapping.
        ValueError: If names are missing or unknown; it lists them.
    """
    rule = f"`values` must be what `{kind}.to_dict` returned"
    if not isinstance(got, Mapping):
        raise TypeError(f"{rule}, got a {type(got).__name__}")
    missing = [f"`{name}`" for name in names if name not in got]
    unknown = [f"`{name}`" for name in got if name not in names]
    faults = [f"it lacks {', '.join(missing)}"] * bool(missing)
    faults += [f"it has an unknown {', '.join(unknown)}"] * bool(unknown)
    if faults:
        raise ValueError(f"{rule}, but {' and '.join(faults)}")
