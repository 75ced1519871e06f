"""Records of made-up runs, for tests of what is drawn of them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from fuelflow.metrics.plain import to_plain

START = 1_780_000_000.0
STEPS_PER_EPOCH = 20
EPOCH_SECS = 10.0
PARAMS = (
    ("encoder.layers.0.kernel", (64, 128), "float32", True),
    ("encoder.layers.0.bias", (128,), "float32", True),
    ("encoder.layers.1.kernel", (128, 128), "bfloat16", False),
    ("head.kernel", (128, 10), "float32", True),
)


def run_record(
    *, epochs: int | None = 10, num_ranks=1, name="digits", **changes
) -> dict[str, Any]:
    """The first record of a run."""
    record = {
        "kind": "run",
        "time": START,
        "version": 1,
        "name": name,
        "epochs": epochs,
        "steps_per_epoch": STEPS_PER_EPOCH,
        "epoch": 0,
        "step": 0,
        "settings": {"optimizer": "adamw", "schedule": "cosine(1e-3, 100, 10000)"},
        "versions": {"python": "3.12.1", "jax": "0.12.0", "fuelflow": "0.1.0"},
        "params": [
            {
                "name": each,
                "shape": list(shape),
                "dtype": dtype,
                "num_bytes": math.prod(shape) * (2 if dtype == "bfloat16" else 4),
                "is_trained": is_trained,
            }
            for each, shape, dtype, is_trained in PARAMS
        ],
        "ranks": [
            {"rank": rank, "device": f"cpu:{rank}", "process": 0}
            for rank in range(num_ranks)
        ],
    }
    return record | changes


def step_record(step: int, **changes) -> dict[str, Any]:
    """A record of a step, its numbers a curve of the step alone."""
    epoch, epoch_step = divmod(step - 1, STEPS_PER_EPOCH)
    noise = math.sin(7.3 * step) + math.sin(2.1 * step)
    record = {
        "kind": "step",
        "time": START + EPOCH_SECS * step / STEPS_PER_EPOCH,
        "epoch": epoch,
        "step": step,
        "epoch_step": epoch_step + 1,
        "loss": 2.3 * math.exp(-step / 200) + 0.2 + 0.03 * noise,
        "grad_norm": 1.5 + 0.4 * noise,
        "lr": 1e-3 * min(1.0, step / 40),
        "metrics": {"accuracy": 1 - 0.9 * math.exp(-step / 150) - 0.01 * noise},
        "num_skipped": 0,
        "steps_per_sec": 2.0 + 0.1 * noise,
        "samples_per_sec": 512.0 + 25 * noise,
        "data_wait": 0.05 + 0.02 * abs(noise),
        "memory": [{"device": "gpu:0", "used": 4.1e9 + 1e7 * noise, "limit": 16e9}],
        "host": {"rss": 1.2e9 + 1e6 * step, "cpu": 0.4},
    }
    return to_plain(record | changes)


def epoch_record(epoch: int, *, num_ranks=1, slow_rank=None, **changes) -> dict:
    """A record of an epoch; one rank may be slow to take its steps."""
    random = np.random.default_rng(epoch)
    step = (epoch + 1) * STEPS_PER_EPOCH
    loss = 2.3 * math.exp(-(step - 10) / 200) + 0.2
    complete = 9000 + 60 * random.random(num_ranks)
    starve = 200 + 100 * random.random(num_ranks)
    if slow_rank is not None:
        complete[slow_rank] *= 1.05
        starve[slow_rank] += 4000
    metrics = {
        "epoch": epoch,
        "scalars": {"accuracy": 1 - 0.9 * math.exp(-step / 150)},
        "per_rank": [{"accuracy": 0.5}] * num_ranks,
        "avg_loss": loss,
        "per_rank_loss": list(loss + 0.05 * random.standard_normal(num_ranks)),
        "per_rank_samples": [5120] * num_ranks,
        "epoch_ms": float(complete.max()),
        "per_rank_share_complete_ms": list(complete),
        "per_rank_throughput": list(5120 / complete),
        "per_rank_batch_share": [1 / num_ranks] * num_ranks,
        "per_rank_compute_only_ms": list(0.9 * (complete - starve)),
        "per_rank_data_starve_ms": list(starve),
        "per_rank_pass_ms": list(40 + random.random(num_ranks)),
        "device_indices": list(range(num_ranks)),
        "process_indices": [0] * num_ranks,
        "compile_ms": 1200.0 if epoch == 0 else 0.0,
        "evaluation": {"loss": loss + 0.05 + 0.0004 * step, "accuracy": 0.93},
        "eval_ms": 800.0,
        "callback_ms": 30.0,
        "num_steps": STEPS_PER_EPOCH,
        "num_skipped": 0,
        "global_step": step,
        "lr": 1e-3,
    }
    return {
        "kind": "epoch",
        "time": START + EPOCH_SECS * (epoch + 1),
        "metrics": to_plain(metrics | changes),
    }


def pass_record(epoch: int, **means) -> dict[str, Any]:
    """A record of one pass of a loop written by hand."""
    step = (epoch + 1) * STEPS_PER_EPOCH
    return {
        "kind": "pass",
        "time": START + EPOCH_SECS * (epoch + 1),
        "epoch": epoch,
        "step": step,
        "num_steps": STEPS_PER_EPOCH,
        "secs": EPOCH_SECS,
        "means": means,
    }


def compile_record(program="step", **changes) -> dict[str, Any]:
    """The first compile of a program."""
    record = {
        "kind": "compile",
        "time": START + 1,
        "program": program,
        "seconds": 1.234,
        "reason": "",
        "is_first": True,
    }
    return record | changes


def event_record(what="checkpoint", text="saved step 20", **changes) -> dict[str, Any]:
    """Something that happened."""
    record = {
        "kind": "event",
        "time": START + EPOCH_SECS,
        "level": "info",
        "what": what,
        "text": text,
        "step": 20,
    }
    return record | changes


def end_record(reason="done", text="", *, epochs=10) -> dict[str, Any]:
    """The last record of a run."""
    time = START + EPOCH_SECS * epochs + 1
    return {"kind": "end", "time": time, "reason": reason, "text": text}


def make_run(epochs=10, num_ranks=1, *, name="digits", every=1, **of_epochs) -> list:
    """All records of a run that went well, a step record every so many steps."""
    records = [
        run_record(epochs=epochs, num_ranks=num_ranks, name=name),
        compile_record("step"),
        compile_record("evaluate", seconds=0.4),
    ]
    for epoch in range(epochs):
        last = (epoch + 1) * STEPS_PER_EPOCH
        steps = range(last - STEPS_PER_EPOCH + 1, last + 1)
        records += [step_record(step) for step in steps if step % every == 0]
        records.append(epoch_record(epoch, num_ranks=num_ranks, **of_epochs))
        time = records[-1]["time"] + 0.5
        records.append(event_record(step=last, time=time, text=f"saved step {last}"))
    return [*records, end_record(epochs=epochs)]


def write_records(directory: Path, records) -> Path:
    """A directory of a run with these records, and the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(record) + "\n" for record in records)
    (directory / "records.jsonl").write_text("".join(lines))
    return directory
