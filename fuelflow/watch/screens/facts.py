"""The figures of a run that are read off, each with its name."""

from collections.abc import Mapping, Sequence
from typing import Any

from fuelflow.watch.record.records import number
from fuelflow.watch.record.steps import steps_taken
from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.text import (
    bytes_text,
    clean,
    clock_text,
    counted,
    figure,
    percent_text,
    speed_text,
)


def title_of(story: Story) -> str:
    """The run's name."""
    name = story.run["name"] if story.run else ""
    return clean(str(name or "run"))


def phase_of(story: Story) -> str:
    """What the run does now, or how it ended."""
    if story.end is None:
        return clean(story.phase)
    words = {"stop": "stopped", "error": "failed", "stop_when": "stopped, as asked"}
    reason = str(story.end["reason"])
    return clean(words.get(reason, reason))


def end_text(story: Story) -> str:
    """What is to be said of the end, if no event has said it already."""
    text = str(story.end["text"] or "") if story.end else ""
    told = story.events[-1]["text"] if story.events else ""
    return "" if text == told else clean(text)


def elapsed_secs(story: Story, now: float) -> float:
    """Seconds since the run began or went on, up to its end."""
    if story.run is None:
        return 0.0
    return max((story.end["time"] if story.end else now) - story.run["time"], 0.0)


def num_epochs_done(story: Story) -> int:
    """How many epochs are over, those of a run that it goes on from among them."""
    begun = story.progress.epoch
    if not story.epochs:
        return begun
    last = story.epochs[-1]
    newest = last["metrics"]["epoch"] if last["kind"] == "epoch" else last["epoch"]
    return max(begun, newest + 1)


def sum_text(story: Story, now: float) -> str:
    """How much was done, and how long it took since the run began or went on."""
    run = story.run or {"time": 0.0, "step": None}
    done = [counted(num_epochs_done(story), "epoch")]
    done += [counted(steps_taken(story.steps[-1]), "step")] if story.steps else []
    part = ", the last part" if run["step"] else ""
    text = f"{', '.join(done)}{part} in {clock_text(elapsed_secs(story, now))}"
    compiles = [each for each in story.compiles if each["time"] >= run["time"]]
    if compiles:
        text += f", {_secs_of(compiles):.1f} s of it compiling"
    return text


def figures_of(story: Story) -> list[tuple[str, str]]:
    """Name and text of each figure that is known now, beside losses and metrics."""
    step = story.steps[-1] if story.steps else {}
    shown = [
        ("lr", figure(step.get("lr")) if step.get("lr") is not None else ""),
        ("grad norm", figure(step["grad_norm"]) if "grad_norm" in step else ""),
        ("steps/s now", _if_known(step, "steps_per_sec", speed_text)),
        ("samples/s now", _if_known(step, "samples_per_sec", speed_text)),
        ("data wait", _if_known(step, "data_wait", percent_text)),
        ("host", _host_text(step.get("host") or {})),
        *_memory(step.get("memory") or []),
        ("compiles", _compiles_text(story)),
        ("skipped", str(step["num_skipped"]) if step.get("num_skipped") else ""),
    ]
    return [(name, text) for name, text in shown if text]


def _if_known(step: Mapping[str, Any], name: str, write: Any) -> str:
    return write(step[name]) if step.get(name) is not None else ""


def _host_text(host: Mapping[str, Any]) -> str:
    parts = [bytes_text(number(host["rss"]))] if host.get("rss") else []
    if host.get("cpu") is not None:
        parts.append(f"{percent_text(host['cpu'])} cpu")
    return ", ".join(parts)


def _memory(devices: list[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The device's memory; of several that of the fullest."""
    if not devices:
        return []
    fullest = max(devices, key=lambda each: each["used"] / (each["limit"] or 1e15))
    text = bytes_text(fullest["used"])
    if fullest["limit"]:
        whole = bytes_text(fullest["limit"])
        unit = text.split()[-1]
        # One unit is enough if both have it.
        text = text.removesuffix(f" {unit}") if whole.endswith(f" {unit}") else text
        text += f" of {whole}"
    name = clean(str(fullest["device"]))
    return [(name if len(devices) == 1 else f"fullest, {name}", text)]


def _secs_of(compiles: Sequence[Mapping[str, Any]]) -> float:
    return sum(number(each["seconds"]) for each in compiles)


def _compiles_text(story: Story) -> str:
    if not story.compiles:
        return ""
    secs = _secs_of(story.compiles)
    spent = f"{secs:.1f} s" if secs < 100 else clock_text(secs)
    return f"{len(story.compiles)}, {spent}"
