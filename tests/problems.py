"""Small training problems shared by the tests, in every kind of model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fuelflow as ff

FEATURES, HIDDEN, CLASSES = 12, 16, 5


class NNXMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(HIDDEN, name="first")(x))
        return nn.Dense(CLASSES, name="second")(x)


def apply_dict(params: dict[str, Any], x: jax.Array) -> jax.Array:
    first, second = params["first"], params["second"]
    hidden = jax.nn.relu(x @ first["kernel"] + first["bias"])
    return hidden @ second["kernel"] + second["bias"]


@dataclass(frozen=True)
class Kind:
    """A kind of model: the fuelflow model, and its params and forward pass by hand."""

    name: str
    make: Callable[[], Any]
    apply: Callable[[Any, jax.Array], jax.Array]
    params_of: Callable[[Any], Any]
    forward: Callable[[Any, jax.Array], jax.Array]


def _linen() -> ff.Linen:
    module = LinenMLP()
    return ff.Linen(module, module.init(jax.random.key(0), jnp.zeros((1, FEATURES))))


def _apply_nnx(params: nnx.State, x: jax.Array) -> jax.Array:
    graphdef, _ = nnx.split(NNXMLP(nnx.Rngs(0)))
    return nnx.merge(graphdef, params)(x)


def _apply_linen(params: Any, x: jax.Array) -> jax.Array:
    return LinenMLP().apply({"params": params}, x)  # pyright: ignore[reportReturnType]


KINDS = [
    Kind(
        "dict",
        lambda: dict(_linen().variables["params"]),
        apply_dict,
        lambda model: model,
        apply_dict,
    ),
    Kind(
        "linen",
        _linen,
        _apply_linen,
        lambda model: model.variables["params"],
        lambda model, x: model(x),
    ),
    Kind(
        "nnx",
        lambda: NNXMLP(nnx.Rngs(0)),
        _apply_nnx,
        lambda model: nnx.state(model, nnx.Param),
        lambda model, x: model(x),
    ),
]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def make_batches(count: int, size: int = 32, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    teacher = random.normal(size=(FEATURES, CLASSES))
    batches = []
    for _ in range(count):
        x = random.normal(size=(size, FEATURES)).astype(np.float32)
        y = (x @ teacher).argmax(-1).astype(np.int32)
        batches.append({"x": x, "y": y})
    return batches


def mlp_loss(kind: Kind) -> Callable[[Any, dict[str, Any]], Any]:
    def loss_fn(model: Any, batch: dict[str, Any]) -> Any:
        return cross_entropy(kind.forward(model, batch["x"]), batch["y"])

    return loss_fn


def train_by_hand(
    kind: Kind,
    tx: optax.GradientTransformation,
    batches: list[dict[str, Any]],
) -> dict[str, np.ndarray]:
    """A plain jitted optax loop; parameters by dotted name at its end."""
    params = kind.params_of(kind.make())

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return cross_entropy(kind.apply(params, batch["x"]), batch["y"]).mean()

        grads = jax.grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    return named(params)


def named(tree: Any) -> dict[str, np.ndarray]:
    """Arrays by dotted name, leaving out what wraps an nnx variable's value."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        for path, _ in paths
    ]
    return {
        name: np.asarray(leaf) for name, (_, leaf) in zip(names, paths, strict=True)
    }


def train(
    loop: ff.TrainingLoop, model: Any, batches: list[dict[str, Any]]
) -> tuple[ff.TrainState, list[ff.StepOutcome]]:
    state = loop.init(model)
    outcomes = []
    for batch in batches:
        state, outcome = loop.step(state, batch)
        outcomes.append(outcome)
    return state, outcomes


def assert_bitwise(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(
            np.asarray(actual[name]), np.asarray(value), err_msg=name
        )


def host_copy(tree: Any) -> dict[str, np.ndarray]:
    """Every leaf of a tree by its path, keys as their raw data."""

    def copy(leaf: Any) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.array(leaf)

    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): copy(leaf) for path, leaf in paths}


def forever(batch: Any) -> Iterator[Any]:
    while True:
        yield batch
