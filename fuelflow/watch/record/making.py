"""Making records of what was told, as plain values."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fuelflow.checkpoint.manifest import versions_here
from fuelflow.metrics.plain import to_plain
from fuelflow.run.watching import RunFacts
from fuelflow.step.program import CompileRecord
from fuelflow.watch.record.records import VERSION, Record


def make_record(kind: str, *, at: float | None = None, **values: Any) -> Record:
    """A record of some kind, made now unless another time is given."""
    moment = time.time() if at is None else at
    return Record(kind=kind, time=moment, **to_plain(values))


def make_run(facts: RunFacts, directory: Path | None) -> Record:
    """The record that a run of a trainer begins with."""
    return make_record(
        "run",
        version=VERSION,
        name=run_name(directory),
        epochs=facts.epochs,
        steps_per_epoch=facts.steps_per_epoch,
        epoch=facts.epoch,
        step=facts.step,
        settings=dict(facts.settings),
        versions=versions_here(),
        params=[asdict(param) for param in facts.params],
        ranks=make_ranks(facts.devices),
    )


def make_loose_run(
    *, epoch: int, step: int, steps_per_epoch: int | None, directory: Path | None
) -> Record:
    """The record that a loop written by hand begins with."""
    return make_record(
        "run",
        version=VERSION,
        name=run_name(directory),
        epochs=None,
        steps_per_epoch=steps_per_epoch,
        epoch=epoch,
        step=step,
        settings={},
        versions=versions_here(),
        params=[],
        ranks=[],
    )


def make_ranks(devices: Sequence[Any]) -> list[dict[str, Any]]:
    """The device and process of each rank."""
    return [
        {
            "rank": rank,
            "device": f"{device.platform}:{device.id}",
            "process": device.process_index,
        }
        for rank, device in enumerate(devices)
    ]


def make_compile(made: CompileRecord) -> Record:
    """The record of a compilation."""
    return make_record(
        "compile",
        program=made.program,
        seconds=made.seconds,
        reason=made.reason,
        is_first=made.is_first,
    )


def make_event(
    level: str, what: str, text: str, step: int | None, at: float | None = None
) -> Record:
    """The record of an event."""
    return make_record("event", at=at, level=level, what=what, text=text, step=step)


def make_end(reason: str, error: BaseException | None = None) -> Record:
    """The record of a run's end."""
    text = "" if error is None else f"{type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt):
        reason, text = "interrupted", ""
    return make_record("end", reason=reason, text=text)


def run_name(directory: Path | None) -> str:
    """The name of the directory, or else of the notebook, module or script."""
    if directory is not None:
        return directory.resolve().name
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if "ipykernel.kernelapp" in sys.modules:
        # Jupyter tells a kernel which notebook it is for; other programs do not.
        program = Path(os.environ.get("JPY_SESSION_NAME", "")).stem or "notebook"
    elif module is not None:  # python -m module
        program = module.name.removesuffix(".__main__")
    else:
        program = Path(sys.argv[0] if sys.argv else "").stem
    return program if program and not program.startswith("-") else "run"


def plain_metrics(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers by name, of NumPy or of Python, as floats."""
    return to_plain({name: float(value) for name, value in values.items()})
