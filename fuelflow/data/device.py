"""The compiled programs that pick, transform and fill up batches on the device."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fuelflow._types import Array
from fuelflow.devices.ranks import ROWS, WHOLE, MeshRanks, Ranks
from fuelflow.step.batch import Transform, filled_up, gather

DeviceFields = dict[str, Any]


class Cursor(NamedTuple):
    """How far an epoch is, kept on the device so that no batch sends anything there.

    ``start`` is the next batch's first sample and ``number`` its number, int32 ``[]``.
    """

    start: Any
    number: Any


class Programs(NamedTuple):
    """What is compiled for a loader.

    Attributes:
        pick: ``(data, order, cursor, key, size=, held=)`` to the next batch's fields
            and the cursor after it.
        finish: ``(fields, key, number, held=)`` to the fields of rows that are on the
            device, transformed and filled up.
    """

    pick: Callable[..., tuple[DeviceFields, Cursor]]
    finish: Callable[..., DeviceFields]


def make_programs(transform: Transform | None) -> Programs:
    """The programs around a transform; jax keeps them as long as they are kept.

    Transforms see true rows alone.
    """

    def apply(fields: DeviceFields, key: jax.Array, number: Array) -> DeviceFields:
        if transform is None:
            return fields
        return transform(fields, jax.random.fold_in(key, number))

    take = partial(gather, transform=transform)
    return _jitted(take, apply, fills_rows=False)


def make_rank_programs(transform: Transform | None, ranks: Ranks) -> Programs:
    """The programs around a transform that each rank applies to its own rows.

    Ranks all have the same number of rows, so batches are filled up first.
    """

    def take_here(
        data: dict[str, Array], rows: Array, key: jax.Array, number: Array
    ) -> DeviceFields:
        return gather(data, rows, ranks.own_key(key), number, transform)

    def apply_here(fields: DeviceFields, key: jax.Array, number: Array) -> DeviceFields:
        assert transform is not None
        return transform(fields, jax.random.fold_in(ranks.own_key(key), number))

    take = ranks.spread(take_here, (WHOLE, ROWS, WHOLE, WHOLE), ROWS)
    apply = ranks.spread(apply_here, (ROWS, WHOLE, WHOLE), ROWS)
    return _jitted(take, apply, fills_rows=True)


def _jitted(
    take: Callable[..., DeviceFields],
    apply: Callable[..., DeviceFields],
    *,
    fills_rows: bool,
) -> Programs:
    """Programs that fill batches up before their rows are gathered, or at the end."""

    def pick(
        data: dict[str, Array],
        order: Array,
        cursor: Cursor,
        key: jax.Array,
        *,
        size: int,
        held: int,
    ) -> tuple[DeviceFields, Cursor]:
        rows = jax.lax.dynamic_slice(order, (cursor.start,), (size,))
        if fills_rows:
            rows = _filled(rows, held)
        fields = _filled(take(data, rows, key, cursor.number), held)
        return fields, _advanced(cursor, 1, size)

    def finish(
        fields: DeviceFields, key: jax.Array, number: Array, *, held: int
    ) -> DeviceFields:
        return _filled(apply(fields, key, number), held)

    return Programs(
        jax.jit(pick, static_argnames=("size", "held")),
        jax.jit(finish, static_argnames="held"),
    )


PLAIN = make_programs(None)
"""For loaders without a transform, which can share what is compiled."""


@cache
def plain_rank_programs(mesh: Mesh) -> Programs:
    """The same for loaders over one mesh."""
    return make_rank_programs(None, MeshRanks(mesh))


@partial(jax.jit, static_argnames=("num_steps", "size"))
def pick_rows(
    order: Array, cursor: Cursor, *, num_steps: int, size: int
) -> tuple[Array, Array, Cursor]:
    """The rows of the next batches ``[num_steps, size]``, their numbers, the cursor."""
    rows = jax.lax.dynamic_slice(order, (cursor.start,), (num_steps * size,))
    numbers = cursor.number + jnp.arange(num_steps, dtype=jnp.int32)
    return rows.reshape(num_steps, size), numbers, _advanced(cursor, num_steps, size)


def _advanced(cursor: Cursor, num_steps: int, size: int) -> Cursor:
    return Cursor(cursor.start + num_steps * size, cursor.number + num_steps)


def _filled(fields: Any, held: int) -> Any:
    is_full = jax.tree.leaves(fields)[0].shape[0] == held
    return fields if is_full else filled_up(fields, held)
