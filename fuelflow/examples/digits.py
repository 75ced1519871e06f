"""Handwritten digits: the data, one small network written in three ways, and its loss.

The network is two convolutions and a linear layer. As a module of `flax.nnx` or linen
it also has BatchNorm and Dropout, so its state changes while it trains; as a dict of
arrays it is JAX alone. `TrainingLoop` takes any of them:

>>> example = plain_example(seed=0)
>>> loop = ff.TrainingLoop(example.loss_fn, optax.adamw, schedule=3e-3)
>>> state = loop.init(example.model)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import fuelflow as ff

NUM_HELD_OUT = 360
NUM_CLASSES = 10

Digits = dict[str, np.ndarray]
"""``image``, float32 ``[row, 8, 8, 1]`` in 0 to 1, and ``label``, int32 ``[row]``."""


def load() -> tuple[Digits, Digits]:
    """The 1,437 digits to train on and the 360 held out, the same ones every time.

    Raises:
        ModuleNotFoundError: If scikit-learn, which brings the images, is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        if error.name not in ("sklearn", "sklearn.datasets"):
            raise
        raise ModuleNotFoundError(
            "fuelflow demo needs scikit-learn: pip install 'fuelflow[examples]'",
            name="sklearn",
        ) from None
    loaded: Any = load_digits(return_X_y=True)
    pixels, labels = loaded
    digits = {
        "image": np.float32(pixels / 16).reshape(-1, 8, 8, 1),
        "label": np.int32(labels),
    }
    order = np.random.default_rng(0).permutation(len(labels))
    return _rows(digits, order[NUM_HELD_OUT:]), _rows(digits, order[:NUM_HELD_OUT])


def _rows(digits: Digits, index: np.ndarray | slice) -> Digits:
    return {name: values[index] for name, values in digits.items()}


@dataclass(frozen=True)
class Example:
    """A model, and what differs between the kinds of model: how it is called.

    Attributes:
        name: What to call it.
        model: What `TrainingLoop.init` is given.
        loss_fn: What `TrainingLoop` is given.
        predict: A trained model and images to logits, ``[row, class]``.
        apply: What `Graph` is given to call the model, if it is no callable.
    """

    name: str
    model: Any
    loss_fn: Callable[..., Any]
    predict: Callable[[Any, Any], Array]
    apply: Callable[[Any, Array], Array] | None = None


def score(logits: Array, label: Array) -> tuple[Array, dict[str, Array]]:
    """The loss and the accuracy of each example: fuelflow takes the means."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return losses, {"accuracy": logits.argmax(-1) == label}


class ConvNet(nnx.Module):
    """The network as a module of `flax.nnx`.

    Args:
        rngs: Where its first parameters and its dropout come from.
        axis_name: The axis of a mesh over which the statistics of a batch are shared.
    """

    def __init__(self, rngs: nnx.Rngs, axis_name: str | None = None) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs, axis_name=axis_name)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 32, NUM_CLASSES, rngs=rngs)

    def __call__(self, image: Array) -> Array:
        """Images ``[row, 8, 8, 1]`` to logits ``[row, class]``."""
        x = nnx.relu(self.norm(self.conv1(image)))
        x = nnx.relu(self.conv2(x))
        return self.head(self.dropout(x.reshape(len(x), -1)))


def nnx_example(seed: int, axis_name: str | None = None) -> Example:
    """The `flax.nnx` module. fuelflow puts it in eval mode for `evaluate`."""

    def loss_fn(model: ConvNet, batch: Any) -> Any:
        return score(model(batch["image"]), batch["label"])

    def predict(model: ConvNet, image: Array) -> Array:
        model.eval()
        return model(image)

    model = ConvNet(nnx.Rngs(seed), axis_name)
    return Example("flax.nnx", model, loss_fn, predict)


class LinenConvNet(nn.Module):
    """The network as a linen module.

    Attributes:
        axis_name: As in `ConvNet`.
    """

    axis_name: str | None = None

    @nn.compact
    def __call__(self, image: Array, *, train: bool = False) -> Array:
        """Images ``[row, 8, 8, 1]`` to logits ``[row, class]``."""
        x = nn.Conv(16, (3, 3))(image)
        norm = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)
        x = nn.relu(norm(x))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(NUM_CLASSES)(x)


def linen_example(seed: int, axis_name: str | None = None) -> Example:
    """The linen module with its variables. ``model.training`` says which pass it is."""

    def loss_fn(model: Any, batch: Any) -> Any:
        return score(model(batch["image"], train=model.training), batch["label"])

    def predict(model: ff.Linen, image: Array) -> Array:
        return model(image)

    module = LinenConvNet(axis_name)
    variables = module.init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)))
    return Example("flax.linen", ff.Linen(module, variables), loss_fn, predict)


def plain_params(seed: int) -> dict[str, dict[str, Array]]:
    """The network's parameters as a dict of arrays."""
    make_kernel = jax.nn.initializers.lecun_normal()
    shapes = {
        "conv1": (3, 3, 1, 16),
        "conv2": (3, 3, 16, 32),
        "head": (4 * 4 * 32, NUM_CLASSES),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: {"kernel": make_kernel(key, shape), "bias": jnp.zeros(shape[-1])}
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def plain_network(params: dict[str, dict[str, Array]], image: Array) -> Array:
    """The network as a function of parameters and images."""
    x = jax.nn.relu(_convolve(image, params["conv1"], stride=1))
    x = jax.nn.relu(_convolve(x, params["conv2"], stride=2))
    return x.reshape(len(x), -1) @ params["head"]["kernel"] + params["head"]["bias"]


def _convolve(x: Array, layer: dict[str, Array], stride: int) -> Array:
    y = jax.lax.conv_general_dilated(
        x,
        layer["kernel"],
        window_strides=(stride, stride),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y + layer["bias"]


def plain_example(seed: int) -> Example:
    """The dict of arrays and the function that uses it."""

    def loss_fn(params: Any, batch: Any) -> Any:
        return score(plain_network(params, batch["image"]), batch["label"])

    params = plain_params(seed)
    return Example("plain JAX", params, loss_fn, plain_network, apply=plain_network)
