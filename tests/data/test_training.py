"""Training from a loader: the same numbers in every mode, by every face of the step."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import CLASSES, FEATURES, KINDS, assert_bitwise, cross_entropy

import fuelflow as ff
from fuelflow.examples import digits

DICT = KINDS[0]
NUM_ROWS, SIZE = 101, 16  # six full batches, and five rows


def rows(num_rows=NUM_ROWS):
    random = np.random.default_rng(3)
    return {
        "x": random.normal(size=(num_rows, FEATURES)).astype(np.float32),
        "y": random.integers(CLASSES, size=num_rows).astype(np.int32),
    }


def loss_fn(model, batch):
    logits = DICT.forward(model, batch["x"])
    return cross_entropy(logits, batch["y"]), {"right": logits.argmax(-1) == batch["y"]}


def make_loop(loss=loss_fn, **options):
    return ff.TrainingLoop(loss, optax.adamw, schedule=0.01, **options)


def train(loader, epochs=2, loop=None):
    loop = loop or make_loop(strict_compile=True)
    state = loop.init(DICT.make())
    for epoch in range(epochs):
        for batch in loader.epoch(epoch):
            state, _ = loop.step(state, batch)
    return state


def make_loader(num_rows=NUM_ROWS, **options):
    return ff.DataLoader(rows(num_rows), SIZE, **options)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_resident_and_streamed_rows_train_the_same_parameters(prefetch):
    resident = train(make_loader(resident=True))
    streamed = train(make_loader(resident=False, prefetch=prefetch))

    assert_bitwise(streamed.params, resident.params)


def test_an_epoch_with_a_tail_equals_the_naive_loop_in_one_compile():
    loader = make_loader()
    loop, naive = make_loop(strict_compile=True), make_loop()
    state, expected = loop.init(DICT.make()), naive.init(DICT.make())
    said, heard = [], []
    for batch in loader.epoch(0):
        fields = {name: np.asarray(values) for name, values in batch.items()}
        state, outcome = loop.step(state, batch)
        heard.append((outcome.loss, outcome.metrics["right"], outcome.grad_norm))
        expected, outcome = naive.step(expected, fields)
        said.append((outcome.loss, outcome.metrics["right"], outcome.grad_norm))

    # The weighted sum adds in another order than the mean.
    np.testing.assert_allclose(heard, said, rtol=2e-6)
    for name, param in expected.params.items():
        np.testing.assert_allclose(state.params[name], param, rtol=1e-4, atol=1e-5)
    assert len(loop.compiles) == 1
    assert len(naive.compiles) == 2


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("num_rows", [NUM_ROWS, 6 * SIZE])
def test_a_run_over_an_epoch_equals_its_steps(resident, num_rows):
    loader = make_loader(num_rows, resident=resident)
    expected = train(loader, epochs=2)
    loop = make_loop()
    state = loop.init(DICT.make())
    steps = []
    for epoch in range(2):
        state, outcome = loop.run(state, loader.epoch(epoch), steps_per_call=4)
        steps += outcome.global_step.tolist()

    assert steps == list(range(1, 2 * len(loader) + 1))
    for name, param in expected.params.items():
        np.testing.assert_allclose(state.params[name], param, rtol=1e-6, atol=1e-7)


def test_a_run_fuses_resident_stretches_into_one_program():
    loader = make_loader(6 * SIZE, resident=True)
    loop = make_loop(strict_compile=True)
    state = loop.init(DICT.make())

    for _ in range(3):
        state, _ = loop.run(state, loader, steps_per_call=3)

    assert [record.program for record in loop.compiles] == ["run on resident data"]
    assert int(state.step) == 18


def test_a_resident_run_sends_nothing_to_the_device_within_an_epoch():
    loader = make_loader(6 * SIZE, resident=True)
    loop = make_loop()
    state, _ = loop.run(loop.init(DICT.make()), loader.epoch(0), steps_per_call=3)
    epoch = loader.epoch(1)

    with jax.transfer_guard_host_to_device("disallow"):
        state, _ = loop.run(state, epoch, steps_per_call=3)

    assert int(state.step) == 12


@pytest.mark.parametrize("num_seen", [0, 1, 3, 6, 7])
def test_training_continues_with_the_very_next_row(num_seen):
    expected = train(make_loader(), epochs=3)
    first, loop = make_loader(), make_loop()
    state = loop.init(DICT.make())
    for batch in first.epoch(0):
        state, _ = loop.step(state, batch)
    for batch in itertools.islice(first.epoch(1), num_seen):
        state, _ = loop.step(state, batch)
    position = first.state()

    second = make_loader(resident=False, prefetch=3)
    second.restore(position)
    for epoch in range(position["epoch"], 3):
        for batch in second.epoch(epoch):
            state, _ = loop.step(state, batch)

    assert_bitwise(state.params, expected.params)


def test_an_evaluation_over_a_loader_counts_every_row_once():
    data = rows()
    loop = make_loop(strict_compile=True)
    state = loop.init(DICT.make())
    whole = loop.replace().evaluate(state, [data])

    loader = ff.DataLoader(data, SIZE, shuffle=False)
    evaluation = loop.evaluate(state, loader.epoch(0))

    assert evaluation.weight == NUM_ROWS
    np.testing.assert_allclose(evaluation["loss"], whole["loss"], rtol=1e-6)
    np.testing.assert_allclose(evaluation["right"], whole["right"], rtol=1e-6)


def test_a_device_transform_is_part_of_a_fused_run():
    def jitter(fields, key):
        noise = jax.random.normal(key, fields["x"].shape)
        return {**fields, "x": fields["x"] + 0.1 * noise}

    loader = make_loader(6 * SIZE, device_transform=jitter)
    expected = train(loader, epochs=1)
    loop = make_loop()

    state, _ = loop.run(loop.init(DICT.make()), loader.epoch(0), steps_per_call=2)

    for name, param in expected.params.items():
        np.testing.assert_allclose(state.params[name], param, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "make_example", [digits.nnx_example, digits.linen_example, digits.plain_example]
)
def test_a_lazy_graph_trains_the_digits_to_the_same_bits(make_example):
    train_rows, _ = digits.load()
    train_rows = {name: values[:300] for name, values in train_rows.items()}
    example = make_example(0)
    rules = {"schedule": ff.schedules.cosine(4e-3, 3, 20), "max_grad_norm": 1.0}

    def mean_loss(model, batch):
        losses, metrics = example.loss_fn(model, batch)
        return losses.mean(), metrics

    loop = ff.TrainingLoop(mean_loss, optax.adamw, **rules)
    state = loop.init(example.model)
    loader = ff.DataLoader(train_rows, 32)
    for epoch in range(2):
        for batch in loader.epoch(epoch):
            state, _ = loop.step(state, batch)

    graph = ff.Graph(example.model, apply=example.apply, max_grad_norm=1.0)
    graph.set_optimizer(optax.adamw)
    graph.set_scheduler(rules["schedule"])
    graph.set_data_loader(loader, "image")
    cross_entropy = ff.lazy(optax.softmax_cross_entropy_with_integer_labels)
    for epoch in range(2):
        for batch in graph.epoch(epoch):
            logits = graph.forward_batch(batch)
            loss = cross_entropy(logits, batch["label"]).mean()
            graph.step(loss)

    assert graph.data_num_batches == 10
    assert graph.training_step == 20
    assert_bitwise(graph.state.params, state.params)
    assert_bitwise(
        jax.tree.map(np.asarray, _plain(graph.state.variables)),
        jax.tree.map(np.asarray, _plain(state.variables)),
    )


def _plain(variables):
    return {
        name: jax.random.key_data(value)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        else value
        for name, value in variables.items()
    }
