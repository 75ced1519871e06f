"""What ranks make of a model's randomness, statistics, buffers and sown values."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import assert_bitwise, host_copy
from rank_problems import assert_close, mesh_of, small_batch

import fuelflow as ff

pytestmark = pytest.mark.filterwarnings("ignore:.*sow.*:DeprecationWarning")
HIDDEN, SIZE = 16, 32


class Norm(nnx.Module):
    """No bias before the norm: its gradient is nothing but rounding."""

    def __init__(self, axis: str | None) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, HIDDEN, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, axis_name=axis, momentum=0.5, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(jnp.tanh(self.norm(self.linear(x))))[:, 0]


class LinenNorm(nn.Module):
    axis: str | None

    @nn.compact
    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        x = nn.Dense(HIDDEN, use_bias=False, name="linear")(x)
        x = nn.BatchNorm(not training, axis_name=self.axis, momentum=0.5, name="norm")(
            x
        )
        return nn.Dense(1)(jnp.tanh(x))[:, 0]


def _nnx_loss(model: Any, batch: Any) -> Any:
    return (model(batch["x"]) - batch["y"]) ** 2


def _linen_loss(model: Any, batch: Any) -> Any:
    return (model(batch["x"], training=model.training) - batch["y"]) ** 2


def _linen(module: nn.Module) -> ff.Linen:
    x = np.zeros((1, 3), np.float32)
    variables = module.init(jax.random.key(0), x, training=False)
    return ff.Linen(module, variables, mutable=("intermediates",))


NORMS = {
    "nnx": (_nnx_loss, Norm, "norm.mean", "norm.var", "linear.kernel"),
    "linen": (
        _linen_loss,
        lambda axis: _linen(LinenNorm(axis)),
        "batch_stats.norm.mean",
        "batch_stats.norm.var",
        "linear.kernel",
    ),
}


@pytest.mark.parametrize("kind", NORMS)
def test_shared_statistics_on_eight_ranks_equal_one_device_on_the_whole_batch(
    kind: str,
):
    loss_fn, make, *_ = NORMS[kind]
    batches = [small_batch(SIZE, seed) for seed in range(20)]
    found = []
    for num_ranks, axis in ((0, None), (8, "data")):
        loop = ff.TrainingLoop(
            loss_fn, optax.adam, schedule=0.01, mesh=mesh_of(num_ranks)
        )
        state, outcome = loop.run(loop.init(make(axis)), batches)
        found.append((host_copy(state.params), host_copy(state.variables), outcome))
    (params, variables, told), (*shared, outcome) = found

    # Twenty updates of a hundredth, each from sums in another order.
    assert_close(shared[0], params, rtol=1e-4, atol=1e-5)
    assert_close(shared[1], variables, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outcome.loss, told.loss, rtol=1e-5)


@pytest.mark.parametrize("kind", NORMS)
def test_statistics_of_ranks_alone_are_averaged(kind: str):
    loss_fn, make, mean, var, kernel = NORMS[kind]
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.0, mesh=mesh_of(8))
    batch = small_batch(SIZE)
    state = loop.init(make(None))
    hidden = (batch["x"] @ np.asarray(state.params[kernel])).reshape(8, 4, HIDDEN)
    state, _ = loop.step(state, batch)

    # From a mean of 0 and a variance of 1, with a momentum of one half.
    own = {mean: 0.5 * hidden.mean(1), var: 0.5 + 0.5 * hidden.var(1)}
    for name, values in own.items():
        np.testing.assert_allclose(
            state.variables[name], values.mean(0), rtol=1e-5, atol=1e-7
        )
    assert np.ptp(hidden.mean(1), axis=0).min() > 0.1  # they do differ


@pytest.mark.parametrize("axis", [None, "data"])
def test_a_norm_runs_a_tail_at_its_own_shape_or_refuses_it(axis: str | None):
    loop = ff.TrainingLoop(_nnx_loss, optax.sgd, schedule=0.1, mesh=mesh_of(8))
    state = loop.init(Norm(axis))
    even = ff.DataLoader(small_batch(24), 16, mesh=mesh_of(8))
    uneven = ff.DataLoader(small_batch(19), 16, mesh=mesh_of(8))

    state, _ = loop.run(state, even)
    assert [record.changes[:1] for record in loop.compiles] == [
        (),
        ('batch["x"]: f32[16,3] → f32[8,3]',),
    ]
    with pytest.raises(ValueError, match="divide .* got 3: .* as of BatchNorm"):
        loop.run(state, uneven)


# Randomness.


class Noisy(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = self.dropout(jnp.ones((len(x), HIDDEN)))
        self.sow(nnx.Intermediate, "mask", mask)
        return (self.linear(x) * mask).sum(-1)


class LinenNoisy(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        dropout = nn.Dropout(0.5, deterministic=not training)
        mask = dropout(jnp.ones((len(x), HIDDEN)))
        self.sow("intermediates", "mask", mask)
        return (nn.Dense(HIDDEN)(x) * mask).sum(-1)


class Keyed(nnx.Module):
    """Sows what a loss with a key of its own draws."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(3, HIDDEN, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        mask = jax.random.bernoulli(key, 0.5, (len(x), HIDDEN)) * 2.0
        self.sow(nnx.Intermediate, "mask", mask)
        return (self.linear(x) * mask).sum(-1)


def _keyed_loss(model: Any, batch: Any, key: jax.Array) -> Any:
    return (model(batch["x"], key) - batch["y"]) ** 2


NOISES = {
    "nnx": (_nnx_loss, Noisy),
    "linen": (_linen_loss, lambda: _linen(LinenNoisy())),
    "key": (_keyed_loss, Keyed),
}


@functools.cache
def _noisy_loop(kind: str, num_ranks: int, accumulate_steps: int) -> Any:
    return ff.TrainingLoop(
        NOISES[kind][0],
        optax.sgd,
        schedule=1e-3,
        mesh=mesh_of(num_ranks),
        accumulate_steps=accumulate_steps,
    )


def _masks(
    kind: str, seed: int = 0, num_ranks: int = 8, accumulate_steps: int = 1
) -> tuple[list[np.ndarray], ff.TrainState, ff.TrainState]:
    """The masks of three steps, and the first and the last state."""
    loop = _noisy_loop(kind, num_ranks, accumulate_steps)
    state = loop.init(NOISES[kind][1](), seed=seed)
    first, masks = jax.tree.map(jnp.copy, state), []
    for _ in range(3):
        state, _ = loop.step(state, small_batch(SIZE))
        (mask,) = state.sown.values()
        masks.append(np.asarray(mask))
    return masks, first, state


@pytest.mark.parametrize("kind", NOISES)
def test_masks_differ_between_ranks_and_steps_and_repeat_from_the_seed(kind: str):
    masks, first, last = _masks(kind)
    again, *_ = _masks(kind)
    others, *_ = _masks(kind, seed=1)

    assert masks[0].shape == (SIZE, HIDDEN)
    assert {0.0, 2.0} == set(np.unique(masks))
    of_ranks = np.stack(masks).reshape(3 * 8, -1)
    assert len(np.unique(of_ranks, axis=0)) == 3 * 8
    np.testing.assert_array_equal(again, masks)
    # An nnx module draws from its own Rngs, whatever the seed.
    assert (np.stack(others) != np.stack(masks)).any() == (kind != "nnx")
    assert_bitwise(_keys(last), _keys(first))


@pytest.mark.parametrize("kind", ["nnx", "key"])
def test_masks_differ_between_the_microbatches_of_ranks(kind: str):
    masks, first, last = _masks(kind, accumulate_steps=2)

    # What is sown is that of the last microbatch, half of each rank's rows.
    assert masks[0].shape == (SIZE // 2, HIDDEN)
    of_ranks = np.stack(masks).reshape(3 * 8, -1)
    assert len(np.unique(of_ranks, axis=0)) == 3 * 8
    assert_bitwise(_keys(last), _keys(first))


def _keys(state: ff.TrainState) -> dict[str, np.ndarray]:
    """The keys that a state holds."""
    return {
        name: leaf
        for name, leaf in host_copy((state.key, state.variables)).items()
        if name == "[0]" or "key" in name
    }


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_counters_go_on_as_on_one_device(accumulate_steps: int):
    counts = []
    for num_ranks in (0, 8):
        *_, state = _masks("nnx", 0, num_ranks, accumulate_steps)
        counts.append({n: int(v) for n, v in state.variables.items() if "count" in n})

    assert counts[0] == counts[1]
    assert set(counts[1].values()) >= {3 * accumulate_steps}


# Buffers and sown values.


class Statistic(nnx.Variable):
    pass


class Buffered(nnx.Module):
    """Buffers that a pass reads, and one that it changes."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.weight = nnx.Param(jnp.ones(3))
        self.scale = Statistic(jnp.asarray(random.normal(size=3), jnp.float32))
        self.half = Statistic(jnp.asarray(random.normal(size=3), jnp.bfloat16))
        self.steps = Statistic(jnp.int32(0))
        self.is_used = Statistic(jnp.zeros((), bool))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.steps.set_value(self.steps.get_value() + len(x))
        self.is_used.set_value(x[0, 0] > 0)
        self.sow(nnx.Intermediate, "rows", x[:, 0] * 2)
        self.sow(nnx.Intermediate, "mean", x.mean())
        self.sow(nnx.Intermediate, "number", (x > 0).sum())
        scale = self.scale.get_value() + self.half.get_value()
        return x @ (self.weight.get_value() * scale)


NUM_RANKS = 6  # a mean over eight equal numbers would be exact


@functools.cache
def _buffered() -> Any:
    mesh = mesh_of(NUM_RANKS)
    loop = ff.TrainingLoop(_nnx_loss, optax.sgd, schedule=0.1, mesh=mesh)
    state = loop.init(Buffered())
    first = host_copy(state.variables)
    batches = [small_batch(6 * NUM_RANKS, seed) for seed in range(3)]
    state, _ = loop.run(state, batches)
    return first, state, batches[-1]["x"]


def test_buffers_that_no_pass_changes_keep_their_bits():
    first, state, _ = _buffered()
    after = host_copy(state.variables)

    # A mean over ranks of equal numbers may round, so there must be none.
    for name in ("['scale']", "['half']"):
        np.testing.assert_array_equal(after[name], first[name])
        assert after[name].dtype == first[name].dtype


def test_counters_and_flags_are_the_first_ranks():
    _, state, x = _buffered()

    assert int(state.variables["steps"]) == 3 * 6
    assert state.variables["steps"].dtype == jnp.int32
    assert bool(state.variables["is_used"]) == (x[0, 0] > 0)
    assert state.variables["is_used"].dtype == jnp.bool_


def test_sown_rows_are_put_together_and_other_values_averaged():
    _, state, x = _buffered()
    sown = {name.partition(".")[0]: value for name, value in state.sown.items()}

    np.testing.assert_array_equal(sown["rows"], x[:, 0] * 2)
    np.testing.assert_allclose(sown["mean"], x.mean(), rtol=1e-5)
    assert int(sown["number"]) == (x[:6] > 0).sum()
