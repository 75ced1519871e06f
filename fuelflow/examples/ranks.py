"""The training run of ``fuelflow demo`` on several ranks: a `Trainer`, and its account.

The script is the same for eight devices of one process and for several processes: each
runs it, and the first one prints.
"""

import os
from collections.abc import Iterator
from typing import Any

import jax
import optax

import fuelflow as ff
from fuelflow.examples import digits
from fuelflow.examples.demo import EVAL_BATCH_SIZE, PEAK_LR, Options, make_example


class UnfitDevicesError(Exception):
    """The devices that there are cannot do what the command was asked for."""


def find_devices(number: int | None) -> list[Any]:
    """The devices of all processes; or so many of this one's, made up on a CPU.

    Raises:
        UnfitDevicesError: If there are fewer.
    """
    # Both must come before anything asks for devices.
    if number is not None and "host_platform_device_count" not in os.environ.get(
        "XLA_FLAGS", ""
    ):
        jax.config.update("jax_num_cpu_devices", number)
    ff.initialize()
    devices = jax.devices()
    if number is None:
        return devices
    if number > len(devices):
        raise UnfitDevicesError(
            f"argument --devices: must be at most {len(devices)}, the number of "
            f"{devices[0].platform} devices here, got {number}"
        )
    return devices[:number]


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
        UnfitDevicesError: If they do not divide the batch.
    """
    trainer = make_trainer(options, train, held_out, devices)
    say = print if jax.process_index() == 0 else _say_nothing
    num_steps = len(train["label"]) // options.batch_size
    for line in _introduction(options, num_steps, devices):
        say(line)
    handle = trainer.run()
    for metrics in handle:
        say(f"  {metrics}")
    trained = handle.join()
    for line in _ranks(trained.history[-1]):
        say(line)


def make_trainer(
    options: Options,
    train: digits.Digits,
    held_out: digits.Digits,
    devices: list[Any],
    monitor: ff.Monitor | None = None,
) -> ff.Trainer:
    """What trains the network on a mesh.

    Args:
        options: What the command was asked for.
        train: Digits to learn from.
        held_out: Digits that are only looked at.
        devices: The ranks, of all processes.
        monitor: Who watches.

    Raises:
        UnfitDevicesError: If the devices do not divide the batch.
    """
    if options.batch_size % len(devices):
        raise UnfitDevicesError(
            f"argument --batch-size: must divide by {len(devices)} devices, got "
            f"{options.batch_size}"
        )
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
    return ff.Trainer(
        loop,
        example.model,
        loader,
        epochs=options.epochs,
        eval_data=unseen,
        seed=options.seed,
        monitor=monitor,
    )


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
