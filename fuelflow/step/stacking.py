"""Batches gathered into stacks that one dispatch can run through."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuelflow._types import Batch


def iterator_of(batches: Iterable[Batch]) -> Iterator[Batch]:
    """An iterator over batches.

    Raises:
        TypeError: If it is no iterable of batches but, it seems, one batch.
    """
    if isinstance(batches, Mapping) or hasattr(batches, "dtype"):
        raise TypeError(
            "`batches` must be an iterable of batches, got a "
            f"{type(batches).__name__}, which looks like one batch: put it in a list"
        )
    return iter(batches)


def at_least_one(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches, of which there must be at least one.

    Raises:
        ValueError: If there is none.
    """
    count = 0
    for count, batch in enumerate(batches, start=1):  # noqa: B007
        yield batch
    if not count:
        raise ValueError(
            "there must be at least one batch, got none: the data is empty, or an "
            "iterator that has been gone through, which can be done only once"
        )


def groups_of_equal_shape(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Consecutive batches of one shape, ``size`` at a time, or singly where fewer.

    Example:
        >>> batches = [np.zeros(3)] * 5 + [np.zeros(2)]
        >>> [len(group) for group in groups_of_equal_shape(batches, 2)]
        [2, 2, 1, 1]
    """
    group: list[Batch] = []
    shape = None
    for batch in batches:
        leaves, treedef = jax.tree.flatten(batch)
        current = (treedef, *[_shape_of(leaf) for leaf in leaves])
        if current != shape:
            yield from ([single] for single in group)
            group = []
        group.append(batch)
        shape = current
        if len(group) == size:
            yield group
            group = []
    yield from ([single] for single in group)


def _shape_of(leaf: Any) -> tuple[Any, Any]:
    # A leaf that is no array is refused where its batch is dispatched.
    return getattr(leaf, "shape", None), getattr(leaf, "dtype", None)


def stack(batches: list[Batch]) -> Batch:
    """Batches stacked along a new leading axis."""

    def stack_leaves(*leaves: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        if isinstance(leaves[0], jax.Array):
            return jnp.stack(leaves)
        return np.stack(leaves)

    return jax.tree.map(stack_leaves, *batches)
