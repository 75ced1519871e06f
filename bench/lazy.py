"""What a step costs whose loss is written line by line in the loop.

Three lines of a notebook, a call of the model, a loss and its mean, are recorded anew
at every step and run as one program. The rows set that beside the hand-written jitted
step, beside `loop.step` with the same loss as a function, and beside Flax's own
optimizer. Then ten thousand steps say what was compiled and how much memory was kept.

    python bench/lazy.py [--smoke] [--json PATH]
"""

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from peers import (
    LEARNING_RATE,
    MAX_NORM,
    Batch,
    Perceptron,
    apply,
    flat_loss,
    make_batches,
    make_hand_loop,
    make_nnx_loop,
    make_params,
)
from step import HAND, SMALL, WIDTH, make_step_loop, on_device
from timing import Row, Target, interleaved, make_parser, make_row, report

import fuelflow as ff

WITHIN = Target(text="≤ 1.10 ×", max_ratio=1.10)
NO_TARGET = Target(text="none")
FIVE_TIMES = Target(text="≥ 5 × faster", max_ratio=1 / 5)


@dataclass(frozen=True)
class Size:
    """How much to measure.

    Attributes:
        rounds: Timed rounds.
        steps: Steps in each repeat.
        many: Steps of the long run.
    """

    rounds: int
    steps: int
    many: int


FULL = Size(rounds=40, steps=200, many=10_000)
SMOKE = Size(rounds=3, steps=4, many=50)


def make_graph(model: Any, **options: Any) -> ff.Graph:
    """The graph that equals the hand-written step."""
    graph = ff.Graph(model, max_grad_norm=MAX_NORM, **options)
    graph.set_optimizer(optax.adamw)
    graph.set_scheduler(LEARNING_RATE)
    return graph


def make_lazy_loop(graph: ff.Graph, batches: Sequence[Batch]) -> Callable[[], None]:
    """A loss written in the loop, and a step over it, for each batch."""
    cross_entropy = ff.lazy(optax.softmax_cross_entropy_with_integer_labels)

    def run() -> None:
        for batch in batches:
            logits = graph(batch["image"])
            loss = cross_entropy(logits, batch["label"]).mean()
            graph.step(loss)
        jax.block_until_ready(graph.state)

    return run


def step_rows(size: Size) -> Iterator[Row]:
    batches = make_batches(size.steps, WIDTH)
    for where, given in (
        ("data on the device", on_device(batches)),
        ("NumPy", batches),
    ):
        samples = interleaved(
            {
                "lazy": make_lazy_loop(
                    make_graph(make_params(SMALL, WIDTH), apply=apply), given
                ),
                "loop": make_step_loop(flat_loss, make_params(SMALL, WIDTH), given),
                "hand": make_hand_loop(make_params(SMALL, WIDTH), given),
            },
            size.rounds,
            per=size.steps,
        )
        name = f"graph.step, 8 leaves, {where}"
        lazy = samples["lazy"]
        yield make_row((name, HAND), lazy, samples["hand"], "us", WITHIN)
        yield make_row((name, "loop.step"), lazy, samples["loop"], "us", NO_TARGET)


def nnx_rows(size: Size) -> Iterator[Row]:
    batches = on_device(make_batches(size.steps, WIDTH))
    samples = interleaved(
        {
            "lazy": make_lazy_loop(make_graph(Perceptron(SMALL, WIDTH)), batches),
            "nnx": make_nnx_loop(Perceptron(SMALL, WIDTH), batches),
        },
        size.rounds,
        per=size.steps,
    )
    names = ("graph.step, NNX, 8 leaves", "nnx.jit + nnx.Optimizer")
    yield make_row(names, samples["lazy"], samples["nnx"], "us", FIVE_TIMES)


def print_long_run(size: Size) -> None:
    """Prints what many steps compiled, and the memory they kept."""
    batches = on_device(make_batches(16, WIDTH))
    graph = make_graph(make_params(SMALL, WIDTH), apply=apply)
    run = make_lazy_loop(graph, batches)
    for _ in range(4):
        run()
    gc.collect()
    arrays = len(jax.live_arrays())
    tracemalloc.start()
    for _ in range(size.many // len(batches)):
        run()
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(
        f"\n{graph.training_step} lazy steps: {len(graph.compiles)} compiled, "
        f"{kept / 1024:.1f} KiB of Python memory kept, "
        f"{len(jax.live_arrays()) - arrays:+d} live arrays"
    )


PARTS = (step_rows, nnx_rows)


def main() -> None:
    arguments = make_parser("Times lazy steps against peers.", __file__).parse_args()
    size = SMOKE if arguments.smoke else FULL
    report((row for part in PARTS for row in part(size)), arguments.json)
    print_long_run(size)


if __name__ == "__main__":
    main()
