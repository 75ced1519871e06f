"""A graph's data: the loader, and which field goes into which input."""

from collections.abc import Iterator, Mapping
from typing import Any

from fuelflow.graph.inputs import UNNAMED, Inputs
from fuelflow.step.batch import Batch


class DataBinding:
    """A loader bound to the inputs of a model.

    Args:
        inputs: The inputs.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._loader: Any = None
        self._wiring: dict[str, str] = {}
        # The epoch that is being iterated, if one is.
        self.active: object | None = None

    def bind(self, loader: Any, entry: str) -> None:
        """Binds a loader, and wires its fields by name.

        Raises:
            RuntimeError: If an epoch is being iterated.
            UnwiredInputError: If the entry, or an input without default, is no field.
        """
        if self.active is not None:
            raise RuntimeError(
                "the loader must not be replaced while an epoch is being iterated: "
                "finish the `for` loop, or close the iterator that `graph.epoch` gave"
            )
        self._wiring = self._inputs.wire(entry, tuple(loader.field_names))
        self._loader = loader

    @property
    def loader(self) -> Any:
        """The loader.

        Raises:
            RuntimeError: If there is none.
        """
        if self._loader is None:
            raise RuntimeError(
                'no data loader was set: `graph.set_data_loader(loader, "image")`, '
                "where `image` is the field for the model's first input"
            )
        return self._loader

    def arguments(self, batch: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The inputs that a batch has: by position if they have no name, or by name.

        Raises:
            MissingFieldError: If the batch lacks a field.
            RuntimeError: If no loader was set, so that nothing is wired.
        """
        if not self._wiring:
            _ = self.loader
        named = {name: batch[field] for name, field in self._wiring.items()}
        return ([named.pop(UNNAMED)] if UNNAMED in named else []), named

    def epoch(self, epoch: int) -> "BoundEpoch":
        """The batches of an epoch."""
        return BoundEpoch(self, self.loader.epoch(epoch))


class BoundEpoch:
    """The batches of a graph's epoch. While it lasts, the loader must not change."""

    def __init__(self, binding: DataBinding, batches: Any) -> None:
        self._binding = binding
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __len__(self) -> int:
        """How many batches are left, if that is known; see `Epoch`."""
        return len(self._batches)

    def __bool__(self) -> bool:
        """True, however many batches are left."""
        return True

    def __next__(self) -> Batch:
        self._binding.active = self._batches
        try:
            return next(self._batches)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Ends the epoch early, and stops what reads ahead for it."""
        self._end()
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> "BoundEpoch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end(self) -> None:
        if self._binding.active is self._batches:
            self._binding.active = None

    def __del__(self) -> None:
        self._end()
