"""What must be the same in all processes of a run, compared before they start."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from fuelflow._errors import DisagreementError


def require_agreement(facts: Mapping[str, str | int | float]) -> None:
    """Returns if all processes of the run hold the same facts, and raises if not.

    Every process must call it, at the same point of the program. It takes one exchange
    of 32 bytes between all processes, and two more if they differ. With one process it
    does nothing.

    Args:
        facts: What has to agree, such as a seed, a number of rows, or a digest of the
            code. A name that one process lacks differs. Integers and floats are
            different from each other, a nan is the same as a nan.

    Raises:
        DisagreementError: On every process, with all that differs and what each has.
        TypeError: If a value is neither text nor a number, on that process alone.

    Example:
        >>> require_agreement({"seed": 0, "rows": 1437})
    """
    texts = {str(name): _text(name, value) for name, value in facts.items()}
    if jax.process_count() == 1:
        return
    record = json.dumps(texts, sort_keys=True).encode()
    digest = np.frombuffer(hashlib.sha256(record).digest(), np.uint8)
    digests = multihost_utils.process_allgather(digest)
    # The same digests lie before every process, so all of them go the same way.
    if (digests == digests[0]).all():
        return
    raise DisagreementError(_different(_gathered(record)))


def _text(name: str, value: str | int | float) -> str:
    if isinstance(value, str | int):
        return repr(value)
    if isinstance(value, float):
        return repr(float(value))  # of a NumPy scalar too
    raise TypeError(
        f"`{name}` must be a str, an int or a float, got a {type(value).__name__}"
    )


def _gathered(record: bytes) -> list[dict[str, str]]:
    """The facts of each process, exchanged at the longest one's length."""
    length = np.asarray(len(record), np.int32)
    lengths = multihost_utils.process_allgather(length)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(record)] = np.frombuffer(record, np.uint8)
    records = multihost_utils.process_allgather(padded)
    return [
        json.loads(row[:end].tobytes())
        for row, end in zip(records, lengths, strict=True)
    ]


def _different(each: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    names = sorted({name for facts in each for name in facts})
    values = {name: [facts.get(name) for facts in each] for name in names}
    return {name: held for name, held in values.items() if len(set(held)) > 1}
