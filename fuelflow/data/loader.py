"""Batches from a source, epoch by epoch."""

import threading
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Literal, final

import jax
from jax.sharding import Mesh

from fuelflow.data import options
from fuelflow.data.epoch import Epoch
from fuelflow.data.layout import Layout
from fuelflow.data.memory import RESIDENT_SHARE, free_device_bytes
from fuelflow.data.placement import DefaultDevice, OverRanks
from fuelflow.data.position import (
    Identity,
    Progress,
    checksum,
    make_state,
    read_state,
    require_same,
)
from fuelflow.data.recipe import Recipe, make_order, whole_bytes
from fuelflow.data.samplers import Indices, Sampler
from fuelflow.data.sources import Table, make_source
from fuelflow.data.streams import Stream
from fuelflow.data.transforms import HostTransform, make_device_transform
from fuelflow.devices.ranks import checked_mesh
from fuelflow.step.checks import checked_count


@final
class DataLoader:
    """Batches of named fields, the same in every run, from wherever the rows are.

    The order of an epoch depends on the seed, the epoch and the number of rows, and on
    nothing else: neither on where batches are made nor on how many are made ahead.
    Every row comes once, unless a sampler says otherwise.

    **Resident**: rows that fit are copied to the device once, when the first epoch
    starts, and stay there as long as the loader does. Batches are picked by a compiled
    program, and `TrainingLoop.run` picks them inside its own. Later changes of the
    source do not matter. **Streaming**: batches are made by a few threads, ahead of
    use, and put on the device. The source must not change meanwhile. With more than one
    thread, a sequence's ``__getitem__`` and ``transform`` are called by several at once
    and must be made for that; ``prefetch=1`` has one thread, which calls them in order.

    Rows at the end of an epoch that fill no batch still come. With ``drop_last=None``
    they are filled up to a whole batch by rows of weight 0, and all batches of such an
    epoch carry a weight, so one compiled program serves them all. A loss that gives no
    value for each row, or a model that keeps statistics of the batch as BatchNorm does,
    is given the true rows alone, which compiles once more. Where rows see each other
    otherwise, as in a contrastive loss, pass ``False``: then the last batch is smaller.
    With ``True`` those rows are dropped. An epoch shorter than a batch is one batch of
    its own size.

    A stream is a function that gives a new iterator of rows whenever it is called; if
    it has a ``__len__``, that many. One thread reads it. To continue inside an epoch it
    is read again up to the position, unless its iterators have ``get_state`` and
    ``set_state``.

    Args:
        source: A mapping from field names to arrays that share their leading axis
            (NumPy, JAX, `numpy.memmap`, h5py data sets, or what else is sliced by an
            index array); a sequence of rows that are mappings, with ``__len__`` and
            ``__getitem__``; or a function that gives an iterator of such rows.
        batch_size: Rows of a batch.
        seed: Of the order of rows, and of transforms.
        shuffle: Whether each epoch has an order of its own. None is True, without a
            ``sampler``; a stream needs False.
        drop_last: What becomes of rows that fill no batch, as above.
        sampler: What chooses and orders the rows of an epoch.
        transform: ``(fields)`` or ``(fields, rng)`` to fields: NumPy arrays of a whole
            batch, on the host. ``rng`` is a `numpy.random.Generator` that depends on
            the seed, the epoch and the batch's number. It sees true rows alone, and
            must keep their number.
        device_transform: ``(fields)`` or ``(fields, key)`` to fields: the same on the
            device, compiled.
        resident: Whether rows stay on the device; ``"auto"`` if the source is arrays
            in memory that take at most a quarter of its free memory and ``transform``
            is not used.
        prefetch: Batches made ahead of use; 0 makes each when it is asked for;
            ``"auto"`` makes from 2 to 16, as memory allows.
        mesh: Devices, such as `mesh` makes, over which the rows of each batch are
            spread, as a `TrainingLoop` with the mesh takes them. ``batch_size`` counts
            the rows of all ranks. Resident rows are on every device. Of several
            processes each makes the rows of its own devices (a stream is read by all),
            and ``transform`` sees those alone, ``rng`` being the process' own.
            ``device_transform`` sees the rows of one rank, which may be filled up, and
            ``key`` is the rank's own.

    Raises:
        TypeError: If an argument is of the wrong kind, or fields are not numbers.
        ValueError: If an argument is out of range or does not fit another, or fields
            are none, empty, or of different lengths.

    Example:
        >>> import numpy as np
        >>> loader = DataLoader({"x": np.arange(5)}, batch_size=2, shuffle=False)
        >>> [batch["x"].tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        source: Any,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        sampler: Sampler | None = None,
        transform: Callable[..., Any] | None = None,
        device_transform: Callable[..., Any] | None = None,
        resident: bool | Literal["auto"] = "auto",
        prefetch: int | Literal["auto"] = "auto",
        mesh: Mesh | None = None,
    ) -> None:
        self._again = partial(
            DataLoader,
            source,
            batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            sampler=sampler,
            transform=transform,
            device_transform=device_transform,
            resident=resident,
            prefetch=prefetch,
        )
        placement = (
            DefaultDevice.here() if mesh is None else OverRanks(checked_mesh(mesh))
        )
        num_ranks = placement.ranks.count
        self._batch_size = options.checked_batch_size(batch_size, num_ranks)
        seed = options.checked_seed(seed)
        shuffle = options.checked_flag("shuffle", shuffle)
        drop_last = options.checked_flag("drop_last", drop_last)
        self._resident = options.checked_resident(resident)
        prefetch = options.checked_prefetch(prefetch)
        host = None if transform is None else HostTransform.of(transform)
        on_device = device_transform and make_device_transform(device_transform)
        self._source = make_source(source)
        self._sampler = options.choose_sampler(
            self._source, shuffle=shuffle, sampler=sampler
        )
        self._num_samples = options.checked_num_samples(
            self._sampler,
            self._source.num_rows,
            self._batch_size,
            drop_last=drop_last,
        )
        self._recipe = Recipe(
            batch_size=_size_within(self._batch_size, self._num_samples, num_ranks),
            drop_last=drop_last,
            seed=seed,
            transform=host,
            device_transform=on_device,
            prefetch=prefetch,
            placement=placement,
        )
        options.require_full_tail(
            self._num_samples, self._recipe.batch_size, num_ranks, drop_last=drop_last
        )
        if self._resident is True:
            self._require_residence()
        self._lock = threading.Lock()
        self._data: dict[str, jax.Array] | None = None
        self._progress = Progress()
        self._restored: Progress | None = None
        self._next_epoch = 0
        self._checksum: tuple[int, int] | None = None  # of an epoch's order

    @property
    def batch_size(self) -> int:
        """Rows of a full batch."""
        return self._batch_size

    @property
    def num_tail_rows(self) -> int:
        """True rows of an epoch's last batch, if it is filled up; 0 if it is not."""
        if self._num_samples is None:
            return 0
        layout = self._layout(self._num_samples, Progress())
        return layout.tail_size if layout.has_weight else 0

    @property
    def seed(self) -> int:
        """The seed of the order of rows, and of transforms."""
        return self._recipe.seed

    @property
    def num_rows(self) -> int | None:
        """Rows of the source; None for a stream without a length."""
        return self._source.num_rows

    @cached_property
    def field_names(self) -> tuple[str, ...]:
        """The fields of batches.

        Transforms are tried on the first rows to know them, and a stream is started
        to see its first row if it was not before.
        """
        return self._recipe.names(self._source)

    @cached_property
    def is_resident(self) -> bool:
        """Whether rows stay on the device; decided when it is first asked."""
        source = self._source
        if isinstance(self._resident, bool):
            return self._resident
        return (
            not isinstance(source, Stream)
            and source.is_in_memory
            and self._recipe.transform is None
            and source.num_rows <= options.MAX_RESIDENT_ROWS
            and self._resident_bytes(source) <= RESIDENT_SHARE * self._free_bytes()
        )

    def __len__(self) -> int:
        if self._num_samples is None:
            raise TypeError(
                "a stream without a `__len__` has no length: how many batches it gives "
                "is known when it ends"
            )
        return self._layout(self._num_samples, Progress()).num_batches

    def __iter__(self) -> Epoch:
        """The epoch after the last one started, or where `restore` left off."""
        return self.epoch(self._next_epoch)

    def epoch(self, epoch: int) -> Epoch:
        """A new iterator over the batches of an epoch.

        Several may be alive at once, each for one consumer. After `restore`, the first
        iterator of that epoch continues inside it.

        Args:
            epoch: Its number, from 0.

        Raises:
            TypeError: If ``epoch`` is no integer, or a sampler's rows are none.
            ValueError: If ``epoch`` is negative, or a sampler's rows are not as many as
                promised, or out of range.
        """
        epoch = checked_count("epoch", epoch, least=0)
        progress = Progress(epoch)
        if self._restored is not None and self._restored.epoch == epoch:
            progress, self._restored = self._restored, None
        made = self._start(progress)
        self._progress = progress
        self._next_epoch = epoch + 1
        return made

    @property
    def mesh(self) -> Mesh | None:
        """The devices that rows are spread over; None for the default device."""
        placement = self._recipe.placement
        return placement.mesh if isinstance(placement, OverRanks) else None

    def on(self, mesh: Mesh) -> "DataLoader":
        """Another loader of the same batches, over a mesh, at the same position.

        Raises:
            TypeError: If it is no mesh.
            ValueError: If its ranks do not divide the batches.
        """
        moved = self._again(mesh=mesh)
        moved._next_epoch = self._next_epoch
        moved._restored = self._restored
        return moved

    def state(self) -> dict[str, Any]:
        """The position in the epoch that was started last, for `restore`.

        It counts the rows that were given to the consumer, not those made ahead. All
        values are ones that JSON has, if the state of a stream's iterator is.
        """
        return make_state(self._progress, self._identity(self._progress.epoch))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Has the position's epoch continue after the position.

        The next ``epoch(state["epoch"])``, or `iter`, gives the rows that follow; other
        epochs, and later passes, start at their beginning. Batch size, prefetching and
        residence may be others than they were.

        Args:
            state: What `state` returned, here or in another process.

        Raises:
            PositionError: If the data, the seed or the order differ; it names what.
            TypeError: If ``state`` is no mapping.
            ValueError: If it is not what `state` returns.
        """
        progress = read_state(state)
        require_same(state, self._identity(progress.epoch))
        if self._num_samples is not None and progress.rows > self._num_samples:
            raise ValueError(
                f"`state['rows']` must be at most the {self._num_samples} of an epoch, "
                f"got {progress.rows}"
            )
        self._restored = progress
        self._progress = progress
        self._next_epoch = progress.epoch + progress.is_done

    def _start(self, progress: Progress) -> Epoch:
        source = self._source
        if isinstance(source, Stream):
            batches = self._recipe.read(source, progress)
        elif self.is_resident:
            order = self._order(progress.epoch)
            batches = self._recipe.resident(self._rows(source), order, progress)
        else:
            order = self._order(progress.epoch)
            batches = self._recipe.streamed(source, order, progress)
        num_batches = None
        if self._num_samples is not None:
            num_batches = self._layout(self._num_samples, progress).num_batches
        return Epoch(batches, progress, num_batches)

    def _rows(self, table: Table) -> dict[str, jax.Array]:
        with self._lock:  # two epochs may start at once, each in a thread of its own
            if self._data is None:
                self._data = self._recipe.placement.keep(table.whole())
            return self._data

    def _order(self, epoch: int) -> Indices:
        assert self._sampler is not None
        assert self._source.num_rows is not None
        return make_order(
            self._sampler, self._source.num_rows, self._recipe.seed, epoch
        )

    def _layout(self, num_samples: int, progress: Progress) -> Layout:
        return self._recipe.layout(num_samples, progress)

    def _identity(self, epoch: int) -> Identity:
        is_stream = self._sampler is None
        return Identity(
            seed=self._recipe.seed,
            num_rows=self._source.num_rows,
            fields=options.fields_as_text(self._source.fields),
            sampler=None if is_stream else type(self._sampler).__name__,
            order=None if is_stream else self._order_checksum(epoch),
        )

    def _order_checksum(self, epoch: int) -> int:
        if self._checksum is None or self._checksum[0] != epoch:
            self._checksum = epoch, checksum(self._order(epoch))
        return self._checksum[1]

    def _require_residence(self) -> None:
        options.require_resident(self._source, self._recipe.transform)
        assert not isinstance(self._source, Stream)
        options.require_room(self._resident_bytes(self._source), self._free_bytes())

    def _resident_bytes(self, table: Table) -> int:
        return whole_bytes(table) * self._recipe.placement.num_copies

    def _free_bytes(self) -> int:
        return free_device_bytes(self._recipe.placement.device)

    def __repr__(self) -> str:
        rows = "a stream" if self.num_rows is None else f"{self.num_rows} rows"
        order = "" if self._sampler is None else f", {self._sampler!r}"
        return f"DataLoader({rows}, batches of {self._batch_size}{order})"


def _size_within(batch_size: int, num_samples: int | None, num_ranks: int) -> int:
    if num_samples is None:
        return batch_size
    return min(batch_size, -(-num_samples // num_ranks) * num_ranks)
