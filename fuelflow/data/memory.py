"""Memory: what is free, how much of it to use, and arrays that JAX can take over."""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fuelflow.devices.placement import Device

RESIDENT_SHARE = 1 / 4
"""Of the free device memory, what rows that stay on it may take."""

PREFETCH_SHARE = 1 / 16
"""Of the free memory, what batches made ahead of use may take."""

# Where the system says nothing: less than any machine that trains has.
_ASSUMED_BYTES = 2 * 2**30
Empty = Callable[[tuple[int, ...], np.dtype[Any]], np.ndarray]
"""Makes arrays of a shape and dtype, with anything in them."""

_ALIGNMENT = 64  # bytes: JAX on a CPU takes such memory over without a copy
_CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """Bytes that this process can still take: the least of what the system says."""
    return min(_host_figures(), default=_ASSUMED_BYTES)


def free_device_bytes(device: Device) -> int:
    """Bytes free on a device; the host's where the device shares its memory."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return free_host_bytes()
    return max(0, stats["bytes_limit"] - stats.get("bytes_in_use", 0))


def num_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _host_figures() -> Iterator[int]:
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    # A container may have been given less than the machine has.
    most, used = _text(_CGROUP / "memory.max"), _text(_CGROUP / "memory.current")
    if most.strip().isdecimal() and used.strip().isdecimal():
        yield max(0, int(most) - int(used))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """A new array whose memory JAX can take over on a CPU."""
    num_bytes = dtype.itemsize * math.prod(shape)
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    first = -raw.__array_interface__["data"][0] % _ALIGNMENT
    return raw[first : first + num_bytes].view(dtype).reshape(shape)


def copied(values: Any) -> np.ndarray:
    """A copy that JAX can take over, of an array that may change later."""
    values = np.asarray(values)
    copy = aligned_empty(values.shape, values.dtype)
    copy[...] = values
    return copy
