"""Batches of named fields in a step: their weights, and rows that fill them up."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import KINDS, assert_bitwise, cross_entropy, make_batches

import fuelflow as ff
from fuelflow.step.batch import filled_up, weight_of_rows

DICT = KINDS[0]
# The same sums in another order, in float32.
RTOL, ATOL = 2e-6, 2e-7


def loss_fn(model, batch):
    logits = DICT.forward(model, batch["x"])
    return cross_entropy(logits, batch["y"]), {"right": logits.argmax(-1) == batch["y"]}


def mean_loss_fn(model, batch):
    return loss_fn(model, batch)[0].mean()


def make_loop(loss=loss_fn, **options):
    return ff.TrainingLoop(loss, optax.adamw, schedule=0.01, **options)


def padded(batch, held):
    """A short batch as a loader makes it."""
    size = len(batch["y"])
    return ff.Batch.held(filled_up(batch, held), weight_of_rows(size, held), size)


def epoch_with_tail(count=4, size=16, tail=5):
    full = make_batches(count, size)
    short = {
        name: rows[:tail] for name, rows in make_batches(1, size, seed=9)[0].items()
    }
    return full, short


def test_a_padded_tail_equals_the_naive_loop_with_one_compile():
    full, short = epoch_with_tail()
    naive = make_loop()
    expected = naive.init(DICT.make())
    said = []
    for batch in [*full, short]:
        expected, outcome = naive.step(expected, batch)
        said.append((outcome.loss, outcome.metrics["right"], outcome.grad_norm))
    loop = make_loop(strict_compile=True)
    state = loop.init(DICT.make())
    heard = []
    for batch in [*(padded(b, 16) for b in full), padded(short, 16)]:
        state, outcome = loop.step(state, batch)
        heard.append((outcome.loss, outcome.metrics["right"], outcome.grad_norm))

    np.testing.assert_allclose(heard, said, rtol=RTOL, atol=ATOL)
    for name, param in expected.params.items():
        np.testing.assert_allclose(state.params[name], param, rtol=1e-4, atol=1e-5)
    assert [record.program for record in loop.compiles] == ["step"]


def test_a_first_batch_that_is_padded_compiles_no_more_than_any():
    full, short = epoch_with_tail()
    loop = make_loop(strict_compile=True)

    state, first = loop.step(loop.init(DICT.make()), padded(short, 16))
    state, second = loop.step(state, padded(full[0], 16))

    assert len(loop.compiles) == 1
    assert np.isfinite([first.loss, second.loss]).all()


def test_a_scalar_loss_runs_the_tail_at_its_own_shape():
    full, short = epoch_with_tail()
    naive, loop = make_loop(mean_loss_fn), make_loop(mean_loss_fn)
    expected, state = naive.init(DICT.make()), loop.init(DICT.make())
    for batch in [*full, short]:
        expected, _ = naive.step(expected, batch)
        state, _ = loop.step(state, padded(batch, 16))

    assert_bitwise(state.params, expected.params)
    assert len(loop.compiles) == 2
    assert 'batch["x"]: f32[16,12] → f32[5,12]' in loop.compiles[1].reason


class Normed(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(12, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(12, 5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.norm(x))


def test_statistics_of_a_batch_see_no_row_that_fills_it_up():
    def normed_loss(model, batch):
        return cross_entropy(model(batch["x"]), batch["y"])

    full, short = epoch_with_tail(count=2)
    naive, loop = make_loop(normed_loss), make_loop(normed_loss)
    expected, state = naive.init(Normed()), loop.init(Normed())
    for batch in [*full, short]:
        expected, _ = naive.step(expected, batch)
        state, _ = loop.step(state, padded(batch, 16))

    for name, value in expected.variables.items():
        np.testing.assert_allclose(state.variables[name], value, rtol=1e-5)
    for name, param in expected.params.items():
        np.testing.assert_allclose(state.params[name], param, rtol=1e-3, atol=1e-4)


def test_an_unweighted_batch_gives_the_bits_of_a_dict():
    batches = make_batches(3)
    plain, named = make_loop(), make_loop()
    expected, state = plain.init(DICT.make()), named.init(DICT.make())
    for batch in batches:
        expected, _ = plain.step(expected, batch)
        state, _ = named.step(state, ff.Batch(batch))

    assert_bitwise(state.params, expected.params)


def test_row_weights_weigh_the_loss_and_its_gradient():
    batch = make_batches(1)[0]
    weight = np.random.default_rng(1).uniform(size=32).astype(np.float32)
    loop = make_loop()
    state = loop.init(DICT.make())

    def by_hand(params):
        losses = cross_entropy(DICT.apply(params, batch["x"]), batch["y"])
        return (losses * weight).sum() / weight.sum()

    expected = jax.grad(by_hand)(DICT.make())
    grads = loop.grads(state, ff.Batch(batch, weight=weight))

    np.testing.assert_allclose(
        grads["first.kernel"], expected["first"]["kernel"], rtol=1e-5, atol=1e-6
    )


def test_microbatches_of_a_padded_batch_count_by_their_true_rows():
    _, short = epoch_with_tail()
    whole, parts = make_loop(), make_loop(accumulate_steps=4)
    state = whole.init(DICT.make())

    expected = whole.grads(state, padded(short, 16))
    grads = parts.grads(parts.init(DICT.make()), padded(short, 16))

    for name, grad in expected.items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-5, atol=1e-6)


def test_a_run_over_padded_batches_equals_the_steps():
    full, short = epoch_with_tail(count=5)
    batches = [padded(batch, 16) for batch in [*full, short]]
    loop = make_loop()
    expected = loop.init(DICT.make())
    for batch in batches:
        expected, _ = loop.step(expected, batch)

    state, outcome = loop.run(loop.init(DICT.make()), batches, steps_per_call=3)

    assert_bitwise(state.params, expected.params)
    assert outcome.global_step.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("loss", [loss_fn, mean_loss_fn])
def test_an_evaluation_counts_true_rows_alone(loss):
    full, short = epoch_with_tail()
    loop = make_loop(loss)
    state = loop.init(DICT.make())
    rows = {
        name: np.concatenate([batch[name] for batch in [*full, short]])
        for name in ("x", "y")
    }

    whole = loop.evaluate(state, [rows])
    parts = loop.evaluate(state, [padded(batch, 16) for batch in [*full, short]])

    assert parts.weight == 69
    np.testing.assert_allclose(parts["loss"], whole["loss"], rtol=1e-6)


def test_an_evaluation_minds_the_weights_given():
    batch = make_batches(1)[0]
    weight = np.zeros(32, np.float32)
    weight[:7] = 2.0
    loop = make_loop()
    state = loop.init(DICT.make())

    weighed = loop.evaluate(state, [ff.Batch(batch, weight=weight)])
    first = loop.evaluate(state, [{name: rows[:7] for name, rows in batch.items()}])

    assert weighed.weight == 14
    np.testing.assert_allclose(weighed["loss"], first["loss"], rtol=1e-6)


def test_a_loss_sees_fields_and_weight():
    seen = {}

    def peek(model, batch):
        seen.update(kind=type(batch), names=list(batch), weight=batch.weight.shape)
        return loss_fn(model, batch)

    loop = make_loop(peek)
    loop.step(loop.init(DICT.make()), padded(make_batches(1)[0], 48))

    assert seen == {"kind": ff.Batch, "names": ["x", "y"], "weight": (48,)}


def test_a_batch_shows_its_true_rows_alone():
    batch = ff.Batch({"x": np.arange(4), "y": jnp.zeros((4, 2))}, size=3)

    assert batch.size == 3
    assert batch["x"].tolist() == [0, 1, 2]
    assert batch["y"].shape == (3, 2)
    assert batch.weight.tolist() == [1, 1, 1]
    assert dict(batch).keys() == {"x", "y"}
    assert jax.tree.map(np.shape, dict(jax.tree.map(lambda x: x[:1], batch))) == {
        "x": (1,),
        "y": (1, 2),
    }
    assert repr(batch) == "Batch(x: i32[3], y: f32[3,2])"


def test_an_unknown_field_lists_those_there_are():
    batch = ff.Batch({"image": np.zeros(2), "label": np.zeros(2)})

    with pytest.raises(ff.MissingFieldError, match="`images`.*`image`, `label`"):
        batch["images"]


@pytest.mark.parametrize(
    ("fields", "options", "error", "text"),
    [
        ([np.zeros(2)], {}, TypeError, "must map names to arrays, got a list"),
        ({}, {}, ValueError, "at least one field"),
        ({1: np.zeros(2)}, {}, TypeError, "must be a string, got 1"),
        ({"x": np.zeros(2)}, {"size": 3}, ValueError, "1 to the 2 rows held, got 3"),
    ],
)
def test_wrong_batches_are_refused(fields, options, error, text):
    with pytest.raises(error, match=text):
        ff.Batch(fields, **options)


def test_a_missing_field_in_a_loss_is_named():
    loop = make_loop()

    with pytest.raises(ff.MissingFieldError, match="`y`; its fields are `x`"):
        loop.step(
            loop.init(DICT.make()), ff.Batch({"x": np.zeros((2, 12), np.float32)})
        )


def test_a_batch_is_no_iterable_of_batches():
    loop = make_loop()

    with pytest.raises(TypeError, match="looks like one batch"):
        loop.run(loop.init(DICT.make()), ff.Batch(make_batches(1)[0]))
