"""A state's arrays as they are between two steps, kept while the next steps go on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.random import key_data
from jax.sharding import NamedSharding, PartitionSpec

from fuelflow._errors import UsedStateError
from fuelflow.checkpoint.manifest import ArraySpec, checksum_of
from fuelflow.data.memory import free_device_bytes
from fuelflow.model.names import named_leaves
from fuelflow.step.programs import arrays_of
from fuelflow.step.state import TrainState

SUMS = "sums"
# Of the device's free memory, what copies may take while the next steps run.
_FREE_SHARE = 1 / 2


@dataclass(frozen=True)
class Snapshot:
    """Copies of a state's arrays by dotted name, on their way or on the host.

    Attributes:
        arrays: The copies, which nobody else has; none once they were fetched.
        num_ranks: Ranks of the state's running sums; 0 if it has none.
    """

    arrays: dict[str, Any]
    num_ranks: int

    def fetched(self) -> tuple[dict[str, np.ndarray], dict[str, ArraySpec]]:
        """The arrays on the host, waited for, keys as their data; and what they are.

        To be called once: each copy on the device is let go as soon as it was read.
        """
        values: dict[str, np.ndarray] = {}
        specs: dict[str, ArraySpec] = {}
        for name in list(self.arrays):
            leaf = self.arrays.pop(name)
            impl = str(jax.random.key_impl(leaf)) if is_key(leaf) else None
            values[name] = np.asarray(leaf if impl is None else key_data(leaf))
            specs[name] = ArraySpec(
                dtype=str(leaf.dtype),
                shape=tuple(leaf.shape),
                checksum=checksum_of(values[name]),
                key_impl=impl,
            )
        return values, specs


def is_key(leaf: Any) -> bool:
    """Whether an array is one of typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def take(state: TrainState) -> Snapshot:
    """A snapshot of a state, which stays usable: a step may take it over at once.

    On the device nothing is waited for: copies are made there as soon as the steps
    before are done, and the next step runs after them. Where they would not fit, the
    arrays are brought to the host, which waits for the steps before. Compiles nothing,
    except that of several processes each compiles one small program for running sums.

    Raises:
        UsedStateError: If a step has taken over the state's buffers.
    """
    tree = dict(arrays_of(state))
    if state.sums is not None:
        tree[SUMS] = state.sums
    leaves = named_leaves(tree)
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise UsedStateError(name)
    local = {name: _local(leaf) for name, leaf in leaves.items()}
    num_ranks = 0 if state.sums is None else state.sums.num_ranks
    return Snapshot(_copied(local), num_ranks)


def _local(leaf: Any) -> Any:
    """What this process needs of an array to have all of it."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        assert isinstance(leaf.sharding, NamedSharding)
        whole = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        leaf = jax.jit(_same, out_shardings=whole)(leaf)
    if len(leaf.sharding.device_set) > 1 and leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    return leaf


def _same(leaf: jax.Array) -> jax.Array:
    """The array; one function for all calls, so that it is compiled once."""
    return leaf


def _copied(leaves: Mapping[str, Any]) -> dict[str, Any]:
    on_device = {k: leaf for k, leaf in leaves.items() if isinstance(leaf, jax.Array)}
    on_host = {k: np.array(leaf) for k, leaf in leaves.items() if k not in on_device}
    if _fits(on_device):
        shardings = {name: leaf.sharding for name, leaf in on_device.items()}
        copies = jax.device_put(on_device, shardings, may_alias=False)
    else:
        copies = {k: _on_host(leaf) for k, leaf in on_device.items()}
    return {name: (copies | on_host)[name] for name in leaves}


def _on_host(leaf: jax.Array) -> Any:
    # A view, which is what a CPU's arrays give, keeps a step from taking them over.
    if is_key(leaf):
        return jax.device_put(leaf, leaf.sharding, may_alias=False)
    return np.array(leaf)


def _fits(leaves: Mapping[str, jax.Array]) -> bool:
    """Whether copies of the arrays have room on the devices that they are on."""
    if not leaves:
        return True
    needed = sum(leaf.nbytes for leaf in leaves.values() if not is_key(leaf))
    device = next(iter(next(iter(leaves.values())).sharding.device_set))
    return needed <= _FREE_SHARE * free_device_bytes(device)
