"""Clipping and AdamW against PyTorch, over a hundred steps."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from problems import CLASSES, FEATURES, HIDDEN, KINDS, make_batches, mlp_loss, train

import fuelflow as ff

torch = pytest.importorskip("torch")

STEPS, RATE = 100, 3e-3


def _torch_model(params: dict[str, Any]) -> Any:
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, CLASSES),
    )
    with torch.no_grad():
        for layer, name in ((model[0], "first"), (model[2], "second")):
            layer.weight.copy_(torch.tensor(np.array(params[name]["kernel"]).T))
            layer.bias.copy_(torch.tensor(np.array(params[name]["bias"])))
    return model


def _train_torch(
    optimizer: Any, model: Any, schedule: Any, clip: tuple[str, float] | None
) -> tuple[dict[str, np.ndarray], list[float]]:
    norms = []
    for batch in make_batches(STEPS):
        optimizer.zero_grad()
        logits = model(torch.tensor(batch["x"]))
        labels = torch.tensor(batch["y"]).long()
        torch.nn.functional.cross_entropy(logits, labels).backward()
        grads = [param.grad for param in model.parameters()]
        norms.append(float(torch.sqrt(sum((grad**2).sum() for grad in grads))))
        if clip is not None:
            clip_fn = getattr(torch.nn.utils, f"clip_grad_{clip[0]}_")
            clip_fn(model.parameters(), clip[1])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    params = {}
    for layer, name in ((model[0], "first"), (model[2], "second")):
        params[f"{name}.kernel"] = layer.weight.detach().numpy().T
        params[f"{name}.bias"] = layer.bias.detach().numpy()
    return params, norms


def _assert_close(state: ff.TrainState, expected: dict[str, np.ndarray]) -> None:
    for name, param in expected.items():
        # A float32 rounding (6e-8) per operation and step, over a hundred steps whose
        # moving averages carry them on; parameters are of order one.
        np.testing.assert_allclose(state.params[name], param, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clip", [None, ("norm", 0.3), ("value", 0.02)])
def test_adamw_with_clipping_equals_torch(clip: tuple[str, float] | None):
    kind = KINDS[0]
    options: Any = {} if clip is None else {f"max_grad_{clip[0]}": clip[1]}
    loop = ff.TrainingLoop(
        mlp_loss(kind),
        lambda lr: optax.adamw(lr, weight_decay=0.01),
        schedule=RATE,
        **options,
    )
    state, outcomes = train(loop, kind.make(), make_batches(STEPS))
    model = _torch_model(kind.make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    expected, norms = _train_torch(optimizer, model, None, clip)

    _assert_close(state, expected)
    np.testing.assert_allclose([o.grad_norm for o in outcomes], norms, rtol=1e-3)


def test_momentum_under_a_cosine_schedule_equals_torch():
    kind = KINDS[0]
    loop = ff.TrainingLoop(
        mlp_loss(kind),
        lambda lr: optax.sgd(lr, momentum=0.9),
        schedule=ff.schedules.cosine(0.1, 0, STEPS),
        max_grad_norm=0.5,
    )
    state, outcomes = train(loop, kind.make(), make_batches(STEPS))
    model = _torch_model(kind.make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    expected, norms = _train_torch(optimizer, model, schedule, ("norm", 0.5))

    _assert_close(state, expected)
    np.testing.assert_allclose([o.grad_norm for o in outcomes], norms, rtol=1e-3)


def test_rate_groups_equal_torchs_parameter_groups():
    kind = KINDS[0]
    loop = ff.TrainingLoop(
        mlp_loss(kind),
        lambda lr: optax.adamw(lr, weight_decay=0.1),
        schedule=RATE,
        lr_groups={"first": 0.1},
    )
    state, _ = train(loop, kind.make(), make_batches(STEPS))
    model = _torch_model(kind.make())
    groups = [
        {"params": model[0].parameters(), "lr": RATE * 0.1},
        {"params": model[2].parameters()},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.1)
    expected, _ = _train_torch(optimizer, model, None, None)

    _assert_close(state, expected)


def test_accumulated_microbatches_equal_torchs_summed_backwards():
    kind = KINDS[0]
    loop = ff.TrainingLoop(
        mlp_loss(kind), optax.sgd, schedule=0.1, accumulate_steps=4, max_grad_norm=0.5
    )
    state, _ = train(loop, kind.make(), make_batches(STEPS))
    model = _torch_model(kind.make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in make_batches(STEPS):
        optimizer.zero_grad()
        for rows in np.split(np.arange(32), 4):
            logits = model(torch.tensor(batch["x"][rows]))
            labels = torch.tensor(batch["y"][rows]).long()
            (torch.nn.functional.cross_entropy(logits, labels) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    expected = {
        "first.kernel": model[0].weight.detach().numpy().T,
        "second.bias": model[2].bias.detach().numpy(),
    }

    _assert_close(state, expected)
    assert jax.tree.leaves(state.opt_state) == []
