"""How the samples of an epoch are cut into batches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The batches of an epoch, from the sample it starts with.

    Attributes:
        num_samples: Samples of the whole epoch.
        batch_size: Rows of a full batch.
        drop_last: Whether samples that fill no batch are dropped; None to have them
            fill up a batch, False to have them in a smaller one.
        start: Samples that were used before.

    Example:
        >>> layout = Layout(10, 4, None)
        >>> layout.num_batches, layout.tail_size, layout.bounds(2)
        (3, 2, (8, 10))
    """

    num_samples: int
    batch_size: int
    drop_last: bool | None
    start: int = 0

    @property
    def num_full(self) -> int:
        """Batches of full size."""
        return (self.num_samples - self.start) // self.batch_size

    @property
    def tail_size(self) -> int:
        """Samples of the last batch if they do not fill it; 0 if there is none."""
        if self.drop_last:
            return 0
        return (self.num_samples - self.start) % self.batch_size

    @property
    def num_batches(self) -> int:
        """Batches of any size."""
        return self.num_full + (self.tail_size > 0)

    @property
    def has_weight(self) -> bool:
        """Whether batches carry a weight: all of them do if one is filled up."""
        return self.drop_last is None and self.tail_size > 0

    @property
    def first_number(self) -> int:
        """The number in the whole epoch of the first batch."""
        return self.start // self.batch_size

    def bounds(self, index: int) -> tuple[int, int]:
        """The first sample of a batch, and the first after it."""
        first = self.start + index * self.batch_size
        return first, min(first + self.batch_size, self.num_samples)
