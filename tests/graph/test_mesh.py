"""A graph on a mesh says what it says on one device, about the whole batch."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from rank_problems import mesh_of

import fuelflow as ff

RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(70, 5)).astype(np.float32),
    "y": RNG.normal(size=(70, 3)).astype(np.float32),
}


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        # A bias before BatchNorm has a gradient of rounding errors alone.
        self.first = nnx.Linear(5, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def make_graph(num_ranks):
    mesh = None if num_ranks is None else mesh_of(num_ranks)
    graph = ff.Graph(Net(), max_grad_norm=1.0, mesh=mesh)
    graph.set_optimizer(optax.sgd)
    graph.set_scheduler(0.1)
    graph.set_data_loader(ff.DataLoader(ROWS, 16), "x")
    return graph


def trained(num_ranks):
    graph = make_graph(num_ranks)
    losses, sums = [], []
    l2 = ff.lazy(optax.l2_loss)
    for epoch in range(2):
        for batch in graph.epoch(epoch):
            outputs = graph.forward_batch(batch)
            each = l2(outputs, batch["y"]).mean(-1)
            total = each.sum()
            outcome = graph.step(each.mean(), fetch=(total, outputs))
            losses.append(outcome.loss)
            sums.append((float(total), np.asarray(outputs)))
    return graph, losses, sums


@pytest.fixture(scope="module")
def alone():
    return trained(None)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_steps_on_ranks_are_those_on_one_device(num_ranks, alone):
    graph, losses, sums = trained(num_ranks)
    expected, expected_losses, expected_sums = alone

    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for (total, outputs), (expected_total, expected_outputs) in zip(
        sums, expected_sums, strict=True
    ):
        # A sum of all rows, and dropout masks of one device: nothing is a rank's own.
        np.testing.assert_allclose(total, expected_total, rtol=1e-5)
        np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-4, atol=1e-5)
    for name, param in graph.state.params.items():
        np.testing.assert_allclose(
            param, expected.state.params[name], rtol=1e-4, atol=1e-5
        )
    assert len(graph.compiles) == len(expected.compiles)  # one, and one for the tail


def test_reading_and_gradients_work_where_rows_are_spread(alone):
    graph, expected = make_graph(8), make_graph(None)
    l2 = ff.lazy(optax.l2_loss)
    x, y = ROWS["x"][:24], ROWS["y"][:24]

    for one in (graph, expected):
        one.training = False
    value = l2(graph(x), y).mean()
    other = l2(expected(x), y).mean()
    grads, other_grads = value.backward(), other.backward()

    np.testing.assert_allclose(float(value), float(other), rtol=1e-6)
    for name, grad in other_grads.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-4, atol=1e-6)
    assert len(graph.state.params["last.kernel"].sharding.device_set) == 8


def test_values_of_several_places_can_be_read_at_one_line():
    twice = ff.lazy(lambda x: 2 * x)
    mesh = ff.mesh(jax.devices()[:8])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    here = np.arange(8, dtype=np.float32)

    for x in (here, jax.device_put(here, rows), jax.device_put(here)):
        assert np.asarray(twice(x)).tolist() == (2 * here).tolist()


def test_a_loader_is_spread_over_the_graphs_mesh():
    graph = make_graph(8)
    with graph.epoch(0) as batches:
        batch = next(batches)

    assert len(batch["x"].sharding.device_set) == 8
