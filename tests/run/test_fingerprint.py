"""Facts differ where the runs of two processes would."""

import functools

import jax
import numpy as np
import optax
import pytest

import fuelflow as ff
from fuelflow.run.fingerprint import code_digest, facts_of

SCALE = 1.0


def make_loss(scale):
    def loss_fn(params, batch):
        return scale * params["w"] * batch["x"]

    return loss_fn


LOSS = make_loss(1.0)


def loss_with_a_global(params, batch):
    return SCALE * params["w"] * batch["x"]


def test_a_function_has_one_digest_and_others_have_another(monkeypatch):
    here = code_digest(loss_with_a_global)

    assert code_digest(make_loss(1.0)) == code_digest(make_loss(1.0))
    assert code_digest(make_loss(1.0)) != code_digest(make_loss(2.0))
    assert code_digest(functools.partial(loss_with_a_global)) == here
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert code_digest(loss_with_a_global) != here


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"w": 2.0}, "`params.w`"),
        ({"max_grad_norm": 1.0}, "max_grad_norm"),
        ({"loss_fn": make_loss(2.0)}, "code of `loss_fn`"),
    ],
)
def test_what_differs_is_named(change, name):
    def facts(*, seed=0, w=1.0, loss_fn=LOSS, **rules):
        loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1, **rules)
        return facts_of(loop, loop.init({"w": np.float32(w)}, seed=seed))

    one, other = facts(), facts(**change)

    assert {key for key in one if one[key] != other[key]} == {name}
    assert facts() == one


def test_facts_read_no_more_than_a_number_of_each_array():
    loop = ff.TrainingLoop(make_loss(1.0), optax.sgd, schedule=0.1)
    state = loop.init({"w": np.zeros((1000, 1000), np.float32)})

    assert "float32[1000, 1000]" in facts_of(loop, state)["`params.w`"]
    assert len(facts_of(loop, state)["`params.w`"]) < 100
    assert jax.tree.leaves(state.params)[0].is_deleted() is False
