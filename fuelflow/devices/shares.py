"""Which devices of this host each of several local processes gets."""

import contextlib
import importlib.metadata
import re
import subprocess
from collections.abc import Mapping

_FORCED_CPUS = re.compile(r"--xla_force_host_platform_device_count=\S*\s*")


def device_settings(
    environment: Mapping[str, str],
    num_processes: int,
    devices_per_process: int | None,
    num_gpus: int,
) -> list[dict[str, str]]:
    """The environment variables that give each process its devices.

    GPUs are parted in order, each process getting the same number, by JAX's
    ``JAX_LOCAL_DEVICE_IDS``. Without GPUs each process makes as many CPU devices as it
    is told by ``JAX_NUM_CPU_DEVICES``, which replaces the flag of XLA's that says the
    same; untold, it makes what it would make without a launcher.

    Args:
        environment: The launcher's own variables.
        num_processes: How many processes share the host.
        devices_per_process: Devices of each; None for an equal share.
        num_gpus: GPUs that JAX would use.

    Raises:
        ValueError: If there are too few GPUs, or an equal share leaves some over.
    """
    if not num_gpus:
        if devices_per_process is None:
            return [{} for _ in range(num_processes)]
        settings = {"JAX_NUM_CPU_DEVICES": str(devices_per_process)}
        if "XLA_FLAGS" in environment:
            # Stripped, as a mere blank would be the name of a file to XLA.
            flags = _FORCED_CPUS.sub("", environment["XLA_FLAGS"])
            settings["XLA_FLAGS"] = flags.strip()
        return [dict(settings) for _ in range(num_processes)]
    share = devices_per_process or num_gpus // num_processes
    if not 0 < share * num_processes <= num_gpus:
        raise ValueError(
            f"{num_processes} processes need at least "
            f"{num_processes * (devices_per_process or 1)} GPUs, and {num_gpus} can be "
            "seen: start fewer, or use the CPU with JAX_PLATFORMS=cpu"
        )
    if devices_per_process is None and share * num_processes < num_gpus:
        raise ValueError(
            f"{num_gpus} GPUs cannot be parted equally among {num_processes} processes:"
            f" --devices-per-process {share} leaves the last ones idle"
        )
    return [
        {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(first, first + share)))}
        for first in range(0, share * num_processes, share)
    ]


def count_gpus(environment: Mapping[str, str]) -> int:
    """How many NVIDIA GPUs JAX would use, found without starting JAX.

    None if JAX lacks its plugin for them, or is told to use another platform.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return 0
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if not any("cuda" in plugin.name for plugin in plugins):
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # As CUDA reads it: what follows the first -1 is hidden.
        names = [name.strip() for name in visible.split(",")]
        end = names.index("-1") if "-1" in names else len(names)
        return sum(1 for name in names[:end] if name)
    with contextlib.suppress(OSError):
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False
        )
        return sum(1 for line in listed.stdout.splitlines() if line.startswith("GPU "))
    return 0
