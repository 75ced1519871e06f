"""Parameters by name in a safetensors file, for exchange with other tools."""

import contextlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # brought by jax
import numpy as np

from fuelflow.model.definition import is_array
from fuelflow.model.names import named_leaves, unboxed_name

# What safetensors calls dtypes; it knows no others that parameters have.
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


def save_params(path: str | os.PathLike[str], params: Mapping[str, Any]) -> None:
    """Writes parameters by dotted name into a safetensors file.

    The file is whole or not there: it is written beside its place and then renamed.

    Args:
        path: The file, usually with the ending ``.safetensors``.
        params: Arrays by name, such as ``state.params``; or a tree of them, whose paths
            become names.

    Raises:
        ImportError: If the extra ``[safetensors]`` is not installed.
        OSError: If the file cannot be written.
        TypeError: If a leaf is no array of numbers that the format has.
        ValueError: If two leaves have one name, or there is none.
    """
    _require_safetensors()
    from safetensors.numpy import save

    leaves = named_leaves(params, unboxed_name)
    if not leaves:
        raise ValueError("`params` must hold at least one array, got none")
    tensors = {name: _as_tensor(name, leaf) for name, leaf in leaves.items()}
    data = save(tensors, metadata={"written_by": "fuelflow"})
    path = Path(path)
    beside = path.with_name(f"{path.name}.{os.getpid()}.writing")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def load_params(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file by name, as NumPy arrays of their own dtype.

    With ``state = loop.init(model)`` they are put to use by
    ``dataclasses.replace(state, params={**state.params, **load_params(path)})``.

    Args:
        path: A file that `save_params`, or any other tool, wrote.

    Returns:
        The arrays in the order of their names; bfloat16 has the dtype of ``ml_dtypes``.

    Raises:
        ImportError: If the extra ``[safetensors]`` is not installed.
        OSError: If the file cannot be read.
        ValueError: If it is no whole safetensors file, or has a dtype without a name in
            NumPy.
    """
    _require_safetensors()
    import safetensors

    data = Path(path).read_bytes()
    try:
        found = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from error
    return {name: _as_array(name, tensor) for name, tensor in sorted(found)}


def _as_tensor(name: str, leaf: Any) -> np.ndarray:
    if not is_array(leaf) or np.dtype(leaf.dtype) not in _NAMES:
        kind = getattr(leaf, "dtype", type(leaf).__name__)
        raise TypeError(f"`{name}` must be an array of numbers, got {kind}")
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    return np.asarray(leaf, order="C")  # another order would be written as if it were


def _as_array(name: str, tensor: Mapping[str, Any]) -> np.ndarray:
    if tensor["dtype"] not in _DTYPES:
        raise ValueError(f"`{name}` has dtype {tensor['dtype']}, which NumPy lacks")
    flat = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]])
    return flat.reshape(tensor["shape"]).copy()


def _require_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError(
            "parameters in safetensors files need an extra: "
            'pip install "fuelflow[safetensors]"'
        )
