"""How the devices of a host are parted among its processes."""

import os

import pytest

from fuelflow.devices.shares import count_gpus, device_settings

IDS = "JAX_LOCAL_DEVICE_IDS"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host with some GPUs, whose JAX has a plugin for them."""

    def make(num_gpus, plugin="xla_cuda12"):
        installed = tmp_path / "made_up-1.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text("Name: made_up\nVersion: 1\n")
        (installed / "entry_points.txt").write_text(f"[jax_plugins]\n{plugin} = x\n")
        monkeypatch.syspath_prepend(tmp_path)
        listing = "".join(f"echo GPU {n}: made up\n" for n in range(num_gpus))
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{listing}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return {}

    return make


@pytest.mark.parametrize(
    ("num_processes", "each", "num_gpus", "ids"),
    [
        (2, None, 8, ["0,1,2,3", "4,5,6,7"]),
        (3, 2, 8, ["0,1", "2,3", "4,5"]),
        (1, None, 1, ["0"]),
        (2, 1, 2, ["0", "1"]),
    ],
)
def test_gpus_are_parted_in_order(num_processes, each, num_gpus, ids):
    settings = device_settings({}, num_processes, each, num_gpus)

    assert settings == [{IDS: listed} for listed in ids]


@pytest.mark.parametrize(
    ("num_processes", "each", "num_gpus", "message"),
    [
        (2, None, 1, "2 processes need at least 2 GPUs, and 1 can be seen"),
        (2, 4, 7, "2 processes need at least 8 GPUs, and 7 can be seen"),
        (3, None, 8, "cannot be parted equally .* --devices-per-process 2 leaves"),
    ],
)
def test_gpus_that_do_not_suffice_are_refused(num_processes, each, num_gpus, message):
    with pytest.raises(ValueError, match=message):
        device_settings({}, num_processes, each, num_gpus)


def test_untold_cpu_devices_are_left_alone():
    assert device_settings({"XLA_FLAGS": "x"}, 2, None, 0) == [{}, {}]


def test_gpus_are_counted_by_their_own_tool(host):
    assert count_gpus(host(3)) == 3


@pytest.mark.parametrize(
    ("environment", "num_gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "2,-1,0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"JAX_PLATFORMS": "cpu"}, 0),
        ({"JAX_PLATFORMS": "cuda,cpu"}, 3),
        ({"JAX_PLATFORMS": ""}, 3),
    ],
)
def test_only_gpus_that_jax_would_use_count(host, environment, num_gpus):
    host(3)

    assert count_gpus(environment) == num_gpus


def test_gpus_without_jax_s_plugin_do_not_count(host):
    assert count_gpus(host(3, plugin="other")) == 0
