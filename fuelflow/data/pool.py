"""Memory that batches take turns in, so that the system need not clear new memory.

A block comes back when the last array that looks into it is gone, a JAX array on a CPU
included: that is what makes it safe to use again.
"""

import math
from collections import deque
from typing import Any

import numpy as np

from fuelflow.data.memory import aligned_empty

_MAX_FREE_BYTES = 256 * 2**20  # in blocks of one size that wait for their next use


class Pool:
    """Blocks of memory by size, for any number of threads."""

    def __init__(self) -> None:
        self._free: dict[int, deque[np.ndarray]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array that nobody else has, with anything in it."""
        num_bytes = dtype.itemsize * math.prod(shape)
        free = self._free.get(num_bytes)
        if free is None:
            most = max(1, _MAX_FREE_BYTES // max(1, num_bytes))
            free = self._free.setdefault(num_bytes, deque(maxlen=most))
        try:
            block = free.pop()  # the last one back is still in the caches
        except IndexError:
            block = aligned_empty((num_bytes,), np.dtype(np.uint8))
        return np.asarray(_Lease(block, free)).view(dtype).reshape(shape)


class _Lease:
    """One use of a block: arrays made of it keep it, and it gives the block back."""

    __slots__ = ("__array_interface__", "_block", "_free")

    def __init__(self, block: np.ndarray, free: deque[np.ndarray]) -> None:
        self.__array_interface__ = block.__array_interface__
        self._block = block
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._block)
