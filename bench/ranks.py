"""What whole epochs and several ranks cost, beside the steps alone.

Four questions. What does a `Trainer` add to an epoch: the account kept on the devices,
the observer's thread, the clocks and, on a mesh, the pass of each rank? Its peer is
`loop.run` over the same batches, with as many steps in a dispatch; both are at their
second epoch or later, and the trainer's thread waits for its turn in `epoch_fn`. What
does a mesh of one device add to a step? What does a step take on 1, 2, 4 and 8 ranks
with 64 rows each? And what does the account of an epoch take with many ranks? Those
are simulated, up to 256: one device adds up the sums of all of them, where in a run
each has its own to add, and the host makes their `EpochMetrics`.

All sides run in one process, in rounds of shuffled order after one that is not timed,
and end with ``block_until_ready``. A row shows the medians, and the median and
quartiles of the ratio within a round.

A CPU is made to look like eight devices, which share its cores. So time grows with the
ranks, as all of their arithmetic is done by the same cores: such rows do not tell how
fast eight devices would be. Beside one device that does the work of all of them, they
tell what spreading it adds: the collectives, the threads, and an optimizer's update for
each rank instead of one.

    python bench/ranks.py [--smoke] [--json PATH]
"""

import os

# Before jax is imported, which reads it soon after.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from peers import Batch, flat_loss, loss_with_metrics, make_batches, make_params
from step import SMALL, WIDTH, make_loop
from timing import Row, Target, interleaved, make_parser, make_row, report

import fuelflow as ff
from fuelflow.metrics.ranks import RankRecord, reduce_ranks
from fuelflow.step.tally import Tally, zero_tally
from fuelflow.step.weighted import Mean

NUM_ROWS = 64  # of a batch, or of a rank's part of one
NEAR = Target(text="≤ 1.03 ×", max_ratio=1.03)
SHARED = Target(text="none: what the cores that the ranks share can show")
NO_TARGET = Target(text="none: what spreading the same work adds")
SMALL_PART = Target(text="≤ 0.03 of them", max_ratio=0.03)
A_HUNDREDTH = Target(text="≤ 0.01 of them", max_ratio=0.01)


@dataclass(frozen=True)
class Size:
    """How much to measure.

    Attributes:
        rounds: Timed rounds on one device.
        mesh_rounds: The same on several.
        steps: Steps of an epoch.
        mesh_steps: Steps of a repeat on several devices.
        several: Steps in a dispatch, where there are several.
        counts: Ranks of the rows on scaling; the first is what they are set beside.
        widths: Of the layers in those rows.
    """

    rounds: int
    mesh_rounds: int
    steps: int
    mesh_steps: int
    several: int
    counts: tuple[int, ...]
    widths: tuple[int, ...]


FULL = Size(
    rounds=25,
    mesh_rounds=5,
    steps=500,
    mesh_steps=50,
    several=25,
    counts=(1, 2, 4, 8),
    widths=(WIDTH, 8 * WIDTH),
)
SMOKE = Size(
    rounds=2,
    mesh_rounds=2,
    steps=8,
    mesh_steps=4,
    several=4,
    counts=(1, 2),
    widths=(WIDTH,),
)


def make_loader(size: Size, mesh: Mesh | None, *, is_resident: bool) -> ff.DataLoader:
    """The rows of an epoch, in another order each time."""
    batches = make_batches(size.steps, WIDTH, NUM_ROWS)
    arrays = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    return ff.DataLoader(arrays, NUM_ROWS, resident=is_resident, mesh=mesh)


def make_run(
    loop: ff.TrainingLoop, loader: ff.DataLoader, steps_per_call: int
) -> Callable[[], None]:
    """`loop.run` over the next epoch."""
    state, epoch = loop.init(make_params(SMALL, WIDTH)), 0

    def run() -> None:
        nonlocal state, epoch
        batches = loader.epoch(epoch)
        state, _ = loop.run(state, batches, steps_per_call=steps_per_call)
        jax.block_until_ready(state)
        epoch += 1

    return run


@contextmanager
def training(
    loop: ff.TrainingLoop, loader: ff.DataLoader, steps_per_call: int, epochs: int
) -> Iterator[Callable[[], None]]:
    """The next epoch of a trainer in the background, which waits until it is called."""
    turn = threading.Semaphore(0)

    def wait(epoch: int, state: ff.TrainState) -> None:
        del epoch, state
        turn.acquire()

    trainer = ff.Trainer(
        loop,
        make_params(SMALL, WIDTH),
        loader,
        epochs=epochs,
        epoch_fn=wait,
        steps_per_call=steps_per_call,
    )
    handle = trainer.run()

    def run() -> None:
        turn.release()
        handle.next_metrics()

    try:
        yield run
    finally:
        handle.stop()
        turn.release()
        handle.join()


def trainer_rows(size: Size) -> Iterator[Row]:
    for mesh, rounds in ((None, size.rounds), (ff.mesh(), size.mesh_rounds)):
        for is_resident in (True, False):
            for steps_per_call in (1, size.several):
                yield _trainer_row(
                    size, mesh, rounds, steps_per_call, is_resident=is_resident
                )


def _trainer_row(
    size: Size,
    mesh: Mesh | None,
    rounds: int,
    steps_per_call: int,
    *,
    is_resident: bool,
) -> Row:
    def make_side() -> tuple[ff.TrainingLoop, ff.DataLoader, int]:
        loader = make_loader(size, mesh, is_resident=is_resident)
        return make_loop(loss_with_metrics, mesh=mesh), loader, steps_per_call

    with training(*make_side(), epochs=rounds + 1) as epoch:
        times = interleaved(
            {"trainer": epoch, "run": make_run(*make_side())}, rounds, size.steps
        )
    where = "one device" if mesh is None else f"{mesh.size} ranks"
    data = "resident" if is_resident else "streamed"
    name = f"Trainer epoch, {data}, {steps_per_call} steps a call, {where}"
    return make_row((name, "loop.run"), times["trainer"], times["run"], "us", NEAR)


def make_steps(
    batches: Sequence[Batch], mesh: Mesh | None, width: int = WIDTH
) -> Callable[[], None]:
    """`loop.step` over the batches, which goes on where it stopped."""
    loop = make_loop(flat_loss, mesh=mesh)
    state = loop.init(make_params(SMALL, width))

    def run() -> None:
        nonlocal state
        for batch in batches:
            state, _ = loop.step(state, batch)
        jax.block_until_ready(state)

    return run


def placed(batches: Sequence[Batch], mesh: Mesh | None) -> list[Batch]:
    """The batches where a loop takes them, as a loader places them."""
    if mesh is None:
        return [jax.tree.map(jnp.asarray, batch) for batch in batches]
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return [jax.device_put(batch, rows) for batch in batches]


def mesh_of_one_rows(size: Size) -> Iterator[Row]:
    mesh = ff.mesh(jax.devices()[:1])
    batches = make_batches(size.steps, WIDTH, NUM_ROWS)
    for kind in ("data at hand", "NumPy"):
        sides = {"one device": None, "mesh of one": mesh}
        times = interleaved(
            {
                side: make_steps(
                    batches if kind == "NumPy" else placed(batches, place), place
                )
                for side, place in sides.items()
            },
            size.rounds,
            size.steps,
        )
        names = (f"loop.step on a mesh of one, {kind}", "loop.step on one device")
        yield make_row(names, times["mesh of one"], times["one device"], "us", NEAR)


def scaling_rows(size: Size) -> Iterator[Row]:
    counts = [count for count in size.counts if count <= jax.device_count()]
    for width in size.widths:
        cases: dict[str, Any] = {}
        for count in counts:
            mesh = ff.mesh(jax.devices()[:count])
            batches = make_batches(size.mesh_steps, width, count * NUM_ROWS)
            cases[f"{count} ranks"] = make_steps(placed(batches, mesh), mesh, width)
            cases[f"{count} as one"] = make_steps(placed(batches, None), None, width)
        times = interleaved(cases, size.mesh_rounds, size.mesh_steps)
        for count in counts[1:]:
            ours = times[f"{count} ranks"]
            name = f"loop.step, {count} ranks with {NUM_ROWS} rows each, {width} wide"
            for against, peer, target in (
                ("1 rank", "1 ranks", SHARED),
                ("one device with all the rows", f"{count} as one", NO_TARGET),
            ):
                yield make_row((name, against), ours, times[peer], "us", target)


NUM_SIMULATED = (1, 8, 64, 256)
NAMES = ("loss", "accuracy", "confidence")


def make_tally(num_ranks: int, num_steps: int) -> Callable[[], None]:
    """The sums of an epoch's steps, added up by one program."""
    random = np.random.default_rng(0)
    shape = (num_steps, num_ranks)
    weights = jnp.full(shape, NUM_ROWS, jnp.float32)
    means = [
        Mean(jnp.asarray(random.random(shape, np.float32)), weights) for _ in NAMES
    ]
    steps = (means, weights.astype(jnp.int32))

    def add(tally: Tally, step: Any) -> tuple[Tally, None]:
        return tally.plus(*step), None

    @jax.jit
    def add_all(tally: Tally, steps: Any) -> Tally:
        return jax.lax.scan(add, tally, steps)[0]

    tally = jax.device_put(zero_tally(num_ranks))

    def run() -> None:
        jax.block_until_ready(add_all(tally, steps))

    return run


def make_reduction(num_ranks: int) -> Callable[[], None]:
    """The metrics of an epoch from what each rank measured, and their line."""

    def run() -> None:
        records = [
            RankRecord(
                device_index=rank,
                process_index=rank // 8,
                samples=1000,
                sums=dict.fromkeys(NAMES, (500.0, 1000.0)),
                epoch_ms=100.0,
                share_complete_ms=100.0,
                compute_only_ms=90.0 + rank % 8,
                data_starve_ms=1.0,
                pass_ms=1.0,
            )
            for rank in range(num_ranks)
        ]
        str(reduce_ranks(records, epoch=0, num_steps=500, global_step=500))

    return run


def account_rows(size: Size) -> Iterator[Row]:
    epoch = make_run(
        make_loop(loss_with_metrics), make_loader(size, None, is_resident=True), 1
    )
    sums = {f"sums {count}": make_tally(count, size.steps) for count in NUM_SIMULATED}
    metrics = {f"metrics {count}": make_reduction(count) for count in NUM_SIMULATED}
    times = interleaved({"epoch": epoch, **sums, **metrics}, size.rounds)
    steps = f"the {size.steps} steps of an epoch"
    for what, name, target in (
        ("sums", "sums of an epoch's steps, {} ranks on one device", SMALL_PART),
        ("metrics", "EpochMetrics and its line, {} ranks", A_HUNDREDTH),
    ):
        for count in NUM_SIMULATED:
            ours = times[f"{what} {count}"]
            yield make_row(
                (name.format(count), steps), ours, times["epoch"], "ms", target
            )


PARTS = (trainer_rows, mesh_of_one_rows, scaling_rows, account_rows)


def main() -> None:
    arguments = make_parser("Times epochs and ranks.", __file__).parse_args()
    size = SMOKE if arguments.smoke else FULL
    report((row for part in PARTS for row in part(size)), arguments.json)
    if jax.default_backend() == "cpu":
        print(
            f"\n{jax.device_count()} devices share {os.cpu_count()} cores: time grows "
            "with the ranks, and says nothing of how fast as many devices would be"
        )


if __name__ == "__main__":
    main()
