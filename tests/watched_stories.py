"""Stories of made-up runs, for tests of what is drawn of them."""

import math

from metric_records import make_metrics, make_record

from fuelflow.metrics.plain import to_plain
from fuelflow.watch.record.records import Record
from fuelflow.watch.record.story import Story

START = 1_800_000_000.0
SECS_PER_STEP = 0.02


def run_record(**fields):
    usual = {
        "kind": "run",
        "time": START,
        "version": 1,
        "name": "digits",
        "epochs": 40,
        "steps_per_epoch": 100,
        "epoch": 0,
        "step": 0,
        "settings": {"seed": "0"},
        "versions": {"jax": "0.10.2"},
        "params": [
            {
                "name": "dense.kernel",
                "shape": [64, 10],
                "dtype": "float32",
                "num_bytes": 2560,
                "is_trained": True,
            }
        ],
        "ranks": [{"rank": 0, "device": "cpu:0", "process": 0}],
    }
    return usual | fields


def step_record(epoch, epoch_step, step, **fields):
    usual = {
        "kind": "step",
        "time": START + 4 + SECS_PER_STEP * step,
        "epoch": epoch,
        "step": step,
        "epoch_step": epoch_step,
        "loss": 2.3 * math.exp(-step / 900) + 0.05 + 0.03 * math.sin(step * 1.7),
        "grad_norm": 1.5 * math.exp(-step / 1500) + 0.2,
        "lr": 1e-3 * (1 + math.cos(step / 4000 * math.pi)) / 2,
        "metrics": {"accuracy": 1 - 0.9 * math.exp(-step / 700)},
        "num_skipped": 0,
        "steps_per_sec": 412.3,
        "samples_per_sec": 52736.4,
        "data_wait": 0.031,
        "memory": [{"device": "cpu:0", "used": 1.2e9, "limit": 16e9}],
        "host": {"rss": 812e6, "cpu": 0.43},
    }
    return to_plain(usual | fields)


def epoch_record(epoch, steps_per_epoch=100, num_ranks=1, **fields):
    step = (epoch + 1) * steps_per_epoch
    loss = 2.3 * math.exp(-step / 900) + 0.05
    accuracy = 1 - 0.9 * math.exp(-step / 700)
    records = [
        make_record(
            rank,
            samples=3200 - 8 * ((rank * 7) % 16),
            sums={"loss": (100 * loss, 100.0), "accuracy": (100 * accuracy, 100.0)},
            share_complete_ms=1000.0 - (rank * 37) % 50,
            compute_only_ms=800.0 - (rank * 13) % 200,
            data_starve_ms=60.0 + (rank * 29) % 100,
        )
        for rank in range(num_ranks)
    ]
    metrics = make_metrics(
        records,
        epoch=epoch,
        num_steps=steps_per_epoch,
        global_step=step,
        lr=1e-3,
        **{
            "evaluation": {"loss": loss * 1.1 + 0.02, "accuracy": accuracy - 0.02},
            **fields,
        },
    )
    time = START + 4 + SECS_PER_STEP * step
    return {"kind": "epoch", "time": time, "metrics": metrics.to_dict()}


def compile_record(secs, *, is_first, reason="first call", time=START + 3):
    return {
        "kind": "compile",
        "time": time,
        "program": "step",
        "seconds": secs,
        "reason": reason,
        "is_first": is_first,
    }


def event_record(text, level="warning", what="skipped", step=7, time=START + 20):
    return {
        "kind": "event",
        "time": time,
        "level": level,
        "what": what,
        "text": text,
        "step": step,
    }


def end_record(reason="done", text="", time=START + 100):
    return {"kind": "end", "time": time, "reason": reason, "text": text}


def records_of(num_epochs=12, *, num_ranks=1, steps_per_epoch=100, every=10, **run):
    """A run that has done some epochs and a part of the next."""
    ranks = [
        {"rank": rank, "device": f"gpu:{rank}", "process": rank // 8}
        for rank in range(num_ranks)
    ]
    records = [
        run_record(**{"ranks": ranks, "steps_per_epoch": steps_per_epoch, **run}),
        compile_record(3.9, is_first=True),
    ]
    for epoch in range(num_epochs + 1):
        done = steps_per_epoch if epoch < num_epochs else steps_per_epoch // 3
        for epoch_step in range(every, done + 1, every):
            step = epoch * steps_per_epoch + epoch_step
            records.append(step_record(epoch, epoch_step, step))
        if epoch < num_epochs:
            records.append(epoch_record(epoch, steps_per_epoch, num_ranks))
    records.append({"kind": "phase", "time": records[-1]["time"], "phase": "training"})
    return records


def story_of(records):
    story = Story()
    for record in records:
        story.add(record)
    return story


def given(sink, records):
    """Gives a sink records, as a monitor does, and closes it."""
    for record in records:
        sink(Record(record))
    close = getattr(sink, "close", None)
    if close is not None:
        close()
