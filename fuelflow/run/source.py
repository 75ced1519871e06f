"""Epochs of batches, from a loader or whatever else can be iterated."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import islice
from queue import SimpleQueue
from typing import Any, Protocol

from jax.sharding import Mesh

from fuelflow.data.loader import DataLoader
from fuelflow.devices.ranks import checked_mesh
from fuelflow.run.compiling import secs_compiled
from fuelflow.step.batch import Stretch, Stretchable
from fuelflow.step.stacking import iterator_of


class Source(Protocol):
    """Where a trainer's batches come from."""

    @property
    def num_steps(self) -> int | None:
        """Batches of an epoch, if that is known."""
        ...

    @property
    def num_tail_rows(self) -> int:
        """Rows of a last batch that is filled up; 0 if there is none, or none known."""
        ...

    def epoch(self, epoch: int, num_done: int = 0) -> "Timed":
        """The batches of an epoch, but for those that are done already."""
        ...

    def position(self) -> Any:
        """Where the data is, for `restore`; None if it cannot tell."""
        ...

    def leave(self, batches: "Timed", mark: Any) -> None:
        """Has the data go on where it was when a mark was made.

        Args:
            batches: An epoch of it, whose next batch another thread still waits for.
            mark: What its `Timed.mark` returned.
        """
        ...

    def restore(self, position: Any) -> None:
        """Has the data go on from a position."""
        ...

    def facts(self) -> dict[str, str]:
        """What must be the same on all processes."""
        ...


class Abandoned(BaseException):
    """The run of a thread that waited for data was ended meanwhile by another."""


class Timed:
    """An iterator over batches that knows how long it was waited for.

    While one thread waits for a batch, which may take for ever, another can `claim` the
    iterator, and leave that thread behind: it ends when its batch comes.

    Args:
        batches: The batches.
        mark: Says where they are, before each is taken; None if that cannot be told.

    Attributes:
        secs_waited: Seconds so far, compiling apart.
        secs_compiling: Seconds of compiling so far, such as of a loader's transform.
        num_given: Batches given so far.
        is_abandoned: Whether the thread that waits was left behind.
    """

    def __init__(
        self, batches: Iterator[Any], mark: Callable[[], Any] = lambda: None
    ) -> None:
        self._batches = batches
        self._ahead: deque[Any] = deque(maxlen=1)
        self._mark = mark
        self._marks: deque[tuple[int, Any]] = deque(maxlen=2)
        self._turn = threading.Lock()
        self._waits_since: float | None = None
        self._late: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.secs_waited = 0.0
        self.secs_compiling = 0.0
        self.num_given = 0
        self.is_abandoned = False

    def keep_marks(self, num_ahead: int) -> None:
        """Has as many batches taken together have their marks kept."""
        self._marks = deque(maxlen=num_ahead + 1)

    def mark_at(self, num_given: int) -> tuple[int, Any] | None:
        """That number and where the batches were after so many, if it is known."""
        return next((each for each in self._marks if each[0] == num_given), None)

    def __iter__(self) -> "Timed":
        return self

    def __next__(self) -> Any:
        batch = self._ahead.pop() if self._ahead else self._next()
        self.num_given += 1
        return batch

    def is_over(self) -> bool:
        """Whether there is no batch left, for which the next one is made."""
        if not self._ahead:
            with contextlib.suppress(StopIteration):
                self._ahead.append(self._next())
        return not self._ahead

    def _next(self) -> Any:
        self._marks.append((self.num_given, self._mark()))
        compiled, start = secs_compiled(), time.perf_counter()
        self._waits_since = start
        try:
            batch = next(self._batches)
        except BaseException as error:
            self._arrive(compiled, start, None, error)
            raise
        self._arrive(compiled, start, batch, None)
        return batch

    def _arrive(
        self, compiled: float, start: float, batch: Any, error: BaseException | None
    ) -> None:
        with self._turn:
            self._waits_since = None
        self._waited(compiled, start)
        if self.is_abandoned:
            self._late.put((batch, error))
            raise Abandoned

    def pulse(self) -> Hashable:
        """What is another one once a batch was given, or while nobody waits."""
        return object() if self.is_abandoned else (id(self), self.num_given)

    def late(self) -> tuple[Any, BaseException | None]:
        """The batch, or error, that an abandoned thread was waiting for, waited for."""
        return self._late.get()

    def claim(self, secs: float) -> bool:
        """Holds up a thread that has waited so long for a batch, should it come now.

        If it does, `release` is to be called.
        """
        self._turn.acquire()
        since = self._waits_since
        if since is not None and time.perf_counter() - since >= secs:
            return True
        self._turn.release()
        return False

    def release(self, *, is_abandoned: bool) -> None:
        """Lets a thread go that `claim` has held up: on, or to its end."""
        self.is_abandoned = is_abandoned
        self._turn.release()

    def stretch(self, num_steps: int) -> Stretch | None:
        """The next batches in one, if they are on the device."""
        if self._ahead or not isinstance(self._batches, Stretchable):
            return None
        self._marks.append((self.num_given, self._mark()))
        compiled, start = secs_compiled(), time.perf_counter()
        try:
            stretch = self._batches.stretch(num_steps)
        finally:
            self._waited(compiled, start)
        self.num_given += num_steps if stretch is not None else 0
        return stretch

    def _waited(self, compiled: float, start: float) -> None:
        secs = time.perf_counter() - start
        compiling = min(secs, secs_compiled() - compiled)
        self.secs_compiling += compiling
        self.secs_waited += secs - compiling

    def close(self) -> None:
        """Lets go of what was made ahead."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


class LoaderSource:
    """The epochs of a loader."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    @property
    def num_steps(self) -> int | None:
        """Batches of an epoch; None for a stream without a length."""
        try:
            return len(self._loader)
        except TypeError:
            return None

    @property
    def num_tail_rows(self) -> int:
        """Rows of a last batch that is filled up; 0 if there is none."""
        return self._loader.num_tail_rows

    def epoch(self, epoch: int, num_done: int = 0) -> Timed:
        """The loader's batches."""
        if num_done:  # it knows where it was
            self._loader.restore(self._loader.state())
        batches = self._loader.epoch(epoch)
        progress = self._loader._progress

        def mark() -> dict[str, Any]:
            return {
                "rows": progress.rows,
                "is_done": progress.is_done,
                "iterator": progress.iterator,
            }

        return Timed(batches, mark)

    def position(self) -> Any:
        """The loader's state."""
        return self._loader.state()

    def leave(self, batches: Timed, mark: Any) -> None:
        """Restores the loader."""
        del batches
        self._loader.restore({**self._loader.state(), **mark})

    def restore(self, position: Any) -> None:
        """Restores the loader."""
        self._loader.restore(position)

    def facts(self) -> dict[str, str]:
        """Its rows, batches and order."""
        loader = self._loader
        return {
            "rows of the data": str(loader.num_rows),
            "batch size": str(loader.batch_size),
            "fields of the data": str(sorted(loader.field_names)),
            "seed of the data": str(loader.seed),
        }


class IterableSource:
    """Batches that can be gone through again and again."""

    def __init__(self, batches: Iterable[Any], num_steps: int | None) -> None:
        self._batches = batches
        self._limit = num_steps

    @property
    def num_steps(self) -> int | None:
        """The limit on an epoch, or its length where it has one."""
        try:
            length = len(self._batches)  # pyright: ignore[reportArgumentType]
        except TypeError:
            return self._limit
        return length if self._limit is None else min(length, self._limit)

    num_tail_rows = 0

    def epoch(self, epoch: int, num_done: int = 0) -> Timed:
        """Another pass, of which what is done is passed over."""
        del epoch
        batches = islice(iterator_of(self._batches), num_done, self._limit)
        return Timed(batches, lambda: "by the number of steps done")

    def position(self) -> None:
        """None: each pass begins at the beginning."""

    def leave(self, batches: Timed, mark: Any) -> None:
        """Nothing."""
        del batches, mark

    def restore(self, position: Any) -> None:
        """Nothing."""
        del position

    def facts(self) -> dict[str, str]:
        """Their number."""
        return {"batches of an epoch": str(self.num_steps)}


class OngoingSource:
    """An iterator that each epoch takes some more batches from."""

    def __init__(self, batches: Iterator[Any], num_steps: int) -> None:
        self._batches = batches
        self.num_steps: int | None = num_steps
        self._left: tuple[Timed, Any] | None = None

    num_tail_rows = 0

    def epoch(self, epoch: int, num_done: int = 0) -> Timed:
        """The next batches."""
        del epoch
        assert self.num_steps is not None
        batches = self._batches if self._left is None else self._after(*self._left)
        return Timed(islice(batches, self.num_steps - num_done), self.position)

    def _after(self, left: Timed, position: Any) -> Iterator[Any]:
        """The batches from the one on that a thread left behind was waiting for."""
        batch, error = left.late()
        if position is not None:
            self.restore(position)
        self._left = None
        if position is None and error is None:
            yield batch
        elif position is None and not isinstance(error, StopIteration):
            raise error or AssertionError
        yield from self._batches

    def position(self) -> Any:
        """The iterator's own state, if it has one."""
        if self._left is not None:  # and must not be asked meanwhile
            return self._left[1]
        get_state = getattr(self._batches, "get_state", None)
        return None if get_state is None else get_state()

    def leave(self, batches: Timed, mark: Any) -> None:
        """Goes on from the iterator's own state then, or with the batch that comes."""
        self._left = batches, mark

    def restore(self, position: Any) -> None:
        """Sets the iterator's own state.

        Raises:
            ValueError: If it has none, so that batches would come again.
        """
        if position is None or not hasattr(self._batches, "set_state"):
            raise ValueError(
                "the run cannot go on: its data is an iterator, a "
                f"{type(self._batches).__name__}, without `get_state` and `set_state`, "
                "which would give batches again that were used before"
            )
        self._batches.set_state(position)  # pyright: ignore[reportAttributeAccessIssue]

    def facts(self) -> dict[str, str]:
        """How many an epoch takes."""
        return {"batches of an epoch": str(self.num_steps)}


def make_source(
    name: str,
    batches: Any,
    *,
    mesh: Mesh | None,
    steps_per_epoch: int | None,
    epochs: int,
) -> Source:
    """The source that an argument stands for.

    Args:
        name: The argument's name.
        batches: A `DataLoader`, an iterable of batches, or an iterator.
        mesh: The devices that batches are to be on.
        steps_per_epoch: Batches of an epoch, for what does not end by itself.
        epochs: How often it is to be gone through.

    Raises:
        TypeError: If it cannot be iterated, or looks like one batch.
        ValueError: If it can be gone through only once, or a loader is given a number
            of steps.
    """
    if isinstance(batches, DataLoader):
        if steps_per_epoch is not None:
            raise ValueError(
                "`steps_per_epoch` must be left out with a DataLoader, whose epochs "
                f"have their own length, got {steps_per_epoch}"
            )
        if mesh is not None and batches.mesh != checked_mesh(mesh):
            batches = batches.on(mesh)
        elif mesh is None and batches.mesh is not None:
            raise ValueError(
                f"`{name}` must be a loader without a mesh for a loop without one, got "
                f"one over {batches.mesh.size} devices: give the loop the mesh too"
            )
        return LoaderSource(batches)
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise TypeError(
            f"`{name}` must be a DataLoader or an iterable of batches, got a "
            f"{type(batches).__name__}"
        )
    if not isinstance(batches, Iterator):
        return IterableSource(batches, steps_per_epoch)
    if steps_per_epoch is None and epochs > 1:
        raise ValueError(
            f"`{name}` must be iterable more than once for {epochs} epochs, got an "
            f"iterator, a {type(batches).__name__}: give the iterable it came from, or "
            "say with `steps_per_epoch` how many of its batches are an epoch"
        )
    if steps_per_epoch is None:
        return IterableSource(batches, None)
    return OngoingSource(batches, steps_per_epoch)
