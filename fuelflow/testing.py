"""What users test their own runs with."""

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import numpy as np

from fuelflow.checkpoint.checkpointer import Checkpointer
from fuelflow.checkpoint.record import RunRecord
from fuelflow.checkpoint.restoring import Restored
from fuelflow.checkpoint.snapshot import take
from fuelflow.metrics.history import History
from fuelflow.model.names import named_leaves
from fuelflow.run.source import Source
from fuelflow.run.timed import Timed
from fuelflow.run.trainer import Trainer
from fuelflow.step.batch import Stretch, Stretchable
from fuelflow.step.checks import checked_count
from fuelflow.step.state import TrainState

_MOST_TOLD = 8


class MakesTrainers(Protocol):
    """A function that makes the same run anew each time."""

    def __call__(self, *, checkpointer: Checkpointer, resume: bool) -> Trainer:
        """The trainer of a run, that has been given both arguments."""
        ...


def assert_resumes_exactly(
    make_trainer: MakesTrainers,
    *,
    at_steps: Iterable[int] | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> None:
    """Checks that a run which is stopped and resumed is the run that is not.

    The run is made and run whole. Then for each of some steps it is made, stopped after
    that step, made once more, and resumed from the checkpoint. Bit for bit the same
    must be: the rows of every step in their order, parameters, variables, the
    optimizer's state, keys and counts, and of the history all but times.

    Args:
        make_trainer: Called as ``make_trainer(checkpointer=..., resume=...)``, returns
            a new `Trainer` that has been given both. Its model and its data must be new
            too; a loop may be shared, which saves compiling it again.
        at_steps: Where to stop, each from 1 to the last step but one. A dispatch of
            several steps is ended first. By default after the first step, at the end of
            the first epoch, and halfway.
        directory: Where to keep checkpoints, which stay there; needed for several
            processes. By default a temporary one.

    Raises:
        AssertionError: If something differs; it names the first things that do.
        TypeError: If a step is no integer.
        ValueError: If a trainer does not use what it was given, a step is out of range,
            or the run cannot be stopped there, as a dispatch goes to its end.

    Example:
        >>> import fuelflow as ff, numpy as np, jax.numpy as jnp, optax
        >>> x = np.arange(12, dtype=np.float32)
        >>> def loss_fn(params, batch):
        ...     return (params["w"] * batch["x"] - batch["y"]) ** 2
        >>> loop = ff.TrainingLoop(loss_fn, optax.adam, schedule=0.01)
        >>> def make_trainer(checkpointer, resume):
        ...     data = ff.DataLoader({"x": x, "y": 2 * x}, batch_size=5)
        ...     return ff.Trainer(
        ...         loop, {"w": jnp.float32(0)}, data, epochs=2,
        ...         checkpointer=checkpointer, resume=resume,
        ...     )
        >>> assert_resumes_exactly(make_trainer)
    """
    with ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(directory)
        whole = _Run(make_trainer, folder / "whole", resume=False)
        num_steps = len(whole.rows)
        for step in _checked_steps(at_steps, whole, num_steps):
            first = _Run(
                make_trainer, folder / f"step-{step}", resume=False, stop_at=step
            )
            if first.stopped_by is None:
                raise ValueError(
                    f"the run of {num_steps} steps cannot be stopped after step "
                    f"{step}, as a dispatch goes on to its end: give an earlier one in "
                    "`at_steps`, or the run more epochs"
                )
            second = _Run(make_trainer, folder / f"step-{step}", resume=True)
            faults = list(_differences(whole, first, second))
            if faults:
                raise AssertionError(_text(faults, len(first.rows)))


def _checked_steps(
    at_steps: Iterable[int] | None, whole: "_Run", num_steps: int
) -> list[int]:
    if num_steps < 2:
        raise ValueError(
            f"the run must have at least 2 steps to be stopped in, got {num_steps}"
        )
    if at_steps is None:
        chosen = {1, whole.history[0].num_steps, num_steps // 2}
        return sorted(step for step in chosen if step < num_steps)
    steps = [checked_count("at_steps", step, least=1) for step in at_steps]
    for step in steps:
        if step >= num_steps:
            raise ValueError(
                f"`at_steps` must be before the last of {num_steps} steps, got {step}"
            )
    return steps


class _Run:
    """A run, and what it led to.

    Attributes:
        rows: What tells the rows of each of its steps from others, in order.
        arrays: The arrays of its state by name.
        history: Its history.
        stopped_by: What stopped it.
    """

    def __init__(
        self,
        make_trainer: MakesTrainers,
        folder: Path,
        *,
        resume: bool,
        stop_at: int | None = None,
    ) -> None:
        checkpointer = _Stopping(Checkpointer(folder, every_epochs=None), stop_at)
        trainer = make_trainer(
            checkpointer=cast(Checkpointer, checkpointer), resume=resume
        )
        course = trainer._course
        is_given = course._checkpointer is checkpointer
        if not is_given or (trainer._resumes is not None) != resume:
            raise ValueError(
                "`make_trainer` must give its trainer the `checkpointer` and the "
                "`resume` that it is called with, got a trainer with others"
            )
        checkpointer.trainer = trainer
        self.rows: list[_Print] = []
        course._data = _Recorded(course._data, self.rows)
        trained = trainer.fit()
        if stop_at is not None:  # one more may have been made, to know if there is one
            del self.rows[checkpointer.num_steps :]
        self.arrays, _ = take(trained.state).fetched()
        self.history: History = trained.history
        self.stopped_by = trained.stopped_by


class _Stopping:
    """A checkpointer that has its trainer stop after a step, which it then saves."""

    def __init__(self, checkpointer: Checkpointer, stop_at: int | None) -> None:
        self._checkpointer = checkpointer
        self._stop_at = stop_at
        self.trainer: Trainer | None = None
        self.num_steps = 0

    @property
    def best(self) -> str | None:
        return self._checkpointer.best

    @property
    def missed(self) -> str | None:
        return self._checkpointer.missed

    def prepare(self) -> None:
        self._checkpointer.prepare()

    def is_due(self, step: int, *, num_epochs: int | None = None) -> str | None:
        self.num_steps = step
        if self._stop_at is not None and step >= self._stop_at:
            assert self.trainer is not None
            self.trainer.stop()
        return self._checkpointer.is_due(step, num_epochs=num_epochs)

    def save(
        self,
        state: TrainState,
        record: RunRecord | None = None,
        *,
        reason: str = "asked for",
    ) -> None:
        self._checkpointer.save(state, record, reason=reason)

    def wait(self) -> None:
        self._checkpointer.wait()

    def close(self) -> None:
        self._checkpointer.close()

    def latest(self) -> int | None:
        return self._checkpointer.latest()

    def restore(self, *arguments: Any, **options: Any) -> Restored:
        return self._checkpointer.restore(*arguments, **options)


# The rows of a step, so far as they can be told: picked on the device or given.
_Print = tuple[str, str]


class _Recorded:
    """A source, of whose batches prints are taken."""

    def __init__(self, source: Source, prints: list[_Print]) -> None:
        self._source = source
        self._prints = prints

    @property
    def num_steps(self) -> int | None:
        return self._source.num_steps

    @property
    def num_tail_rows(self) -> int:
        return self._source.num_tail_rows

    def epoch(self, epoch: int, num_done: int = 0) -> Timed:
        timed = self._source.epoch(epoch, num_done)
        timed._batches = _Printed(timed._batches, self._prints)
        return timed

    def position(self) -> Any:
        return self._source.position()

    def leave(self, batches: Timed, mark: Any) -> None:
        self._source.leave(batches, mark)

    def restore(self, position: Any) -> None:
        self._source.restore(position)

    def facts(self) -> dict[str, str]:
        return self._source.facts()


class _Printed:
    """Batches, of which prints are taken."""

    def __init__(self, batches: Iterator[Any], prints: list[_Print]) -> None:
        self._batches = batches
        self._prints = prints

    def __iter__(self) -> "_Printed":
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._prints.append(("given", _print_of(batch)))
        return batch

    def stretch(self, num_steps: int) -> Stretch | None:
        if not isinstance(self._batches, Stretchable):
            return None
        stretch = self._batches.stretch(num_steps)
        if stretch is not None:
            steps = jax.tree.map(_here, stretch.steps())
            for step in range(num_steps):
                picked = jax.tree.map(lambda x, step=step: x[step], steps)
                self._prints.append(("picked", _print_of(picked)))
        return stretch

    def close(self) -> None:
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


def _print_of(batch: Any) -> str:
    digest = hashlib.sha256()
    for name, leaf in named_leaves(batch).items():
        values = _here(leaf)
        digest.update(f"{name} {values.dtype} {values.shape} ".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def _here(leaf: Any) -> np.ndarray:
    """What this process has of an array."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return np.concatenate(
            [np.asarray(part.data).ravel() for part in leaf.addressable_shards]
        )
    return np.asarray(leaf)


def _differences(whole: _Run, first: _Run, second: _Run) -> Iterator[str]:
    """What differs, first things first."""
    rows = first.rows + second.rows
    if len(rows) != len(whole.rows):
        yield f"there were {len(rows)} steps in all, not {len(whole.rows)}"
    for step, (got, expected) in enumerate(
        zip(rows, whole.rows, strict=False), start=1
    ):
        if got[0] == expected[0] and got != expected:
            when = "before" if step <= len(first.rows) else "after"
            yield f"step {step}, {when} the stop, had other rows"
    for name in whole.arrays | second.arrays:
        if name not in whole.arrays or name not in second.arrays:
            yield f"`{name}` is in only one of them"
        else:
            yield from _array_difference(name, second.arrays[name], whole.arrays[name])
    yield from _history_differences(second.history, whole.history)


def _array_difference(
    name: str, got: np.ndarray, expected: np.ndarray
) -> Iterator[str]:
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        yield (
            f"`{name}` is {got.dtype}{list(got.shape)}, "
            f"not {expected.dtype}{list(expected.shape)}"
        )
    elif got.tobytes() != expected.tobytes():
        bits = np.dtype((np.void, expected.dtype.itemsize))
        differs = np.ravel(_as_bits(got, bits) != _as_bits(expected, bits))
        where = int(differs.argmax())
        yield (
            f"`{name}`: {differs.sum()} of {differs.size} values differ, the first is "
            f"{got.ravel()[where]}, not {expected.ravel()[where]}"
        )


def _as_bits(values: np.ndarray, bits: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(bits)


def _history_differences(got: History, expected: History) -> Iterator[str]:
    if len(got) != len(expected):
        yield f"the history has {len(got)} epochs, not {len(expected)}"
    for one, other in zip(got, expected, strict=False):
        mine, theirs = _untimed(one.to_dict()), _untimed(other.to_dict())
        for name in theirs | mine:
            if mine.get(name) != theirs.get(name):
                yield (
                    f"`{name}` of epoch {other.epoch} is {mine.get(name)}, "
                    f"not {theirs.get(name)}"
                )


def _untimed(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that no clock has a part in."""
    return {
        name: value
        for name, value in metrics.items()
        if not name.endswith(("_ms", "_throughput"))
    }


def _text(faults: list[str], step: int) -> str:
    told = "".join(f"\n- {fault}" for fault in islice(faults, _MOST_TOLD))
    more = len(faults) - _MOST_TOLD
    rest = f"\n- and {more} more" if more > 0 else ""
    return (
        f"a run that was stopped after step {step} and resumed is not the run that was "
        f"not stopped:{told}{rest}"
    )
