"""Dotted names for the leaves of a tree, and patterns that select among them."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    KeyPath,
    SequenceKey,
    tree_flatten_with_path,
)


def path_name(path: KeyPath) -> str:
    """The dotted name of a tree path, such as ``encoder.layers.0.kernel``.

    Example:
        >>> path_name((DictKey("encoder"), SequenceKey(0), GetAttrKey("kernel")))
        'encoder.0.kernel'
    """
    return ".".join(_key_name(key) for key in path)


def _key_name(key: Any) -> str:
    match key:
        case DictKey() | FlattenedIndexKey():
            return str(key.key)
        case SequenceKey():
            return str(key.idx)
        case GetAttrKey():
            return key.name
        case _:
            return str(key)


def unboxed_name(path: KeyPath) -> str:
    """The name of a path without the ``value`` of flax's Variables and boxes.

    Example:
        >>> unboxed_name((DictKey("kernel"), GetAttrKey("value")))
        'kernel'
    """
    return path_name(tuple(key for key in path if key != _VALUE))


_VALUE = GetAttrKey("value")


def named_leaves(
    tree: Any, name_of: Callable[[KeyPath], str] = path_name
) -> dict[str, Any]:
    """The leaves of a tree by dotted name, in the tree's own order.

    Raises:
        ValueError: If two leaves have the same name.

    Example:
        >>> named_leaves({"layers": [{"kernel": 1.0}, {"kernel": 2.0}]})
        {'layers.0.kernel': 1.0, 'layers.1.kernel': 2.0}
    """
    paths = [(name_of(path), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]
    require_distinct([name for name, _ in paths])
    return dict(paths)


def require_distinct(names: Sequence[str]) -> None:
    """Refuses names that stand for two leaves.

    Raises:
        ValueError: If a name occurs twice.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(
                f"every parameter needs a name of its own, but two are named `{name}`; "
                "rename a key that holds a dot"
            )
        seen.add(name)


def select_names(
    patterns: str | Iterable[str], names: Sequence[str], argument: str
) -> frozenset[str]:
    """The names that the patterns select.

    A pattern is a glob over the whole dotted name, in which ``*`` also runs over dots.
    A pattern that matches a path prefix selects everything below it: ``encoder``
    selects ``encoder.*``. A pattern after ``!`` takes names away again; if there are
    only such patterns, they take from all names.

    Args:
        patterns: One pattern, or several.
        names: The names to select from.
        argument: The argument the patterns were given as, for errors.

    Raises:
        TypeError: If a pattern is no string.
        ValueError: If there is no pattern, or one selects nothing: close names are
            shown.

    Example:
        >>> names = ["encoder.0.kernel", "encoder.0.bias", "head.kernel"]
        >>> sorted(select_names("encoder", names, "trainable"))
        ['encoder.0.bias', 'encoder.0.kernel']
        >>> sorted(select_names("!*.bias", names, "trainable"))
        ['encoder.0.kernel', 'head.kernel']
    """
    listed = _as_patterns(patterns, argument)
    kept = [pattern for pattern in listed if not pattern.startswith("!")]
    taken = [pattern[1:] for pattern in listed if pattern.startswith("!")]
    selected = set(names) if not kept else set()
    for pattern in kept:
        selected |= _matches(pattern, names, argument)
    for pattern in taken:
        selected -= _matches(pattern, names, argument)
    return frozenset(selected)


def _as_patterns(patterns: str | Iterable[str], argument: str) -> list[str]:
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    if not listed:
        raise ValueError(f"`{argument}` must hold at least one pattern, got none")
    for pattern in listed:
        if not isinstance(pattern, str):
            raise TypeError(
                f"`{argument}` must hold patterns over parameter names, "
                f"got a {type(pattern).__name__}"
            )
    return listed


def _matches(pattern: str, names: Sequence[str], argument: str) -> set[str]:
    found = {name for name in names if _is_match(pattern, name)}
    if not found:
        raise ValueError(
            f"`{argument}` pattern `{pattern}` selects no parameter; "
            + _close_names(pattern, names)
        )
    return found


def _is_match(pattern: str, name: str) -> bool:
    return (
        name == pattern
        or name.startswith(pattern + ".")
        or fnmatchcase(name, pattern)
        or fnmatchcase(name, pattern + ".*")
    )


def _close_names(pattern: str, names: Sequence[str]) -> str:
    prefixes = {
        ".".join(name.split(".")[:depth])
        for name in names
        for depth in range(1, name.count(".") + 2)
    }
    close = difflib.get_close_matches(pattern, sorted(prefixes), n=5, cutoff=0.5)
    if close:
        return "close names are " + ", ".join(f"`{name}`" for name in close)
    shown = ", ".join(f"`{name}`" for name in list(names)[:8])
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"the names are {shown}{more}"
