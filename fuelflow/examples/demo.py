"""The training run of ``fuelflow demo``: epochs, made of steps and an evaluation."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
import optax

import fuelflow as ff
from fuelflow.examples import digits
from fuelflow.examples.screen import Epoch, Misread, Screen

PEAK_LR = 4e-3
EVAL_BATCH_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command was asked for.

    Attributes:
        kind: The kind of model to train.
        epochs: Passes over the digits to learn from.
        batch_size: Digits in one step.
        seed: Of the first parameters, the dropout and the order of the digits.
    """

    kind: Literal["nnx", "linen", "plain"]
    epochs: int
    batch_size: int
    seed: int


def run(
    options: Options, train: digits.Digits, held_out: digits.Digits, screen: Screen
) -> None:
    """Trains a network on the digits and shows how it goes.

    Args:
        options: What the command was asked for.
        train: Digits to learn from, ``batch_size`` or more.
        held_out: Digits that are only looked at.
        screen: Where it is shown.
    """
    screen.wait("building the model")
    example = _make_example(options)
    steps_per_epoch = len(train["label"]) // options.batch_size
    num_steps = options.epochs * steps_per_epoch
    loop = ff.TrainingLoop(
        example.loss_fn,
        optax.adamw,
        schedule=ff.schedules.cosine(PEAK_LR, num_steps // 10, num_steps),
        max_grad_norm=1.0,
    )
    state = loop.init(example.model, seed=options.seed)
    num_params = sum(param.size for param in state.params.values())
    screen.introduce(
        len(held_out["label"]),
        data=f"{len(train['label']):,} handwritten digits to learn from, "
        f"{len(held_out['label'])} held out",
        model=f"two convolutions in {example.name}, {num_params:,} parameters",
        steps=f"{options.epochs} epochs of {steps_per_epoch}, each of "
        f"{options.batch_size} digits, on {jax.devices()[0].platform}",
    )
    screen.start(num_steps)
    rng = np.random.default_rng(options.seed)
    for number in range(1, options.epochs + 1):
        batches = digits.shuffled_batches(train, options.batch_size, rng)
        state, outcomes, secs = _train_epoch(loop, state, batches, screen.advance)
        unseen = digits.ordered_batches(held_out, EVAL_BATCH_SIZE)
        screen.show(_summary(number, outcomes, secs, loop.evaluate(state, unseen)))
    misread = _find_misread(example, loop.model(state), held_out)
    screen.conclude(misread, _compile_secs(loop))


def _make_example(options: Options) -> digits.Example:
    match options.kind:
        case "nnx":
            return digits.nnx_example(options.seed)
        case "linen":
            return digits.linen_example(options.seed)
        case "plain":
            return digits.plain_example(options.seed)


def _train_epoch(
    loop: ff.TrainingLoop,
    state: ff.TrainState,
    batches: Iterable[digits.Digits],
    on_step: Callable[[], None],
) -> tuple[ff.TrainState, list[ff.StepOutcome], float]:
    """A step over each batch: the state, what each said, and the seconds they took."""
    secs_compiling = _compile_secs(loop)
    start = time.perf_counter()
    outcomes = []
    for batch in batches:
        state, outcome = loop.step(state, batch)
        outcomes.append(outcome)
        on_step()
    outcomes[-1].realize()  # the loop runs ahead of the device: only now is it done
    secs = time.perf_counter() - start
    return state, outcomes, secs - (_compile_secs(loop) - secs_compiling)


def _compile_secs(loop: ff.TrainingLoop) -> float:
    return sum(record.seconds for record in loop.compiles)


def _summary(
    number: int,
    outcomes: Sequence[ff.StepOutcome],
    secs: float,
    evaluation: ff.Evaluation,
) -> Epoch:
    return Epoch(
        number=number,
        loss=_mean(outcome.loss for outcome in outcomes),
        train_accuracy=_mean(outcome.metrics["accuracy"] for outcome in outcomes),
        held_out_accuracy=evaluation["accuracy"],
        lr=outcomes[-1].lr,
        grad_norm=_mean(outcome.grad_norm for outcome in outcomes),
        steps_per_sec=len(outcomes) / secs,
    )


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _find_misread(
    example: digits.Example, model: object, held_out: digits.Digits
) -> list[Misread]:
    """The held-out digits that a trained model takes for others."""
    logits = example.predict(model, held_out["image"])
    guesses = np.asarray(logits.argmax(-1))
    return [
        Misread(held_out["image"][row, ..., 0], int(label), int(guess))
        for row, (label, guess) in enumerate(
            zip(held_out["label"], guesses, strict=True)
        )
        if label != guess
    ]
