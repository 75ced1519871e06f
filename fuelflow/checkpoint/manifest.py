"""The readable half of a checkpoint: names, shapes, versions, and checksums."""

import json
import math
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ml_dtypes  # brought by jax
import numpy as np

from fuelflow._errors import DamagedCheckpointError
from fuelflow.checkpoint.paths import AnyPath, files_below

FORMAT = 1
FILE_NAME = "checkpoint.json"

_PACKAGES = ("fuelflow", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
_CHUNK_BYTES = 2**22
_CHECKSUM = "checksum"


@dataclass(frozen=True)
class ArraySpec:
    """One array of a checkpoint.

    Attributes:
        dtype: Its dtype by name, such as ``float32``; for random keys that of JAX,
            such as ``key<fry>``.
        shape: Its shape.
        checksum: CRC-32 of its bytes in C order; of a key, of its data.
        key_impl: How keys are made, such as ``threefry2x32``; None for numbers.
    """

    dtype: str
    shape: tuple[int, ...]
    checksum: int
    key_impl: str | None = None

    @property
    def text(self) -> str:
        """Dtype and shape, such as ``float32[64,28]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def is_key(self) -> bool:
        """Whether it holds random keys, and no numbers."""
        return self.dtype.startswith("key<")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Its dtype, if it holds numbers."""
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    @property
    def num_values(self) -> int:
        """How many numbers or keys it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class FileSpec:
    """One file of a checkpoint: its bytes, and their CRC-32."""

    size: int
    checksum: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a checkpoint is but its arrays.

    Attributes:
        format: The layout of checkpoints, counted up.
        step: Completed updates.
        serial: The number of the save in its directory.
        reason: Why it was saved.
        written: When, as ISO 8601 has it.
        num_ranks: Ranks of the running sums; 0 if there are none.
        num_processes: Processes of the run.
        versions: Of Python and the packages that wrote it.
        run: What `RunRecord.to_dict` returned.
        arrays: By dotted name.
        files: By path within the checkpoint.
    """

    format: int = FORMAT
    step: int
    serial: int
    reason: str
    written: str
    num_ranks: int
    num_processes: int
    versions: Mapping[str, str]
    run: Mapping[str, Any]
    arrays: Mapping[str, ArraySpec]
    files: Mapping[str, FileSpec]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def versions_here() -> dict[str, str]:
    """Versions of Python and of the packages that a checkpoint depends on."""
    return {
        "python": sys.version.split()[0],
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources
        return "not installed"


def write_manifest(directory: AnyPath, manifest: Manifest) -> None:
    """Writes the manifest, with a sum of its own, into a checkpoint."""
    values = asdict(manifest)
    values[_CHECKSUM] = _sum_of(values)
    (directory / FILE_NAME).write_text(json.dumps(values, indent=1, allow_nan=False))


def read_manifest(directory: AnyPath) -> Manifest:
    """The manifest of a checkpoint, known to be as it was written.

    Raises:
        DamagedCheckpointError: If it is missing, no JSON, or not what was written.
        ValueError: If it is of a format that this fuelflow does not know.
    """

    def damaged(fault: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(str(directory), [f"{FILE_NAME} {fault}"])

    try:
        values = json.loads((directory / FILE_NAME).read_bytes())
    except FileNotFoundError:
        raise damaged("is missing") from None
    except (ValueError, RecursionError) as error:
        raise damaged(f"is no JSON ({error})") from error
    if not isinstance(values, dict) or values.pop(_CHECKSUM, None) != _sum_of(values):
        raise damaged("does not add up to its checksum")
    if values["format"] != FORMAT:
        raise ValueError(
            f"the checkpoint {directory} has format {values['format']}, and this "
            f"fuelflow reads format {FORMAT}: it was written by fuelflow "
            f"{values['versions']['fuelflow']}"
        )
    return _parsed(values)


def _parsed(values: Mapping[str, Any]) -> Manifest:
    known = {each.name: values[each.name] for each in fields(Manifest)}
    known["arrays"] = {
        name: ArraySpec(**{**spec, "shape": tuple(spec["shape"])})
        for name, spec in values["arrays"].items()
    }
    known["files"] = {name: FileSpec(**spec) for name, spec in values["files"].items()}
    return Manifest(**known)


def _sum_of(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def checksum_of(values: np.ndarray) -> int:
    """CRC-32 of an array's bytes, in C order."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return zlib.crc32(flat.view(np.uint8).data) if flat.size else 0


def survey(directory: AnyPath) -> dict[str, FileSpec]:
    """The files of a checkpoint that is being written, all but its manifest."""
    return {
        name: FileSpec(*_size_and_sum(file)) for name, file in files_below(directory)
    }


def require_files(directory: AnyPath, manifest: Manifest) -> None:
    """Returns if all files of a checkpoint are there and as they were written.

    Files that are not in the manifest are of no account.

    Raises:
        DamagedCheckpointError: With each file that is not.
    """
    faults = list(_file_faults(directory, manifest.files))
    if faults:
        raise DamagedCheckpointError(str(directory), faults)


def _file_faults(directory: AnyPath, files: Mapping[str, FileSpec]) -> Iterable[str]:
    for name, spec in files.items():
        try:
            size, checksum = _size_and_sum(directory.joinpath(*name.split("/")))
        except FileNotFoundError:
            yield f"{name} is missing"
            continue
        if size != spec.size:
            yield f"{name} has {size:,} bytes and had {spec.size:,}"
        elif checksum != spec.checksum:
            yield f"{name} has other bytes than were written"


def _size_and_sum(file: AnyPath) -> tuple[int, int]:
    size = checksum = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return size, checksum
