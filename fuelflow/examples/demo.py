"""The training run of ``fuelflow demo``: epochs, made of steps and an evaluation."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

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
        is_graph: Whether the losses are written line by line, in a `Graph`.
        epochs: Passes over the digits to learn from.
        batch_size: Digits in one step.
        seed: Of the first parameters, the dropout and the order of the digits.
    """

    kind: Literal["nnx", "linen", "plain"]
    is_graph: bool
    epochs: int
    batch_size: int
    seed: int


class Training(Protocol):
    """One of the two ways to train the network: they come to the same numbers."""

    def steps(self, epoch: int) -> Iterator[ff.StepOutcome]:
        """A step over each batch of an epoch, and what it said."""
        ...

    def evaluate(self, batches: Iterable[ff.Batch]) -> ff.Evaluation:
        """The means over a data set."""
        ...

    def model(self) -> Any:
        """The model as trained so far."""
        ...

    def num_params(self) -> int:
        """Values that are trained."""
        ...

    def compile_secs(self) -> float:
        """Seconds spent compiling so far."""
        ...


class LoopTraining:
    """The network trained by a `TrainingLoop`: the loss is a function."""

    def __init__(
        self, example: digits.Example, loader: ff.DataLoader, seed: int, **rules: Any
    ) -> None:
        self._loop = ff.TrainingLoop(example.loss_fn, optax.adamw, **rules)
        self._state = self._loop.init(example.model, seed=seed)
        self._loader = loader

    def steps(self, epoch: int) -> Iterator[ff.StepOutcome]:
        """A step over each batch of an epoch, and what it said."""
        for batch in self._loader.epoch(epoch):
            self._state, outcome = self._loop.step(self._state, batch)
            yield outcome

    def evaluate(self, batches: Iterable[ff.Batch]) -> ff.Evaluation:
        """The means over a data set."""
        return self._loop.evaluate(self._state, batches)

    def model(self) -> Any:
        """The model as trained so far."""
        return self._loop.model(self._state)

    def num_params(self) -> int:
        """Values that are trained."""
        return _num_params(self._state)

    def compile_secs(self) -> float:
        """Seconds spent compiling so far."""
        return _compile_secs(self._loop)


class GraphTraining:
    """The network trained by a `Graph`: the loss is written where it is used."""

    def __init__(
        self,
        example: digits.Example,
        loader: ff.DataLoader,
        seed: int,
        *,
        schedule: Any,
        **rules: Any,
    ) -> None:
        self._graph = ff.Graph(example.model, seed=seed, apply=example.apply, **rules)
        self._graph.set_optimizer(optax.adamw)
        self._graph.set_scheduler(schedule)
        self._graph.set_data_loader(loader, "image")
        self._judge = self._graph.loop.replace(loss_fn=example.loss_fn)

    def steps(self, epoch: int) -> Iterator[ff.StepOutcome]:
        """A step over each batch of an epoch, and what it said."""
        score = ff.lazy(digits.score)
        for batch in self._graph.epoch(epoch):
            logits = self._graph.forward_batch(batch)
            losses, metrics = score(logits, batch["label"])
            yield self._graph.step(losses, metrics=metrics)

    def evaluate(self, batches: Iterable[ff.Batch]) -> ff.Evaluation:
        """The means over a data set."""
        return self._judge.evaluate(self._graph.state, batches)

    def model(self) -> Any:
        """The model as trained so far."""
        return self._graph.model

    def num_params(self) -> int:
        """Values that are trained."""
        return _num_params(self._graph.state)

    def compile_secs(self) -> float:
        """Seconds spent compiling so far."""
        return _compile_secs(self._graph) + _compile_secs(self._judge)


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
    example = make_example(options)
    # Rows that fill no batch wait for the next epoch, which has another order.
    loader = ff.DataLoader(train, options.batch_size, seed=options.seed, drop_last=True)
    unseen = ff.DataLoader(held_out, EVAL_BATCH_SIZE, shuffle=False)
    num_steps = options.epochs * len(loader)
    training = _make_training(options, example, loader, num_steps)
    num_params = training.num_params()
    way = "line by line, in a lazy graph" if options.is_graph else "by a training loop"
    screen.introduce(
        len(held_out["label"]),
        data=f"{len(train['label']):,} handwritten digits to learn from, "
        f"{len(held_out['label'])} held out",
        model=f"two convolutions in {example.name}, {num_params:,} parameters",
        steps=f"{options.epochs} epochs of {len(loader)}, each of "
        f"{options.batch_size} digits, {way}, on {jax.devices()[0].platform}",
    )
    screen.start(num_steps)
    for epoch in range(options.epochs):
        outcomes, secs = _train_epoch(training, epoch, screen.advance)
        evaluation = training.evaluate(unseen.epoch(0))
        screen.show(_summary(epoch + 1, outcomes, secs, evaluation))
    misread = _find_misread(example, training.model(), held_out)
    screen.conclude(misread, training.compile_secs())


def _make_training(
    options: Options, example: digits.Example, loader: ff.DataLoader, num_steps: int
) -> Training:
    kind = GraphTraining if options.is_graph else LoopTraining
    return kind(
        example,
        loader,
        options.seed,
        schedule=ff.schedules.cosine(PEAK_LR, num_steps // 10, num_steps),
        max_grad_norm=1.0,
    )


def make_example(options: Options, axis_name: str | None = None) -> digits.Example:
    """The model that was asked for.

    Args:
        options: What the command was asked for.
        axis_name: The axis of a mesh over which statistics of a batch are shared.
    """
    match options.kind:
        case "nnx":
            return digits.nnx_example(options.seed, axis_name)
        case "linen":
            return digits.linen_example(options.seed, axis_name)
        case "plain":
            return digits.plain_example(options.seed)


def _train_epoch(
    training: Training, epoch: int, on_step: Callable[[], None]
) -> tuple[list[ff.StepOutcome], float]:
    """What each step of an epoch said, and the seconds they took."""
    secs_compiling = training.compile_secs()
    start = time.perf_counter()
    outcomes = []
    for outcome in training.steps(epoch):
        outcomes.append(outcome)
        on_step()
    outcomes[-1].realize()  # the loop runs ahead of the device: only now is it done
    secs = time.perf_counter() - start
    return outcomes, secs - (training.compile_secs() - secs_compiling)


def _compile_secs(loop: ff.TrainingLoop | ff.Graph) -> float:
    return sum(record.seconds for record in loop.compiles)


def _num_params(state: ff.TrainState) -> int:
    return sum(param.size for param in state.params.values())


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
