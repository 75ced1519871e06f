"""Random numbers that depend on a seed and a place in the run, and on nothing else."""

import jax
import numpy as np

from fuelflow.step.keys import as_key

# What hangs from an epoch's own sequence, which gives its order.
_HOST, _DEVICE = 0, 1


def order_rng(seed: int, epoch: int) -> np.random.Generator:
    """The generator that a sampler is given."""
    return _rng(seed, epoch)


def batch_rng(seed: int, epoch: int, number: int, *part: int) -> np.random.Generator:
    """The generator of a transform for one batch of an epoch, or a part of it."""
    return _rng(seed, epoch, _HOST, number, *part)


def device_key(seed: int, epoch: int) -> jax.Array:
    """The key that each batch of an epoch folds its number into."""
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch, _DEVICE))
    with jax.transfer_guard("allow"):  # once for each epoch, and no data
        return as_key(int(sequence.generate_state(1)[0]))


def _rng(seed: int, *place: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=place))
