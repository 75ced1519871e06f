"""Placement of a training state, and of batches, on the devices that train it."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from fuelflow._types import PyTree
from fuelflow.devices.ranks import AXIS, MeshRanks, OneRank, Ranks, checked_mesh

Device = Any
"""A `jax.Device`, which to type checkers is a variable and no type."""


class Placement(Protocol):
    """Where a loop's arrays live: what its host side and its programs ask."""

    @property
    def ranks(self) -> Ranks:
        """What programs ask inside their trace."""
        ...

    @property
    def platform(self) -> str:
        """The kind of the devices, such as ``cpu``."""
        ...

    @property
    def rank_devices(self) -> list[Device]:
        """The device of each rank, in their order; its first, if it has several."""
        ...

    def put(self, value: Any) -> jax.Array:
        """An array or number placed like a state, without compiling anything."""
        ...

    def place(self, tree: PyTree, *, copy: bool = False) -> PyTree:
        """The tree's arrays placed like a state, no two of them sharing a buffer.

        Args:
            tree: A tree of NumPy and JAX arrays.
            copy: Whether arrays that are already there are copied, so that donating
                the result leaves the given ones usable.
        """
        ...

    def taken(self, tree: PyTree) -> PyTree:
        """Copies of a state's arrays on one device, as a user's model has them."""
        ...

    def fetched(self, tree: PyTree) -> PyTree:
        """A state's arrays as NumPy arrays, waited for; rows of all ranks, in order.

        Of several processes each must ask.
        """
        ...

    def settled(self, results: PyTree) -> PyTree:
        """A program's results, once another program may be sent after it."""
        ...

    def rows(self, batch: PyTree, *, axis: int = 0) -> PyTree:
        """A batch's arrays as compiled programs take them.

        Args:
            batch: Arrays whose rows lie along ``axis``.
            axis: 1 for stacked batches.
        """
        ...

    def leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Arrays of any kind as programs over all of the rows take them.

        Where one goes depends on its shape alone, as do programs.
        """
        ...

    def require_reachable(self, name: str, leaf: Any) -> None:
        """Refuses an array of a batch that is on other devices, by name."""
        ...


class SingleDevice:
    """All of a state on one device.

    Arrays are placed *committed* to the device, as the compiled step returns them, so
    that a state read back from a file is no different from one the step made.

    Args:
        device: The device to train on.
    """

    ranks = OneRank()

    def __init__(self, device: Device) -> None:
        self.device = device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SingleDevice) and self.device == other.device

    def __hash__(self) -> int:
        return hash(self.device)

    @property
    def platform(self) -> str:
        """The kind of the device."""
        return self.device.platform

    @property
    def rank_devices(self) -> list[Device]:
        """The device."""
        return [self.device]

    def put(self, value: Any) -> jax.Array:
        """An array or number on the device, without compiling anything."""
        return jax.device_put(value, self.device)

    def place(self, tree: PyTree, *, copy: bool = False) -> PyTree:
        """The tree's arrays on the device, no two of them sharing a buffer."""
        return _placed(tree, self, copy=copy)

    def taken(self, tree: PyTree) -> PyTree:
        """Copies on the device."""
        return copied(tree)

    def fetched(self, tree: PyTree) -> PyTree:
        """The arrays as NumPy arrays, waited for."""
        return jax.device_get(tree)

    def settled(self, results: PyTree) -> PyTree:
        """The results, as they are: a device queues what it is sent."""
        return results

    def rows(self, batch: PyTree, *, axis: int = 0) -> PyTree:
        """The batch as it is: what is on the host follows the state."""
        del axis
        return batch

    def leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The arrays as they are."""
        return leaves

    def require_reachable(self, name: str, leaf: Any) -> None:
        """Refuses an array that is committed to another device.

        Raises:
            ValueError: With the names of both places.
        """
        if isinstance(leaf, jax.Array) and leaf.committed:
            places = leaf.sharding.device_set
            if places != {self.device}:
                raise ValueError(
                    f"`{name}` must be where the state is, on {self.device}, but is on "
                    f"{_where(places)}: leave batches on the host, or move them with "
                    "jax.device_put"
                )


class OnMesh:
    """A state on every device of a mesh, and batches by their rows.

    Args:
        mesh: A mesh with Auto axes, one of them named ``data``.

    Attributes:
        local_devices: Those of this process.
        is_whole: Whether they are all of the mesh's.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks = MeshRanks(mesh)
        self._state = NamedSharding(mesh, PartitionSpec())
        self._rows = [
            NamedSharding(mesh, PartitionSpec(AXIS)),
            NamedSharding(mesh, PartitionSpec(None, AXIS)),
        ]
        self.local_devices = [d for d in mesh.devices.flat if _is_local(d)]
        self.is_whole = len(self.local_devices) == mesh.devices.size
        self._must_wait = self.platform == "cpu" and len(self.local_devices) > 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnMesh) and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash(self.mesh)

    @property
    def rank_devices(self) -> list[Device]:
        """The device of each rank, in their order; its first, if it has several."""
        along = self.mesh.axis_names.index(AXIS)
        return list(np.moveaxis(self.mesh.devices, along, 0).reshape(-1)[:: self._each])

    @property
    def _each(self) -> int:
        """Devices of one rank."""
        return self.mesh.devices.size // self.ranks.count

    @property
    def platform(self) -> str:
        """The kind of the devices."""
        return self.mesh.devices.flat[0].platform

    def put(self, value: Any) -> jax.Array:
        """An array or number on every device.

        Of several processes each must give the same value.
        """
        if isinstance(value, jax.Array) and value.sharding == self._state:
            return value
        if self.is_whole:
            return jax.device_put(value, self._state)
        return self._from_here(value, self._state)

    def place(self, tree: PyTree, *, copy: bool = False) -> PyTree:
        """The tree's arrays on every device, no two of them sharing a buffer."""
        return _placed(tree, self, copy=copy)

    def taken(self, tree: PyTree) -> PyTree:
        """Copies on the first device of this process."""
        return copied(jax.tree.map(_local_data, tree))

    def fetched(self, tree: PyTree) -> PyTree:
        """The arrays as NumPy arrays, waited for; rows of all ranks, in order."""
        if not self.is_whole:
            tree = jax.jit(lambda tree: tree, out_shardings=self._state)(tree)
        return jax.device_get(tree)

    def settled(self, results: PyTree) -> PyTree:
        """The results; of several CPU devices waited for.

        Devices made of one CPU wait for each other in its threads. Two programs under
        way can take all of them up, and then neither ever ends.
        """
        if self._must_wait:
            return jax.block_until_ready(results)
        return results

    def rows(self, batch: PyTree, *, axis: int = 0) -> PyTree:
        """The batch with each rank's rows on its device.

        Of several processes each must give the whole batch, unless it lies on the
        ranks already, as a `DataLoader` with the mesh puts it.
        """
        sharding = self._rows[axis]
        leaves, treedef = jax.tree.flatten(batch)
        is_elsewhere = [
            leaf.sharding != sharding
            if isinstance(leaf, jax.Array)
            else self.mesh.devices.size > 1  # one device takes what is on the host
            for leaf in leaves
        ]
        if not any(is_elsewhere):
            return batch
        if self.is_whole:
            return jax.device_put(batch, sharding)
        leaves = [
            self._from_here(leaf, sharding) if moves else leaf
            for leaf, moves in zip(leaves, is_elsewhere, strict=True)
        ]
        return jax.tree.unflatten(treedef, leaves)

    def leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The arrays by their rows, where the ranks divide them, and else whole."""
        return [self._leaf(leaf) for leaf in leaves]

    def _leaf(self, leaf: Any) -> jax.Array:
        shape = np.shape(leaf)
        is_by_rows = bool(shape) and shape[0] % self.ranks.count == 0 and shape[0] > 0
        sharding = self._rows[0] if is_by_rows else self._state
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
            return leaf
        if self.is_whole:
            return jax.device_put(leaf, sharding)
        return self._from_here(leaf, sharding)

    def _from_here(self, value: Any, sharding: Sharding) -> jax.Array:
        """An array over all processes, from a value that each of them has."""
        is_key = isinstance(value, jax.Array) and jnp.issubdtype(
            value.dtype, jax.dtypes.prng_key
        )
        if is_key:
            bits = self._from_here(jax.random.key_data(value), sharding)
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(value))
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return jax.jit(lambda value: value, out_shardings=sharding)(value)
        host = np.asarray(value)
        return jax.make_array_from_callback(
            host.shape, sharding, lambda index: host[index]
        )

    def require_reachable(self, name: str, leaf: Any) -> None:
        """Refuses an array that this process does not have, nor the mesh.

        Raises:
            ValueError: If it lies on devices of other processes and other meshes.
        """
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            places = leaf.sharding.device_set
            if places != set(self.mesh.devices.flat):
                raise ValueError(
                    f"`{name}` must be on the host or on the mesh's devices, but is on "
                    f"{_where(places)}, some of them of other processes"
                )


def _local_data(array: jax.Array) -> jax.Array:
    return array.addressable_data(0)


def placement_of_arrays(arrays: Iterable[Any]) -> Placement | None:
    """The mesh that arrays are on; None if all are on a single device or the host."""
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, NamedSharding) and AXIS in sharding.mesh.axis_names:
            return OnMesh(checked_mesh(sharding.mesh))
    return None


def _is_local(device: Device) -> bool:
    return device.process_index == jax.process_index()


def _where(places: set[Device]) -> str:
    return str(next(iter(places))) if len(places) == 1 else f"{len(places)} devices"


def _placed(tree: PyTree, placement: Placement, *, copy: bool) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    if copy:
        leaves = copied(leaves)
    seen: set[int] = set()

    def place(leaf: Any) -> jax.Array:
        if not isinstance(leaf, jax.Array):
            # device_put may keep NumPy's own memory, which must not be donated.
            leaf = jnp.array(leaf, copy=True)
        placed = placement.put(leaf)
        if _buffer(placed) in seen:
            placed = placement.put(jnp.copy(placed))
        seen.add(_buffer(placed))
        return placed

    return jax.tree.unflatten(treedef, [place(leaf) for leaf in leaves])


@jax.jit
def copied(tree: PyTree) -> PyTree:
    """Copies of all of a tree's arrays, by one small program."""
    return jax.tree.map(jnp.copy, tree)


def device_of(tree: PyTree) -> Device:
    """The one device that a tree's arrays are committed to, or JAX's default.

    Raises:
        ValueError: If an array is spread over several devices, or two are apart.
    """
    devices: dict[Device, str] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not isinstance(leaf, jax.Array):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if len(leaf.sharding.device_set) > 1:
            raise ValueError(
                f"the model must be on one device, but `{name}` is sharded over "
                f"{len(leaf.sharding.device_set)}: give the loop the mesh, as `mesh=`, "
                "or gather the model with jax.device_put(model, device)"
            )
        if leaf.committed:  # others follow, as in any computation with them
            devices.setdefault(next(iter(leaf.sharding.device_set)), name)
    if len(devices) > 1:
        (first, a), (second, b), *_ = devices.items()
        raise ValueError(
            f"the model must be on one device, but `{a}` is on {first} and `{b}` "
            f"on {second}"
        )
    if devices:
        return next(iter(devices))
    return next(iter(jnp.zeros(()).sharding.device_set))


def _buffer(array: jax.Array) -> int:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return array.addressable_data(0).unsafe_buffer_pointer()
