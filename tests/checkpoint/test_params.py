"""Parameters by name in safetensors files."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import fuelflow as ff
from fuelflow.checkpoint.params import load_params, save_params


def test_parameters_come_back_by_name_to_the_bit(tmp_path):
    random = np.random.default_rng(0)
    params = {
        "encoder.0.kernel": jnp.asarray(random.normal(size=(5, 3)), jnp.bfloat16),
        "encoder.0.scale": jnp.float32(0.1),
        "turned": np.asarray(random.normal(size=(4, 6)), np.float32).T,
        "tiny": jnp.ones(3, jnp.float8_e4m3fn),
        "empty": np.zeros((0, 2), np.float16),
    }
    save_params(tmp_path / "a.safetensors", params)

    loaded = load_params(tmp_path / "a.safetensors")

    assert set(loaded) == set(params)
    for name, values in params.items():
        assert loaded[name].dtype == values.dtype
        assert loaded[name].shape == values.shape
        assert loaded[name].tobytes() == np.asarray(values).tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_other_tools_read_and_write_the_same_files(tmp_path):
    path = tmp_path / "a.safetensors"
    save_params(path, {"first": {"kernel": jnp.arange(6.0).reshape(2, 3)}})
    np.testing.assert_array_equal(
        load_file(path)["first.kernel"], np.arange(6.0).reshape(2, 3)
    )

    save_file({"w": np.array([1, 2], np.float32)}, path)
    assert load_params(path)["w"].tolist() == [1, 2]


def test_loaded_parameters_go_into_a_state(tmp_path):
    loop = ff.TrainingLoop(
        lambda params, batch: batch["x"] * params["w"], optax.sgd, schedule=0.1
    )
    save_params(tmp_path / "a.safetensors", {"w": jnp.float32(3)})
    state = loop.init({"w": jnp.float32(0)})

    params = {**state.params, **load_params(tmp_path / "a.safetensors")}
    state = dataclasses.replace(state, params=params)
    state, outcome = loop.step(state, {"x": np.array([2], np.float32)})

    assert outcome.loss == 6


def test_parameters_on_every_device_are_written_once(tmp_path):
    everywhere = jax.sharding.NamedSharding(ff.mesh(), jax.sharding.PartitionSpec())
    params = {"w": jax.device_put(np.array([1, 2], np.float32), everywhere)}
    save_params(tmp_path / "a.safetensors", params)

    assert load_params(tmp_path / "a.safetensors")["w"].tolist() == [1, 2]


def test_what_is_no_array_is_refused_by_name(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(TypeError, match="`a.b` must be an array of numbers, got str"):
        save_params(path, {"a": {"b": "text"}})
    with pytest.raises(TypeError, match="`c` must be an array of numbers, got complex"):
        save_params(path, {"c": np.ones(2, np.complex64)})
    with pytest.raises(ValueError, match="at least one array"):
        save_params(path, {})
    path.write_bytes(b"\x08")
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        load_params(path)


def test_without_the_extra_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(ImportError, match=r'pip install "fuelflow\[safetensors\]"'):
        save_params(tmp_path / "a.safetensors", {"w": jnp.float32(1)})
    assert "safetensors" in sys.modules
