"""How many steps a run has taken, those that were left out among them."""

from collections.abc import Mapping
from typing import Any


def steps_taken(record: Mapping[str, Any]) -> int:
    """Updates done and steps left out, up to the one that a record is of.

    Args:
        record: Of kind ``step``. Its step counts itself as done, even if it is the one
            that was left out for not being finite.

    Example:
        >>> steps_taken({"step": 5, "loss": 0.5, "num_skipped": 2})
        7
        >>> steps_taken({"step": 5, "loss": "NaN", "num_skipped": 3})
        7
    """
    num_skipped = record.get("num_skipped") or 0
    words = [isinstance(record.get(name), str) for name in ("loss", "grad_norm")]
    return record["step"] + num_skipped - (num_skipped > 0 and any(words))
