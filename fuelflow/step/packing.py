"""Named numbers packed into one vector of words, for one small transfer to the host."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuelflow._types import Array


@dataclass(frozen=True)
class Layout:
    """How named numbers lie in a vector of 32-bit words.

    Attributes:
        fields: Name, NumPy dtype and shape of each, scalars first.
        params: The parameters that a field with one number each speaks of.
        observed: The metrics that the vector ``observed`` has, in order.
        histograms: The histograms that wait aside, in order.
        is_maskable: Whether all the numbers can leave out single rows.
    """

    fields: tuple[tuple[str, str, tuple[int, ...]], ...]
    params: tuple[str, ...] = ()
    is_maskable: bool = False
    observed: tuple[str, ...] = ()
    histograms: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The fields' names, in order."""
        return tuple(name for name, _, _ in self.fields)

    @cached_property
    def dtype(self) -> np.dtype:
        """The NumPy dtype of one record."""
        return np.dtype(list(self.fields))

    @cached_property
    def struct(self) -> struct.Struct:
        """One record as Python's `struct` reads it."""
        kinds = [f"{math.prod(shape)}{_CODES[kind]}" for _, kind, shape in self.fields]
        return struct.Struct("<" + "".join(kinds))

    @cached_property
    def spans(self) -> tuple[tuple[str, int, int], ...]:
        """Name, start and end of each field that is a vector, counted in numbers."""
        ends = accumulate(math.prod(shape) for _, _, shape in self.fields)
        return tuple(
            (name, end - shape[0], end)
            for (name, _, shape), end in zip(self.fields, ends, strict=True)
            if shape
        )

    def unpack_one(self, words: Any) -> dict[str, Any]:
        """Python numbers by name, or tuples of them, from words ``[num_words]``.

        Faster than NumPy's records where it counts, right after a wait.
        """
        numbers = self.struct.unpack(words)
        # Vectors come last, so the scalars' names meet their numbers.
        values: dict[str, Any] = dict(zip(self.names, numbers, strict=False))
        for name, start, end in self.spans:
            values[name] = numbers[start:end]
        return values

    def unpack_many(self, words: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays ``[num_steps, ...]`` by name from words ``[num_steps, num_words]``."""
        records = np.ascontiguousarray(words).view(self.dtype)[:, 0]
        return {name: records[name] for name in self.names}


_CODES = {"<f4": "f", "<f8": "d", "<i4": "i"}


class Packed:
    """Packed numbers, uint32 ``[num_words]``, with their layout.

    Besides there may be words ``aside``, that are read apart. A plain class, since JAX
    makes one for each step.
    """

    __slots__ = ("aside", "layout", "words")

    def __init__(
        self, words: Array, layout: Layout, aside: Array | None = None
    ) -> None:
        self.words = words
        self.layout = layout
        self.aside = aside


jax.tree_util.register_pytree_node(
    Packed,
    lambda packed: ((packed.words, packed.aside), packed.layout),
    lambda layout, children: Packed(children[0], layout, children[1]),
)


def pack(
    numbers: Mapping[str, Array],
    *,
    params: tuple[str, ...] = (),
    is_maskable: bool = False,
    observed: tuple[str, ...] = (),
    histograms: tuple[str, ...] = (),
    aside: Array | None = None,
) -> Packed:
    """Numbers packed without loss.

    Args:
        numbers: Scalars by name, then vectors: floats of 32 or 64 bits, integers or
            bools.
        params: Kept in the layout.
        is_maskable: Kept in the layout.
        observed: Kept in the layout.
        histograms: Kept in the layout.
        aside: What is to be read apart.

    Example:
        >>> packed = pack({"loss": jnp.float32(0.5), "step": jnp.int32(7)})
        >>> packed.layout.unpack_one(np.asarray(packed.words))
        {'loss': 0.5, 'step': 7}
    """
    wide = {name: _widened(number) for name, number in numbers.items()}
    words = [
        jnp.ravel(jax.lax.bitcast_convert_type(number, jnp.uint32))
        for number in wide.values()
    ]
    fields = tuple(
        (name, number.dtype.newbyteorder("<").str, number.shape)
        for name, number in wide.items()
    )
    layout = Layout(fields, params, is_maskable, observed, histograms)
    return Packed(jnp.concatenate(words), layout, aside)


def _widened(number: Array) -> Array:
    if jnp.issubdtype(number.dtype, jnp.floating):
        return number.astype(jnp.promote_types(number.dtype, jnp.float32))
    return number.astype(jnp.int32)
