"""A checkpoint of a model that has changed since: what fits, and what is said."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fuelflow as ff
from fuelflow._errors import StateMismatchError, UsedStateError
from fuelflow.checkpoint.checkpointer import Checkpointer
from fuelflow.checkpoint.rename import renamed


def layer(value, num_in=3, num_out=2):
    return {"kernel": jnp.full((num_in, num_out), value), "bias": jnp.full(2, value)}


def loss_fn(params, batch):
    return batch["x"].mean(-1)


def make_loop(**options):
    return ff.TrainingLoop(loss_fn, optax.adam, **{"schedule": 0.1, **options})


BATCH = {"x": np.ones((4, 3), np.float32)}
OLD = {"encoder": layer(1.0), "head": layer(2.0)}


@pytest.fixture
def saved(tmp_path):
    """A checkpointer that holds step 1 of a run."""
    loop = make_loop()
    state, _ = loop.step(loop.init(OLD, seed=5), BATCH)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state)
    return checkpointer


def test_what_does_not_fit_is_named_before_anything_changes(saved):
    loop = make_loop()
    model = {"encoder": layer(7.0, num_in=4), "tail": layer(8.0)}
    state = loop.init(model)

    with pytest.raises(StateMismatchError) as caught:
        saved.restore(loop, state)

    error = caught.value
    assert "the checkpoint " in str(error)
    assert "`partial=True`" in str(error)
    assert "params.tail.kernel" in error.missing
    assert "opt_state.0.mu.head.bias" in error.unexpected
    assert ("params.encoder.kernel", "float32[3,2]", "float32[4,2]") in error.different
    assert int(loop.step(state, BATCH)[0].step) == 1


def test_a_partial_restore_loads_what_fits_and_reports_the_rest(saved):
    loop = make_loop()
    model = {"encoder": layer(7.0, num_in=4), "tail": layer(8.0)}

    restored = saved.restore(loop, model, partial=True)

    params, report = restored.state.params, restored.report
    assert params["encoder.bias"].tolist() == [1, 1]
    assert params["encoder.kernel"][0, 0] == 7
    assert params["tail.bias"].tolist() == [8, 8]
    assert "params.encoder.bias" in report.loaded
    assert "params.tail.bias" in report.missing
    assert "params.head.bias" in report.unexpected
    assert ("params.encoder.kernel", "float32[3,2]", "float32[4,2]") in report.different
    assert "differently shaped: " in str(report)
    assert int(loop.step(restored.state, BATCH)[0].step) == 2


def test_another_dtype_is_a_mismatch_unless_it_may_be_cast(saved):
    loop = make_loop()
    model = {"encoder": layer(7.0), "head": layer(7.0)}
    model["head"] = {name: x.astype(jnp.bfloat16) for name, x in model["head"].items()}

    with pytest.raises(StateMismatchError, match="params.head.bias is float32"):
        saved.restore(loop, model)
    restored = saved.restore(loop, model, partial=True)

    assert restored.state.params["head.bias"].dtype == jnp.bfloat16
    assert restored.state.params["head.bias"].tolist() == [2, 2]
    cast = {name: (had, has) for name, had, has in restored.report.cast}
    assert cast["params.head.kernel"] == ("float32[3,2]", "bfloat16[3,2]")


def test_renamed_parameters_take_their_moments_along(saved):
    loop = make_loop()
    model = {"backbone": layer(7.0), "head": layer(7.0)}
    moments = saved.restore(make_loop(), OLD).state.opt_state[0].mu

    restored = saved.restore(loop, model, rename={"encoder": "backbone"})

    assert restored.report.is_complete
    assert restored.state.params["backbone.kernel"][0, 0] == 1
    np.testing.assert_array_equal(
        restored.state.opt_state[0].mu["backbone.kernel"], moments["encoder.kernel"]
    )
    assert int(restored.state.step) == 1


def test_a_whole_checkpoint_goes_into_a_part_of_a_larger_model(saved):
    loop = make_loop()
    model = {"student": OLD, "teacher": {"encoder": layer(7.0), "head": layer(7.0)}}
    model["student"] = {name: layer(8.0) for name in OLD}

    restored = saved.restore(
        loop,
        model,
        only="params.teacher",
        rename={"*": "teacher.*"},
    )

    assert restored.state.params["teacher.head.bias"].tolist() == [2, 2]
    assert restored.state.params["student.head.bias"].tolist() == [8, 8]
    assert int(restored.state.step) == 0
    assert len(restored.report.loaded) == 4


def test_one_part_of_a_checkpoint_goes_into_another_model(saved):
    loop = make_loop()
    model = {"encoder": layer(7.0), "new": layer(8.0)}
    state = loop.init(model)

    restored = saved.restore(loop, state, only="params.encoder")

    assert restored.report.loaded == ("params.encoder.bias", "params.encoder.kernel")
    assert restored.state.params["encoder.bias"].tolist() == [1, 1]
    loop.step(restored.state, BATCH)
    assert state.params["new.bias"].tolist() == [8, 8]  # copied, so still usable


def test_a_used_up_state_can_tell_the_names_but_not_the_values(saved):
    loop = make_loop()
    state = loop.init(OLD)
    loop.step(state, BATCH)

    restored = saved.restore(loop, state).state
    assert int(restored.step) == 1
    assert restored.key == jax.random.key(5)
    with pytest.raises(UsedStateError):
        saved.restore(loop, state, only="params.encoder")


def test_an_optimizer_that_changed_is_named_and_can_be_left_out(saved):
    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)

    with pytest.raises(StateMismatchError, match="unexpected opt_state"):
        saved.restore(loop, OLD)
    restored = saved.restore(loop, OLD, only=["params", "step"])

    assert int(restored.state.step) == 1


def test_patterns_that_select_nothing_are_refused(saved):
    with pytest.raises(ValueError, match="`only` pattern `params.encodr` selects no"):
        saved.restore(make_loop(), OLD, only="params.encodr")
    with pytest.raises(ValueError, match="`rename` pattern `encodr` matches nothing"):
        saved.restore(make_loop(), OLD, rename={"encodr": "x"})


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"a.0": "b.0"}, "params.b.0.kernel"),
        ({"*": "deep.*"}, "params.deep.a.0.kernel"),
        ({"a.*.kernel": "layers.*.w"}, "params.layers.0.w"),
        ({"a": ""}, "params.0.kernel"),
        ({"a.?": "b"}, None),
        ({"0": "b"}, None),
    ],
)
def test_patterns_rename_paths(rename, expected):
    if expected is None:
        with pytest.raises(ValueError, match="matches nothing"):
            renamed(["params.a.0.kernel"], rename)
    else:
        made = renamed(["params.a.0.kernel", "opt_state.0.mu.a.0.kernel"], rename)
        assert made["params.a.0.kernel"] == expected
        moment = expected.replace("params.", "opt_state.0.mu.")
        assert made["opt_state.0.mu.a.0.kernel"] == moment


def test_names_that_would_become_one_are_refused():
    with pytest.raises(ValueError, match="makes `params.c` of both"):
        renamed(["params.a", "params.b"], {"a": "c", "b": "c"})
    with pytest.raises(ValueError, match="as many `\\*` in a replacement"):
        renamed(["params.a"], {"*": "c"})


def test_variables_of_a_module_are_compared_as_well(tmp_path):
    class Normed(nnx.Module):
        def __init__(self, width):
            self.norm = nnx.BatchNorm(width, rngs=nnx.Rngs(0))

    loop = ff.TrainingLoop(lambda model, batch: batch["x"].mean(-1), optax.sgd)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(loop.init(Normed(3)))

    with pytest.raises(
        StateMismatchError, match="variables.norm.mean is float32\\[3\\]"
    ):
        checkpointer.restore(loop, Normed(4))
