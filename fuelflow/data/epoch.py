"""One pass over a loader's rows."""

import time
from typing import Any, Protocol, final

from fuelflow.data.position import Progress
from fuelflow.step.batch import Batch, Stretch
from fuelflow.step.checks import checked_count


class Batches(Protocol):
    """Where an epoch's batches come from.

    Attributes:
        state: That of a stream's iterator after the last batch given, if it has one.
    """

    state: Any

    def __next__(self) -> Batch:
        """The next batch."""
        ...

    def stretch(self, num_steps: int) -> Stretch | None:
        """The next full batches, where they are on the device."""
        ...

    def close(self) -> None:
        """Lets go of what was made ahead."""
        ...


@final
class Epoch:
    """An iterator over the batches of one epoch, for one consumer.

    It ends its threads and lets go of what was made ahead when it is used up, closed,
    left as a context, or forgotten.

    Attributes:
        number: The epoch.
        num_batches: Batches from where it started; None for a stream.
        secs_waited: Seconds that the consumer has waited for batches.
    """

    def __init__(
        self, batches: Batches, progress: Progress, num_batches: int | None
    ) -> None:
        self.number = progress.epoch
        self.num_batches = num_batches
        self.secs_waited = 0.0
        self._batches = batches
        self._progress = progress
        self._num_given = 0
        self._is_closed = False

    def __iter__(self) -> "Epoch":
        return self

    def __len__(self) -> int:
        """How many batches are left.

        Raises:
            TypeError: If that is not known, as of a stream.
        """
        if self.num_batches is None:
            raise TypeError("an epoch of a stream has no length")
        return 0 if self._is_closed else self.num_batches - self._num_given

    def __bool__(self) -> bool:
        """True, however many batches are left."""
        return True

    def __next__(self) -> Batch:
        if self._is_closed:
            raise StopIteration
        start = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._progress.is_done = not self._is_closed
            self.close()
            raise
        except BaseException:
            self.close()
            raise
        finally:
            self.secs_waited += time.perf_counter() - start
        self._count(1, batch.size)
        self._progress.iterator = self._batches.state
        return batch

    def stretch(self, num_steps: int) -> Stretch | None:
        """The next ``num_steps`` full batches, to run through in one dispatch.

        Returns:
            None if rows are not resident, or fewer full batches are left; then nothing
            was taken.

        Raises:
            TypeError: If ``num_steps`` is no integer.
            ValueError: If it is less than 1.
        """
        num_steps = checked_count("num_steps", num_steps, least=1)
        if self._is_closed:
            return None
        stretch = self._batches.stretch(num_steps)
        if stretch is not None:
            self._count(num_steps, stretch.rows.size)
        return stretch

    def close(self) -> None:
        """Ends the iteration here."""
        self._is_closed = True
        self._batches.close()

    def _count(self, num_batches: int, num_rows: int) -> None:
        self._num_given += num_batches
        self._progress.rows += num_rows
        if self._num_given == self.num_batches:
            self._progress.is_done = True

    def __enter__(self) -> "Epoch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        of = "" if self.num_batches is None else f" of {self.num_batches}"
        return f"Epoch({self.number}, {self._num_given}{of} batches given)"
