"""What is in a checkpoint, as text: read from its manifest, without any array."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fuelflow._errors import DamagedCheckpointError
from fuelflow.checkpoint.directory import Directory, Entry
from fuelflow.checkpoint.manifest import (
    FILE_NAME,
    Manifest,
    read_manifest,
    require_files,
)
from fuelflow.checkpoint.paths import AnyPath, as_path
from fuelflow.checkpoint.record import RunRecord

_UNITS = ("B", "kB", "MB", "GB", "TB")


def describe(path: str | os.PathLike[str], *, verify: bool = False) -> str:
    """What there is in a directory of checkpoints, or in one of them.

    A directory gives a line for each checkpoint, oldest save first, and then all of the
    newest.

    Args:
        path: A directory that a `Checkpointer` wrote to, or one checkpoint in it.
        verify: Whether all files are read and compared with their checksums.

    Raises:
        DamagedCheckpointError: If ``path`` is one checkpoint, and damaged.
        FileNotFoundError: If there is no checkpoint.
        ValueError: If it is of a format that this fuelflow does not know.
    """
    path = as_path(path)
    if _is_checkpoint(path):
        return "\n".join(_one(path, _checked(path, verify=verify)))
    entries = _entries(path)
    lines, newest = [], None
    for entry in entries:
        try:
            manifest = _checked(entry.path, verify=verify)
        except DamagedCheckpointError as error:
            row = [entry.path.name, f"step {entry.step}", "damaged:"]
            lines.append([*row, "; ".join(error.faults)])
        else:
            lines.append([entry.path.name, *_summary(manifest)])
            newest = entry.path, manifest
    text = [f"{len(entries)} checkpoints in {path}", *_aligned(lines)]
    if newest is not None:
        text += ["", *_one(*newest)]
    return "\n".join(text)


def compare(
    one: str | os.PathLike[str], other: str | os.PathLike[str], *, limit: int = 20
) -> str:
    """What differs between two checkpoints; of a directory the newest is taken.

    Values are compared by their checksums, so arrays that differ are named and not
    shown.

    Args:
        one: A checkpoint, or a directory of some.
        other: Another.
        limit: Names shown of each kind.

    Raises:
        DamagedCheckpointError: If one of them is damaged.
        FileNotFoundError: If there is none.
        ValueError: If one is of a format that this fuelflow does not know.
    """
    paths = [_newest(as_path(path)) for path in (one, other)]
    a, b = (read_manifest(path) for path in paths)
    lines = [f"{paths[0]}", f"{paths[1]}", ""]
    lines += _aligned(_pairs(_facts(a), _facts(b))) or ["the same facts"]
    lines.append("")
    both = [name for name in a.arrays if name in b.arrays]
    alike = [n for n in both if a.arrays[n].text == b.arrays[n].text]
    changed = [n for n in both if n not in set(alike)]
    equal = [n for n in alike if a.arrays[n].checksum == b.arrays[n].checksum]
    kinds = {
        "only in the first": [n for n in a.arrays if n not in b.arrays],
        "only in the second": [n for n in b.arrays if n not in a.arrays],
        "differently shaped": [
            f"{n} {a.arrays[n].text} → {b.arrays[n].text}" for n in changed
        ],
        "other values": [n for n in alike if n not in set(equal)],
    }
    for kind, names in kinds.items():
        if names:
            lines += [f"{len(names)} {kind}:", *_limited(names, limit)]
    lines.append(f"{len(equal)} with the same values")
    return "\n".join(lines)


def _entries(path: AnyPath) -> list[Entry]:
    entries = Directory(path).entries()
    if not entries:
        raise FileNotFoundError(f"there is no checkpoint in {path}")
    return entries


def _is_checkpoint(path: AnyPath) -> bool:
    return (path / FILE_NAME).exists()


def _newest(path: AnyPath) -> AnyPath:
    return path if _is_checkpoint(path) else _entries(path)[-1].path


def _checked(path: AnyPath, *, verify: bool) -> Manifest:
    manifest = read_manifest(path)
    if verify:
        require_files(path, manifest)
    return manifest


def _summary(manifest: Manifest) -> list[str]:
    return [
        f"step {manifest.step}",
        f"epoch {manifest.run['epoch']}",
        _bytes_text(manifest.num_bytes),
        manifest.reason,
        manifest.written,
        ", ".join(_metric_texts(manifest)),
    ]


def _one(path: AnyPath, manifest: Manifest) -> Iterator[str]:
    yield str(path)
    yield from _aligned(_facts(manifest).items())
    yield ""
    rows = [
        (name, spec.text, f"{spec.num_values:,}")
        for name, spec in manifest.arrays.items()
    ]
    yield f"{len(rows)} arrays"
    yield from _aligned(rows)


def _facts(manifest: Manifest) -> dict[str, str]:
    """What a checkpoint says of itself, short enough for a line each."""
    params = {n: s for n, s in manifest.arrays.items() if n.startswith("params.")}
    values = sum(spec.num_values for spec in params.values())
    return {
        "step": str(manifest.step),
        "epoch": str(manifest.run["epoch"]),
        "saved": f"{manifest.written}, {manifest.reason}",
        "size": f"{_bytes_text(manifest.num_bytes)} in {len(manifest.files)} files",
        "parameters": f"{len(params)}, {values:,} values",
        "metrics": ", ".join(_metric_texts(manifest)) or "none",
        "history": f"{len(manifest.run['history']['epochs'])} epochs",
        "position": _short(manifest.run["position"]),
        "ranks": str(manifest.num_ranks or "not recorded"),
        "processes": str(manifest.num_processes),
        **{f"{name} version": each for name, each in manifest.versions.items()},
    }


def _metric_texts(manifest: Manifest) -> list[str]:
    metrics = RunRecord.from_dict(manifest.run).metrics
    return [f"{name} {value:.4g}" for name, value in metrics.items()]


def _pairs(a: Mapping[str, str], b: Mapping[str, str]) -> list[tuple[str, ...]]:
    names = [*a, *(name for name in b if name not in a)]
    return [
        (name, a.get(name, "absent"), "→", b.get(name, "absent"))
        for name in names
        if a.get(name) != b.get(name)
    ]


def _short(position: Any, width: int = 60) -> str:
    if position is None:
        return "none"
    if isinstance(position, Mapping) and {"epoch", "rows"} <= set(position):
        return f"epoch {position['epoch']}, after {position['rows']} rows"
    text = str(position)
    return text if len(text) <= width else text[: width - 1] + "…"


def _limited(names: Sequence[str], limit: int) -> list[str]:
    more = [f"  and {len(names) - limit} more"] * (len(names) > limit)
    return [*(f"  {name}" for name in names[:limit]), *more]


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, with columns below each other."""
    rows = [list(row) for row in rows]
    widths = [
        max(len(row[column]) for row in rows if column < len(row))
        for column in range(max(map(len, rows), default=0))
    ]
    return [
        "  " + "  ".join(map(str.ljust, row, widths[: len(row)])).rstrip()
        for row in rows
    ]


def _bytes_text(size: float) -> str:
    """Bytes in the largest unit that leaves at least one.

    Example:
        >>> _bytes_text(1_536_000)
        '1.5 MB'
    """
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"
