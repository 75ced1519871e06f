"""Checkpointer: whole runs written while they go on, and brought back to the bit."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Protocol, Self, final

from fuelflow._errors import DamagedCheckpointError, SaveError
from fuelflow.checkpoint import paths
from fuelflow.checkpoint.background import Background
from fuelflow.checkpoint.cadence import Cadence
from fuelflow.checkpoint.directory import Directory, Entry
from fuelflow.checkpoint.record import RunRecord
from fuelflow.checkpoint.restoring import (
    Choice,
    Contents,
    Restored,
    read_contents,
    restore_state,
)
from fuelflow.checkpoint.retention import Retention
from fuelflow.checkpoint.snapshot import take
from fuelflow.checkpoint.together import from_first, is_alone, is_first
from fuelflow.checkpoint.writing import Writer
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.state import TrainState

logger = logging.getLogger("fuelflow")


class SavesRuns(Protocol):
    """What a run asks of whoever keeps it: a `Checkpointer`, or nobody."""

    @property
    def best(self) -> str | None:
        """The metric by which checkpoints stay besides, if there is one."""
        ...

    @property
    def missed(self) -> str | None:
        """Why the last save was made, if it failed, and none was made since."""
        ...

    def prepare(self) -> None:
        """Gets ready, before the first step; raises if nothing could be written."""
        ...

    def is_due(self, step: int, *, num_epochs: int | None = None) -> str | None:
        """Why the run is to be saved now; None if it is not."""
        ...

    def save(
        self,
        state: TrainState,
        record: RunRecord | None = None,
        *,
        reason: str = "asked for",
    ) -> None:
        """Saves the run, without waiting for it."""
        ...

    def wait(self) -> None:
        """Waits for what is being saved; raises if it could not be."""
        ...

    def close(self) -> None:
        """Ends; as `wait`."""
        ...


@final
class Checkpointer:
    """Writes whole runs into a directory while they go on, and brings them back.

    A checkpoint is one folder: the arrays of a `TrainState` by their dotted names, in
    orbax's format, and ``checkpoint.json``, which can be read by eye: names, shapes and
    dtypes, versions, the step, the epoch, the position in the data, the history. It has
    checksums of all files and arrays.

    `save` keeps the arrays as they are at that moment and returns: a step may take the
    state over at once. They are written by a thread of its own. A second save waits for
    the first. A write that is killed is never seen as a checkpoint. What went wrong in
    the background is raised by the next call, as a `SaveError`. A program that ends
    waits for the save under way; one that is killed loses that alone.

    Several processes each make the same calls in the same order, with a directory that
    all of them see. The first one writes.

    Args:
        directory: Where checkpoints are: a path, or a URL such as ``gs://`` that orbax
            can write to. Made when it is first needed.
        every_epochs: Epochs between saves, for `is_due`; None for not by epochs.
        every_steps: Steps between saves, besides.
        every_secs: Seconds between saves, besides. Of several processes the first
            one's clock counts, looked at every 32 steps.
        keep: How many of the newest checkpoints stay; None for all.
        best: A metric of `RunRecord.metrics`, such as ``"eval.accuracy"``, the best
            checkpoints by which stay besides.
        higher_is_better: Whether more of it is better; needed with ``best``.
        keep_best: How many of the best stay.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If one is out of range, or does not go with another.

    Example:
        >>> import tempfile
        >>> import fuelflow as ff, numpy as np, jax.numpy as jnp, optax
        >>> def loss_fn(params, batch):
        ...     return (params["w"] * batch["x"] - batch["y"]) ** 2
        >>> loop = ff.TrainingLoop(loss_fn, optax.sgd, schedule=0.1)
        >>> model = {"w": jnp.float32(0.0)}
        >>> batch = {"x": np.float32([1, 2]), "y": np.float32([2, 4])}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with Checkpointer(directory) as checkpointer:
        ...         state, _ = loop.step(loop.init(model), batch)
        ...         checkpointer.save(state)
        ...     state = checkpointer.restore(loop, model).state
        >>> int(state.step), round(float(state.params["w"]), 6)
        (1, 1.0)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_epochs: int | None = 1,
        every_steps: int | None = None,
        every_secs: float | None = None,
        keep: int | None = 3,
        best: str | None = None,
        higher_is_better: bool | None = None,
        keep_best: int = 1,
    ) -> None:
        self._cadence = Cadence(every_epochs, every_steps, every_secs)
        self._retention = Retention(
            keep=keep,
            best=best,
            higher_is_better=higher_is_better,
            keep_best=keep_best,
        )
        self._directory = Directory(paths.as_path(directory))
        self._background = Background(f"fuelflow checkpointer of {directory}")
        self._reason: str | None = None
        self._has_missed = False

    @property
    def directory(self) -> paths.AnyPath:
        """Where checkpoints are."""
        return self._directory.path

    @property
    def best(self) -> str | None:
        """The metric by which checkpoints stay besides; None if there is none."""
        return self._retention.best

    @property
    def missed(self) -> str | None:
        """Why the last save was made, if it failed; None if it did not, or none was.

        A run that goes on after that makes it then. Known once its error was raised.
        """
        return self._reason if self._has_missed else None

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._background.is_busy

    @cached_property
    def _writer(self) -> Writer:
        return Writer(self._directory, self._retention)

    # Saving.

    def prepare(self) -> None:
        """Makes the directory, and removes what a killed process left half-written.

        `save` does it if it was not done before, and after a save that failed.

        Raises:
            SaveError: If the directory cannot be made or written to, or the last save
                failed.
        """
        self.wait()
        self._start(lambda: None)
        self.wait()

    def is_due(self, step: int, *, num_epochs: int | None = None) -> str | None:
        """The setting by which the run is to be saved now, such as ``"every_steps"``.

        To be asked after each dispatch, and at the end of each epoch once more.
        ``every_steps`` counts from the last save or restore, and is due as soon as a
        multiple of it is reached or passed.

        Args:
            step: Completed updates, those counted that are still on their way.
            num_epochs: Epochs done, if one has just ended.

        Returns:
            The setting, or None if no save is due.

        Raises:
            SaveError: If the last save has failed meanwhile; with several processes
                the next `save` or `wait` raises it instead, on all of them.
        """
        if is_alone():
            self._raise_error()
        return self._cadence.reason(step, num_epochs)

    def save(
        self,
        state: TrainState,
        record: RunRecord | None = None,
        *,
        reason: str = "asked for",
    ) -> None:
        """Saves a run as it is now, and returns without waiting for the disk.

        Waits for the save before it, and for the steps so far only where a copy of the
        state has no room on the device. The state stays usable, also to be donated.

        Args:
            state: The state.
            record: What the run knows besides. It is taken down before this returns.
            reason: Why, for people who read it.

        Raises:
            SaveError: If the save before it failed.
            TypeError: If the position in the record is nothing that JSON has.
            UsedStateError: If a step has taken over the state's buffers.
            ValueError: If the record has metrics, and ``best`` is not among them.
        """
        record = RunRecord() if record is None else record
        self._retention.require_metric(record.metrics)
        run = record.to_dict()
        self._reason = reason  # of this one, which fails with the one before
        self.wait()
        snapshot = take(state)
        self._start(partial(self._writer.write, snapshot, run, reason))
        self._has_missed = False
        self._cadence.saved()

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
            SaveError: If it could not be written.
        """
        self._background.wait()
        self._raise_error()

    def close(self) -> None:
        """Waits for the last save; the checkpointer may still be used afterwards.

        Raises:
            SaveError: If it could not be written.
        """
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, work: Callable[[], None]) -> None:
        """Has the thread of the process that writes do something with the directory."""

        def run() -> None:
            try:
                self._writer.prepare()
                work()
            except Exception as error:
                self._writer.begin_anew()
                raise self._save_error(error) from error

        if is_first():
            self._background.start(run)

    def _save_error(self, error: Exception) -> SaveError:
        good = None
        with contextlib.suppress(OSError):
            good = next(iter(reversed(self._directory.entries())), None)
        fault = f"{type(error).__name__}: {error}"
        if isinstance(error, RuntimeError) and "shutdown" in str(error):
            fault += (  # on Python 3.12.0 and 3.12.1
                ", as the program ended meanwhile: end it with `checkpointer.wait()`, "
                "or save inside `with checkpointer:`"
            )
        return SaveError(str(self.directory), fault, str(good.path) if good else None)

    def _raise_error(self) -> None:
        """Raises what went wrong in the background, on all processes."""
        error = self._background.taken_error()
        (has_failed,) = from_first(int(error is not None))
        self._has_missed |= error is not None or bool(has_failed)
        if error is not None:
            raise error
        if has_failed:
            raise self._save_error(OSError("process 0 failed, and says why"))

    # Restoring.

    def steps(self) -> tuple[int, ...]:
        """The steps of the checkpoints there are, in the order of their saves."""
        return tuple(entry.step for entry in self._directory.entries())

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None if there is none.

        The newest is the one saved last, also if a run went back to an earlier step.
        """
        return next(reversed(self.steps()), None)

    def restore(
        self,
        loop: TrainingLoop,
        model: Any,
        step: int | None = None,
        *,
        partial: bool = False,
        only: str | Iterable[str] = "*",
        rename: Mapping[str, str] | None = None,
        skip_damaged: bool = False,
    ) -> Restored:
        """A run as it was saved, for a loop to go on with.

        The checkpoint may be of another number of devices or processes, another Python
        or jax. Arrays come back bit for bit, placed as the loop's steps return them, so
        that no program is compiled again, and donated like any others. Everything is
        read and compared before anything is made of it.

        Running sums come back with as many ranks as there are now: with another number
        each is given the same part of them. They are left out if anything else is.

        Args:
            loop: The loop to go on with.
            model: The model, as `TrainingLoop.init` takes it, or a state of the loop,
                which may be used up. It says which names and shapes there are, and what
                is not loaded has its values, copied.
            step: Which checkpoint; None for the newest.
            partial: Whether what does not fit is left as it was, rather than an error.
                Numbers of another dtype of the same kind are then cast.
            only: Patterns of the names to load, such as ``"params.encoder"``.
            rename: Pattern of parameters' names in the checkpoint → what they are
                called in the model, such as ``{"*": "encoder.*"}``; the optimizer's
                arrays for them follow.
            skip_damaged: Whether a damaged checkpoint is passed over, with a warning,
                for the newest one before it that is whole.

        Returns:
            The state, the record, and a report of each name.

        Raises:
            DamagedCheckpointError: If the checkpoint is not as it was written.
            FileNotFoundError: If there is none, or none of that step.
            SaveError: If the last save failed.
            StateMismatchError: If names, shapes or dtypes differ.
            UsedStateError: If something is to stay as it was in a state that is used.
            ValueError: If a pattern selects nothing, or the format is not known.
        """
        self.wait()
        contents = self._read(step, skip_damaged=skip_damaged)
        choice = Choice(partial=partial, only=only, rename=rename)
        restored = restore_state(contents, loop, model, choice)
        self._cadence.restart(restored.step if choice.is_whole else 0)
        self._has_missed = False
        return restored

    def _read(self, step: int | None, *, skip_damaged: bool) -> Contents:
        """A checkpoint that the first process chooses, read by each for itself."""
        contents, error = None, None
        if is_first():
            try:
                contents = self._choose(step, skip_damaged=skip_damaged)
            except Exception as raised:
                if is_alone():
                    raise
                error = raised
        (serial,) = from_first(contents.entry.serial if contents else 0)
        if error is not None:
            raise error
        if contents is None:
            contents = read_contents(self._entry_of(serial))
        return contents

    def _choose(self, step: int | None, *, skip_damaged: bool) -> Contents:
        candidates = self._candidates(step)
        for entry in candidates:
            try:
                return read_contents(entry)
            except DamagedCheckpointError as error:
                if not skip_damaged or entry is candidates[-1]:
                    raise
                logger.warning("passed over: %s", error)
        raise AssertionError("there is at least one candidate")

    def _candidates(self, step: int | None) -> list[Entry]:
        """The checkpoints to try, newest first, of which there is at least one."""
        entries = self._directory.entries()[::-1]
        if not entries:
            raise FileNotFoundError(f"there is no checkpoint in {self.directory}")
        found = [entry for entry in entries if step is None or entry.step == step]
        if not found:
            raise FileNotFoundError(
                f"there is no checkpoint of step {step} in {self.directory}, only of "
                + ", ".join(str(entry.step) for entry in entries[::-1])
            )
        return found

    def _entry_of(self, serial: int) -> Entry:
        for entry in self._directory.entries():
            if entry.serial == serial:
                return entry
        raise FileNotFoundError(
            f"process 0 found no whole checkpoint in {self.directory}, or one that "
            "this process does not see: all processes need the same directory"
        )

    def __repr__(self) -> str:
        return f"Checkpointer({str(self.directory)!r})"
