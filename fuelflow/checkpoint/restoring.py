"""A state of a loop, made of the arrays of a checkpoint."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fuelflow._errors import DamagedCheckpointError, UsedStateError
from fuelflow.checkpoint.directory import Entry
from fuelflow.checkpoint.fit import RestoreReport, compare, require_complete
from fuelflow.checkpoint.manifest import (
    ArraySpec,
    Manifest,
    checksum_of,
    require_files,
)
from fuelflow.checkpoint.orbax import read_arrays
from fuelflow.checkpoint.record import RunRecord
from fuelflow.checkpoint.rename import renamed
from fuelflow.checkpoint.snapshot import SUMS
from fuelflow.checkpoint.tallies import resized
from fuelflow.model.names import named_leaves
from fuelflow.step.loop import TrainingLoop
from fuelflow.step.programs import arrays_of
from fuelflow.step.state import TrainState, evolve
from fuelflow.step.tally import Tally

_KEY = "key"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What of a checkpoint is restored.

    Attributes:
        partial: Whether what does not fit is left out, and not an error.
        only: Patterns of the names to load.
        rename: Pattern → replacement, as in `renamed`.
    """

    partial: bool = False
    only: str | Iterable[str] = "*"
    rename: Mapping[str, str] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the run is to go on, rather than another to start from it."""
        return not self.partial and self.only == "*" and not self.rename


@dataclass(frozen=True)
class Restored:
    """A run that was brought back.

    Attributes:
        state: The state, placed as the loop's programs take it.
        record: What the run knew besides.
        report: What became of each array.
        step: Completed updates of the checkpoint.
        path: The checkpoint.
    """

    state: TrainState
    record: RunRecord
    report: RestoreReport
    step: int
    path: str


@dataclass(frozen=True)
class Contents:
    """A checkpoint that was read and found to be as it was written."""

    entry: Entry
    manifest: Manifest
    arrays: Mapping[str, np.ndarray]


def read_contents(entry: Entry) -> Contents:
    """All of a checkpoint, on the host.

    Raises:
        DamagedCheckpointError: If any of it is not as it was written.
        OSError: If it cannot be read for another reason.
        ValueError: If it is of an unknown format.
    """
    manifest = entry.manifest()
    require_files(entry.path, manifest)
    try:
        read = read_arrays(entry.path)
    except (OSError, MemoryError):
        raise  # of the moment: the files are as they were written
    except Exception as error:
        fault = f"its arrays cannot be read ({type(error).__name__}: {error})"
        raise DamagedCheckpointError(str(entry.path), [fault]) from error
    arrays: dict[str, np.ndarray] = {}
    faults: list[str] = []
    for name, spec in manifest.arrays.items():
        values = read.get(name)
        if values is None and spec.num_values == 0:
            values = np.zeros(spec.shape, spec.numpy_dtype)
        if values is None:
            faults.append(f"`{name}` is missing")
        elif checksum_of(values) != spec.checksum:
            faults.append(f"`{name}` has other values than were written")
        else:
            arrays[name] = values
    if faults:
        raise DamagedCheckpointError(str(entry.path), faults)
    return Contents(entry, manifest, arrays)


def restore_state(
    contents: Contents, loop: TrainingLoop, model: Any, choice: Choice
) -> Restored:
    """The state that a checkpoint's arrays make for a loop.

    Raises:
        StateMismatchError: If names, shapes or dtypes differ, and all must fit.
        UsedStateError: If something is to stay as it was in a state that is used up.
        ValueError: If a pattern selects nothing.
    """
    template = _template(contents, loop, model)
    manifest = contents.manifest
    specs = {n: spec for n, spec in manifest.arrays.items() if not _is_sum(n)}
    new_names = renamed(specs, choice.rename or {})
    old_names = {new: old for old, new in new_names.items()}
    expected = named_leaves(dict(arrays_of(template)))
    report = compare(
        {new: specs[old] for new, old in old_names.items()}, expected, choice.only
    )
    path = str(contents.entry.path)
    if not choice.partial:
        require_complete(report, path)
    loaded = frozenset(report.loaded)

    def leaf_of(name: str) -> Any:
        if name not in loaded:
            return _kept(name, expected[name])
        old = old_names[name]
        return _as_leaf(contents.arrays[old], specs[old], expected[name])

    state = _with_arrays(template, [leaf_of(name) for name in expected])
    state, programs = loop._host.ready(state)
    if choice.is_whole and manifest.num_ranks:
        tally = Tally(*(contents.arrays[f"{SUMS}.{name}"] for name in Tally._fields))
        tally = resized(tally, programs.placement.ranks.count)
        state = evolve(state, sums=programs.placement.rows(tally))
    record = RunRecord.from_dict(manifest.run)
    return Restored(state, record, report, manifest.step, path)


def _template(contents: Contents, loop: TrainingLoop, model: Any) -> TrainState:
    """A state with the names and shapes that the model has."""
    if isinstance(model, TrainState):
        return model
    # By a key of the run's own kind, which the model does not tell.
    data = jax.device_put(contents.arrays[_KEY])
    return loop.init(model, seed=_as_key(data, contents.manifest.arrays[_KEY]))


def _is_sum(name: str) -> bool:
    return name.startswith(SUMS + ".")


def _with_arrays(template: TrainState, leaves: list[Any]) -> TrainState:
    treedef = jax.tree.structure(dict(arrays_of(template)))
    arrays = jax.tree.unflatten(treedef, leaves)
    marks = {"spec": None, "flight": None, "sown": {}, "sums": None}
    return evolve(template, **arrays, **marks)


def _kept(name: str, leaf: Any) -> Any:
    """A copy, so that stepping the restored state leaves the given one usable."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if leaf.is_deleted():
        raise UsedStateError(name)
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def _as_leaf(values: np.ndarray, spec: ArraySpec, expected: Any) -> Any:
    if not spec.is_key:
        values = values.astype(expected.dtype, copy=False)
    # On a CPU the first of these may keep NumPy's memory, which no step can take over.
    # Unlike jnp.array, neither compiles anything.
    array = jax.device_put(values)
    array = jax.device_put(array, array.sharding, may_alias=False)
    return _as_key(array, spec) if spec.is_key else array


def _as_key(data: jax.Array, spec: ArraySpec) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=spec.key_impl)
