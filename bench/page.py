"""How big the page of a long run on many ranks is, and how soon it is there.

A thousand epochs on 256 ranks, with a record for every tenth of their steps. The page
must be read by a browser, with its first curve drawn, in two seconds, and be no more
than twice as big as plotly alone, which draws it. To tell what a slow machine adds, a
page of plotly and nothing else is loaded in the same rounds, in shuffled order. How
long the page takes to make is set beside reading the same records from their file.

Loading is timed in a headless Chromium, where there is one.

    python bench/page.py [--smoke] [--json PATH]
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from timing import Row, Target, interleaved, make_parser, make_row, report

from fuelflow.metrics.plain import to_plain
from fuelflow.metrics.ranks import RankRecord, reduce_ranks
from fuelflow.watch.pages.page import make_page, save_page
from fuelflow.watch.record.reading import read_records

STEPS = 100
TWO_SECS = Target(text="≤ 2 s", max_ratio=1.0)
TWICE = Target(text="≤ 2 ×", max_ratio=2.0)
NO_TARGET = Target(text="none")
ALONE = '<!doctype html><meta charset="utf-8"><p>plotly</p><script>{}</script>'
FIRST_CURVE = "#curves .scatterlayer .trace"


@dataclass(frozen=True)
class Size:
    """How much to measure.

    Attributes:
        rounds: Timed rounds.
        num_epochs: Epochs of the run.
        num_ranks: Its ranks.
    """

    rounds: int
    num_epochs: int
    num_ranks: int

    @property
    def name(self) -> str:
        """What the rows call it."""
        return f"page of {self.num_epochs:,} epochs × {self.num_ranks} ranks"


FULL = Size(rounds=7, num_epochs=1000, num_ranks=256)
SMOKE = Size(rounds=1, num_epochs=20, num_ranks=16)


def make_records(size: Size) -> list[dict[str, Any]]:
    """The records of a run with noise in all that it measures."""
    random = np.random.default_rng(0)
    run = {"kind": "run", "time": 0.0, "version": 1, "name": "long"}
    run |= {"epochs": size.num_epochs, "steps_per_epoch": STEPS, "epoch": 0, "step": 0}
    run |= {"settings": {}, "versions": {}, "params": [], "ranks": []}
    records = [run]
    for epoch in range(size.num_epochs):
        steps = range(10, STEPS + 1, 10)
        records += [make_step(epoch, epoch_step, random) for epoch_step in steps]
        records.append(make_epoch(epoch, size.num_ranks, random))
    return records


def make_step(epoch: int, epoch_step: int, random: np.random.Generator) -> dict:
    step = epoch * STEPS + epoch_step
    return {
        "kind": "step",
        "time": step / 10,
        "epoch": epoch,
        "step": step,
        "epoch_step": epoch_step,
        "lr": 1e-3,
        "num_skipped": 0,
        "loss": float(np.exp(-step / 3e4) + 0.1 * random.random()),
        "grad_norm": float(random.random()),
        "metrics": {"accuracy": float(random.random())},
        "steps_per_sec": float(10 + random.random()),
        "samples_per_sec": float(640 + random.random()),
        "data_wait": float(0.1 * random.random()),
        "memory": [],
        "host": {"rss": 1.2e9, "cpu": float(random.random())},
    }


def make_epoch(epoch: int, num_ranks: int, random: np.random.Generator) -> dict:
    noise = random.random((num_ranks, 4)).tolist()
    ranks = [
        RankRecord(
            device_index=rank,
            process_index=rank // 8,
            samples=100,
            sums={"loss": (50 + each[0], 100.0), "accuracy": (90 + each[1], 100.0)},
            epoch_ms=10_000.0,
            share_complete_ms=9900 + 100 * each[2],
            compute_only_ms=9700.0,
            data_starve_ms=100 * each[3],
        )
        for rank, each in enumerate(noise)
    ]
    step = (epoch + 1) * STEPS
    metrics = reduce_ranks(ranks, epoch=epoch, num_steps=STEPS, global_step=step)
    return {"kind": "epoch", "time": step / 10, "metrics": to_plain(metrics.to_dict())}


def page_rows(size: Size) -> Iterator[Row]:
    from plotly.offline import get_plotlyjs

    records = make_records(size)
    page, alone = make_page(records, title="long"), ALONE.format(get_plotlyjs())
    sizes = [float(len(each.encode())) for each in (page, alone)]
    yield make_row((size.name, "plotly"), sizes[:1], sizes[1:], "B", TWICE)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        text = "".join(json.dumps(record) + "\n" for record in records)
        (path / "records.jsonl").write_text(text)
        times = interleaved(
            {
                "make": partial(save_page, path / "page.html", records, title="long"),
                "read": partial(read_all, path),
            },
            max(2, size.rounds // 2),
        )
        names = (f"{size.name}: made", "reading its records")
        yield make_row(names, times["make"], times["read"], "ms", NO_TARGET)
        (path / "alone.html").write_text(alone)
        yield from load_rows(size, path)


def read_all(path: Path) -> None:
    read_records(path)


def load_rows(size: Size, path: Path) -> Iterator[Row]:
    with browser() as load:
        if load is None:
            return
        times = interleaved(
            {
                "page": partial(load, path / "page.html", FIRST_CURVE),
                "alone": partial(load, path / "alone.html", "p"),
            },
            size.rounds,
        )
    name = f"{size.name}: loaded, first curve drawn"
    promise = [2.0] * len(times["page"])
    yield make_row((name, "two seconds"), times["page"], promise, "ms", TWO_SECS)
    names = (name, "loading plotly alone")
    yield make_row(names, times["page"], times["alone"], "ms", NO_TARGET)


@contextlib.contextmanager
def browser() -> Iterator[Callable[[Path, str], None] | None]:
    """What loads a file and waits for something in it; None without a Chromium."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=arguments)

        def load(path: Path, selector: str) -> None:
            page = opened.new_page(viewport={"width": 1280, "height": 900})
            page.goto(path.as_uri())
            page.wait_for_selector(selector)
            page.close()

        yield load
        opened.close()


def main() -> None:
    arguments = make_parser("Times the page of a long run.", __file__).parse_args()
    rows = page_rows(SMOKE if arguments.smoke else FULL)
    report(rows, arguments.json, ("plotly",))


if __name__ == "__main__":
    main()
