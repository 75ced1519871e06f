"""What processes that train together must have in common, in a few short facts."""

import contextlib
import hashlib
import inspect
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fuelflow._types import PyTree
from fuelflow.model.names import named_leaves
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.state import TrainState


def facts_of(loop: TrainingLoop, state: TrainState) -> dict[str, str]:
    """The code, the seed and the arrays that a run begins with.

    Of each array there is its shape, its dtype and a sum of its values, as this
    process' own devices have them.
    """
    facts = {
        "versions of jax, flax and optax": " ".join(
            (jax.__version__, flax.__version__, optax.__version__)
        ),
        "code of `loss_fn`": code_digest(loop.loss_fn),
        "code of `eval_fn`": code_digest(loop.eval_fn),
        "code of `optimizer`": code_digest(loop.optimizer),
        "code of `schedule`": code_digest(loop.schedule),
        "seed": str(np.asarray(_own(jax.random.key_data(state.key))).tolist()),
        "step": str(int(state.step)),
        "accumulate_steps": str(loop.accumulate_steps),
        "max_grad_norm": str(loop.max_grad_norm),
        "max_grad_value": str(loop.max_grad_value),
    }
    arrays = named_leaves({"params": state.params, "variables": state.variables})
    sums = _sums_of_bits(arrays)
    for name, leaf in arrays.items():
        total = int(np.asarray(_own(sums[name])))
        facts[f"`{name}`"] = f"{leaf.dtype}{list(leaf.shape)}, bits sum to {total}"
    return facts


def code_digest(function: Any) -> str:
    """A short text that differs where the code of a function does.

    Or a number or text that it takes from outside of itself.
    """
    if function is None or isinstance(function, int | float):
        return str(function)
    function = inspect.unwrap(getattr(function, "func", function))
    try:
        code = inspect.getsource(function)
    except (OSError, TypeError):  # typed in, or no Python function
        compiled = getattr(function, "__code__", None)
        code = type(function).__qualname__
        if compiled is not None:
            code = f"{compiled.co_code.hex()} {compiled.co_names} {compiled.co_consts}"
    code += repr(_numbers_used(function))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _numbers_used(function: Any) -> dict[str, Any]:
    """Numbers and texts that a function takes from outside, by name."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    known = {name: function.__globals__.get(name) for name in code.co_names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not filled yet
            known[name] = cell.cell_contents
    plain = (bool, int, float, str)
    return {name: value for name, value in known.items() if isinstance(value, plain)}


@jax.jit
def _sums_of_bits(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _sum_of_bits(leaf) for name, leaf in arrays.items()}


def _sum_of_bits(leaf: PyTree) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = jax.lax.bitcast_convert_type(leaf.astype(jnp.float32), jnp.uint32)
    return jnp.sum(leaf.astype(jnp.uint32))


def _own(array: jax.Array) -> jax.Array:
    """What the first of this process' devices has of an array that all have."""
    return array.addressable_data(0)
