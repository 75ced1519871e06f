"""What watching costs the run that is watched.

Two questions. What does an epoch of a `Trainer` take with everything on, against none
of it? Everything is a monitor with a display in a pseudo-terminal, records in a file,
CSV of steps and epochs, TensorBoard, a function, and a page that is served and read.
And what does it take when things go wrong: a sink that hangs, a disk that is full, a
hundred browsers that asked for the page's news and never read them?

Each side trains alone, as threads that watch one run would slow another: a run of some
epochs for each side in each round, in shuffled order, after a round that is not timed.
The time is that from the first epoch's start to the last one's end. A row shows the
medians, and the median and quartiles of the ratio within a round.

    python bench/watch.py [--smoke] [--json PATH]
"""

import contextlib
import gc
import os
import random
import socket
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers import loss_with_metrics, make_batches, make_params
from step import SMALL, WIDTH, make_loop
from timing import Row, Target, make_parser, make_row, report

import fuelflow as ff

NUM_ROWS = 64
NUM_DEAD = 100
NEAR = Target(text="≤ 1.03 ×", max_ratio=1.03)
Watching = Callable[[], contextlib.AbstractContextManager[ff.Monitor | None]]


@dataclass(frozen=True)
class Size:
    """How much to measure.

    Attributes:
        rounds: Timed rounds.
        epochs: Epochs of a run.
        steps: Steps of an epoch.
        several: Steps in a dispatch, where there are several.
    """

    rounds: int
    epochs: int
    steps: int
    several: int


FULL = Size(rounds=15, epochs=6, steps=1500, several=25)
SMOKE = Size(rounds=2, epochs=2, steps=8, several=4)


def make_loader(size: Size) -> ff.DataLoader:
    """The rows of an epoch, which stay on the device."""
    batches = make_batches(size.steps, WIDTH, NUM_ROWS)
    arrays = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    return ff.DataLoader(arrays, NUM_ROWS, resident=True)


@contextmanager
def nothing() -> Iterator[None]:
    """No monitor."""
    yield None


@contextmanager
def everything() -> Iterator[ff.Monitor]:
    """A monitor with all that it can have."""
    with tempfile.TemporaryDirectory() as directory, terminal():
        path = Path(directory)
        got: list[ff.sinks.Record] = []
        sinks = [
            ff.sinks.Csv(path / "steps.csv", kinds=("step", "epoch")),
            ff.sinks.TensorBoard(path / "events"),
            got.append,
        ]
        monitor = ff.Monitor(directory=path, sinks=sinks, display="console")
        with monitor, reader(monitor.serve()):
            yield monitor


@contextmanager
def hanging() -> Iterator[ff.Monitor]:
    """A monitor with a sink that does not return before the run is over."""
    is_over = threading.Event()

    def hang(record: ff.sinks.Record) -> None:
        del record
        is_over.wait()

    with ff.Monitor(sinks=[hang], display="none") as monitor:
        yield monitor
        is_over.set()


@contextmanager
def full_disk() -> Iterator[ff.Monitor]:
    """A monitor whose records do not fit on the disk."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "records.jsonl").symlink_to("/dev/full")
        with ff.Monitor(directory=directory, display="none") as monitor:
            yield monitor


@contextmanager
def dead_readers() -> Iterator[ff.Monitor]:
    """A monitor whose page is asked for its news by many who never read them."""
    with ff.Monitor(display="none") as monitor, contextlib.ExitStack() as stack:
        port = urllib.parse.urlsplit(monitor.serve()).port
        for _ in range(NUM_DEAD):
            dead = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            dead.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        yield monitor


@contextmanager
def terminal() -> Iterator[None]:
    """A pseudo-terminal as standard output, which somebody reads."""
    ours, theirs = os.openpty()

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end was closed
            while os.read(ours, 65_536):
                pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    shown = sys.stdout
    try:
        with os.fdopen(theirs, "w") as sys.stdout:
            yield
    finally:
        sys.stdout = shown
        thread.join()
        os.close(ours)


@contextmanager
def reader(url: str) -> Iterator[None]:
    """Somebody who has a page open, from the start to the end."""

    def read() -> None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url).read()
            address = url.rstrip("/") + "/events"
            with urllib.request.urlopen(address) as events:
                while events.readline():
                    pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield


def make_side(
    loop: ff.TrainingLoop,
    loader: ff.DataLoader,
    size: Size,
    steps_per_call: int,
    watching: Watching,
) -> Callable[[], float]:
    """A run of some epochs, and how long they took."""

    def run() -> float:
        times: list[float] = []

        def begins(epoch: int, state: Any) -> None:
            del state
            if epoch == 0:
                times.append(time.perf_counter())

        def ends(metrics: Any) -> None:
            del metrics
            times.append(time.perf_counter())

        with watching() as monitor:
            ff.Trainer(
                loop,
                make_params(SMALL, WIDTH),
                loader,
                epochs=size.epochs,
                steps_per_call=steps_per_call,
                epoch_fn=begins,
                metrics_fn=ends,
                monitor=monitor,
            ).fit()
        return times[-1] - times[0]

    return run


def in_turn(
    sides: Mapping[str, Callable[[], float]], rounds: int, per: int
) -> dict[str, list[float]]:
    """What each side says it took in every round, in an order shuffled anew."""
    order, names = random.Random(0), list(sides)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for run in sides.values():
        run()
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            gc.collect()
            samples[name].append(sides[name]() / per)
    return samples


def watched_rows(size: Size) -> Iterator[Row]:
    ways: dict[str, Watching] = {
        "no monitor": nothing,
        "everything on": everything,
        "a sink that hangs": hanging,
        "a full disk for records": full_disk,
        f"{NUM_DEAD} dead readers of the page": dead_readers,
    }
    loader = make_loader(size)
    for steps_per_call in (1, size.several):
        loop = make_loop(loss_with_metrics)
        sides = {
            name: make_side(loop, loader, size, steps_per_call, way)
            for name, way in ways.items()
        }
        times = in_turn(sides, size.rounds, size.epochs * size.steps)
        for name in list(ways)[1:]:
            names = (
                f"Trainer epoch, {name}, {steps_per_call} steps a call",
                "without a monitor",
            )
            yield make_row(names, times[name], times["no monitor"], "us", NEAR)


PARTS = (watched_rows,)


def main() -> None:
    arguments = make_parser("Times a watched run.", __file__).parse_args()
    size = SMOKE if arguments.smoke else FULL
    report(
        (row for part in PARTS for row in part(size)),
        arguments.json,
        ("plotly", "rich", "starlette", "tensorboardX", "uvicorn"),
    )


if __name__ == "__main__":
    main()
