"""Side-by-side timing: interleaved repeats of several cases, and a row per claim."""

import argparse
import gc
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

Samples = Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One claim, measured.

    Attributes:
        name: What was measured.
        against: What it was measured against, in the same process and rounds.
        unit: Of ``ours`` and ``peer``: ``"us"`` for each step, ``"ms"`` or ``"B"``.
        ours: Median over the rounds.
        peer: Median over the rounds.
        ratio: Median over the rounds of ours / peer within the round, so that a slow
            moment of the machine falls on both.
        spread: First and third quartile of those ratios.
        target: The promise.
        met: Whether it is kept.
    """

    name: str
    against: str
    unit: str
    ours: float
    peer: float
    ratio: float
    spread: tuple[float, float]
    target: str
    met: bool


def interleaved(
    cases: Mapping[str, Callable[[], None]], rounds: int, per: int = 1
) -> Samples:
    """Wall seconds of every case in every round, the order shuffled anew each round.

    Args:
        cases: What to time; each waits for all of its results before it returns.
        rounds: Timed rounds, after one that is not (it compiles).
        per: What each time is divided by, such as the number of steps.
    """
    order = random.Random(0)
    names = list(cases)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for run in cases.values():
        run()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            order.shuffle(names)
            for name in names:
                start = time.perf_counter()
                cases[name]()
                samples[name].append((time.perf_counter() - start) / per)
    finally:
        gc.enable()
    return samples


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a row promises: a bound on the ratio, or on the difference.

    Attributes:
        text: As the table shows it.
        max_ratio: Largest ratio of ours to the peer's.
        max_difference: Largest difference of ours and the peer's, in the row's unit.
    """

    text: str
    max_ratio: float = math.inf
    max_difference: float = math.inf


def make_row(
    names: tuple[str, str],
    ours: Sequence[float],
    peer: Sequence[float],
    unit: str,
    target: Target,
) -> Row:
    """The row of two cases that were measured in the same rounds.

    Args:
        names: What was measured, and against what.
        ours: A figure for each round, in seconds if the unit is one of time.
        peer: The peer's.
        unit: The unit to show them in.
        target: The promise.
    """
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    ratio = statistics.median(ratios)
    first, last = ratio, ratio
    if len(ratios) > 1:
        first, _, last = statistics.quantiles(ratios, n=4, method="inclusive")
    a, b = (_SCALES[unit] * statistics.median(values) for values in (ours, peer))
    return Row(
        name=names[0],
        against=names[1],
        unit=unit,
        ours=a,
        peer=b,
        ratio=ratio,
        spread=(first, last),
        target=target.text,
        met=ratio <= target.max_ratio and a - b <= target.max_difference,
    )


_SCALES = {"us": 1e6, "ms": 1e3, "B": 1.0}


def machine() -> dict[str, Any]:
    """Versions and hardware that the numbers belong to."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "python": sys.version.split()[0],
        **{name: version(name) for name in packages},
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "num_devices": jax.device_count(),
        "num_cpus": os.cpu_count(),
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one line each."""
    lines = [
        ("what", "against", "ours", "peer", "ratio", "quartiles", "target", "met"),
        *[
            (
                row.name,
                row.against,
                _quantity(row.ours, row.unit),
                _quantity(row.peer, row.unit),
                f"{row.ratio:.3f}",
                f"{row.spread[0]:.3f} to {row.spread[1]:.3f}",
                row.target,
                "yes" if row.met else "NO",
            )
            for row in rows
        ],
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def make_parser(description: str, script: str) -> argparse.ArgumentParser:
    """The options that every benchmark has; its rows are written beside the script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--smoke", action="store_true", help="a little of each row")
    parser.add_argument("--json", type=Path, default=Path(script).with_suffix(".json"))
    return parser


def report(rows: Iterable[Row], path: Path, packages: Sequence[str] = ()) -> None:
    """Measures rows, and prints and writes them with the versions they belong to."""
    facts = {**machine(), **{name: version(name) for name in packages}}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    measured = list(rows)
    print(table(measured))
    _write_json(path, facts, measured)


def _write_json(path: Path, facts: Mapping[str, Any], rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {**facts, "rows": [_record(row) for row in rows]}
    path.write_text(json.dumps(document, indent=2) + "\n")


def _record(row: Row) -> dict[str, Any]:
    record = asdict(row)
    if row.unit == "us":
        record["ours_us"], record["peer_us"] = row.ours, row.peer
    return record


def _quantity(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
