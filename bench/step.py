"""What one optimizer step costs through fuelflow, beside the step written by hand.

Every row answers "how much dearer or cheaper than ...?". Ours and the peer run in one
process on the same model, batches, optimizer (AdamW behind a clip by global norm) and
devices, with their states donated. A repeat is a stretch of steps that ends with
``block_until_ready``; the repeats of both are interleaved in shuffled order, after one
that is not timed, so compiling stays apart. A row shows the medians, and the median and
quartiles of the ratio within a round: a slow moment of the machine falls on both sides.
Memory is what the compiled programs say of themselves, and imports run in fresh
interpreters.

    python bench/step.py [--smoke] [--json PATH] [--profile]
"""

import cProfile
import os
import pstats
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from peers import (
    LEARNING_RATE,
    MAX_NORM,
    Batch,
    Perceptron,
    flat_loss,
    loss_with_metrics,
    make_batches,
    make_hand_loop,
    make_hand_scan,
    make_hand_step,
    make_nnx_loop,
    make_optimizer,
    make_params,
    module_loss,
)
from timing import Row, Target, interleaved, make_parser, make_row, report

import fuelflow as ff

SMALL = 4  # layers: 8 leaves
WIDTH = 64
HAND = "hand-written jitted optax step"
NEAR = Target(text="≤ 1.03 ×", max_ratio=1.03)
FIVE_TIMES = Target(text="≥ 5 × faster", max_ratio=1 / 5)
RUN_TARGET = Target(text="≥ 3.5 × faster", max_ratio=1 / 3.5)
NO_SLOWER = Target(text="no slower", max_ratio=1.0)
EQUAL = Target(text="equal", max_ratio=1.0)
NO_TARGET = Target(text="none: what a loop in one program can give")
IMPORT = Target(text="+ 60 ms at most", max_difference=60)


@dataclass(frozen=True)
class Size:
    """How much to measure.

    Attributes:
        rounds: Timed rounds.
        steps: Steps in each repeat, and at most 50 of them in a call of `loop.run`.
        imports: Fresh interpreters for each import.
        deep: Layers of the deep model.
    """

    rounds: int
    steps: int
    imports: int
    deep: int


# A stretch is many times longer than the run-ahead of either side: it is the pace of a
# long training run that counts, not that of filling an empty queue.
FULL = Size(rounds=40, steps=200, imports=15, deep=24)
SMOKE = Size(rounds=3, steps=4, imports=1, deep=5)


def make_loop(loss_fn: Callable[..., Any], **options: Any) -> ff.TrainingLoop:
    """The loop that equals the hand-written step."""
    return ff.TrainingLoop(
        loss_fn,
        optax.adamw,
        schedule=LEARNING_RATE,
        max_grad_norm=MAX_NORM,
        **options,
    )


def make_step_loop(
    loss_fn: Callable[..., Any],
    model: Any,
    batches: Sequence[Batch],
    *,
    reads_outcome: bool = False,
) -> Callable[[], None]:
    """`loop.step` over the batches, which goes on where it stopped."""
    loop = make_loop(loss_fn)
    state = loop.init(model)

    def run() -> None:
        nonlocal state
        for batch in batches:
            state, outcome = loop.step(state, batch)
            if reads_outcome:
                read_all(outcome)
        jax.block_until_ready(state)

    return run


def make_run_loop(batches: Sequence[Batch], steps_per_call: int) -> Callable[[], None]:
    """`loop.run` over the batches, which goes on where it stopped."""
    loop = make_loop(flat_loss)
    state = loop.init(make_params(SMALL, WIDTH))

    def run() -> None:
        nonlocal state
        state, _ = loop.run(state, batches, steps_per_call=steps_per_call)
        jax.block_until_ready(state)

    return run


def read_all(outcome: ff.StepOutcome) -> tuple[Any, ...]:
    """Every field of an outcome, as a user who logs each step reads it."""
    return (
        outcome.loss,
        outcome.grad_norm,
        outcome.lr,
        outcome.global_step,
        outcome.metrics,
    )


def on_device(batches: Sequence[Batch]) -> list[Batch]:
    """The batches as JAX arrays."""
    return [jax.tree.map(jnp.asarray, batch) for batch in batches]


def step_rows(size: Size) -> Iterator[Row]:
    params = make_params(SMALL, WIDTH)
    arrays = make_batches(size.steps, WIDTH)
    for kind, batches in (("data at hand", on_device(arrays)), ("NumPy", arrays)):
        times = interleaved(
            {
                "ours": make_step_loop(flat_loss, params, batches),
                "hand": make_hand_loop(params, batches),
            },
            size.rounds,
            size.steps,
        )
        names = (f"loop.step, 8 leaves, {kind}", HAND)
        yield make_row(names, times["ours"], times["hand"], "us", NEAR)


def nnx_rows(size: Size) -> Iterator[Row]:
    batches = on_device(make_batches(size.steps, WIDTH))
    # The deep model's steps take several times as long, so it has fewer rounds.
    for num_layers, rounds in ((SMALL, size.rounds), (size.deep, -(-size.rounds // 4))):
        params = make_params(num_layers, WIDTH)
        module = Perceptron(num_layers, WIDTH)
        times = interleaved(
            {
                "ours": make_step_loop(module_loss, module, batches),
                "flat": make_step_loop(flat_loss, params, batches),
                "nnx": make_nnx_loop(Perceptron(num_layers, WIDTH), batches),
                "hand": make_hand_loop(params, batches),
            },
            rounds,
            size.steps,
        )
        name = f"loop.step, NNX, {2 * num_layers} leaves"
        for against, peer, target in (
            ("nnx.jit + nnx.Optimizer", "nnx", FIVE_TIMES),
            ("loop.step on the flat dict", "flat", NEAR),
            (f"{HAND}, flat dict", "hand", NEAR),
        ):
            yield make_row((name, against), times["ours"], times[peer], "us", target)


def run_rows(size: Size) -> Iterator[Row]:
    batches = make_batches(size.steps, WIDTH)
    steps_per_call = min(50, size.steps)
    times = interleaved(
        {
            "NumPy": make_run_loop(batches, steps_per_call),
            "data at hand": make_run_loop(on_device(batches), steps_per_call),
            "hand": make_hand_loop(make_params(SMALL, WIDTH), batches),
            "scan": make_hand_scan(
                make_params(SMALL, WIDTH), on_device(batches), steps_per_call
            ),
        },
        size.rounds,
        size.steps,
    )
    for kind in ("NumPy", "data at hand"):
        names = (f"loop.run, {steps_per_call} steps a call, {kind}", f"{HAND}, NumPy")
        yield make_row(names, times[kind], times["hand"], "us", RUN_TARGET)
    names = (f"loop.run, {steps_per_call} steps a call, NumPy", "hand-written lax.scan")
    yield make_row(names, times["NumPy"], times["scan"], "us", NO_TARGET)


def reading_rows(size: Size) -> Iterator[Row]:
    params = make_params(SMALL, WIDTH)
    batches = on_device(make_batches(size.steps, WIDTH))
    loss_fn = loss_with_metrics
    times = interleaved(
        {
            "ours": make_step_loop(loss_fn, params, batches, reads_outcome=True),
            "hand": make_hand_loop(params, batches, loss_fn, reads_loss=True),
        },
        size.rounds,
        size.steps,
    )
    names = ("loop.step, all of the outcome read", "hand-written step, float(loss)")
    yield make_row(names, times["ours"], times["hand"], "us", NO_SLOWER)


def memory_rows(size: Size) -> Iterator[Row]:
    del size
    for width, batch_size in ((WIDTH, 64), (512, 8)):
        params = make_params(SMALL, width)
        batch = on_device(make_batches(1, width, batch_size))[0]
        loop = make_loop(flat_loss)
        plan = loop.plan(loop.init(params), batch)
        opt_state = make_optimizer().init(params)
        compiled = make_hand_step().lower(params, opt_state, batch).compile()
        peer = compiled.memory_analysis()
        for what, ours, theirs in (
            ("memory", _plan_bytes(plan), _analysis_bytes(peer)),
            ("peak", plan.peak_bytes, getattr(peer, "peak_memory_in_bytes", None)),
        ):
            if ours and theirs:  # not every backend gives both
                names = (f"{what} of a step, {width} wide, batch {batch_size}", HAND)
                yield make_row(names, [ours], [theirs], "B", EQUAL)


def _plan_bytes(plan: ff.StepPlan) -> int | None:
    """Arguments, outputs that reuse none of them, and temporaries."""
    held, made = plan.argument_bytes, plan.output_bytes
    reused, temporary = plan.aliased_bytes, plan.temporary_bytes
    if held is None or made is None or reused is None or temporary is None:
        return None
    return held + made - reused + temporary


def _analysis_bytes(analysis: Any) -> int | None:
    """The same sum of JAX's own figures."""
    if analysis is None:
        return None
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )


def import_rows(size: Size) -> Iterator[Row]:
    ours: list[float] = []
    peer: list[float] = []
    sides = [("fuelflow", ours), ("jax, optax", peer)]
    import_seconds("fuelflow")  # writes the bytecode, which any installed package has
    for _ in range(size.imports):
        sides.reverse()
        for modules, seconds in sides:
            seconds.append(import_seconds(modules))
    yield make_row(("import fuelflow", "import jax, optax"), ours, peer, "ms", IMPORT)


def import_seconds(modules: str) -> float:
    """Seconds that an import statement takes in a fresh interpreter."""
    code = (
        "import time; start = time.perf_counter(); "
        f"import {modules}; print(time.perf_counter() - start)"
    )
    unwanted = "PYTHONDONTWRITEBYTECODE"
    environment = {k: v for k, v in os.environ.items() if k != unwanted}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return float(done.stdout)


PARTS = (step_rows, nnx_rows, run_rows, reading_rows, memory_rows, import_rows)


def print_profile(num_steps: int = 20_000) -> None:
    """Prints where the host's time of a step goes, for a model of one number."""
    loop = make_loop(lambda params, batch: params["w"] * batch["x"])
    batch = {"x": jnp.ones(1)}
    state, _ = loop.step(loop.init({"w": jnp.float32(0)}), batch)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        state, _ = loop.step(state, batch)
    jax.block_until_ready(state)
    profiler.disable()
    print(
        f"\nhost time of {num_steps} steps of a trivial model (the profiler adds to it)"
    )
    pstats.Stats(profiler).sort_stats("tottime").print_stats(15)


def main() -> None:
    parser = make_parser("Times a step against its peers.", __file__)
    parser.add_argument("--profile", action="store_true", help="host time by function")
    arguments = parser.parse_args()
    size = SMOKE if arguments.smoke else FULL
    report((row for part in PARTS for row in part(size)), arguments.json)
    if arguments.profile:
        print_profile()


if __name__ == "__main__":
    main()
