"""What compiled programs expect of their arguments, by name, and what differs."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey, KeyPath, tree_flatten_with_path

from fuelflow._errors import StateMismatchError
from fuelflow._types import Batch, PyTree
from fuelflow.devices.placement import Placement
from fuelflow.model.definition import Definition, is_array
from fuelflow.model.names import path_name

Table = dict[str, str]
"""Shape and dtype of each leaf by name, such as ``f32[64,28,28]``."""


@dataclass(frozen=True, eq=False)
class StateSpec:
    """The arrays of a state, by name: what a loop's programs are compiled for.

    Attributes:
        definition: The model.
        treedef: The structure of the state's arrays.
        table: Shape and dtype of each array, in the structure's order.
    """

    definition: Definition
    treedef: Any
    table: Table

    def matches(self, other: "StateSpec") -> bool:
        """Whether a program compiled for one takes states of the other."""
        return (
            self.treedef == other.treedef
            and self.table == other.table
            and same_definition(self.definition, other.definition)
        )

    def arrange(self, arrays: PyTree) -> PyTree:
        """Arrays that have the expected names, in the expected structure.

        A structure that went through a file may have dicts and lists for what were
        named tuples; the names are what counts.

        Raises:
            StateMismatchError: If names, shapes or dtypes differ.
        """
        leaves = {
            path_name(path): leaf for path, leaf in tree_flatten_with_path(arrays)[0]
        }
        table = {name: leaf_text(leaf) for name, leaf in leaves.items()}
        missing = [name for name in self.table if name not in table]
        unexpected = [name for name in table if name not in self.table]
        different = [
            (name, table[name], text)
            for name, text in self.table.items()
            if name in table and table[name] != text
        ]
        if missing or unexpected or different:
            raise StateMismatchError(missing, unexpected, different)
        return jax.tree.unflatten(self.treedef, [leaves[name] for name in self.table])


def same_definition(one: Definition, other: Definition) -> bool:
    """Whether two models have one structure; not so if that cannot be told."""
    try:
        return one is other or bool(one == other)
    except ValueError:  # settings that are arrays have no single truth value
        return False


def make_spec(definition: Definition, arrays: PyTree) -> StateSpec:
    """The spec of a state's arrays, or of their shapes and dtypes."""
    paths, treedef = tree_flatten_with_path(arrays)
    table = {path_name(path): leaf_text(leaf) for path, leaf in paths}
    return StateSpec(definition, treedef, table)


def leaf_text(leaf: Any) -> str:
    """A leaf's dtype and shape in JAX's short form.

    Example:
        >>> leaf_text(np.zeros((64, 28), np.float32))
        'f32[64,28]'
    """
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    shape = ",".join(str(size) for size in leaf.shape)
    return f"{_short_dtype(leaf.dtype)}[{shape}]"


def _short_dtype(dtype: Any) -> str:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return str(dtype)
    name = jax.dtypes.canonicalize_dtype(dtype).name
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def batch_table(batch: Batch) -> Table:
    """Shape and dtype of a batch's leaves under the names a user knows them by.

    Example:
        >>> batch_table({"image": np.zeros((64, 28), np.float32)})
        {'batch["image"]': 'f32[64,28]'}
    """
    paths, _ = tree_flatten_with_path(batch)
    return {"batch" + _index_text(path): leaf_text(leaf) for path, leaf in paths}


def _index_text(path: KeyPath) -> str:
    if path[:1] == _FIELDS:  # of `Rows`, which a user knows as a Batch
        path = path[1:]
    return "".join(
        f"[{json.dumps(key.key)}]"
        if isinstance(key, DictKey) and isinstance(key.key, str)
        else str(key)
        for key in path
    )


_FIELDS = (GetAttrKey("fields"),)


def changes_between(old: Table, new: Table) -> list[str]:
    """One text per leaf that differs, old → new.

    Example:
        >>> changes_between({"x": "f32[64]", "y": "i32[64]"}, {"x": "f32[17]"})
        ['x: f32[64] → f32[17]', 'y: i32[64] → absent']
    """
    names = [*old, *(name for name in new if name not in old)]
    return [
        f"{name}: {old.get(name, 'absent')} → {new.get(name, 'absent')}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def nearest_changes(known: Iterable[Table], new: Table) -> list[str]:
    """The shortest list of changes from any known table to a new one."""
    return min((changes_between(old, new) for old in reversed(list(known))), key=len)


def num_rows(batch: Batch) -> int:
    """The rows of a batch that has been checked."""
    return jax.tree.leaves(batch)[0].shape[0]


def check_batch(
    batch: Batch,
    placement: Placement,
    *,
    num_ranks: int = 1,
    num_microbatches: int = 1,
) -> None:
    """Refuses a batch that no program should be made for, or run with.

    Raises:
        TypeError: If a leaf is no numeric array.
        ValueError: If it has no leaves or rows, its leaves disagree on the leading
            axis or are on another device, or the ranks or microbatches do not divide
            it.
    """
    paths, _ = tree_flatten_with_path(batch)
    if not paths:
        raise ValueError(f"`batch` must hold at least one array, got {batch!r}")
    sizes: dict[str, int] = {}
    for path, leaf in paths:
        name = "batch" + _index_text(path)
        require_array(name, leaf)
        placement.require_reachable(name, leaf)
        if not leaf.shape:
            raise ValueError(f"`{name}` must have a leading batch axis, got a scalar")
        sizes[name] = leaf.shape[0]
    rows = next(iter(sizes.values()))
    if any(size != rows for size in sizes.values()):
        listed = ", ".join(f"`{name}` has {size}" for name, size in sizes.items())
        raise ValueError(f"a batch's leaves must agree on their leading axis: {listed}")
    if rows == 0:
        raise ValueError(
            f"`batch` must have at least one row, got {leaf_text(paths[0][1])}"
        )
    require_rows_for_all(rows, num_ranks)
    if rows // num_ranks % num_microbatches:
        of_each = "" if num_ranks == 1 else f" of each of {num_ranks} ranks"
        raise ValueError(
            f"`accumulate_steps` must divide the batch, got {num_microbatches} "
            f"microbatches for {rows // num_ranks} rows{of_each}"
        )


def require_rows_for_all(num_rows: int, num_ranks: int) -> None:
    """Refuses a batch whose rows cannot be dealt out evenly.

    Raises:
        ValueError: With what can be done.
    """
    if num_rows % num_ranks:
        raise ValueError(
            f"the {num_ranks} ranks of the mesh must divide the rows of a batch, got "
            f"{num_rows}: take a batch size that is a multiple of {num_ranks}; and for "
            "the end of an epoch have the loss and every metric return one value for "
            "each row, or ff.Weighted, so that a DataLoader can fill the batch up (not "
            "for a model with statistics of a batch, as of BatchNorm), or drop those "
            "rows with DataLoader(drop_last=True)"
        )


def require_array(name: str, leaf: Any) -> None:
    """Refuses a leaf that no compiled program can take, by name.

    Raises:
        TypeError: If it is no array of numbers.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"`{name}` must have no mask: pass it as a field of its own")
    if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
        raise TypeError(
            f"`{name}` must be in this machine's byte order, got {leaf.dtype.str}: "
            'convert it with .astype(x.dtype.newbyteorder("="))'
        )
    if is_array(leaf):
        return
    if isinstance(leaf, np.ndarray):
        raise TypeError(
            f"`{name}` must be numeric, got dtype {leaf.dtype}: encode it as numbers, "
            "or leave it out of the batch"
        )
    raise TypeError(
        f"`{name}` must be a NumPy or JAX array, got a {type(leaf).__module__}."
        f"{type(leaf).__name__}: convert it with numpy.asarray"
    )
