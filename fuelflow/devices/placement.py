"""Placement of a training state on the device that trains it."""

from typing import Any

import jax
import jax.numpy as jnp

from fuelflow._types import PyTree

Device = Any
"""A `jax.Device`, which to type checkers is a variable and no type."""


class SingleDevice:
    """All of a state on one device.

    Arrays are placed *committed* to the device, as the compiled step returns them, so
    that a state read back from a file is no different from one the step made.

    Args:
        device: The device to train on.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def put(self, value: Any) -> jax.Array:
        """An array or number on the device, without compiling anything."""
        return jax.device_put(value, self.device)

    def place(self, tree: PyTree, *, copy: bool = False) -> PyTree:
        """The tree's arrays on the device, no two of them sharing a buffer.

        Args:
            tree: A tree of NumPy and JAX arrays.
            copy: Whether arrays that are already there are copied, so that donating
                the result leaves the given ones usable.
        """
        leaves, treedef = jax.tree.flatten(tree)
        if copy:
            leaves = copied(leaves)
        seen: set[int] = set()
        placed = [self._place_leaf(leaf, seen) for leaf in leaves]
        return jax.tree.unflatten(treedef, placed)

    def _place_leaf(self, leaf: Any, seen: set[int]) -> jax.Array:
        if not isinstance(leaf, jax.Array):
            # device_put may keep NumPy's own memory, which must not be donated.
            leaf = jnp.array(leaf, copy=True)
        placed = self.put(leaf)
        if _buffer(placed) in seen:
            placed = self.put(jnp.copy(placed))
        seen.add(_buffer(placed))
        return placed


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
                f"{len(leaf.sharding.device_set)}: gather it with "
                "jax.device_put(model, device)"
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
    return array.unsafe_buffer_pointer()
