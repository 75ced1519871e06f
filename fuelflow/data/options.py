"""The arguments of a loader that must fit each other, checked together."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Literal

from fuelflow.data.samplers import Sampler, SequentialSampler, ShuffledSampler
from fuelflow.data.sources import Table
from fuelflow.data.streams import Stream
from fuelflow.step.checks import checked_count

MAX_RESIDENT_ROWS = 2**31 - 1  # their numbers are int32 on the device

Resident = bool | Literal["auto"]
Prefetch = int | Literal["auto"]


def checked_seed(seed: Any) -> int:
    """The seed as an int, refused by name if it is none or negative."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(
            f"`seed` must be an integer, got {seed!r} of type {type(seed).__name__}"
        )
    if seed < 0:
        raise ValueError(f"`seed` must be at least 0, got {seed}")
    return int(seed)


def checked_batch_size(batch_size: Any, num_ranks: int) -> int:
    """The size as an int, refused if it is below 1 or the ranks do not divide it."""
    size = checked_count("batch_size", batch_size, least=1)
    if size % num_ranks:
        below, above = size - size % num_ranks, size + num_ranks - size % num_ranks
        fitting = f"{below} or {above}" if below else str(above)
        raise ValueError(
            f"`batch_size` must divide by the {num_ranks} ranks of the mesh, got "
            f"{size}: take {fitting}, or a mesh of fewer devices, ff.mesh(devices)"
        )
    return size


def require_full_tail(
    num_samples: int | None, batch_size: int, num_ranks: int, *, drop_last: bool | None
) -> None:
    """Refuses a last batch of its own size that the ranks do not divide.

    Raises:
        ValueError: With what can be done.
    """
    if drop_last is not False or num_ranks == 1:
        return
    tail = None if num_samples is None else num_samples % batch_size
    if tail is None or tail % num_ranks:
        rows = "rows of no known number" if tail is None else f"{tail} rows"
        raise ValueError(
            f"`drop_last` must not be False where the {num_ranks} ranks of the mesh do "
            f"not divide the last batch, of {rows}: leave it out to have that batch "
            "filled up, or drop it with True"
        )


def checked_flag(name: str, value: Any) -> bool | None:
    """The value, refused by name if it is not True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True, False or None, got {value!r}")
    return value


def checked_resident(resident: Any) -> Resident:
    """The value, refused if it is not True, False or ``"auto"``."""
    if not isinstance(resident, bool) and resident != "auto":
        raise ValueError(f'`resident` must be True, False or "auto", got {resident!r}')
    return resident


def checked_prefetch(prefetch: Any) -> Prefetch:
    """The value, refused if it is neither a number of batches nor ``"auto"``."""
    if isinstance(prefetch, str):
        if prefetch != "auto":
            raise ValueError(
                f'`prefetch` must be a number of batches or "auto", got {prefetch!r}'
            )
        return "auto"
    return checked_count("prefetch", prefetch, least=0)


def choose_sampler(
    source: Table | Stream, *, shuffle: bool | None, sampler: Any
) -> Sampler | None:
    """What orders the rows: the sampler given, or the one that ``shuffle`` means.

    Returns:
        None for a stream, which has its own order.

    Raises:
        TypeError: If ``sampler`` is no sampler.
        ValueError: If both are given, or a stream is to be shuffled or sampled.
    """
    if isinstance(source, Stream):
        if sampler is not None:
            raise ValueError(
                "`sampler` must not be given for a stream, whose rows come in its own "
                "order"
            )
        if shuffle is not False:
            raise ValueError(
                f"`shuffle` must be False for a stream, got {shuffle}: its rows come "
                "in its own order, so shuffle where they are made"
            )
        return None
    if sampler is None:
        return SequentialSampler() if shuffle is False else ShuffledSampler()
    if shuffle is not None:
        raise ValueError(
            f"`shuffle` must be left out where a `sampler` is given, got {shuffle}"
        )
    if isinstance(sampler, type) or not isinstance(sampler, Sampler):
        raise TypeError(
            "`sampler` must have the methods `num_samples` and `indices`, got "
            f"{sampler!r}"
        )
    return sampler


def checked_num_samples(
    sampler: Sampler | None,
    num_rows: int | None,
    batch_size: int,
    *,
    drop_last: bool | None,
) -> int | None:
    """Samples of an epoch, refused if there are none or ``drop_last`` drops them all.

    None for a stream without a length.
    """
    if num_rows is None:
        return None
    if sampler is None:
        name, asked = "len(source)", num_rows
    else:
        name = f"{type(sampler).__name__}.num_samples"
        asked = sampler.num_samples(num_rows)
    num_samples = _checked_samples(name, asked)
    if drop_last and num_samples < batch_size:
        raise ValueError(
            f"`batch_size` must be at most the {num_samples} rows of an epoch with "
            f"drop_last=True, got {batch_size}: all rows would be dropped"
        )
    return num_samples


def _checked_samples(name: str, value: Any) -> int:
    """The value as an int of any size: rows in a file can be more than int32 counts."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}")
    return int(value)


def require_resident(source: Table | Stream, transform: Any) -> None:
    """Refuses ``resident=True`` where rows cannot be kept on the device.

    Raises:
        ValueError: If the source is a stream, or the host transforms batches.
    """
    if isinstance(source, Stream):
        raise ValueError(
            "`resident` must not be True for a stream, whose rows are not all known"
        )
    if transform is not None:
        raise ValueError(
            "`resident` must not be True with a `transform`, which runs on the host: "
            "use `device_transform`, which is compiled"
        )
    if source.num_rows > MAX_RESIDENT_ROWS:
        raise ValueError(
            f"`resident` must not be True for {source.num_rows} rows: on the device "
            f"their numbers are int32, at most {MAX_RESIDENT_ROWS}"
        )


def require_room(num_bytes: int, free: int) -> None:
    """Refuses rows that do not fit in the device's free memory.

    Raises:
        ValueError: With both figures.
    """
    if num_bytes > free:
        raise ValueError(
            f"`resident` must not be True for {num_bytes / 2**20:.1f} MiB of rows with "
            f"{free / 2**20:.1f} MiB of device memory free: leave it out to stream "
            "them"
        )


def fields_as_text(fields: Mapping[str, Any]) -> dict[str, str]:
    """Dtype and shape of each field, as messages and positions have them."""
    return {name: str(spec) for name, spec in fields.items()}
