"""One checkpoint after the other written into a directory, and old ones removed."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import jax

from fuelflow._errors import DamagedCheckpointError
from fuelflow.checkpoint.directory import Directory, Entry
from fuelflow.checkpoint.manifest import (
    Manifest,
    survey,
    versions_here,
    write_manifest,
)
from fuelflow.checkpoint.orbax import write_arrays
from fuelflow.checkpoint.record import RunRecord
from fuelflow.checkpoint.retention import Retention, Save
from fuelflow.checkpoint.snapshot import Snapshot


class Writer:
    """Writes checkpoints into a directory that it alone writes to.

    Args:
        directory: The directory.
        retention: Which checkpoints stay.
    """

    def __init__(self, directory: Directory, retention: Retention) -> None:
        self._directory = directory
        self._retention = retention
        self._is_prepared = False
        self._saves: dict[int, Save] = {}

    def prepare(self) -> None:
        """Makes the directory and clears it, once.

        Not again by itself: a directory that has vanished meanwhile is trouble that the
        run should hear of.

        Raises:
            OSError: If it cannot be made or written to.
        """
        if not self._is_prepared:
            self._directory.create()
            self._is_prepared = True

    def begin_anew(self) -> None:
        """Has the directory made again, and looked at again, after trouble with it."""
        self._is_prepared = False
        self._saves.clear()

    def write(self, snapshot: Snapshot, run: Mapping[str, Any], reason: str) -> None:
        """Writes one checkpoint, and removes those that need not stay.

        Args:
            snapshot: The arrays.
            run: What `RunRecord.to_dict` returned.
            reason: Why the run is saved.

        Raises:
            Exception: What the file system or orbax says.
        """
        arrays, specs = snapshot.fetched()
        entry = self._directory.begin(int(arrays["step"]))
        try:
            write_arrays(entry.path, arrays)
            manifest = Manifest(
                step=entry.step,
                serial=entry.serial,
                reason=reason,
                written=datetime.now(UTC).isoformat(timespec="milliseconds"),
                num_ranks=snapshot.num_ranks,
                num_processes=jax.process_count(),
                versions=versions_here(),
                run=run,
                arrays=specs,
                files=survey(entry.path),
            )
            write_manifest(entry.path, manifest)
            entry = self._directory.commit(entry)
        except BaseException:
            self._directory.abandon(entry)
            raise
        self._saves[entry.serial] = _save_of(entry, manifest)
        self._remove_superfluous()

    def _remove_superfluous(self) -> None:
        entries = {entry.serial: entry for entry in self._directory.entries()}
        saves = [self._known(entry) for entry in entries.values()]
        for serial in self._retention.superfluous(saves):
            self._directory.remove(entries[serial])
            self._saves.pop(serial, None)

    def _known(self, entry: Entry) -> Save:
        if entry.serial not in self._saves:
            try:
                self._saves[entry.serial] = _save_of(entry, entry.manifest())
            except (DamagedCheckpointError, ValueError):
                # Of a damaged one nothing is known: it goes when it is old.
                self._saves[entry.serial] = Save(entry.serial, entry.step, {})
        return self._saves[entry.serial]


def _save_of(entry: Entry, manifest: Manifest) -> Save:
    metrics = RunRecord.from_dict(manifest.run).metrics
    return Save(entry.serial, entry.step, metrics)
