"""A run as plain lines: one for its start, each epoch, each warning and its end."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.metrics.wording import secs_text
from fuelflow.watch.record.records import number
from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.facts import (
    end_text,
    phase_of,
    sum_text,
)
from fuelflow.watch.screens.text import bytes_text, clean, counted, figure


def start_line(run: Mapping[str, Any]) -> str:
    """What is about to be trained, on what, and for how long.

    Args:
        run: A record of kind ``run``.
    """
    parts = [_params_text(run["params"]), _ranks_text(run["ranks"])]
    if run["epochs"]:
        parts.append(counted(run["epochs"], "epoch"))
        if run["steps_per_epoch"]:
            parts[-1] += f" of {counted(run['steps_per_epoch'], 'step')}"
    if run["step"]:
        parts.append(f"goes on with epoch {run['epoch']} after step {run['step']:,}")
    told = "; ".join(filter(None, parts))
    name = run["name"] or "run"
    return clean(f"{name}: {told}" if told else name)


def epoch_line(record: Mapping[str, Any]) -> str:
    """What an epoch came to, or a pass of a loop written by hand.

    Args:
        record: A record of kind ``epoch`` or ``pass``.
    """
    if record["kind"] == "epoch":
        return clean(str(EpochMetrics.from_dict(record["metrics"])))
    means = ", ".join(
        f"{name} {figure(mean)}" for name, mean in record["means"].items()
    )
    secs = number(record["secs"])
    parts = [means] if means else []
    parts.append(f"{counted(record['num_steps'], 'step')}, {secs_text(1e3 * secs)}")
    return clean(f"epoch {record['epoch']}: {'; '.join(parts)}")


def event_line(event: Mapping[str, Any]) -> str:
    """What happened, after its level.

    Args:
        event: A record of kind ``event``.
    """
    return clean(f"{event['level']}: {event['text'] or event['what']}")


def end_line(story: Story, now: float) -> str:
    """How the run ended, how much was done and how long it took."""
    line = f"{phase_of(story) or 'left'}: {sum_text(story, now)}"
    text = end_text(story)
    return clean(f"{line}; {text}" if text else line)


def _params_text(params: Sequence[Mapping[str, Any]]) -> str:
    if not params:
        return ""
    count = sum(math.prod(each["shape"]) for each in params)
    frozen = sum(math.prod(p["shape"]) for p in params if not p["is_trained"])
    size = bytes_text(sum(each["num_bytes"] for each in params))
    held = f", {frozen:,} of them frozen" if frozen else ""
    return f"{counted(count, 'parameter')} ({size}){held}"


def _ranks_text(ranks: Sequence[Mapping[str, Any]]) -> str:
    if not ranks:
        return ""
    first, last = ranks[0]["device"], ranks[-1]["device"]
    if len(ranks) == 1:
        return f"on {first}"
    num_processes = len({each["process"] for each in ranks})
    several = f" in {num_processes} processes" if num_processes > 1 else ""
    return f"{len(ranks)} ranks, {first} to {last}{several}"
