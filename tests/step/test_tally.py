"""What steps add up, rank by rank: exact, whatever the number of steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import assert_bitwise, host_copy
from rank_problems import (
    mesh_of,
    read_sums,
    small_batch,
    small_loop,
    small_model,
    summing,
    token_loss,
    token_model,
    tokens,
)

import fuelflow as ff
from fuelflow.step.tally import Tally, Totals, totals_of, zero_tally
from fuelflow.step.weighted import Mean


@pytest.mark.parametrize("num_ranks", [0, 8])
def test_the_sums_of_an_epoch_are_exact_for_its_tail(num_ranks: int):
    rows = small_batch(67)
    loop = small_loop(num_ranks).replace(schedule=0.0)
    loader = ff.DataLoader(rows, 16, shuffle=False, mesh=mesh_of(num_ranks))
    state = loop.init(small_model())
    state, outcome = loop.run(summing(loop, state), loader)
    totals = read_sums(state, outcome)

    # With eight ranks, rank r has the rows 2 r and 2 r + 1 of each batch of sixteen.
    errors = (rows["x"] @ small_model()["w"] - rows["y"]) ** 2
    counts, sums = (
        np.append(values, np.zeros(13)).reshape(5, max(num_ranks, 1), -1).sum((0, 2))
        for values in (np.ones(67), errors)
    )
    assert counts.sum() == 67
    assert totals.num_rows.tolist() == counts.tolist()
    assert totals.weights["loss"].tolist() == counts.tolist()
    assert totals.weights["absolute"].tolist() == counts.tolist()
    np.testing.assert_allclose(totals.sums["loss"], sums, rtol=1e-6)


def test_the_sums_of_ranks_add_up_to_those_of_one_device():
    one, ranks = (_sums_of_tokens(num_ranks) for num_ranks in (0, 8))

    num_tokens = sum(tokens(seed)["mask"].sum() for seed in range(6))
    assert ranks.weights["loss"].sum() == one.weights["loss"].sum() == num_tokens
    assert ranks.weights["loss"][0] == 0  # a rank of rows without tokens
    assert ranks.num_rows.tolist() == [12] * 8
    assert one.num_rows.tolist() == [96]
    assert set(one.sums) == {"loss", "error", "first"}
    for name, values in one.sums.items():
        np.testing.assert_allclose(ranks.sums[name].sum(), values.sum(), rtol=1e-6)


def _sums_of_tokens(num_ranks: int) -> Totals:
    loop = ff.TrainingLoop(
        token_loss,
        optax.sgd,
        schedule=0.01,
        accumulate_steps=2,
        mesh=mesh_of(num_ranks),
    )
    state = summing(loop, loop.init(token_model()))
    batches = [tokens(seed) for seed in range(6)]
    return read_sums(*loop.run(state, batches, steps_per_call=3))


def test_skipped_steps_are_in_no_mean_though_their_rows_are_counted():
    loop = small_loop(nonfinite="skip")
    bad = small_batch()
    bad["x"][3] = np.inf
    state = summing(loop, loop.init(small_model()))
    state, outcome = loop.run(state, [small_batch(), bad, small_batch(), bad])
    totals = read_sums(state, outcome)

    assert int(state.num_skipped) == 2
    assert totals.weights["loss"].tolist() == [4] * 8
    assert totals.num_rows.tolist() == [8] * 8
    assert np.isfinite(totals.sums["loss"]).all()


def test_keeping_account_changes_no_number_of_a_step():
    loop = small_loop()
    plain, summed = loop.init(small_model()), loop.init(small_model())
    summed = summing(loop, summed)
    for seed in range(3):
        plain, _ = loop.step(plain, small_batch(seed=seed))
        summed, _ = loop.step(summed, small_batch(seed=seed))

    assert_bitwise(host_copy(summed.params), host_copy(plain.params))
    assert_bitwise(host_copy(summed.opt_state), host_copy(plain.opt_state))


NUM_STEPS, NUM_RANKS = 4096, 2


@jax.jit
def _added_up(tally: Tally, means: Any, weights: Any) -> Tally:
    """A tally with steps ``[num_steps, num_ranks]`` added, one by one."""

    def add(tally: Tally, step: Any) -> tuple[Tally, None]:
        mean, weight = step
        rows = jnp.ones(NUM_RANKS, jnp.int32)
        return tally.plus([Mean(mean, weight)], rows), None

    return jax.lax.scan(add, tally, (means, weights))[0]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 0.5]),
    offset=st.sampled_from([0.0, 1.0, 1000.0]),
)
def test_sums_of_many_steps_are_far_better_than_in_float32(
    seed: int, spread: float, offset: float
):
    random = np.random.default_rng(seed)
    shape = (NUM_STEPS, NUM_RANKS)
    means = np.float32(offset + 10 ** (spread * random.normal(size=shape)))
    weights = np.float32(2.0 ** random.integers(0, 4, size=shape))  # exact products
    tally = _added_up(zero_tally(NUM_RANKS, 1), means, weights)
    totals = totals_of(tally, ["loss"])
    exact = (np.float64(means) * weights).sum(0)

    assert totals.weights["loss"].tolist() == weights.sum(0, dtype=np.float64).tolist()
    assert totals.num_rows.tolist() == [NUM_STEPS] * NUM_RANKS
    # Each step rounds what it adds to 24 bits, in either direction.
    error = np.abs(totals.sums["loss"] / exact - 1)
    assert (error < 2**-27).all()
    naive = np.add.accumulate(means * weights, axis=0)[-1]
    assert (error < np.abs(naive / exact - 1) / 8).any()


def test_counting_goes_on_where_float32_stops():
    tally = zero_tally(NUM_RANKS, 1)
    tally.sums[:, 1] = 2**24  # where adding 1 to a float32 no longer changes it
    ones = np.ones((NUM_STEPS, NUM_RANKS), np.float32)
    totals = totals_of(_added_up(tally, 0.1 * ones, ones), ["loss"])

    assert totals.weights["loss"].tolist() == [2**24 + NUM_STEPS] * NUM_RANKS
    assert np.float32(2**24) + np.float32(1) == 2**24
