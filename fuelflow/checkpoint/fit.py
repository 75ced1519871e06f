"""How the arrays of a checkpoint fit those of a state, name by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from fuelflow._errors import StateMismatchError
from fuelflow.checkpoint.manifest import ArraySpec
from fuelflow.model.names import select_names

Differences = tuple[tuple[str, str, str], ...]
"""Name, what the checkpoint has, and what the state has."""


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """What became of each array, by its name in the state.

    ``str()`` says it in a line for each kind.

    Attributes:
        loaded: Taken from the checkpoint, the cast ones among them.
        missing: Not in the checkpoint: left as they were.
        unexpected: In the checkpoint, and not in the state: left out.
        different: Of another shape or kind: left as they were.
        cast: Taken from the checkpoint, and cast to the state's dtype.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    different: Differences = ()
    cast: Differences = ()

    @property
    def is_complete(self) -> bool:
        """Whether all fitted, bit for bit."""
        rest = (self.missing, self.unexpected, self.different, self.cast)
        return not any(rest)

    def __str__(self) -> str:
        def pairs(differences: Differences) -> list[str]:
            return [f"{name} {had} → {has}" for name, had, has in differences]

        kinds = {
            "loaded": self.loaded,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "differently shaped": pairs(self.different),
            "cast": pairs(self.cast),
        }
        return "\n".join(
            f"{len(names)} {kind}" + (f": {_some(names)}" if kind != "loaded" else "")
            for kind, names in kinds.items()
            if names or kind == "loaded"
        )


def _some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def compare(
    saved: Mapping[str, ArraySpec],
    expected: Mapping[str, Any],
    only: str | Iterable[str],
) -> RestoreReport:
    """What would become of each array.

    Args:
        saved: The checkpoint's arrays, by their names in the state.
        expected: The state's arrays by name.
        only: Patterns of the names that matter; others are in no list.

    Raises:
        TypeError: If a pattern is no string.
        ValueError: If a pattern selects nothing.
    """
    names = [*expected, *(name for name in saved if name not in expected)]
    wanted = select_names(only, names, "only")
    loaded, different, cast = [], [], []
    for name in names:
        if name not in wanted or name not in saved or name not in expected:
            continue
        had, has = saved[name], spec_of(expected[name])
        if had.text == has.text:
            loaded.append(name)
        elif had.shape == has.shape and _can_cast(had, has):
            loaded.append(name)
            cast.append((name, had.text, has.text))
        else:
            different.append((name, had.text, has.text))
    return RestoreReport(
        loaded=tuple(loaded),
        missing=tuple(n for n in expected if n in wanted and n not in saved),
        unexpected=tuple(n for n in saved if n in wanted and n not in expected),
        different=tuple(different),
        cast=tuple(cast),
    )


def require_complete(report: RestoreReport, path: str) -> None:
    """Refuses a checkpoint that does not fit in all.

    Raises:
        StateMismatchError: With the names.
    """
    if not report.is_complete:
        raise StateMismatchError(
            report.missing,
            report.unexpected,
            report.different + report.cast,
            subject=f"the checkpoint {path}",
            remedy=". Load what fits with `partial=True`, give parameters other names "
            "with `rename=`, or choose some with `only=`",
        )


def spec_of(leaf: Any) -> ArraySpec:
    """What a state's array is, without its values."""
    return ArraySpec(str(leaf.dtype), tuple(leaf.shape), checksum=0)


def _can_cast(had: ArraySpec, has: ArraySpec) -> bool:
    if had.is_key or has.is_key:
        return False
    return any(
        all(jnp.issubdtype(spec.numpy_dtype, kind) for spec in (had, has))
        for kind in (jnp.floating, jnp.signedinteger, jnp.unsignedinteger)
    )
