"""Records as TensorBoard reads them."""

import os
from itertools import count
from typing import Any, final

import numpy as np

from fuelflow.watch.record.records import Record, number

MAX_RANKS = 16
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
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "`TensorBoard` needs tensorboardX, of the extra `tensorboard`: "
                "pip install 'fuelflow[tensorboard]'"
            ) from error
        self._make = SummaryWriter
        self._directory = os.fspath(directory)
        self._writer: Any = None

    def __call__(self, record: Record) -> None:
        """Writes a record's numbers."""
        if record.kind == "run":
            self._begin(record)
            return
        if self._writer is None:
            self._writer = self._open()
        step, when = record.step, record["time"]
        for name, value in record.scalars.items():
            self._writer.add_scalar(name, value, step, walltime=when)
        for name, histogram in record.get("histograms", {}).items():
            self._add_histogram(name, histogram, step, when)
        if record.kind == "epoch":
            self._add_ranks(record, step, when)
        if record.kind in ("epoch", "pass", "end"):
            self._writer.flush()

    def close(self) -> None:
        """Closes the files; another record begins new ones."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _begin(self, run: Record) -> None:
        """Has what a run does anew, from its step on, not shown twice."""
        self.close()
        self._writer = self._open(purge_step=run["step"] + 1)

    def _open(self, **options: Any) -> Any:
        # Without a suffix two files of one second would have one name.
        suffix = f".{os.getpid()}.{next(_numbers)}"
        return self._make(self._directory, filename_suffix=suffix, **options)

    def _add_ranks(self, record: Record, step: int | None, when: float) -> None:
        rates = [1e3 * number(v) for v in record["metrics"]["per_rank_throughput"]]
        if len(rates) == 1:
            return
        if len(rates) > MAX_RANKS:
            name = "ranks/samples_per_sec"
            self._writer.add_histogram(name, np.asarray(rates), step, walltime=when)
            return
        for rank, rate in enumerate(rates):
            name = f"ranks/{rank}/samples_per_sec"
            self._writer.add_scalar(name, rate, step, walltime=when)

    def _add_histogram(
        self, name: str, histogram: dict[str, Any], step: int | None, when: float
    ) -> None:
        low, high = number(histogram["low"]), number(histogram["high"])
        counts = np.asarray(histogram["counts"], np.float64)
        edges = np.linspace(low, high, len(counts) + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        self._writer.add_histogram_raw(
            name,
            min=low,
            max=high,
            num=counts.sum(),
            sum=(counts * middles).sum(),
            sum_squares=(counts * middles**2).sum(),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
            walltime=when,
        )
