"""Where a loader's arrays go: the one place to change for other devices."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fuelflow.data.memory import copied
from fuelflow.devices.placement import Device


@dataclass(frozen=True)
class DefaultDevice:
    """Arrays on JAX's default device, not committed: they follow a model elsewhere.

    Attributes:
        default: What `jax.default_device` was where the loader was made; threads that
            make batches have a setting of their own.
    """

    default: Any

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

    def put(self, tree: Any) -> Any:
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
            else self.put(copied(values))
            for name, values in arrays.items()
        }
