"""The training run of ``fuelflow demo --serve``: a page in the browser follows it."""

import contextlib
import signal
import threading
from typing import Any

import jax

import fuelflow as ff
from fuelflow.examples import digits
from fuelflow.examples.demo import Options
from fuelflow.examples.ranks import make_trainer


def run(
    options: Options,
    train: digits.Digits,
    held_out: digits.Digits,
    devices: list[Any],
    port: int,
) -> None:
    """Trains the network, and serves its page until it is interrupted.

    Args:
        options: What the command was asked for.
        train: Digits to learn from.
        held_out: Digits that are only looked at.
        devices: The ranks, of all processes.
        port: Of the page, 0 for any that is free.

    Raises:
        ModuleNotFoundError: If a package of ``fuelflow[report]`` is missing.
        OSError: If the port is taken.
        UnfitDevicesError: If the devices do not divide the batch.
    """
    with ff.Monitor() as monitor:
        trainer = make_trainer(options, train, held_out, devices, monitor)
        is_first = jax.process_index() == 0
        if is_first:
            print(f"\n  the page of this run: {monitor.serve(port)}\n", flush=True)
        trainer.fit()
        # All processes: those that left would soon be missed, and end the others.
        _wait_for_interrupt("\n  the page stays until Ctrl-C" if is_first else None)


def _wait_for_interrupt(text: str | None) -> None:
    """What Ctrl-C ends, and nothing else with it, once a text was printed."""
    before = signal.getsignal(signal.SIGINT)
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if text is not None:
            print(text, flush=True)
        threading.Event().wait()
    signal.signal(signal.SIGINT, before)
