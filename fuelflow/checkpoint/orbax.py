"""Arrays by name in a directory, written and read by orbax: its one place here."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fuelflow.checkpoint.paths import AnyPath

ARRAYS = "arrays"


def write_arrays(directory: AnyPath, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays into a checkpoint, by this process alone, and waits for it.

    Orbax refuses arrays without values, so those are left out: their shape says all.

    Args:
        directory: The checkpoint, a directory that is there.
        arrays: Arrays by name. A name is any text.

    Raises:
        OSError: If the files cannot be written; TensorStore has a ValueError for some
            such troubles.
    """
    import orbax.checkpoint as ocp

    tree = {name: values for name, values in arrays.items() if values.size}
    with _checkpointer() as checkpointer:
        checkpointer.save(directory / ARRAYS, ocp.args.PyTreeSave(tree))


def read_arrays(directory: AnyPath) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by name, as NumPy arrays.

    Raises:
        Exception: Whatever orbax and TensorStore make of a damaged directory.
    """
    with _checkpointer() as checkpointer:
        restored = checkpointer.restore(directory / ARRAYS)
    return {name: np.asarray(values) for name, values in restored.items()}


def _checkpointer() -> Any:
    """A checkpointer of orbax that asks no other process for anything.

    What every process holds needs to be written once, and its barriers would be
    computations among those of the training thread.
    """
    import orbax.checkpoint as ocp

    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here,
        active_processes={here},
        barrier_sync_key_prefix=f"fuelflow-{here}",
    )
    # Floats hardly get smaller, and compressing them takes a core from the training.
    handler = ocp.PyTreeCheckpointHandler(
        use_compression=False, use_zarr3=True, multiprocessing_options=alone
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)
