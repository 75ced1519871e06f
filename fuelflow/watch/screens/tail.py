"""What was added to a list since one last looked."""

from collections.abc import Sequence
from typing import Any


class Tail:
    """Knows the records it gave, and gives those after them.

    Where the last ones were forgotten since, as a run that goes on does them anew, it
    gives what came in their place.
    """

    def __init__(self) -> None:
        self._given: list[Any] = []

    def later(self, records: Sequence[Any]) -> list[Any]:
        """The records after those given before."""
        count = len(self._given)
        is_kept = count <= len(records)
        if count and not (is_kept and records[count - 1] is self._given[-1]):
            both = zip(self._given, records, strict=False)
            same = [given is record for given, record in both]
            count = [*same, False].index(False)
            del self._given[count:]
        later = list(records[count:])
        self._given += later
        return later
