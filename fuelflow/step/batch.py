"""Batches of named fields, and stretches of them that one dispatch can run through."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from fuelflow._errors import MissingFieldError
from fuelflow._types import Array
from fuelflow.devices.ranks import ROWS, WHOLE, Ranks, Spec

Field = np.ndarray | jax.Array
DeviceTransform = Callable[..., Any]
"""Fields, or fields and a key, to fields; traced."""


class Rows(NamedTuple):
    """A batch as compiled programs take it: what JAX flattens at no cost.

    ``weight`` counts each row, float32 ``[rows]``; None counts each once.
    """

    fields: dict[str, Any]
    weight: Any


@jax.tree_util.register_pytree_with_keys_class
class Batch(Mapping[str, Any]):
    """Rows of named fields: a read-only mapping from name to array ``[size, ...]``.

    A loader may hold its last, partial batch filled up to full size. Nobody sees those
    rows but a compiled step, where they count with weight 0; the mapping shows the true
    rows alone. Inside a loss the fields and `weight` have all rows that are held.

    Args:
        fields: Arrays that share their leading axis.
        weight: How much each row counts, ``[rows]``, not negative; None for 1 each.
        size: True rows, if the fields are filled up with more.

    Raises:
        MissingFieldError: On asking for a field that is not there.
        TypeError: If ``fields`` is no mapping with names for keys.
        ValueError: If there is no field, or ``size`` exceeds the rows held.

    Example:
        >>> batch = Batch({"x": np.arange(4), "y": np.zeros(4)}, size=3)
        >>> batch.size, batch["x"].tolist(), list(batch)
        (3, [0, 1, 2], ['x', 'y'])
    """

    __slots__ = ("_fields", "_size", "_weight")

    def __init__(
        self,
        fields: Mapping[str, Any],
        *,
        weight: Any = None,
        size: int | None = None,
    ) -> None:
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"`fields` must map names to arrays, got a {type(fields).__name__}"
            )
        if not fields:
            raise ValueError("a batch must have at least one field, got none")
        for name in fields:
            if not isinstance(name, str):
                raise TypeError(f"a field's name must be a string, got {name!r}")
        self._fields = dict(fields)
        self._weight = weight
        self._size = size
        if size is not None and not 1 <= size <= self.num_held:
            raise ValueError(
                f"`size` must be from 1 to the {self.num_held} rows held, got {size}"
            )

    @classmethod
    def held(
        cls, fields: dict[str, Any], weight: Any = None, size: int | None = None
    ) -> "Batch":
        """A batch around fields known to be good, unchecked."""
        batch = object.__new__(cls)
        batch._fields, batch._weight, batch._size = fields, weight, size
        return batch

    @property
    def num_held(self) -> int:
        """Rows held, those that fill it up included."""
        return np.shape(next(iter(self._fields.values())))[0]

    @property
    def size(self) -> int:
        """Rows that the mapping shows."""
        return self.num_held if self._size is None else self._size

    @property
    def weight(self) -> Any:
        """How much each row counts, float32 ``[size]``."""
        if self._weight is None:
            return np.ones(self.size, np.float32)
        return self._shown(self._weight)

    @property
    def is_filled_up(self) -> bool:
        """Whether more rows are held than shown."""
        return self._size is not None and self._size < self.num_held

    def rows(self) -> Rows:
        """All that is held, for a program that minds the weight."""
        return Rows(self._fields, self._weight)

    def true_rows(self) -> Rows:
        """What is shown alone, for a program that cannot mind the weight."""
        weight = None if self._weight is None else self.weight
        return Rows(dict(self), weight)

    def _shown(self, values: Any) -> Any:
        return values[: self._size] if self.is_filled_up else values

    def __getitem__(self, name: str) -> Any:
        try:
            values = self._fields[name]
        except KeyError:
            raise MissingFieldError(name, list(self._fields)) from None
        return values if self._size is None else self._shown(values)

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        return self is other  # arrays have no single truth value

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        from fuelflow.step.spec import leaf_text

        fields = ", ".join(f"{name}: {leaf_text(self[name])}" for name in self._fields)
        return f"Batch({fields})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """The true rows of each field, then the weight, for `jax.tree`."""
        key = jax.tree_util.DictKey
        weight = None if self._weight is None else self.weight
        children = [(key(name), self[name]) for name in self._fields]
        return [*children, (jax.tree_util.GetAttrKey("weight"), weight)], tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], children: Any) -> "Batch":
        """A batch around new values."""
        *values, weight = children
        return cls.held(dict(zip(names, values, strict=True)), weight)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive batches of rows that are on the device: a program gathers them.

    Attributes:
        data: All rows of each field, ``[num_rows, ...]``, on the device.
        rows: The rows of each batch, int32 ``[num_steps, batch]``.
        weight: How much each counts, float32 ``[num_steps, batch]``; None for 1 each.
        key: Base of the transform's keys; each batch folds its number in.
        numbers: The number of each batch in its epoch, int32 ``[num_steps]``.
        transform: Applied to each batch's fields; None for nothing.
    """

    data: dict[str, Array]
    rows: Any
    weight: Any
    key: jax.Array
    numbers: Any
    transform: "Transform | None" = field(metadata={"static": True})

    @property
    def num_steps(self) -> int:
        """Batches in it."""
        return self.rows.shape[0]

    def steps(self) -> Any:
        """What differs from batch to batch, stacked along the first axis."""
        return self.rows, self.weight, self.numbers

    def pick(self, step: Any) -> "Pick":
        """One batch of them, inside a trace."""
        rows, weight, number = step
        return Pick(self.data, rows, weight, number, self.key, self.transform)

    def pick_first(self) -> "Pick":
        """The first batch of them."""
        return self.pick(jax.tree.map(lambda x: x[0], self.steps()))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Pick:
    """A batch of a `Stretch`, whose rows are still to be gathered.

    Attributes:
        data: All rows of each field, ``[num_rows, ...]``, on the device.
        rows: The rows of the batch, int32 ``[batch]``.
        weight: How much each counts, float32 ``[batch]``; None for 1 each.
        number: Its number in its epoch, int32 ``[]``.
        key: Base of the transform's keys.
        transform: Applied to the fields; None for nothing.
    """

    data: Any
    rows: Any
    weight: Any
    number: Any
    key: Any
    transform: "Transform | None" = field(metadata={"static": True})

    def gathered(self, ranks: Ranks) -> Rows:
        """The rows of this rank."""
        key = ranks.own_key(self.key)
        fields = gather(self.data, self.rows, key, self.number, self.transform)
        return Rows(fields, self.weight)

    def spec(self) -> "Pick":
        """What of it each rank has whole, and what by rows."""
        return Pick(WHOLE, ROWS, ROWS, WHOLE, WHOLE, self.transform)


@dataclass(frozen=True)
class Transform:
    """A transform that is compiled: fields to fields, on the device.

    Attributes:
        function: ``(fields)`` or ``(fields, key)`` to fields.
        takes_key: Whether it is given a key.
    """

    function: DeviceTransform
    takes_key: bool

    def __call__(self, fields: dict[str, Any], key: jax.Array) -> dict[str, Any]:
        """The transformed fields."""
        made = self.function(fields, key) if self.takes_key else self.function(fields)
        if not isinstance(made, Mapping) or not made:
            raise TypeError(
                "a transform must return a mapping of fields, "
                f"got a {type(made).__name__}"
            )
        return dict(made)


def gather(
    data: dict[str, Array],
    rows: Array,
    key: jax.Array,
    number: Array,
    transform: Transform | None,
) -> dict[str, Any]:
    """Rows of each field, transformed: traced alone or as part of a step.

    Args:
        data: All rows of each field, ``[num_rows, ...]``.
        rows: The rows to take, int32 ``[batch]``, each from 0 to ``num_rows - 1``.
        key: Base of the transform's keys.
        number: Folded into ``key``, int32 ``[]``.
        transform: Applied to the fields taken.
    """
    # Rows are in range, so nothing need be clipped or filled.
    fields = {
        name: values.at[rows].get(mode="promise_in_bounds")
        for name, values in data.items()
    }
    if transform is None:
        return fields
    return transform(fields, jax.random.fold_in(key, number))


@runtime_checkable
class Stretchable(Protocol):
    """An iterator of batches that can hand over several as one `Stretch`."""

    def stretch(self, num_steps: int) -> Stretch | None:
        """The next ``num_steps`` full batches; None if so many are not on the device.

        If None, nothing was taken.
        """
        ...

    def __iter__(self) -> Iterator[Batch]:
        """The batches, one by one."""
        ...


def spec_of(batch: Any) -> Spec:
    """What of a program's batch each rank has whole, and what by rows."""
    return batch.spec() if isinstance(batch, Pick) else ROWS


def rows_here(batch: Any, ranks: Ranks) -> Any:
    """A program's batch as one rank goes through it."""
    return batch.gathered(ranks) if isinstance(batch, Pick) else batch


def as_seen_by_loss(batch: Any) -> tuple[Any, Any]:
    """What a loss is given for a program's batch, and the weight of its rows."""
    if isinstance(batch, Rows):
        return Batch.held(batch.fields, batch.weight), batch.weight
    return batch, None


def weight_of_rows(size: int, held: int) -> np.ndarray:
    """1 for each true row, 0 for each that fills the batch up, float32 ``[held]``."""
    return (np.arange(held) < size).astype(np.float32)


def filled_up(fields: Any, held: int) -> Any:
    """A tree of fields, each with its last row repeated up to ``held`` rows."""

    def fill(values: Field) -> Field:
        rows = np.minimum(np.arange(held), values.shape[0] - 1)
        if isinstance(values, jax.Array):
            return jnp.take(values, rows, axis=0)
        return values[rows]

    return jax.tree.map(fill, fields)
