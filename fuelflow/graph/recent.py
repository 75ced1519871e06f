"""A bounded memory of what was used most recently."""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Values by key, at most so many: the one used longest ago goes first.

    Args:
        size: How many to keep.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[Hashable, T] = {}

    def get(self, key: Hashable) -> T | None:
        """The value of a key, which is then the one used last; None if none."""
        values = self._values
        found = values.get(key)
        # While there is room, the order does not matter. Other threads may be here too.
        if found is not None and 2 * len(values) > self._size:
            values[key] = values.pop(key, found)
        return found

    def add(self, key: Hashable, value: T) -> None:
        """Keeps a value."""
        while len(self._values) >= self._size:
            self._values.pop(next(iter(self._values)), None)
        self._values[key] = value

    def __len__(self) -> int:
        return len(self._values)
