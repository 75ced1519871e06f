"""The parts of a state as compiled programs see them, and what they leave besides."""

from typing import NamedTuple

import jax

from fuelflow._types import Array, Grads, Params, PyTree, Scalar, Variables
from fuelflow.step.tally import Tally


class Moving(NamedTuple):
    """The part of a state that a step replaces; its buffers are donated."""

    params: Params
    variables: Variables
    opt_state: PyTree
    step: Array
    num_skipped: Array
    sums: Tally | None


class Fixed(NamedTuple):
    """The part of a state that a step only reads."""

    lr: Scalar
    lr_scale: Scalar
    key: jax.Array
    num_seen: Array | None = None


class Seen(NamedTuple):
    """What a step leaves besides: what it created, was asked for, or changed."""

    sown: Variables
    fetched: PyTree
    beside: PyTree


class Held(NamedTuple):
    """Gradients of several backward passes, added up, that wait for one step."""

    loss: Scalar
    grads: Grads
    variables: Variables
    sown: Variables
    num_passes: Array


class Still(NamedTuple):
    """The part of a state that an evaluation reads."""

    params: Params
    variables: Variables
    key: jax.Array
