"""The page of runs that are in directories: what ``fuelflow report`` writes."""

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fuelflow.checkpoint.directory import Directory
from fuelflow.checkpoint.manifest import Manifest
from fuelflow.watch.pages.page import make_comparison, make_page, write_page
from fuelflow.watch.record.reading import FILE_NAME, read_records
from fuelflow.watch.record.records import VERSION

_PAGE_NAME = "report.html"


def write_report(directories: Sequence[str], output: str | None = None) -> Path:
    """Writes the page of one run, or of several on the same axes.

    A run is read from its records; where there are none but checkpoints, from what the
    newest checkpoint knows of the epochs before it.

    Args:
        directories: Of each run its directory, or its file of records.
        output: The file to write; by default ``report.html`` in the directory of the
            run, or, for several, in the current one.

    Returns:
        The file.

    Raises:
        ModuleNotFoundError: If plotly, which draws the curves, is not installed.
        OSError: If something cannot be read or written.
        ValueError: If a directory has neither records nor checkpoints, is given twice,
            or was written by another version.
    """
    runs = {
        label: _read_run(Path(given)) for label, given in _labels(directories).items()
    }
    first = Path(directories[0])
    if output is not None:
        path = Path(output)
    elif len(runs) == 1 and first.is_dir():
        path = first / _PAGE_NAME
    else:
        path = Path(_PAGE_NAME)
    if path.is_dir():
        raise ValueError(f"the page must be a file, but {path} is a directory")
    try:
        if len(runs) == 1:
            ((label, records),) = runs.items()
            page = make_page(records, title=label)
        else:
            page = make_comparison(runs, title=" · ".join(runs))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"a record in {', '.join(directories)} is not as fuelflow writes it: "
            f"{type(error).__name__}: {error}"
        ) from error
    write_page(path, page)
    return path


def _labels(directories: Sequence[str]) -> dict[str, str]:
    """The directories by their last part, or whole where that is not enough."""
    resolved = [Path(given).resolve() for given in directories]
    for given, path in zip(directories, resolved, strict=True):
        if resolved.count(path) > 1:
            raise ValueError(f"each run must be given once, got {given} again")
    names = [path.name for path in resolved]
    return {
        name if names.count(name) == 1 else str(path): given
        for name, path, given in zip(names, resolved, directories, strict=True)
    }


def _read_run(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise FileNotFoundError(f"there is no directory {path}")
    records: list[dict[str, Any]] = []
    if path.is_file() or (path / FILE_NAME).exists():
        records = [*read_records(path)]
    if not records and path.is_dir():
        records = list(_from_checkpoints(path))
    if not records:
        raise ValueError(
            f"there are no records in {path}: a run writes {FILE_NAME} with "
            "`monitor=ff.Monitor()` and a checkpointer or a directory"
        )
    versions = {each.get("version") for each in records if each["kind"] == "run"}
    if not versions <= {VERSION}:
        raise ValueError(f"the records in {path} are of another version of fuelflow")
    return records


def _from_checkpoints(path: Path) -> Iterator[dict[str, Any]]:
    """The records that the newest checkpoint could have been preceded by."""
    entries = Directory(path).entries()
    if not entries:
        return
    manifest = entries[-1].manifest()
    epochs = manifest.run["history"]["epochs"]
    saved = dt.datetime.fromisoformat(manifest.written).timestamp()
    secs = [_secs(metrics) for metrics in epochs]
    time = saved - sum(secs)
    yield {
        "kind": "run",
        "time": time,
        "version": VERSION,
        "name": path.resolve().name,
        "epochs": None,
        "steps_per_epoch": None,
        "epoch": 0,
        "step": 0,
        "settings": {},
        "versions": dict(manifest.versions),
        "params": _params(manifest),
        "ranks": [],
    }
    for metrics, each in zip(epochs, secs, strict=True):
        time += each
        yield {"kind": "epoch", "time": time, "metrics": metrics}
    yield {
        "kind": "event",
        "time": saved,
        "level": "info",
        "what": "checkpoint",
        "text": f"{entries[-1].path.name}, {manifest.reason}",
        "step": manifest.step,
    }


def _secs(metrics: Mapping[str, Any]) -> float:
    parts = ("epoch_ms", "eval_ms", "callback_ms", "compile_ms")
    return sum(metrics[name] for name in parts) / 1e3


def _params(manifest: Manifest) -> list[dict[str, Any]]:
    prefix = "params."
    return [
        {
            "name": name.removeprefix(prefix),
            "shape": list(spec.shape),
            "dtype": spec.dtype,
            "num_bytes": spec.num_values * spec.numpy_dtype.itemsize,
            "is_trained": None,  # a checkpoint does not know
        }
        for name, spec in manifest.arrays.items()
        if name.startswith(prefix) and not spec.is_key
    ]
