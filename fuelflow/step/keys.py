"""The random key of a run, from a seed."""

import operator
from typing import SupportsIndex

import jax
import jax.numpy as jnp

from fuelflow.step.spec import leaf_text


def as_key(seed: SupportsIndex | jax.Array) -> jax.Array:
    """The key that a seed stands for; a key stands for itself.

    Raises:
        TypeError: If it is neither an integer nor one key.
    """
    if isinstance(seed, jax.Array):
        if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.ndim == 0:
            return seed
        raise TypeError(
            "`seed` must be an integer or one key from jax.random.key, "
            f"got an array {leaf_text(seed)}"
        )
    try:
        return jax.random.key(operator.index(seed))
    except TypeError as error:
        raise TypeError(
            "`seed` must be an integer or a key from jax.random.key, "
            f"got a {type(seed).__name__}"
        ) from error
