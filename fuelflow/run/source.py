"""Epochs of batches, from a loader or whatever else can be iterated."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Protocol

from jax.sharding import Mesh

from fuelflow.data.loader import DataLoader
from fuelflow.devices.ranks import checked_mesh
from fuelflow.run.timed import Timed
from fuelflow.step.stacking import iterator_of

logger = logging.getLogger("fuelflow")
# In the place of an iterator's own state: how many batches it gave in vain.
_AHEAD = "batches taken and not trained on"


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

    def epoch(self, epoch: int, num_done: int = 0) -> Timed:
        """The batches of an epoch, but for those that are done already."""
        ...

    def position(self) -> Any:
        """Where the data is, for `restore`; None if it cannot or need not tell."""
        ...

    def leave(self, batches: Timed, mark: Any) -> None:
        """Has the data go on after the batches that were trained on.

        Args:
            batches: An epoch of it, whose next batch another thread still waits for.
            mark: Where the data was before the first that was not trained on.
        """
        ...

    def restore(self, position: Any) -> None:
        """Has the data go on from a position."""
        ...

    def facts(self) -> dict[str, str]:
        """What must be the same on all processes."""
        ...


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
        if position is not None:
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
    """Batches that can be gone through again and again, or an iterator once."""

    def __init__(self, batches: Iterable[Any], num_steps: int | None) -> None:
        self._batches = batches
        self._limit = num_steps
        self._is_begun = False

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
        """Another pass, of which what is done is passed over.

        Raises:
            ValueError: If there can be no other.
        """
        del epoch
        if self._is_begun and isinstance(self._batches, Iterator):
            raise ValueError(
                "the data was an iterator, which has been gone through in part and has "
                "no beginning any more: give the trainer the iterable it came from, or "
                "say with `steps_per_epoch` how many of its batches are an epoch"
            )
        self._is_begun = True
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
    """An iterator that each epoch takes some more batches from.

    A thread may be left behind that waits in it, and after that another one that waits
    for the first. Each hands its batch on to the next run, in the order they came.
    """

    def __init__(self, batches: Iterator[Any], num_steps: int) -> None:
        self._batches = batches
        self.num_steps: int | None = num_steps
        self._rest = batches
        self._return: _Return | None = None
        self._again: deque[Any] = deque()

    num_tail_rows = 0

    def epoch(self, epoch: int, num_done: int = 0) -> Timed:
        """The next batches."""
        del epoch
        assert self.num_steps is not None
        return Timed(islice(self._rest, self.num_steps - num_done), self._mark)

    def position(self) -> Any:
        """The iterator's own state, or if it has none how many come again, if any."""
        mark = self._mark()
        return {_AHEAD: len(self._again)} if mark is None and self._again else mark

    def _mark(self) -> Any:
        if self._return is not None and not self._return.is_made:
            return self._return.position  # the iterator must not be asked meanwhile
        get_state = getattr(self._batches, "get_state", None)
        return None if get_state is None else get_state()

    def leave(self, batches: Timed, mark: Any) -> None:
        """Goes on from the iterator's own state then, or with what it gave since."""
        if mark is not None:
            self._return = _Return(self, batches, mark)
            self._rest = chain(self._return.batches(), self._batches)
            return
        self._again = again = deque(batches.untrained)
        given = (again.popleft() for _ in range(len(again)))
        self._rest = chain(given, _late(batches), self._rest)

    def restore(self, position: Any) -> None:
        """Sets the iterator's own state, or says that it goes on as it is.

        Raises:
            ValueError: If there is a state, and the iterator takes none.
        """
        if isinstance(position, dict) and set(position) == {_AHEAD}:
            logger.warning(
                "the run goes on without %d batches that its iterator had given when "
                "it was saved, which were not trained on",
                position[_AHEAD],
            )
            return
        kind = type(self._batches).__name__
        if position is None:
            logger.warning(
                "the run goes on with what its data gives next, which may have been "
                "used before: an iterator without `get_state` and `set_state`, a %s, "
                "cannot be set to where it was",
                kind,
            )
            return
        if not hasattr(self._batches, "set_state"):
            raise ValueError(
                f"the run cannot go on: its data is an iterator, a {kind}, without "
                "`set_state`, which would give batches again that were used before"
            )
        self._batches.set_state(position)  # pyright: ignore[reportAttributeAccessIssue]

    def facts(self) -> dict[str, str]:
        """How many an epoch takes."""
        return {"batches of an epoch": str(self.num_steps)}


class _Return:
    """The way back of an iterator to a position, once nobody waits in it any more.

    Args:
        source: What it is the iterator of.
        left: Whose thread was left behind.
        position: The position.

    Attributes:
        position: The position.
        is_made: Whether the iterator is there.
    """

    def __init__(self, source: OngoingSource, left: Timed, position: Any) -> None:
        self._source = source
        self._left = left
        self.position = position
        self.is_made = False

    def batches(self) -> Iterator[Any]:
        """None, for which the iterator is gone back with."""
        self._left.late()
        self._source.restore(self.position)
        self.is_made = True
        yield from ()


def _late(left: Timed) -> Iterator[Any]:
    """The batch that a thread which was left behind waited for, or its error."""
    batch, error = left.late()
    if error is None:
        yield batch
    elif not isinstance(error, StopIteration):
        raise error


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
