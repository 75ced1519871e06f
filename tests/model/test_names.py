import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import fuelflow as ff
from fuelflow.model.names import select_names

NAMES = ["encoder.0.kernel", "encoder.0.bias", "encoder.10.bias", "head.kernel"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("*", NAMES),
        ("encoder.0.bias", ["encoder.0.bias"]),
        ("encoder", ["encoder.0.kernel", "encoder.0.bias", "encoder.10.bias"]),
        ("encoder.1*", ["encoder.10.bias"]),
        ("encoder.?", ["encoder.0.kernel", "encoder.0.bias"]),
        ("*.kernel", ["encoder.0.kernel", "head.kernel"]),
        ("*er.[0-9]", ["encoder.0.kernel", "encoder.0.bias"]),
        ("!encoder", ["head.kernel"]),
        (["encoder", "!*.bias"], ["encoder.0.kernel"]),
        (["!*.bias", "encoder"], ["encoder.0.kernel"]),
        (["head", "encoder.10"], ["encoder.10.bias", "head.kernel"]),
    ],
)
def test_a_pattern_selects_by_glob_by_prefix_and_by_exclusion(patterns, expected):
    assert select_names(patterns, NAMES, "trainable") == frozenset(expected)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("encodr", "`trainable` pattern `encodr` selects no .* names are `encoder`"),
        ("encoder.1", r"`encoder.1` selects no parameter; close names are .*`encoder."),
        ("enc", "`enc` selects no parameter"),
        ("Head.kernel", "close names are `head.kernel`"),
        ("zzz", "the names are `encoder.0.kernel`, .*`head.kernel`"),
        ("!encodr", "pattern `encodr` selects no parameter"),
    ],
)
def test_a_pattern_that_selects_nothing_is_refused_with_close_names(pattern, message):
    with pytest.raises(ValueError, match=message):
        select_names(pattern, NAMES, "trainable")


def test_of_many_names_only_the_first_are_shown():
    names = [f"a{number}" for number in range(20)]

    with pytest.raises(ValueError, match=r"`a0`, .*`a7` and 12 more"):
        select_names("zzzzzz", names, "trainable")


def test_patterns_must_be_strings_and_there_must_be_one():
    with pytest.raises(ValueError, match="`trainable` must hold at least one pattern"):
        select_names([], NAMES, "trainable")
    with pytest.raises(TypeError, match=r"`trainable` must hold patterns .* got a int"):
        select_names(["head", 3], NAMES, "trainable")  # pyright: ignore[reportArgumentType]


def test_a_frozen_subtree_has_no_gradient_and_a_wrong_name_is_refused_at_init():
    model = {"encoder": [jnp.ones(2)], "head": jnp.ones(2)}
    batch = {"x": np.ones((3, 2), np.float32)}

    def loss_fn(model, batch):
        return batch["x"] @ (model["encoder"][0] * model["head"])

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1, trainable="!encoder")
    grads = loop.grads(loop.init(model), batch)

    assert list(grads) == ["head"]
    with pytest.raises(
        ValueError, match=r"`encoder\.O` selects .* names are `encoder.0`"
    ):
        loop.replace(trainable="encoder.O").init(model)


class _NNXWithADottedKey(nnx.Module):
    def __init__(self):
        self.layers = nnx.Dict(
            {"a.b": nnx.Param(jnp.ones(1)), "a": nnx.Dict(b=nnx.Param(jnp.ones(1)))}
        )


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, "a.b"),
        (
            ff.Linen(
                nn.Dense(1), {"params": {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}}
            ),
            "a.b",
        ),
        (_NNXWithADottedKey(), "layers.a.b"),
    ],
    ids=["dict", "linen", "nnx"],
)
def test_two_parameters_of_one_name_are_refused(model, name):
    loop = ff.TrainingLoop(lambda model, batch: 0.0, optax.sgd, schedule=0.1)

    with pytest.raises(ValueError, match=f"two are named `.*{name}`; rename a key"):
        loop.init(model)


def test_names_follow_dicts_sequences_and_attributes():
    model = {"layers": [{"w": jnp.ones(1)}, (jnp.ones(1), jnp.ones(1))], 3: jnp.ones(1)}
    model = {"net": {str(key): value for key, value in model.items()}}

    state = ff.TrainingLoop(lambda model, batch: 0.0, optax.sgd).init(model)

    assert list(state.params) == [
        "net.3",
        "net.layers.0.w",
        "net.layers.1.0",
        "net.layers.1.1",
    ]
    assert jax.tree.structure(state.params).num_leaves == 4
