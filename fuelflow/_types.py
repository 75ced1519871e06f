"""Shared names for the arrays and trees that the rooms hand to each other."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

Array = jax.Array
Scalar = jax.Array
"""A floating array ``[]``."""

Params = dict[str, jax.Array]
"""Parameters by dotted name."""

Grads = dict[str, jax.Array]
"""Gradients by the dotted name of their parameter."""

Variables = dict[str, jax.Array]
"""What a forward pass may change, by dotted name: statistics, counters, keys."""

PyTree: TypeAlias = Any
Batch: TypeAlias = Any
"""A tree of arrays that share their leading axis."""

LossFunction = Callable[..., Any]
"""``(model, batch)`` or ``(model, batch, key)`` to a loss, or a loss and metrics."""

Schedule = Callable[[Any], Any]
"""A step, int ``[]``, to a learning rate, float32 ``[]``."""
