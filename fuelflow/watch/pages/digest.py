"""Records of a run folded into what a page draws: few columns, however long it was."""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

from fuelflow.metrics.bottleneck import find_bottleneck, split_times
from fuelflow.metrics.epoch import EpochMetrics
from fuelflow.watch.pages.bins import RankBins
from fuelflow.watch.pages.columns import columns, rounded, thin
from fuelflow.watch.record.steps import steps_taken

# Curves of a thousand pixels gain nothing from more.
MAX_ROWS = 3000
MAX_EVENTS = 300
MAX_HISTOGRAMS = 40
_MAX_DEVICES = 16
_STEP_FACTS = ("epoch", "step", "epoch_step", "time", "loss", "grad_norm", "lr")
_STEP_FACTS += ("num_skipped", "steps_per_sec", "samples_per_sec", "data_wait")
_EPOCH_FACTS = ("epoch", "epoch_ms", "eval_ms", "callback_ms", "compile_ms")
_EPOCH_FACTS += ("num_steps", "num_skipped", "lr")
_TIMES = ("epoch_ms", "eval_ms", "callback_ms", "compile_ms", "num_steps")
_TIMES += ("per_rank_share_complete_ms", "per_rank_compute_only_ms")
_TIMES += ("per_rank_data_starve_ms", "per_rank_pass_ms", "process_indices")
_RUN_FACTS = ("name", "epochs", "steps_per_epoch", "epoch", "step", "time")
_PARAM_FACTS = ("name", "shape", "dtype", "num_bytes", "is_trained")


class Digest:
    """What a page draws of a run, kept small while records are added.

    A digest of the newest records alone is what a page that has the others adds.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._run: Mapping[str, Any] | None = None
        self._sessions: list[list[float]] = []
        self._steps: list[Mapping[str, Any]] = []
        self._epochs: list[Mapping[str, Any]] = []
        self._ranks = RankBins()
        self._histograms: dict[str, list[Mapping[str, Any]]] = {}
        self._compiles: list[Mapping[str, Any]] = []
        self._events: list[Mapping[str, Any]] = []
        self._num_events = 0
        # Steps left out: as far as known, and before the end of the newest epoch.
        self._skipped = self._skipped_by_epochs = 0
        self._end: Mapping[str, Any] | None = None
        self._phase: str | None = None
        self._time: float | None = None
        for record in records:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Takes the next record; one of an unknown kind changes nothing."""
        adders = {
            "run": self._add_run,
            "step": self._add_step,
            "epoch": self._add_epoch,
            "pass": self._add_pass,
            "compile": self._add_compile,
            "event": self._add_event,
            "phase": self._add_phase,
            "end": self._add_end,
        }
        if record["kind"] not in adders:
            return
        adders[record["kind"]](record)
        self._time = record["time"]
        if self._sessions:
            session = self._sessions[-1]
            session[1] = max(session[1], record["time"])  # clocks may be set back

    def to_dict(self) -> dict[str, Any]:
        """All of it, in types that any JSON has."""
        return {
            "run": self._run,
            "time": self._time,
            "sessions": self._sessions,
            "steps": columns(self._steps),
            "epochs": columns(self._epochs),
            "ranks": self._ranks.to_dict(),
            "histograms": self._histograms,
            "compiles": self._compiles,
            "events": self._events,
            "num_events": self._num_events,
            "skipped": self._skipped_by_epochs,
            "end": self._end,
            "phase": self._phase,
        }

    def _add_run(self, record: Mapping[str, Any]) -> None:
        # What comes after the place where a run goes on is done anew.
        step, epoch = record["step"], record["epoch"]
        self._steps = [row for row in self._steps if row["step"] <= step]
        self._epochs = [row for row in self._epochs if row["epoch"] < epoch]
        self._ranks.drop_from(epoch)
        for name, rows in self._histograms.items():
            self._histograms[name] = [row for row in rows if row["step"] <= step]
        by_steps = [row.get("num_skipped", 0) for row in self._steps[-1:]]
        by_epochs = [row["taken"] - row["step"] for row in self._epochs[-1:]]
        self._skipped = max([*by_steps, *by_epochs], default=0)
        self._skipped_by_epochs = self._skipped
        self._end = None
        self._sessions.append([record["time"], record["time"]])
        self._run = {
            **{name: record.get(name) for name in _RUN_FACTS},
            "settings": record["settings"],
            "versions": record["versions"],
            "params": columns(
                [{n: each.get(n) for n in _PARAM_FACTS} for each in record["params"]]
            ),
            "ranks": columns(record["ranks"]),
        }

    def _add_step(self, record: Mapping[str, Any]) -> None:
        row = {name: record[name] for name in _STEP_FACTS if name in record}
        # The record counts those of the whole run.
        self._skipped = max(self._skipped, row.get("num_skipped", 0))
        row["taken"] = steps_taken(record)
        row |= {f"metric/{name}": value for name, value in record["metrics"].items()}
        for each in record.get("memory", ())[:_MAX_DEVICES]:
            row[f"memory/{each['device']}"] = each["used"]
        row |= {f"host/{name}": value for name, value in record.get("host", {}).items()}
        self._steps.append(row)
        if len(self._steps) >= 2 * MAX_ROWS:
            self._steps = thin(self._steps, "taken", MAX_ROWS)
        for name, histogram in record.get("histograms", {}).items():
            self._add_histogram(
                name, {"step": row["step"], "taken": row["taken"], **histogram}
            )

    def _add_histogram(self, name: str, row: Mapping[str, Any]) -> None:
        rows = self._histograms.setdefault(name, [])
        rows.append(row)
        if len(rows) >= 2 * MAX_HISTOGRAMS:
            self._histograms[name] = [*rows[:-1:2], rows[-1]]

    def _add_epoch(self, record: Mapping[str, Any]) -> None:
        metrics = record["metrics"]
        self._skipped_by_epochs = self._skipped = max(
            self._skipped_by_epochs + metrics["num_skipped"], self._skipped
        )
        self._add_epoch_row(
            {
                **{name: metrics[name] for name in _EPOCH_FACTS},
                "step": metrics["global_step"],
                "time": record["time"],
                "loss": metrics["avg_loss"],
                "samples": sum(metrics["per_rank_samples"]),
                **_named("metric", metrics["scalars"]),
                **_named("eval", metrics["evaluation"]),
                **_held_back(metrics),
            }
        )
        self._ranks.add(metrics)

    def _add_pass(self, record: Mapping[str, Any]) -> None:
        means = dict(record["means"])
        row = {name: record[name] for name in ("epoch", "step", "time", "num_steps")}
        row["epoch_ms"] = 1e3 * record["secs"]
        if "loss" in means:
            row["loss"] = means.pop("loss")
        self._add_epoch_row({**row, **_named("metric", means)})

    def _add_epoch_row(self, row: Mapping[str, Any]) -> None:
        self._epochs.append({**row, "taken": row["step"] + self._skipped})
        if len(self._epochs) >= 2 * MAX_ROWS:
            self._epochs = thin(self._epochs, "epoch", MAX_ROWS)

    def _add_compile(self, record: Mapping[str, Any]) -> None:
        self._compiles = [*self._compiles[1 - MAX_EVENTS :], record]

    def _add_event(self, record: Mapping[str, Any]) -> None:
        self._num_events += 1
        if self._events and _are_saves(self._events[-1], record):
            count = self._events.pop().get("count", 1) + 1
            record = {**record, "count": count}
        self._events.append(record)
        if len(self._events) > MAX_EVENTS:
            usual = (at for at, each in enumerate(self._events) if _is_usual(each))
            del self._events[next(usual, 0)]

    def _add_phase(self, record: Mapping[str, Any]) -> None:
        self._phase = record["phase"]

    def _add_end(self, record: Mapping[str, Any]) -> None:
        self._end = record


def _named(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{group}/{name}": value for name, value in values.items()}


def _are_saves(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both only say that a checkpoint was written."""
    kinds = {(each["what"], each["level"]) for each in (one, other)}
    return kinds == {("checkpoint", "info")}


def _is_usual(event: Mapping[str, Any]) -> bool:
    """Whether an event may give way to others."""
    return event["level"] == "info" and event["what"] != "resumed"


def _held_back(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What held an epoch back, and the parts of the median rank's time."""
    try:
        # Nothing but times is read: to have all of it checked takes five times as long.
        times = SimpleNamespace(**{name: metrics[name] for name in _TIMES})
        full = cast(EpochMetrics, times)
        found, parts = find_bottleneck(full), split_times(full)
    except (KeyError, TypeError, ValueError):  # written by another version
        return {}
    return {
        "held": str(found),
        "held_kind": found.kind,
        "held_share": rounded(found.share, 3),
        "compute_ms": _middle([each.compute for each in parts]),
        "input_ms": _middle([each.input for each in parts]),
        "host_ms": _middle([each.host for each in parts]),
    }


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
