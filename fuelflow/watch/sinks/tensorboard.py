"""Records as TensorBoard reads them."""

import os
import re
import time
from itertools import count
from typing import Any, final

import numpy as np

from fuelflow.watch.record.records import Record, number

MAX_RANKS = 16
_SECS_BETWEEN_FLUSHES = 10.0
_FILE_VERSION = "brain.Event:2"
_NOT_IN_TAGS = re.compile(r"[^-/\w.]")
_numbers = count()


@final
class TensorBoard:
    """Writes what `Record.scalars` has, by step, into event files.

    Besides: the throughput of each rank in samples per second, as a curve each up to 16
    ranks, else as a histogram; and the histograms of records that have some.

    Args:
        directory: Where the event files go, for ``tensorboard --logdir``.

    Raises:
        ImportError: If tensorboardX is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from tensorboardX import event_file_writer, record_writer
            from tensorboardX.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise ImportError(
                "`TensorBoard` needs tensorboardX, of the extra `tensorboard`: "
                "pip install 'fuelflow[tensorboard]'"
            ) from error
        # Not its `SummaryWriter`, which writes in a thread that tells nobody of a full
        # disk, ends with records unwritten, and prints a line for each NaN.
        self._make = event_file_writer.EventsWriter
        self._check = record_writer.directory_check
        self._events, self._summaries = event_pb2, summary_pb2
        self._directory = os.fspath(directory)
        self._writer: Any = None
        self._flushed = time.monotonic()

    def __call__(self, record: Record) -> None:
        """Writes a record's numbers; those of an epoch are then in its file.

        Raises:
            OSError: If they cannot be written.
        """
        if record.kind == "run":
            self._begin(record)
            return
        if self._writer is None:
            self._writer = self._open()
        step, when = record.step, record["time"]
        for name, value in record.scalars.items():
            self._add_scalar(name, value, step, when)
        for name, histogram in record.get("histograms", {}).items():
            self._add_histogram(name, histogram, step, when)
        if record.kind == "epoch":
            self._add_ranks(record, step, when)
        is_old = time.monotonic() - self._flushed >= _SECS_BETWEEN_FLUSHES
        if is_old or record.kind in ("epoch", "pass", "end"):
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Closes the files; another record begins new ones."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _begin(self, run: Record) -> None:
        """Has what a run does anew, from its step on, not shown twice."""
        self.close()
        self._writer = self._open()
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(run["step"] + 1, run["time"], file_version=_FILE_VERSION)
        self._add(run["step"] + 1, run["time"], session_log=log)
        self._writer.flush()

    def _open(self) -> Any:
        self._check(self._directory)
        # Without a suffix two files of one second would have one name.
        suffix = f".{os.getpid()}.{next(_numbers)}"
        return self._make(f"{self._directory}/events", suffix)

    def _add(self, step: int | None, when: float, **what: Any) -> None:
        event = self._events.Event(wall_time=when, step=step or 0, **what)
        self._writer.write_event(event)

    def _add_summary(
        self, name: str, step: int | None, when: float, **value: Any
    ) -> None:
        tag = _NOT_IN_TAGS.sub("_", name).lstrip("/")
        summary = self._summaries.Summary
        self._add(step, when, summary=summary(value=[summary.Value(tag=tag, **value)]))

    def _add_scalar(
        self, name: str, value: float, step: int | None, when: float
    ) -> None:
        self._add_summary(name, step, when, simple_value=value)

    def _add_ranks(self, record: Record, step: int | None, when: float) -> None:
        rates = [1e3 * number(v) for v in record["metrics"]["per_rank_throughput"]]
        if len(rates) == 1:
            return
        if len(rates) > MAX_RANKS:
            counts, edges = np.histogram(np.asarray(rates)[np.isfinite(rates)], bins=30)
            shown = {"low": edges[0], "high": edges[-1], "counts": counts}
            self._add_histogram("ranks/samples_per_sec", shown, step, when)
            return
        for rank, rate in enumerate(rates):
            name = f"ranks/{rank}/samples_per_sec"
            self._add_scalar(name, rate, step, when)

    def _add_histogram(
        self, name: str, histogram: dict[str, Any], step: int | None, when: float
    ) -> None:
        low, high = number(histogram["low"]), number(histogram["high"])
        counts = np.asarray(histogram["counts"], np.float64)
        edges = np.linspace(low, high, len(counts) + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        shown = self._summaries.HistogramProto(
            min=low,
            max=high,
            num=counts.sum(),
            sum=(counts * middles).sum(),
            sum_squares=(counts * middles**2).sum(),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )
        self._add_summary(name, step, when, histo=shown)
