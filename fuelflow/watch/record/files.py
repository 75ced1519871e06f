"""Files that are replaced whole, so that who reads one never finds half of it."""

import contextlib
import os
import tempfile
from pathlib import Path


def replaceable(path: str | os.PathLike[str]) -> Path:
    """The file that may be replaced, where links lead to.

    Raises:
        ValueError: If there is something that is no file, such as a device.
    """
    place = Path(path).resolve()
    if place.exists() and not place.is_file():
        kind = "a directory" if place.is_dir() else "a device or a pipe"
        raise ValueError(f"there must be a file at {os.fspath(path)}, but it is {kind}")
    return place


def replace(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file beside its place, and then moves it there.

    Args:
        path: The file, or a link to it, which stays one.
        text: What it is to have in it.

    Raises:
        OSError: If it cannot be written; what was there stays.
        ValueError: If there is something that is no file.
    """
    place = replaceable(path)
    handle, name = tempfile.mkstemp(".tmp", f".{place.name}.", place.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        # As any new file's, which others may read where the user has it so.
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(place)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
