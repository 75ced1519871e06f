"""How many steps a run has taken, those that were left out among them."""

from collections.abc import Mapping
from typing import Any


def steps_taken(record: Mapping[str, Any]) -> int:
    """Updates done and steps left out, up to the one that a record is of.

    Args:
        record: Of kind ``step``.

    Example:
        >>> steps_taken({"step": 5, "num_skipped": 2})
        7
    """
    return record["step"] + (record.get("num_skipped") or 0)
