"""The model and batches that are timed, and the training steps people write by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

Params = dict[str, jax.Array]
Batch = dict[str, Any]

NUM_CLASSES = 10
LEARNING_RATE = 1e-3
MAX_NORM = 1.0


def make_params(num_layers: int, width: int) -> Params:
    """A multilayer perceptron as a flat dict: two leaves for each layer."""
    random = np.random.default_rng(0)
    sizes = [width] * num_layers + [NUM_CLASSES]
    params: Params = {}
    for layer in range(num_layers):
        shape = (sizes[layer], sizes[layer + 1])
        kernel = random.normal(size=shape, scale=(2 / shape[0]) ** 0.5)
        params[f"layers.{layer:02}.kernel"] = jnp.asarray(kernel, jnp.float32)
        params[f"layers.{layer:02}.bias"] = jnp.zeros(shape[1], jnp.float32)
    return params


class Perceptron(nnx.Module):
    """The same perceptron as a module."""

    def __init__(self, num_layers: int, width: int) -> None:
        rngs = nnx.Rngs(0)
        sizes = [width] * num_layers + [NUM_CLASSES]
        self.layers = nnx.List(
            nnx.Linear(sizes[layer], sizes[layer + 1], rngs=rngs)
            for layer in range(num_layers)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits of a batch ``[batch, width]``."""
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


def apply(params: Params, x: jax.Array) -> jax.Array:
    """The logits of the flat dict's perceptron."""
    num_layers = len(params) // 2
    for layer in range(num_layers):
        x = x @ params[f"layers.{layer:02}.kernel"] + params[f"layers.{layer:02}.bias"]
        if layer < num_layers - 1:
            x = jax.nn.relu(x)
    return x


def cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
    """The mean cross-entropy, as a scalar."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
    ).mean()


def flat_loss(params: Params, batch: Batch) -> jax.Array:
    """The loss of the flat dict."""
    return cross_entropy(apply(params, batch["image"]), batch)


def module_loss(module: Perceptron, batch: Batch) -> jax.Array:
    """The loss of the module."""
    return cross_entropy(module(batch["image"]), batch)


def loss_with_metrics(
    params: Params, batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of the flat dict with two metrics."""
    logits = apply(params, batch["image"])
    metrics = {
        "accuracy": (logits.argmax(-1) == batch["label"]).mean(),
        "confidence": jax.nn.softmax(logits).max(-1).mean(),
    }
    return cross_entropy(logits, batch), metrics


def make_batches(num: int, width: int, size: int = 64) -> list[Batch]:
    """Batches of NumPy arrays."""
    random = np.random.default_rng(1)
    return [
        {
            "image": random.normal(size=(size, width)).astype(np.float32),
            "label": random.integers(NUM_CLASSES, size=size, dtype=np.int32),
        }
        for _ in range(num)
    ]


def make_optimizer() -> optax.GradientTransformation:
    """AdamW behind a clip by global norm, as everybody writes it."""
    return optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE))


def make_hand_step(
    loss_fn: Callable[..., Any] = flat_loss, *, has_metrics: bool = False
) -> Any:
    """The jitted step that a user writes, its state donated."""
    optimizer = make_optimizer()

    def step(params: Params, opt_state: Any, batch: Batch) -> tuple[Any, Any, Any]:
        said, grads = jax.value_and_grad(loss_fn, has_aux=has_metrics)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, said

    return jax.jit(step, donate_argnums=(0, 1))


def make_hand_loop(
    params: Params,
    batches: Sequence[Batch],
    loss_fn: Callable[..., Any] = flat_loss,
    *,
    reads_loss: bool = False,
) -> Callable[[], None]:
    """A hand-written loop over the batches, which goes on where it stopped.

    Args:
        params: First parameters, copied.
        batches: One step each.
        loss_fn: The loss; if it is to be read, with metrics, as ours has.
        reads_loss: Whether every step's loss is brought to the host.
    """
    step = make_hand_step(loss_fn, has_metrics=reads_loss)
    params = jax.tree.map(jnp.copy, params)
    opt_state = make_optimizer().init(params)

    def run() -> None:
        nonlocal params, opt_state
        said = None
        for batch in batches:
            params, opt_state, said = step(params, opt_state, batch)
            if reads_loss:
                float(said[0])
        jax.block_until_ready((params, opt_state, said))

    return run


def make_hand_scan(
    params: Params, batches: Sequence[Batch], steps_per_call: int
) -> Callable[[], None]:
    """A hand-written scan over batches stacked on the device beforehand."""
    step = make_hand_step()
    params = jax.tree.map(jnp.copy, params)
    opt_state = make_optimizer().init(params)
    stacks = [
        jax.tree.map(lambda *x: jnp.stack(x), *batches[start : start + steps_per_call])
        for start in range(0, len(batches), steps_per_call)
    ]

    def scan(params: Params, opt_state: Any, stack: Batch) -> tuple[Any, Any, Any]:
        def body(carry: tuple[Any, Any], batch: Batch) -> tuple[tuple[Any, Any], Any]:
            params, opt_state, said = step(*carry, batch)
            return (params, opt_state), said

        (params, opt_state), said = jax.lax.scan(body, (params, opt_state), stack)
        return params, opt_state, said

    program = jax.jit(scan, donate_argnums=(0, 1))

    def run() -> None:
        nonlocal params, opt_state
        said = None
        for stack in stacks:
            params, opt_state, said = program(params, opt_state, stack)
        jax.block_until_ready((params, opt_state, said))

    return run


def make_nnx_loop(module: Perceptron, batches: Sequence[Batch]) -> Callable[[], None]:
    """The loop of flax's own guide: `nnx.jit` and `nnx.Optimizer`, state donated."""
    optimizer = nnx.Optimizer(module, make_optimizer(), wrt=nnx.Param)

    def step(module: Perceptron, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
        loss, grads = nnx.value_and_grad(module_loss)(module, batch)
        optimizer.update(module, grads)
        return loss

    jitted = nnx.jit(step, donate_argnums=(0, 1))

    def run() -> None:
        loss = None
        for batch in batches:
            loss = jitted(module, optimizer, batch)
        jax.block_until_ready((nnx.state(module), nnx.state(optimizer), loss))

    return run
