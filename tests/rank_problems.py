"""Training problems over ranks, shared by tests of steps, loaders and the trainer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import fuelflow as ff
from fuelflow.examples import digits
from fuelflow.step.state import evolve
from fuelflow.step.tally import Totals, totals_of

NUM_ROWS, SIZE = 1437, 64  # 22 full batches, and 29 rows: of eight ranks four get none
PIXELS, HIDDEN, CLASSES = 64, 12, 10


def mesh_of(num_ranks: int) -> Mesh | None:
    """A mesh of so many devices; none at all for 0."""
    return ff.mesh(jax.devices()[:num_ranks]) if num_ranks else None


@functools.cache
def digit_rows(num_rows: int = NUM_ROWS) -> dict[str, np.ndarray]:
    """The first digits to train on, their pixels in one row."""
    rows, _ = digits.load()
    return {
        "image": rows["image"][:num_rows].reshape(-1, PIXELS),
        "label": rows["label"][:num_rows],
    }


def dense_params() -> dict[str, Any]:
    """The parameters of a small dense network, as NumPy arrays."""
    random = np.random.default_rng(0)

    def layer(num_in: int, num_out: int) -> dict[str, np.ndarray]:
        kernel = random.normal(size=(num_in, num_out)) / np.sqrt(num_in)
        return {
            "kernel": kernel.astype(np.float32),
            "bias": np.zeros(num_out, np.float32),
        }

    return {"first": layer(PIXELS, HIDDEN), "second": layer(HIDDEN, CLASSES)}


def dense_logits(params: Any, image: Any) -> jax.Array:
    """The network, smooth so that rounding flips nothing."""
    first, second = params["first"], params["second"]
    hidden = jnp.tanh(image @ first["kernel"] + first["bias"])
    return hidden @ second["kernel"] + second["bias"]


def dense_loss(params: Any, batch: Any) -> Any:
    """The loss and the accuracy of each digit."""
    return digits.score(dense_logits(params, batch["image"]), batch["label"])


def digit_loader(num_rows: int = NUM_ROWS, **options: Any) -> ff.DataLoader:
    """The digits in batches of 64, with a tail."""
    return ff.DataLoader(digit_rows(num_rows), SIZE, seed=3, **options)


def assert_close(actual: Any, expected: Any, *, rtol: float, atol: float) -> None:
    """Arrays by the same names that are close."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(
            np.asarray(actual[name]), value, rtol=rtol, atol=atol, err_msg=name
        )


def summing(loop: ff.TrainingLoop, state: ff.TrainState) -> ff.TrainState:
    """The state with an account of nothing yet."""
    state, programs = loop._host.ready(state)
    return evolve(state, sums=programs.zero_sums())


def read_sums(state: ff.TrainState, outcome: ff.StepOutcome) -> Totals:
    """What the steps of a state added up, the last of which said ``outcome``."""
    assert state.sums is not None
    return totals_of(jax.device_get(state.sums), ("loss", *outcome.metrics))


def least_squares(params: Any, batch: Any) -> Any:
    """The squared error of each row, and as a metric the absolute one."""
    error = batch["x"] @ params["w"] - batch["y"]
    return error**2, {"absolute": jnp.abs(error)}


@functools.cache
def small_loop(num_ranks: int = 8, **options: Any) -> ff.TrainingLoop:
    """A loop over least squares, whose programs tests can share."""
    rules = {"schedule": 0.1, "max_grad_norm": 1.0, **options}
    return ff.TrainingLoop(least_squares, optax.adam, mesh=mesh_of(num_ranks), **rules)


def small_loop_of_all() -> ff.TrainingLoop:
    """That loop without ranks, or with every device of several processes."""
    return small_loop(jax.device_count() if jax.process_count() > 1 else 0)


def small_model() -> dict[str, Any]:
    """What least squares begin with."""
    return {"w": np.array([0.5, -1, 2], np.float32)}


def small_batch(size: int = 16, seed: int = 0) -> dict[str, Any]:
    """Rows for least squares."""
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(size, 3)).astype(np.float32),
        "y": random.normal(size=size).astype(np.float32),
    }


_FIRST = np.eye(6, dtype=np.float32)[0]


def token_loss(params: Any, batch: Any) -> Any:
    """Least squares over tokens that count or not."""
    error = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
    weighted = ff.Weighted(error, batch["mask"])
    return weighted, {"error": weighted, "first": ff.Weighted(error, _FIRST)}


def token_model() -> dict[str, Any]:
    """What least squares over tokens begin with."""
    return {"w": np.array([0.5, -1, 2], np.float32), "b": np.float32(0.1)}


def tokens(seed: int) -> dict[str, Any]:
    """Sixteen rows with the more tokens the later they are; the first two have none."""
    random = np.random.default_rng(seed)
    share = np.maximum(0, np.linspace(-0.15, 1, 16))[:, None]
    return {
        "x": random.normal(size=(16, 6, 3)).astype(np.float32),
        "y": random.normal(size=(16, 6)).astype(np.float32),
        "mask": (random.random((16, 6)) < share).astype(np.float32),
    }
