"""How fast batches come out of a loader, beside taking the same rows with NumPy.

The rows are in memory and come in a new order each epoch. The strictest peer is
`numpy.take` alone, batch after batch into memory that it has just given back: it
neither draws the order nor puts anything on a device, as a loop by hand would. The
loaders of grain and torch, where they are installed, read the same rows, which they do
one by one. Whether the work of a loader is hidden is asked of an epoch with steps of
5 ms, which stand for a device that is busy, and a transform of 2 ms: it should last no
longer than the steps.

All sides run in one process, in rounds of shuffled order after one that is not timed,
and end with ``block_until_ready``. A row shows the medians, and the median and
quartiles of the ratio within a round.

    python bench/data.py [--smoke] [--json PATH]
"""

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from timing import Row, Target, interleaved, make_parser, make_row, report

from fuelflow.data.loader import DataLoader

WIDTH = 784
NUMPY = "numpy.take, batch by batch"
NEAR = Target(text="≥ 0.8 of its rate", max_ratio=1 / 0.8)
TEN_TIMES = Target(text="≥ 10 × faster", max_ratio=1 / 10)
HIDDEN = Target(text="≤ 1.05 ×", max_ratio=1.05)
NOT_STARVED = Target(text="≤ 0.02 of it", max_ratio=0.02)
NO_TARGET = Target(text="none")
STEP_SECS = 5e-3
TRANSFORM_SECS = 2e-3


@dataclass(frozen=True)
class Size:
    """How much to measure.

    Attributes:
        rounds: Timed rounds.
        num_rows: Rows of an epoch, for what reads arrays.
        num_single: Rows of an epoch for grain, which takes long for each.
        num_steps: Steps of an epoch that has steps of 5 ms.
    """

    rounds: int
    num_rows: int
    num_single: int
    num_steps: int


FULL = Size(rounds=25, num_rows=60_000, num_single=4096, num_steps=100)
SMOKE = Size(rounds=2, num_rows=1024, num_single=512, num_steps=4)


def make_arrays(num_rows: int, width: int = WIDTH) -> dict[str, np.ndarray]:
    """Rows of the size of a small image in float32, and their labels."""
    random = np.random.default_rng(0)
    images = random.random((num_rows, width), np.float32)
    return {"image": images, "label": random.integers(10, size=num_rows, dtype="i4")}


class Rows:
    """The rows of arrays one by one, as grain and torch ask for them."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays["label"])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: values[row] for name, values in self.arrays.items()}


def epochs_of(loader: DataLoader) -> Callable[[], None]:
    """A new epoch of a loader with each call."""

    def run() -> None:
        batch = None
        for batch in loader:  # noqa: B007 - the last is waited for
            pass
        jax.block_until_ready(batch)

    return run


def passes_over(batches: Iterable[Any]) -> Callable[[], None]:
    """One pass over a peer's loader with each call."""

    def run() -> None:
        for _ in batches:
            pass

    return run


def take_with_numpy(
    arrays: dict[str, np.ndarray], batch_size: int, *, puts_on_device: bool = False
) -> None:
    """The rows of one epoch, whose order is drawn beforehand."""
    order = _order(len(arrays["label"]))
    fields = {}
    for first in range(0, len(order), batch_size):
        rows = order[first : first + batch_size]
        fields = {
            name: np.take(values, rows, axis=0) for name, values in arrays.items()
        }
        if puts_on_device:
            fields = jax.device_put(fields)
    jax.block_until_ready(fields)


@cache
def _order(num_rows: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(num_rows)


def rate_rows(size: Size) -> Iterator[Row]:
    arrays = make_arrays(size.num_rows)
    for batch_size in (256, 1024):
        times = interleaved(
            {
                "streaming": epochs_of(DataLoader(arrays, batch_size, resident=False)),
                "resident": epochs_of(DataLoader(arrays, batch_size, resident=True)),
                "numpy": partial(take_with_numpy, arrays, batch_size),
                "by hand": partial(
                    take_with_numpy, arrays, batch_size, puts_on_device=True
                ),
            },
            size.rounds,
            -(-size.num_rows // batch_size),
        )
        for road, target in (("streaming", NEAR), ("resident", NO_TARGET)):
            names = (f"{road}, batches of {batch_size}", NUMPY)
            yield make_row(names, times[road], times["numpy"], "us", target)
        names = (f"streaming, batches of {batch_size}", "the same and jax.device_put")
        yield make_row(names, times["streaming"], times["by hand"], "us", NO_TARGET)


def peer_rows(size: Size) -> Iterator[Row]:
    batch_size = 1024
    for name, make in PEERS.items():
        if not is_installed(name):
            continue
        num_rows = size.num_single if name == "grain" else size.num_rows
        for width in (32, WIDTH):
            arrays = make_arrays(num_rows, width)
            loader = DataLoader(arrays, batch_size, resident=False)
            times = interleaved(
                {"ours": epochs_of(loader), "peer": make(arrays, batch_size)},
                max(2, size.rounds // 5),
                -(-num_rows // batch_size),
            )
            names = (f"streaming, rows of {width} floats", f"the loader of {name}")
            yield make_row(names, times["ours"], times["peer"], "us", TEN_TIMES)


def make_grain(arrays: dict[str, np.ndarray], batch_size: int) -> Callable[[], None]:
    import grain

    rows: Any = Rows(arrays)
    dataset = grain.MapDataset.source(rows).shuffle(seed=0)
    return passes_over(dataset.to_iter_dataset().batch(batch_size))


def make_torch(arrays: dict[str, np.ndarray], batch_size: int) -> Callable[[], None]:
    # By name: a type checker need not find what is not required.
    torch_data = importlib.import_module("torch.utils.data")
    loader = torch_data.DataLoader(Rows(arrays), batch_size, shuffle=True)
    return passes_over(loader)


PEERS = {"grain": make_grain, "torch": make_torch}


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def hiding_rows(size: Size) -> Iterator[Row]:
    arrays = make_arrays(256 * size.num_steps)
    waited: dict[str, list[float]] = {}

    def slow(fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(TRANSFORM_SECS)
        return fields

    def steps_over(name: str, loader: DataLoader) -> Callable[[], None]:
        waited[name] = []

        def run() -> None:
            epoch = iter(loader)
            for _ in epoch:
                time.sleep(STEP_SECS)
            waited[name].append(epoch.secs_waited)

        return run

    def steps_alone() -> None:
        for _ in range(size.num_steps):
            time.sleep(STEP_SECS)

    ahead = DataLoader(arrays, 256, transform=slow)
    at_once = DataLoader(arrays, 256, transform=slow, prefetch=0)
    times = interleaved(
        {
            "ahead": steps_over("ahead", ahead),
            "at once": steps_over("at once", at_once),
            "steps": steps_alone,
        },
        max(2, size.rounds // 5),
    )
    steps = f"{size.num_steps} steps of 5 ms alone"
    ours = "a 2 ms transform made ahead"
    yield make_row((ours, steps), times["ahead"], times["steps"], "ms", HIDDEN)
    names = ("a 2 ms transform, prefetch=0", steps)
    yield make_row(names, times["at once"], times["steps"], "ms", NO_TARGET)
    names = (f"{ours}: time waited for batches", "that epoch")
    # The first of them was not timed.
    yield make_row(names, waited["ahead"][1:], times["ahead"], "ms", NOT_STARVED)


PARTS = (rate_rows, peer_rows, hiding_rows)


def main() -> None:
    arguments = make_parser("Times a loader against its peers.", __file__).parse_args()
    size = SMOKE if arguments.smoke else FULL
    rows = (row for part in PARTS for row in part(size))
    report(rows, arguments.json, [name for name in PEERS if is_installed(name)])


if __name__ == "__main__":
    main()
