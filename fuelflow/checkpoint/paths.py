"""Paths of checkpoints: of this machine, or of a store that has a URL."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AnyPath = Any
"""A `pathlib.Path`, or an ``etils.epath.Path`` of a URL such as ``gs://``."""


def as_path(path: str | os.PathLike[str]) -> AnyPath:
    """The path, absolute if it is one of this machine.

    Raises:
        TypeError: If it is no path, or one of bytes.
        ValueError: If it is empty.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise TypeError(f"`directory` must be a str or a Path, got {path!r}")
    text = os.fspath(path)
    if not text:
        raise ValueError('`directory` must name a directory, got "": "." is this one')
    if "://" in text:
        from etils import epath  # brought by orbax

        return epath.Path(text)
    return Path(text).expanduser().absolute()


def is_local(path: AnyPath) -> bool:
    """Whether a directory there can be renamed in one go."""
    return isinstance(path, Path)


def remove_tree(path: AnyPath) -> None:
    """Removes a directory and all that is in it."""
    if is_local(path):
        shutil.rmtree(path)
    else:
        path.rmtree()


def files_below(path: AnyPath) -> Iterator[tuple[str, AnyPath]]:
    """The files of a directory, sorted, by their paths within it."""
    for child in sorted(path.iterdir(), key=lambda child: child.name):
        if child.is_dir():
            for name, file in files_below(child):
                yield f"{child.name}/{name}", file
        else:
            yield child.name, child
