"""Wrong input is refused by name, before work starts, with the state still usable."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import KINDS, make_batches, mlp_loss, train

import fuelflow as ff

BATCH = {"x": np.ones((4, 3), np.float32), "y": np.zeros(4, np.int32)}


def _squares(params: Any, batch: Any) -> Any:
    return (batch["x"] @ params["w"]) ** 2


def _loop(loss_fn: Any = _squares, **options: Any) -> ff.TrainingLoop:
    return ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1, **options)


def _init(loop: ff.TrainingLoop) -> ff.TrainState:
    return loop.init({"w": np.ones(3, np.float32)})


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (
            lambda x: x.astype(int),
            TypeError,
            r"the loss must be floating, got int32\[4\]",
        ),
        (lambda x: x > 0, TypeError, r"the loss must be floating, got bool\[4\]"),
        (lambda x: x + 0j, TypeError, r"the loss must be floating, got complex64\[4\]"),
        (
            lambda x: x[:, None] * np.ones(5, np.float32),
            ValueError,
            r"the loss must be a scalar, a vector .* \[4\], .* got float32\[4, 5\]",
        ),
        (lambda x: x[:2], ValueError, r"got float32\[2\]"),
        (lambda x: None, TypeError, "the loss must be a scalar, .* got a NoneType"),
        (lambda x: "low", TypeError, "the loss must be a scalar, .* got a str"),
        (lambda x: {"loss": x}, TypeError, "the loss must be a scalar, .* got a dict"),
        (lambda x: (x, x), TypeError, r"a dict of metrics, got a tuple of \(.*, "),
        (lambda x: (x, {}, 1), TypeError, "a dict of metrics, got a tuple of"),
        (lambda x: (x, {3: x}), TypeError, "a metric's name must be a string, got 3"),
        (lambda x: (x, {"loss": x}), ValueError, "a metric must not be named `loss`"),
        (
            lambda x: (x, {"wide": x[:, None] * x}),
            ValueError,
            r"the metric `wide` must be a scalar, .* got float32\[4, 4\]",
        ),
        (
            lambda x: ff.Weighted(x, np.ones(3)),
            ValueError,
            r"the weight of the loss must broadcast to its value \[4\], got \[3\]",
        ),
        (
            lambda x: ff.Weighted(x.astype(int), np.ones(4)),
            TypeError,
            r"the loss must be floating, got int32\[4\]",
        ),
    ],
)
@pytest.mark.parametrize("call", ["step", "evaluate", "grads", "plan", "run"])
def test_losses_and_metrics_of_wrong_form_are_refused(
    call: str, result: Any, error: type[Exception], message: str
):
    loop = _loop(lambda params, batch: result(_squares(params, batch)))
    state = _init(loop)
    argument = [BATCH] * 2 if call in ("evaluate", "run") else BATCH
    options = {"steps_per_call": 2} if call == "run" else {}

    with pytest.raises(error, match=message):
        getattr(loop, call)(state, argument, **options)
    assert not state.step.is_deleted()
    assert loop.compiles == ()


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        (
            {"x": np.ones((4, 3), np.float32), "y": np.zeros(5)},
            ValueError,
            r'leading axis: `batch\["x"\]` has 4, `batch\["y"\]` has 5',
        ),
        ({}, ValueError, "`batch` must hold at least one array, got {}"),
        (None, ValueError, "`batch` must hold at least one array, got None"),
        (
            {"x": np.ones((0, 3), np.float32)},
            ValueError,
            r"`batch` must have at least one row, got f32\[0,3\]",
        ),
        ({"x": np.float32(1)}, ValueError, r'`batch\["x"\]` must have a leading batch'),
        (
            {"x": 1.0},
            TypeError,
            r'`batch\["x"\]` must be a NumPy or JAX array, got a b',
        ),
        ({"x": ["a", "b"]}, TypeError, r'`batch\["x"\]\[0\]` must be a NumPy or JAX'),
        (
            {"x": np.array(["a", "b"])},
            TypeError,
            r'`batch\["x"\]` must be numeric, got dtype <U1: encode it',
        ),
        (
            {"x": np.array([None, {}])},
            TypeError,
            r'`batch\["x"\]` must be numeric, got dtype object',
        ),
    ],
)
@pytest.mark.parametrize("call", ["step", "evaluate", "run"])
def test_batches_of_wrong_form_are_refused(
    call: str, batch: Any, error: type[Exception], message: str
):
    loop = _loop()
    argument = batch if call == "step" else [batch]

    with pytest.raises(error, match=message):
        getattr(loop, call)(_init(loop), argument)


def test_a_torch_tensor_is_refused_by_its_type():
    torch = pytest.importorskip("torch")
    loop = _loop()

    with pytest.raises(
        TypeError, match=r'`batch\["x"\]` must be .*, got a torch.Tensor'
    ):
        loop.step(_init(loop), {"x": torch.ones(4, 3)})


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_field_the_batch_lacks_is_named_with_those_there_are(call: str):
    loop = _loop(lambda params, batch: (batch["image"] @ params["w"]) ** 2)
    argument = BATCH if call == "step" else [BATCH]

    with pytest.raises(
        ff.MissingFieldError, match="no field `image`; its fields are `x`, `y`"
    ) as info:
        getattr(loop, call)(_init(loop), argument)
    assert (info.value.name, info.value.fields) == ("image", ("x", "y"))
    assert isinstance(info.value, KeyError)


def test_a_key_error_of_the_users_own_stays_as_it_is():
    table: dict[Any, int] = {"a": 1}
    loop = _loop(lambda params, batch: _squares(params, batch) * table[3])

    with pytest.raises(KeyError) as info:
        loop.step(_init(loop), BATCH)
    assert type(info.value) is KeyError
    assert info.value.args == (3,)


@pytest.mark.parametrize("name", ["max_grad_norm", "max_grad_value"])
@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "1", True])
def test_clip_limits_that_are_not_positive_are_refused(name: str, limit: Any):
    with pytest.raises(
        (ValueError, TypeError), match=f"`{name}` must be (finite and more|a number)"
    ):
        _loop(**{name: limit})


@pytest.mark.parametrize("name", ["accumulate_steps", "log_interval", "max_in_flight"])
def test_counts_below_one_are_refused(name: str):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        _loop(**{name: 0})
    with pytest.raises(
        TypeError, match=f"`{name}` must be an integer, got .* of type float"
    ):
        _loop(**{name: 2.0})


def test_other_arguments_of_the_wrong_kind_are_refused():
    with pytest.raises(
        ValueError, match='`nonfinite` must be "raise", "skip" or "prop'
    ):
        _loop(nonfinite="ignore")
    with pytest.raises(TypeError, match="`optimizer` must be an optax .* got a float"):
        ff.TrainingLoop(_squares, 0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="`lr_groups` must map patterns to factors"):
        _init(_loop(lr_groups=["w"]))
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_norm'"):
        _loop().replace(max_norm=1.0)


@pytest.mark.parametrize(
    "loss_fn", [lambda model: 0, lambda a, b, c, d: 0, lambda model, *, key: 0]
)
def test_loss_functions_that_cannot_be_called_are_refused(loss_fn: Any):
    with pytest.raises(
        TypeError, match=r"`loss_fn` must be callable as \(model, batch\)"
    ):
        _loop(loss_fn)
    with pytest.raises(TypeError, match="`loss_fn` must be a function .* got a int"):
        _loop(3)


def test_an_optimizer_with_its_own_rate_takes_no_other():
    remedy = "pass the factory, `optax.adamw` in place of"
    with pytest.raises(ValueError, match=f"a `schedule` needs an optimizer.*{remedy}"):
        ff.TrainingLoop(_squares, optax.adamw(1e-3), schedule=0.1)
    loop = ff.TrainingLoop(_squares, optax.adamw(1e-3))
    state = _init(loop)
    with pytest.raises(ValueError, match=f"`set_lr` needs an optimizer.*{remedy}"):
        loop.set_lr(state, 0.1)
    with pytest.raises(
        ValueError, match=f"`set_lr_scale` needs an optimizer.*{remedy}"
    ):
        loop.set_lr_scale(state, 0.1)


def test_factories_that_cannot_be_used_are_refused():
    def wants_a_number(lr: Any) -> Any:
        return optax.sgd(lr if lr > 0 else 0.0)

    with pytest.raises(
        TypeError, match="`wants_a_number` must accept a traced learning"
    ):
        _init(ff.TrainingLoop(_squares, wants_a_number, schedule=0.1))
    with pytest.raises(
        TypeError, match="must return an optax transformation, got a int"
    ):
        _init(ff.TrainingLoop(_squares, lambda lr: 3, schedule=0.1))  # pyright: ignore[reportArgumentType]


def test_a_rate_that_was_never_given_is_asked_for():
    loop = ff.TrainingLoop(_squares, optax.sgd)
    state = _init(loop)

    with pytest.raises(
        ValueError, match="learning rate must be given before the first"
    ):
        loop.step(state, BATCH)
    state, outcome = loop.step(loop.set_lr(state, 0.25), BATCH)
    assert outcome.lr == 0.25


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), "high", None])
def test_rates_that_cannot_be_used_are_refused(rate: Any):
    loop = ff.TrainingLoop(_squares, optax.sgd)
    state = _init(loop)

    with pytest.raises(
        (ValueError, TypeError), match="`lr` must be (finite and at least 0|a n)"
    ):
        loop.set_lr(state, rate)
    with pytest.raises(
        (ValueError, TypeError), match="`scale` must be (finite and at least 0|a n)"
    ):
        loop.set_lr_scale(state, rate)


@pytest.mark.parametrize("seed", [1.5, "0", None, np.ones(2), jnp.ones(2)])
def test_seeds_that_are_none_are_refused(seed: Any):
    with pytest.raises(TypeError, match="`seed` must be an integer or"):
        _loop().init({"w": np.ones(3, np.float32)}, seed=seed)


def test_the_step_count_is_checked():
    loop = _loop()
    with pytest.raises(ValueError, match="`step` must be at least 0, got -1"):
        loop.set_global_step(_init(loop), -1)
    with pytest.raises(
        TypeError, match="`step` must be an integer, got .* of type float"
    ):
        loop.set_global_step(_init(loop), 1.0)  # pyright: ignore[reportArgumentType]


def test_a_schedule_of_more_than_one_rate_is_refused():
    with pytest.raises(TypeError, match="`schedule` must return one real number"):
        _loop().replace(schedule=lambda step: jnp.stack([step, step]) * 0.1)


def test_a_state_of_another_optimizer_is_refused_by_name():
    sgd, adam = _loop(), ff.TrainingLoop(_squares, optax.adam, schedule=0.1)
    state = _init(adam)

    _init(sgd)
    with pytest.raises(
        ff.StateMismatchError, match="unexpected opt_state.0.count, opt_state.0.mu.w"
    ) as info:
        sgd.step(state, BATCH)
    assert info.value.missing == ()
    with pytest.raises(ff.StateMismatchError, match="missing opt_state.0.count"):
        adam.step(_init(sgd), BATCH)


def test_a_state_of_another_model_is_refused_by_name():
    loop = ff.TrainingLoop(mlp_loss(KINDS[0]), optax.sgd, schedule=0.1)
    other = ff.TrainingLoop(mlp_loss(KINDS[0]), optax.sgd, schedule=0.1)
    loop.init(KINDS[0].make())
    model = KINDS[0].make()
    wider = {**model, "first": {**model["first"], "bias": np.zeros(17, np.float32)}}
    renamed = {"first": model["first"], "last": model["second"]}

    with pytest.raises(
        ff.StateMismatchError,
        match=r"params.first.bias is f32\[17\] where f32\[16\] is expected",
    ):
        loop.step(other.init(wider), make_batches(1)[0])
    with pytest.raises(
        ff.StateMismatchError,
        match="missing params.second.bias, .*; unexpected params.last.bias",
    ):
        loop.step(other.init(renamed), make_batches(1)[0])


def test_a_state_of_another_structure_with_equal_names_is_refused():
    def loss_fn(params: Any, batch: Any) -> Any:
        return batch["x"] @ params[0]

    loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
    loop.init([np.ones(3, np.float32)])
    state = loop.replace().init({"0": np.ones(3, np.float32)})

    with pytest.raises(
        ff.StateMismatchError, match="the model is of another structure"
    ):
        loop.step(state, BATCH)


@pytest.mark.parametrize("state", [None, {}, "state"])
def test_what_is_no_state_is_refused(state: Any):
    loop = _loop()
    _init(loop)

    with pytest.raises(TypeError, match="`state` must be a TrainState from loop.init"):
        loop.step(state, BATCH)


@pytest.mark.parametrize("call", ["step", "grads", "evaluate", "model", "run", "plan"])
def test_a_state_that_was_used_up_is_refused(call: str):
    loop = _loop()
    first = _init(loop)
    second, _ = loop.step(first, BATCH)
    loop.step(second, BATCH)
    arguments = {"model": (), "evaluate": ([BATCH],), "run": ([BATCH],)}

    for state in (first, second, jax.tree.unflatten(*_flat(second))):
        with pytest.raises(ff.UsedStateError, match="this state has been used up"):
            getattr(loop, call)(state, *arguments.get(call, (BATCH,)))


def _flat(state: ff.TrainState) -> tuple[Any, Any]:
    leaves, treedef = jax.tree.flatten(state)
    return treedef, leaves


def test_an_error_in_the_loss_is_the_users_own_and_costs_nothing():
    def loss_fn(params: Any, batch: Any) -> Any:
        raise RuntimeError("of the user's")

    loop = _loop(loss_fn)
    state = _init(loop)

    with pytest.raises(RuntimeError, match="of the user's"):
        loop.step(state, BATCH)
    assert not state.step.is_deleted()
    good = loop.replace(loss_fn=_squares)
    _, outcome = good.step(state, BATCH)
    assert outcome.global_step == 1


def test_the_loop_is_immutable():
    loop = _loop()
    with pytest.raises(AttributeError):
        loop.accumulate_steps = 2  # pyright: ignore[reportAttributeAccessIssue]
    state, _ = train(loop, {"w": np.ones(3, np.float32)}, [BATCH])
    with pytest.raises(AttributeError):
        state.step = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("nonfinite", ["raise", "propagate"])
def test_an_optimizer_that_changes_a_dtype_is_refused(nonfinite: Any):
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return grads, state.astype(jnp.bfloat16)

    chain: Any = optax.GradientTransformation
    forgetful = chain(lambda params: jnp.zeros(()), update)
    loop = ff.TrainingLoop(_squares, forgetful, nonfinite=nonfinite)

    with pytest.raises(TypeError, match=r"would change opt_state: f32\[\] → bf16\[\]"):
        loop.step(_init(loop), BATCH)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_batch_on_another_device_is_refused(is_first: bool):
    loop = _loop()
    state = _init(loop)
    if not is_first:
        state, _ = loop.step(state, BATCH)
    away = jax.device_put(BATCH, jax.devices()[1])

    with pytest.raises(
        ValueError, match=r'`batch\["x"\]` must be where the state is, on .*, but is on'
    ):
        loop.step(state, away)
    _, outcome = loop.step(state, BATCH)
    assert outcome.finite


@pytest.mark.parametrize("call", ["grads", "plan", "model", "evaluate"])
def test_what_takes_no_step_needs_no_rate(call: str):
    loop = ff.TrainingLoop(_squares, optax.sgd)
    state = _init(loop)
    arguments = {"model": (), "evaluate": ([BATCH],)}

    assert getattr(loop, call)(state, *arguments.get(call, (BATCH,)))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_state_without_a_rate_never_steps_by_another_loop(nonfinite: Any):
    scheduled = _loop(nonfinite=nonfinite)
    unset = scheduled.replace(schedule=None)
    state, _ = scheduled.step(_init(scheduled), BATCH)
    state, _ = unset.step(unset.set_lr(state, 0.1), BATCH)
    state, _ = scheduled.step(_init(scheduled), BATCH)
    before = np.array(state.params["w"])
    state, outcome = unset.step(state, BATCH)

    assert outcome.finite is False
    np.testing.assert_array_equal(state.params["w"], before)


def test_a_factory_that_keeps_its_rate_is_refused():
    injected = optax.inject_hyperparams(optax.adam)

    with pytest.raises(TypeError, match="must not keep its rate in its state"):
        _init(ff.TrainingLoop(_squares, injected, schedule=0.1))


@pytest.mark.parametrize(
    "optimizer", [optax.scale_by_adam, optax.clip, optax.MultiSteps]
)
def test_what_optax_has_besides_factories_is_refused(optimizer: Any):
    with pytest.raises(TypeError, match="must be a factory of the learning rate, but"):
        ff.TrainingLoop(_squares, optimizer, schedule=0.1)


def test_a_key_error_about_the_model_is_not_blamed_on_the_batch():
    loop = _loop(lambda params, batch: (batch["x"] @ params["weight"]) ** 2)

    with pytest.raises(KeyError, match="weight") as info:
        loop.step(_init(loop), BATCH)
    assert type(info.value) is KeyError


def test_arrays_that_jax_would_misread_are_refused():
    loop = _loop()
    foreign = BATCH["x"].astype(BATCH["x"].dtype.newbyteorder())

    with pytest.raises(TypeError, match="this machine's byte order, got >f4"):
        loop.step(_init(loop), {"x": foreign})
    with pytest.raises(TypeError, match="must have no mask: pass it as a field"):
        loop.step(_init(loop), {"x": np.ma.masked_array(BATCH["x"])})


@pytest.mark.parametrize(
    "error",
    [
        ff.NonFiniteError(
            3, 0.5, 1.0, lr=0.1, names=("w",), num_names=1, num_skipped=1
        ),
        ff.RecompileError("step", ["batch: f32[3] → f32[4]"]),
        ff.UsedStateError("step"),
        ff.StateMismatchError(["a"], ["b"], [("c", "f32[3]", "f32[4]")]),
        ff.MissingFieldError("image", ["x", "y"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_text_and_facts_when_pickled(error: Exception):
    copied = pickle.loads(pickle.dumps(error))

    assert (type(copied), str(copied)) == (type(error), str(error))
    assert vars(copied) == vars(error)
