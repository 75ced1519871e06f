"""Names of a model that has changed since: parameters renamed by patterns."""

import re
from collections.abc import Iterable, Mapping

_PARAMS = "params."
_VARIABLES = "variables."


def renamed(names: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """What each of a checkpoint's names becomes.

    Patterns are over parameters' and variables' own names, ``encoder.0.kernel``, and
    carry over to what the optimizer holds for them. One that equals a path prefix
    renames all below it; ``*`` is any text, dots as well, and stands in the replacement
    for the same text: ``{"*": "encoder.*"}`` puts all below ``encoder``. The first
    pattern that matches a name counts.

    Args:
        names: Names in the checkpoint, such as ``params.encoder.0.kernel``.
        rename: Pattern → replacement.

    Raises:
        TypeError: If patterns or replacements are no strings.
        ValueError: If a pattern matches nothing, a replacement has other ``*`` than its
            pattern, or two names become one.

    Example:
        >>> renamed(["params.old.kernel", "step"], {"old": "new"})
        {'params.old.kernel': 'params.new.kernel', 'step': 'step'}
    """
    names = list(names)
    rules = [_Rule(pattern, text) for pattern, text in rename.items()]
    own = [_own_name(name) for name in names]
    known = {name for name in own if name is not None}
    for rule in rules:
        if not any(rule.apply(name) is not None for name in known):
            listed = ", ".join(f"`{name}`" for name in sorted(known)[:8])
            raise ValueError(
                f"`rename` pattern `{rule.pattern}` matches nothing in the checkpoint, "
                f"whose names are {listed}" + (" and more" if len(known) > 8 else "")
            )
    made = {name: _renamed(name, known, rules) for name in names}
    _require_distinct(made)
    return made


def _renamed(name: str, known: set[str], rules: list["_Rule"]) -> str:
    own = _own_name(name) or _longest_suffix(name, known)
    if own is None:
        return name
    head = name.removesuffix(own)
    for rule in rules:
        new = rule.apply(own)
        if new is not None:
            return head + new
    return name


def _own_name(name: str) -> str | None:
    for prefix in (_PARAMS, _VARIABLES):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return None


def _longest_suffix(name: str, known: set[str]) -> str | None:
    """The parameter that a name of the optimizer's ends with."""
    parts = name.split(".")
    for first in range(1, len(parts)):
        suffix = ".".join(parts[first:])
        if suffix in known:
            return suffix
    return None


def _require_distinct(made: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for old, new in made.items():
        if new in seen:
            raise ValueError(
                f"`rename` must keep names apart, but makes `{new}` of both "
                f"`{seen[new]}` and `{old}`"
            )
        seen[new] = old


class _Rule:
    """One pattern and its replacement."""

    def __init__(self, pattern: str, replacement: str) -> None:
        for text in (pattern, replacement):
            if not isinstance(text, str):
                raise TypeError(
                    "`rename` must map patterns to names, both strings, got a "
                    f"{type(text).__name__}"
                )
        if pattern.count("*") != replacement.count("*"):
            raise ValueError(
                "`rename` must have as many `*` in a replacement as in its pattern, "
                f"got {pattern!r}: {replacement!r}"
            )
        self.pattern = pattern
        self._parts = replacement.split("*")
        texts = (re.escape(part) for part in pattern.split("*"))
        self._regex = re.compile("(.*)".join(texts) + r"(\..*)?", re.DOTALL)

    def apply(self, name: str) -> str | None:
        """What the name becomes; None if the pattern does not match it."""
        match = self._regex.fullmatch(name)
        if match is None:
            return None
        *found, tail = match.groups(default="")
        pieces = [self._parts[0]]
        for text, part in zip(found, self._parts[1:], strict=True):
            pieces += [text, part]
        return ("".join(pieces) + tail).removeprefix(".")
