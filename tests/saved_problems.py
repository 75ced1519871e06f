"""Runs that are saved and go on, shared by the tests of checkpoints.

As a program it goes on with runs that another process saved::

    python saved_problems.py DIRECTORY CASE...
"""

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fuelflow as ff
from fuelflow.checkpoint.checkpointer import Checkpointer
from fuelflow.checkpoint.record import RunRecord
from fuelflow.step.state import evolve

FEATURES, HIDDEN, CLASSES, SIZE = 12, 16, 5, 32
NUM_ROWS = 7 * SIZE - 8
BEFORE, AFTER = 5, 6  # of the seven batches of an epoch: the run goes over its end
NUM_CPUS = 8


class NoisyNNX(nnx.Module):
    """A small network that draws random numbers and keeps statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


class NoisyLinen(nn.Module):
    """The same of linen."""

    @nn.compact
    def __call__(self, x: jax.Array, *, training: bool = False) -> jax.Array:
        x = nn.Dense(HIDDEN, name="first")(x)
        x = nn.BatchNorm(use_running_average=not training, name="norm")(x)
        x = nn.Dropout(0.2, deterministic=not training)(nn.relu(x))
        return nn.Dense(CLASSES, name="second")(x)


def make_linen() -> ff.Linen:
    module = NoisyLinen()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return ff.Linen(module, module.init(keys, jnp.zeros((1, FEATURES))))


def make_dict() -> dict[str, Any]:
    random = np.random.default_rng(1)

    def layer(num_in: int, num_out: int) -> dict[str, Any]:
        kernel = random.normal(size=(num_in, num_out)) / np.sqrt(num_in)
        return {"kernel": np.float32(kernel), "bias": np.zeros(num_out, np.float32)}

    return {"first": layer(FEATURES, HIDDEN), "second": layer(HIDDEN, CLASSES)}


def apply_dict(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    hidden *= jax.random.bernoulli(key, 0.8, hidden.shape)
    return hidden @ params["second"]["kernel"] + params["second"]["bias"]


def score(logits: jax.Array, labels: jax.Array) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses, {"accuracy": logits.argmax(-1) == labels}


def nnx_loss(model: Any, batch: Any) -> Any:
    return score(model(batch["x"]), batch["y"])


def linen_loss(model: Any, batch: Any) -> Any:
    return score(model(batch["x"], training=model.training), batch["y"])


def dict_loss(params: Any, batch: Any, key: jax.Array) -> Any:
    return score(apply_dict(params, batch["x"], key), batch["y"])


@dataclass(frozen=True)
class Case:
    """A run: a kind of model, on so many ranks; 0 for no mesh."""

    make_model: Callable[[], Any]
    loss_fn: Callable[..., Any]
    num_ranks: int

    def make_loop(self, **changes: Any) -> ff.TrainingLoop:
        mesh = ff.mesh(jax.devices()[: self.num_ranks]) if self.num_ranks else None
        options = {"schedule": ff.schedules.cosine(0.05, 3, 40), "max_grad_norm": 1.0}
        return ff.TrainingLoop(
            self.loss_fn, optax.adamw, mesh=mesh, **{**options, **changes}
        )

    def make_loader(self, loop: ff.TrainingLoop) -> ff.DataLoader:
        random = np.random.default_rng(0)
        x = random.normal(size=(NUM_ROWS, FEATURES)).astype(np.float32)
        y = (x @ random.normal(size=(FEATURES, CLASSES))).argmax(-1).astype(np.int32)
        drops = self.loss_fn is not dict_loss  # statistics of a batch
        return ff.DataLoader(
            {"x": x, "y": y}, SIZE, seed=3, mesh=loop.mesh, drop_last=drops or None
        )


CASES = {
    f"{kind}-{ranks}": Case(make_model, loss_fn, ranks)
    for kind, make_model, loss_fn in (
        ("nnx", lambda: NoisyNNX(nnx.Rngs(0)), nnx_loss),
        ("linen", make_linen, linen_loss),
        ("dict", make_dict, dict_loss),
    )
    for ranks in (0, 8)
}


def with_sums(loop: ff.TrainingLoop, state: ff.TrainState) -> ff.TrainState:
    """The state with an account of nothing yet, as a trainer's has it."""
    state, programs = loop._host.ready(state)
    return evolve(state, sums=programs.zero_sums())


def batches_of(loader: ff.DataLoader) -> Iterator[ff.Batch]:
    """Batches from where the loader is, over the ends of epochs."""
    while True:
        yield from loader


def run(
    loop: ff.TrainingLoop,
    state: ff.TrainState,
    batches: Iterator[ff.Batch],
    num_steps: int,
) -> ff.TrainState:
    """So many steps over the next batches."""
    for _ in range(num_steps):
        state, _ = loop.step(state, next(batches))
    return state


def arrays_by_name(state: ff.TrainState) -> dict[str, np.ndarray]:
    """Every array of a state but what its last step left to look at."""
    state = evolve(state, sown={})
    paths = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): _values(leaf) for path, leaf in paths}


def _values(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert set(actual) == set(expected)
    for name, values in expected.items():
        assert actual[name].dtype == values.dtype, name
        assert actual[name].tobytes() == values.tobytes(), name


def begin(case: Case, directory: Path) -> dict[str, np.ndarray]:
    """A run that is saved after some steps and goes on: its arrays at the end."""
    loop = case.make_loop()
    loader = case.make_loader(loop)
    batches = batches_of(loader)
    state = with_sums(loop, loop.init(case.make_model(), seed=7))
    with Checkpointer(directory) as checkpointer:
        state = run(loop, state, batches, BEFORE)
        checkpointer.save(state, RunRecord(position=loader.state()))
        state = run(loop, state, batches, AFTER)
    return arrays_by_name(state)


def go_on(case: Case, directory: Path) -> dict[str, np.ndarray]:
    """The same run from its checkpoint on."""
    loop = case.make_loop()
    loader = case.make_loader(loop)
    restored = Checkpointer(directory).restore(loop, case.make_model())
    loader.restore(restored.record.position)
    return arrays_by_name(run(loop, restored.state, batches_of(loader), AFTER))


def main(directory: str, names: Iterable[str]) -> None:
    for name in names:
        arrays = go_on(CASES[name], Path(directory, name))
        Path(directory, f"{name}.pickle").write_bytes(pickle.dumps(arrays))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
