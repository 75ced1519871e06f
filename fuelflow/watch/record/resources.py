"""What the host and the devices have in use, as far as they tell."""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_MANY = 1 << 20


def device_memory(devices: Iterable[Any]) -> list[dict[str, Any]]:
    """Bytes in use, and their limit, on each device that says so."""
    found = []
    for device in devices:
        stats = device.memory_stats()
        if stats and "bytes_in_use" in stats:
            name = f"{device.platform}:{device.id}"
            limit = stats.get("bytes_limit")
            found.append(
                {"device": name, "used": stats["bytes_in_use"], "limit": limit}
            )
    return found


def most_files() -> int:
    """How many files this process may have open; a lot, if there is no limit."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return _MANY
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY if limit == resource.RLIM_INFINITY else limit


class HostUse:
    """What this process uses of its host."""

    def __init__(self) -> None:
        self._num_cores = _num_cores()
        self._busy, self._time = time.process_time(), time.perf_counter()

    def read(self) -> dict[str, Any]:
        """The bytes in its memory, and of all cores the fraction since the last time.

        What cannot be read is left out.
        """
        busy, now = time.process_time(), time.perf_counter()
        secs = max(now - self._time, 1e-9) * self._num_cores
        share = min((busy - self._busy) / secs, 1.0)
        self._busy, self._time = busy, now
        num_bytes = _resident_bytes()
        return {"cpu": share} if num_bytes is None else {"rss": num_bytes, "cpu": share}


def _resident_bytes() -> int | None:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except (OSError, IndexError):  # not on Linux
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
