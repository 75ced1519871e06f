"""Named numbers packed into one vector of words, for one small transfer to the host."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from fuelflow._types import Array

_BAD = "bad"


@dataclass(frozen=True)
class Layout:
    """How named numbers lie in a vector of 32-bit words.

    Attributes:
        fields: Name and NumPy dtype of each number, in order.
        flagged: The names that have a bit each in the words behind the numbers.
        is_maskable: Whether all the numbers can leave out single rows.
    """

    fields: tuple[tuple[str, str], ...]
    flagged: tuple[str, ...] = ()
    is_maskable: bool = False

    @cached_property
    def dtype(self) -> np.dtype:
        """The NumPy dtype of one record."""
        return np.dtype([*self.fields, (_BAD, "<u4", (num_flag_words(self.flagged),))])

    def unpack(self, words: np.ndarray) -> np.ndarray:
        """Records ``[...]`` from words ``[..., num_words]``."""
        return np.ascontiguousarray(words).view(self.dtype)[..., 0]

    def flagged_names(self, record: np.ndarray) -> list[str]:
        """The names whose bit is set in one record ``[]``."""
        bytes_ = np.ascontiguousarray(record[_BAD]).view(np.uint8)
        bits = np.unpackbits(bytes_, bitorder="little")
        return [name for name, bit in zip(self.flagged, bits, strict=False) if bit]


@dataclass(frozen=True)
class Packed:
    """Packed numbers, uint32 ``[num_words]``, with their layout."""

    words: Array
    layout: Layout


jax.tree_util.register_dataclass(Packed, data_fields=["words"], meta_fields=["layout"])


def num_flag_words(names: tuple[str, ...]) -> int:
    """The number of words that hold one bit for each name."""
    return -(-len(names) // 32)


def pack(
    numbers: Mapping[str, Array],
    *,
    flags: Array | None = None,
    flagged: tuple[str, ...] = (),
    is_maskable: bool = False,
) -> Packed:
    """Numbers packed without loss.

    Args:
        numbers: Scalars by name: floats of 32 or 64 bits, integers or bools.
        flags: Words of `flag_words`, uint32 ``[num_flag_words(flagged)]``.
        flagged: The names the flags stand for.
        is_maskable: Kept in the layout.

    Example:
        >>> packed = pack({"loss": jnp.float32(0.5), "step": jnp.int32(7)})
        >>> packed.layout.unpack(np.asarray(packed.words))["step"].item()
        7
    """
    parts = {name: _as_words(number) for name, number in numbers.items()}
    fields = tuple((name, kind) for name, (_, kind) in parts.items())
    words = [word for word, _ in parts.values()]
    if flags is not None:
        words.append(flags)
    return Packed(jnp.concatenate(words), Layout(fields, flagged, is_maskable))


def _as_words(number: Array) -> tuple[Array, str]:
    if jnp.issubdtype(number.dtype, jnp.floating):
        wide = number.astype(jnp.promote_types(number.dtype, jnp.float32))
    else:
        wide = number.astype(jnp.int32)
    words = jax.lax.bitcast_convert_type(wide, jnp.uint32)
    return jnp.ravel(words), wide.dtype.newbyteorder("<").str


def flag_words(flags: list[Array]) -> Array:
    """Bools ``[]`` as bits, lowest first, in words uint32 ``[ceil(n / 32)]``."""
    padding = [jnp.bool_(False)] * (-len(flags) % 32)
    bits = jnp.stack([*flags, *padding]).reshape(-1, 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=1, dtype=jnp.uint32)
