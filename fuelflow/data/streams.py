"""Sources that are read from their beginning: a function that gives an iterator."""

from collections.abc import Callable, Iterator, Sized
from itertools import islice
from typing import Any, NamedTuple, final

import numpy as np

from fuelflow._errors import RowError
from fuelflow.data.fields import Fields
from fuelflow.data.rows import specs_of_row, stack_rows


@final
class Stream:
    """A function that gives a new iterator over rows, each time it is called.

    If it has a length, the iterator must give as many rows.

    Args:
        start: Called for each epoch, and once more to look at the first row if the
            fields are asked for before.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self.num_rows = len(start) if isinstance(start, Sized) else None
        self._fields: Fields | None = None

    @property
    def fields(self) -> Fields:
        """The fields of the first row, which is read if none was before."""
        if self._fields is None:
            for row in self.start():
                return self.fields_like(row)
            raise ValueError("`source` must give at least one row, got none")
        return self._fields

    def fields_like(self, row: Any) -> Fields:
        """The fields of the first row: this one, if there was none before."""
        if self._fields is None:
            self._fields = specs_of_row(row)
        return self._fields

    def start(self) -> Iterator[Any]:
        """A new iterator over the rows.

        Raises:
            TypeError: If the function gives no iterable.
        """
        return iter(self._start())


class Piece(NamedTuple):
    """Consecutive rows of a stream, and the state of its iterator after them."""

    fields: dict[str, np.ndarray]
    size: int
    state: Any


class StreamReader:
    """One pass over a stream, ``size`` rows at a time.

    An iterator with ``get_state`` and ``set_state`` is continued by them, any other by
    reading again, and leaving out, what was used before.

    Args:
        stream: The source.
        size: Rows of a piece; the last may have fewer.
        num_used: Rows to continue after.
        state: The iterator's state after them, if it has one.

    Raises:
        RowError: If the stream has fewer rows than were used before.
    """

    def __init__(
        self, stream: Stream, size: int, num_used: int = 0, state: Any = None
    ) -> None:
        self._stream = stream
        self._size = size
        self._rows: Any = stream.start()
        self._num_read = num_used
        self._has_state = hasattr(self._rows, "get_state") and hasattr(
            self._rows, "set_state"
        )
        if self._has_state and state is not None:
            self._rows.set_state(state)
        else:
            num_skipped = sum(1 for _ in islice(self._rows, num_used))
            if num_skipped < num_used:
                raise RowError(num_skipped, f"is missing: {num_used} were used before")

    def read(self) -> Piece | None:
        """The next rows, None after the last.

        Raises:
            RowError: If a row is unlike the first, or there are more or fewer rows
                than the stream's length.
        """
        rows = self._next_rows()
        self._check_end(len(rows))
        if not rows:
            return None
        first = self._num_read
        self._num_read += len(rows)
        fields = self._stream.fields_like(rows[0])
        stacked = stack_rows(rows, range(first, self._num_read), fields)
        return Piece(stacked, len(rows), self._state())

    def _next_rows(self) -> list[Any]:
        rows: list[Any] = []
        try:
            rows.extend(islice(self._rows, self._size))
        except BaseException as error:
            number = self._num_read + len(rows)
            error.add_note(f"while reading row {number} of the source")
            raise
        return rows

    def _check_end(self, num_new: int) -> None:
        promised = self._stream.num_rows
        if promised is None:
            return
        reached = self._num_read + num_new
        if reached > promised:
            raise RowError(promised, f"is one more than its length of {promised}")
        if num_new < self._size and reached < promised:
            raise RowError(reached, f"is missing: its length is {promised}")

    def _state(self) -> Any:
        return self._rows.get_state() if self._has_state else None
