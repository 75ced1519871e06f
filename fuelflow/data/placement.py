"""Where a loader's arrays go: the one place to change for other devices."""

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fuelflow.data.memory import copied
from fuelflow.devices.placement import Device, OnMesh
from fuelflow.devices.ranks import ROWS, OneRank, Ranks


class Placement(Protocol):
    """Where a loader's arrays go."""

    @property
    def ranks(self) -> Ranks:
        """What the loader's compiled programs ask."""
        ...

    @property
    def device(self) -> Device:
        """A device of this process that batches go to, whose memory is looked at."""
        ...

    @property
    def num_copies(self) -> int:
        """How often the memory of that device holds rows that stay on the devices."""
        ...

    def context(self) -> AbstractContextManager[Any]:
        """What compiled programs are called in, for their results to be there."""
        ...

    def own_rows(self, held: int) -> np.ndarray | None:
        """Which rows of a batch of ``held`` this process has; None for all of them."""
        ...

    def rows(self, batches: Sequence[Any], held: Sequence[int]) -> list[Any]:
        """Batches of so many rows on the devices, from the rows of this process."""
        ...

    def whole(self, tree: Any) -> Any:
        """Arrays that every device is to have."""
        ...

    def keep(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Copies that every device has; JAX arrays that are there already, stay."""
        ...


@lru_cache(maxsize=64)
def _rows_here(sharding: NamedSharding, held: int) -> np.ndarray:
    """The rows of a batch that lie on devices of this process, in order."""
    places = sharding.addressable_devices_indices_map((held,)).values()
    spans = {rows.indices(held)[:2] for (rows,) in filter(None, places)}
    return np.concatenate([np.arange(*span) for span in sorted(spans)])


@dataclass(frozen=True)
class DefaultDevice:
    """Arrays on JAX's default device, not committed: they follow a model elsewhere.

    Attributes:
        default: What `jax.default_device` was where the loader was made; threads that
            make batches have a setting of their own.
    """

    default: Any

    ranks = OneRank()
    num_copies = 1

    @classmethod
    def here(cls) -> "DefaultDevice":
        """The default device of the calling thread."""
        config: Any = jax.config  # whose attributes are made at run time
        return cls(config.jax_default_device)

    def context(self) -> AbstractContextManager[Any]:
        """What compiled programs are called in, for their results to be there."""
        return jax.default_device(self.default)

    @property
    def device(self) -> Device:
        """The device itself."""
        with self.context():
            return next(iter(jnp.zeros(()).sharding.device_set))

    def own_rows(self, held: int) -> None:
        """None: all rows."""
        del held

    def rows(self, batches: Sequence[Any], held: Sequence[int]) -> list[Any]:
        """The batches' arrays on the device."""
        del held
        return self.whole(list(batches))

    def whole(self, tree: Any) -> Any:
        """A tree's arrays on the device.

        On a CPU they may share the memory of NumPy arrays, whatever `jax.device_put` is
        told of aliases, so those must not change any more.
        """
        with self.context():
            return jax.device_put(tree)

    def keep(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Copies on the device; JAX arrays that are there, and cannot change, stay."""
        place = {self.device}
        return {
            name: values
            if isinstance(values, jax.Array) and values.sharding.device_set == place
            else self.whole(copied(values))
            for name, values in arrays.items()
        }


@dataclass(frozen=True)
class OverRanks:
    """Batches by their rows over the ranks of a mesh.

    Attributes:
        mesh: The mesh, with Auto axes, one of them named ``data``.
    """

    mesh: Mesh

    @cached_property
    def _placement(self) -> OnMesh:
        return OnMesh(self.mesh)

    @property
    def ranks(self) -> Ranks:
        """The ranks of the mesh."""
        return self._placement.ranks

    @property
    def device(self) -> Device:
        """The mesh's first device of this process."""
        return self._placement.local_devices[0]

    @property
    def num_copies(self) -> int:
        """One for each device that shares the host's memory."""
        is_host = self._placement.platform == "cpu"
        return len(self._placement.local_devices) if is_host else 1

    def context(self) -> AbstractContextManager[Any]:
        """Nothing: results are where a program's arguments are."""
        return contextlib.nullcontext()

    def own_rows(self, held: int) -> np.ndarray | None:
        """The rows of this process' ranks; None where there is one process."""
        return None if self._placement.is_whole else _rows_here(self._sharding, held)

    def rows(self, batches: Sequence[Any], held: Sequence[int]) -> list[Any]:
        """The batches' arrays by their rows, each process giving its own."""
        if self._placement.is_whole:
            return jax.device_put(list(batches), self._sharding)

        def put(values: Any, num_rows: int) -> jax.Array:
            return jax.make_array_from_process_local_data(
                self._sharding, np.asarray(values), (num_rows, *values.shape[1:])
            )

        return [
            jax.tree.map(partial(put, num_rows=num_rows), batch)
            for batch, num_rows in zip(batches, held, strict=True)
        ]

    def whole(self, tree: Any) -> Any:
        """A tree's arrays on every device."""
        return jax.tree.map(self._placement.put, tree)

    def keep(self, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Copies on every device."""
        return {
            name: self._placement.put(
                values if isinstance(values, jax.Array) else copied(values)
            )
            for name, values in arrays.items()
        }

    @cached_property
    def _sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, ROWS)
