"""Ranks: what a compiled program asks about the devices it is spread over."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fuelflow._types import PyTree

AXIS = "data"
"""The axis of a mesh that the rows of a batch lie along."""

WHOLE = PartitionSpec()
"""Every rank has all of it."""

ROWS = PartitionSpec(AXIS)
"""Each rank has its own rows."""

Spec = PyTree
"""`WHOLE` or `ROWS`, or a tree of them that an argument's tree begins with."""


class Ranks(Protocol):
    """The ranks of a program, as it sees them inside its trace."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def spread(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Spec],
        outputs: Spec,
    ) -> Callable[..., Any]:
        """The function, run by each rank on its own part of the arguments."""
        ...

    def total(self, tree: PyTree) -> PyTree:
        """Sums over all ranks, inside of `spread`."""
        ...

    def mean(self, tree: PyTree) -> PyTree:
        """Means over all ranks, inside of `spread`."""
        ...

    def first(self, tree: PyTree) -> PyTree:
        """What the first rank has, inside of `spread`."""
        ...

    def own_key(self, key: jax.Array) -> jax.Array:
        """Keys ``[...]`` of this rank alone, inside of `spread`."""
        ...

    def keep_whole(self, tree: PyTree) -> PyTree:
        """The tree, which every rank is to have whole, outside of `spread`."""
        ...

    def keep_rows(self, tree: PyTree) -> PyTree:
        """The tree, of which each rank is to have its rows, outside of `spread`."""
        ...


class OneRank:
    """A program that one device runs: all there is, is its own."""

    count = 1

    def spread(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Spec],
        outputs: Spec,
    ) -> Callable[..., Any]:
        """The function itself."""
        del inputs, outputs
        return function

    def total(self, tree: PyTree) -> PyTree:
        """The tree itself."""
        return tree

    def mean(self, tree: PyTree) -> PyTree:
        """The tree itself."""
        return tree

    def first(self, tree: PyTree) -> PyTree:
        """The tree itself."""
        return tree

    def own_key(self, key: jax.Array) -> jax.Array:
        """The key itself."""
        return key

    def keep_whole(self, tree: PyTree) -> PyTree:
        """The tree itself."""
        return tree

    def keep_rows(self, tree: PyTree) -> PyTree:
        """The tree itself."""
        return tree


class MeshRanks:
    """A rank for each place along the ``data`` axis of a mesh.

    Args:
        mesh: A mesh with Auto axes, one of them named ``data``.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.count: int = mesh.shape[AXIS]

    def spread(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Spec],
        outputs: Spec,
    ) -> Callable[..., Any]:
        """The function under `jax.shard_map`."""
        # With check_vma, a model whose scan starts from constants is refused.
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(inputs),
            out_specs=outputs,
            check_vma=False,
        )

    def total(self, tree: PyTree) -> PyTree:
        """Sums over all ranks: one collective for the tree."""
        return jax.lax.psum(tree, AXIS)

    def mean(self, tree: PyTree) -> PyTree:
        """Means over all ranks: one collective for the tree."""
        return jax.lax.pmean(tree, AXIS)

    def first(self, tree: PyTree) -> PyTree:
        """What the first rank has."""
        is_first = jax.lax.axis_index(AXIS) == 0

        def pick(leaf: jax.Array) -> jax.Array:
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                bits = pick(jax.random.key_data(leaf))
                return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
            number = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
            picked = jax.lax.psum(jnp.where(is_first, number, 0), AXIS)
            return picked.astype(leaf.dtype)

        return jax.tree.map(pick, tree)

    def own_key(self, key: jax.Array) -> jax.Array:
        """The keys with the rank's number folded in; a single rank keeps its own."""
        if self.count == 1:
            return key
        rank = jax.lax.axis_index(AXIS)
        if not key.ndim:
            return jax.random.fold_in(key, rank)
        folded = jax.vmap(jax.random.fold_in, (0, None))(key.ravel(), rank)
        return folded.reshape(key.shape)

    def keep_whole(self, tree: PyTree) -> PyTree:
        """The tree, with a copy on every rank."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, WHOLE))

    def keep_rows(self, tree: PyTree) -> PyTree:
        """The tree, by the rows of its arrays."""
        return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, ROWS))


def mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with one axis, ``data``: each device is a rank, with rows of its own.

    Args:
        devices: The devices, in the order of their ranks. By default all devices of all
            processes, in an order that suits how they are connected.

    Raises:
        TypeError: If it is no sequence.
        ValueError: If there is no device, or one comes twice.

    Example:
        >>> dict(mesh().shape) == {"data": len(jax.devices())}
        True
    """
    if devices is None:
        return jax.make_mesh((jax.device_count(),), (AXIS,), (AxisType.Auto,))
    if not isinstance(devices, Iterable):
        raise TypeError(
            f"`devices` must be a sequence of devices, got a {type(devices).__name__}: "
            "such as jax.devices()[:4]"
        )
    devices = list(devices)
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(
            f"`devices` must be at least one device, each once, got {devices}"
        )
    return Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))


def checked_mesh(mesh: Any) -> Mesh:
    """The mesh with Auto axes, refused by name if rows cannot lie along it.

    Raises:
        TypeError: If it is no `jax.sharding.Mesh`.
        ValueError: If it has no axis ``data``.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            "`mesh` must be a jax.sharding.Mesh, such as ff.mesh() makes, got a "
            f"{type(mesh).__name__}"
        )
    if AXIS not in mesh.axis_names:
        raise ValueError(
            f"`mesh` must have an axis named `{AXIS}`, along which the rows of a batch "
            f"lie, got the axes {list(mesh.axis_names)}"
        )
    # What is inside a step is placed by fuelflow alone, so the types of a mesh's axes,
    # which say who places it, do not matter to it.
    return Mesh(
        mesh.devices,
        mesh.axis_names,
        axis_types=(AxisType.Auto,) * len(mesh.axis_names),
    )
