"""A directory of checkpoints: one folder for each, named by the save and the step."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fuelflow.checkpoint.manifest import FILE_NAME, Manifest, read_manifest
from fuelflow.checkpoint.paths import AnyPath, is_local, remove_tree

# What is being made or taken away has a name that no reader takes for a checkpoint.
_WRITING = ".writing"
_REMOVING = ".removing"
_NAME = re.compile(r"(?P<serial>\d{5,})-step-(?P<step>\d+)")


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a directory, as its name tells.

    Attributes:
        path: Its folder.
        serial: The number of its save: later ones have larger numbers, also where a
            run went back to an earlier step.
        step: Completed updates.
    """

    path: AnyPath
    serial: int
    step: int

    def manifest(self) -> Manifest:
        """All that it is but its arrays.

        Raises:
            DamagedCheckpointError: If that cannot be read.
        """
        return read_manifest(self.path)


class Directory:
    """The checkpoints in a directory.

    On this machine a checkpoint is written under another name and renamed when it is
    whole, so a killed write is never seen. Elsewhere, as in ``gs://``, nothing can be
    renamed in one go: there its manifest, written last, says that it is whole.

    Args:
        path: The directory.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = path

    def entries(self) -> list[Entry]:
        """The checkpoints, oldest save first; none if there is no such directory."""
        found = [entry for entry in self._named() if self._is_whole(entry)]
        return sorted(found, key=lambda entry: entry.serial)

    def _named(self) -> Iterator[Entry]:
        try:
            children = list(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return
        for child in children:
            match = _NAME.fullmatch(child.name)
            if match:
                yield Entry(child, int(match["serial"]), int(match["step"]))

    def _is_whole(self, entry: Entry) -> bool:
        # A folder here has its name only since it was whole: without a manifest it is
        # damaged, which the reader is to hear about.
        return is_local(self.path) or (entry.path / FILE_NAME).exists()

    def create(self) -> None:
        """Makes the directory, and clears away what a killed process left there.

        Raises:
            OSError: If it cannot be made or written to.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for child in self.path.iterdir():
            if child.name.endswith((_WRITING, _REMOVING)):
                remove_tree(child)
        for entry in self._named():
            if not self._is_whole(entry):
                remove_tree(entry.path)
        if is_local(self.path):
            probe = self.path / f"probe{_WRITING}"
            probe.mkdir()
            probe.rmdir()

    def begin(self, step: int) -> Entry:
        """A folder to write the next checkpoint into, which `commit` is then given.

        Raises:
            OSError: If it cannot be made.
        """
        matches = (_NAME.match(child.name) for child in self.path.iterdir())
        serial = 1 + max((int(m["serial"]) for m in matches if m), default=0)
        name = f"{serial:05d}-step-{step}"
        path = self.path / (name + _WRITING if is_local(self.path) else name)
        path.mkdir()
        return Entry(path, serial, step)

    def commit(self, entry: Entry) -> Entry:
        """The checkpoint that a folder has become, its manifest being written."""
        if not is_local(self.path):
            return entry
        whole = entry.path.with_name(entry.path.name.removesuffix(_WRITING))
        return Entry(entry.path.rename(whole), entry.serial, entry.step)

    def abandon(self, entry: Entry) -> None:
        """Takes away what of a checkpoint was written, as far as that can be done."""
        with contextlib.suppress(OSError):
            remove_tree(entry.path)

    def remove(self, entry: Entry) -> None:
        """Removes a checkpoint; killed meanwhile, it is gone or whole."""
        path = entry.path
        if is_local(self.path):
            path = path.rename(path.with_name(path.name + _REMOVING))
        else:
            (path / FILE_NAME).unlink()
        remove_tree(path)
