"""The training run of ``fuelflow demo`` on several ranks: a `Trainer`, and its account.

The script is the same for eight devices of one process and for several processes: each
runs it, and the first one prints.
"""

from collections.abc import Iterator
from typing import Any

import jax
import optax

import fuelflow as ff
from fuelflow.examples import digits
from fuelflow.examples.demo import EVAL_BATCH_SIZE, PEAK_LR, Options, make_example


def run(
    options: Options, train: digits.Digits, held_out: digits.Digits, devices: list[Any]
) -> None:
    """Trains the network on a mesh and prints a line for each epoch.

    Args:
        options: What the command was asked for.
        train: Digits to learn from.
        held_out: Digits that are only looked at.
        devices: The ranks, of all processes.

    Raises:
        ValueError: If they do not divide the batch.
    """
    mesh = ff.mesh(devices)
    # Statistics over all ranks are those of the whole batch, as on a single device.
    example = make_example(options, axis_name="data")
    loader = ff.DataLoader(
        train, options.batch_size, seed=options.seed, drop_last=True, mesh=mesh
    )
    unseen = ff.DataLoader(held_out, EVAL_BATCH_SIZE, shuffle=False, mesh=mesh)
    num_steps = options.epochs * len(loader)
    loop = ff.TrainingLoop(
        example.loss_fn,
        optax.adamw,
        schedule=ff.schedules.cosine(PEAK_LR, num_steps // 10, num_steps),
        max_grad_norm=1.0,
        mesh=mesh,
    )
    trainer = ff.Trainer(
        loop,
        example.model,
        loader,
        epochs=options.epochs,
        eval_data=unseen,
        seed=options.seed,
    )
    say = print if jax.process_index() == 0 else _say_nothing
    for line in _introduction(options, len(loader), devices):
        say(line)
    handle = trainer.run()
    for metrics in handle:
        say(f"  {metrics}")
    trained = handle.join()
    for line in _ranks(trained.history[-1]):
        say(line)


def _introduction(
    options: Options, num_batches: int, devices: list[Any]
) -> Iterator[str]:
    num_processes = len({device.process_index for device in devices})
    of = "" if num_processes == 1 else f" of {num_processes} processes"
    yield ""
    yield (
        f"  {options.epochs} epochs of {num_batches} steps, each of "
        f"{options.batch_size} digits, on {len(devices)} {devices[0].platform} "
        f"devices{of}"
    )
    yield ""


def _ranks(metrics: ff.EpochMetrics) -> Iterator[str]:
    """What each rank did in an epoch, as a table."""
    yield ""
    yield f"  {'rank':>4}{'process':>9}{'samples':>9}{'loss':>9}{'samples/s':>11}"
    for rank in range(metrics.num_ranks):
        loss = metrics.per_rank_loss[rank]
        yield (
            f"  {rank:>4}{metrics.process_indices[rank]:>9}"
            f"{metrics.per_rank_samples[rank]:>9}"
            f"{'none' if loss is None else f'{loss:.4f}':>9}"
            f"{1e3 * metrics.per_rank_throughput[rank]:>11.0f}"
        )
    yield ""
    yield f"  {metrics.bottleneck}"
    yield ""


def _say_nothing(line: str) -> None:
    """What all processes but the first say."""
