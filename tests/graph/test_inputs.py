"""Named inputs, the loader, and how a graph wires one to the other."""

import threading
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import fuelflow as ff


class Loader:
    """A stand-in for a loader: rows of an epoch that depend on its number."""

    def __init__(self, fields: tuple[str, ...] = ("image", "label"), batches: int = 3):
        self.field_names = fields
        self.batch_size = 4
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def epoch(self, epoch: int) -> Iterator[ff.Batch]:
        for number in range(self.batches):
            value = np.full((4, 3), 10 * epoch + number, np.float32)
            yield ff.Batch(dict.fromkeys(self.field_names, value))


class TwoInputs(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def __call__(self, x: Any, mask: Any = None, *, extra: Any = None) -> Any:
        y = self.linear(x)
        y = y if mask is None else y * 100
        return y if extra is None else y * 10_000


class LinenTwo(nn.Module):
    @nn.compact
    def __call__(self, x: Any, other: Any, *, train: bool) -> Any:
        return nn.Dense(2)(x + other) * (1.0 if train else 3.0)


def linen_two() -> ff.Linen:
    module, x = LinenTwo(), np.ones((1, 3), np.float32)
    return ff.Linen(module, module.init(jax.random.key(0), x, x, train=True))


def test_fields_go_to_the_inputs_of_their_names():
    graph = ff.Graph(TwoInputs())
    batch = {
        name: np.ones((4, 3), np.float32)
        for name in ("image", "extra", "mask", "label")
    }
    plain = np.asarray(graph(batch["image"]))
    seen = {}
    for fields in (("label", "image"), ("image", "mask"), ("extra", "mask", "image")):
        graph.set_data_loader(Loader(fields), "image")
        seen[fields] = np.asarray(graph.forward_batch(batch)) / plain

    assert [value.round().flat[0] for value in seen.values()] == [1, 100, 1_000_000]


def test_linen_inputs_are_those_of_its_call_and_the_mode_is_told():
    graph = ff.Graph(linen_two())
    graph.set_data_loader(Loader(("image", "other", "train")), "image")
    batch = next(graph.epoch(0))
    training = np.asarray(graph.forward_batch(batch))
    evaluated = np.asarray(graph.eval().forward_batch(batch))

    np.testing.assert_allclose(evaluated, training * 3)


def test_an_entry_with_an_inputs_own_name_goes_there():
    graph = ff.Graph(TwoInputs())
    graph.set_data_loader(Loader(("mask", "x")), "x")
    batch = {name: np.ones((4, 3), np.float32) for name in ("mask", "x")}

    np.testing.assert_allclose(
        graph.forward_batch(batch), np.asarray(graph(batch["x"])) * 100, rtol=1e-6
    )


def test_inputs_may_be_named_for_a_model_that_names_none():
    def apply(model: Any, *args: Any, **kwargs: Any) -> Any:
        return kwargs["a"] * model["w"] + kwargs["b"]

    graph = ff.Graph({"w": np.float32(2)}, apply=apply, inputs=("a", "b"))
    graph.set_data_loader(Loader(("image", "b")), "image")

    batch = {"image": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
    assert float(graph.forward_batch(batch).sum()) == 12.0


def test_entries_and_inputs_that_are_no_fields_are_refused_with_both_lists():
    graph = ff.Graph(linen_two())
    with pytest.raises(
        ff.UnwiredInputError,
        match="the entry `picture` is no field .* inputs are `x`, `other`; the data's "
        "fields are `image`, `label`",
    ) as info:
        graph.set_data_loader(Loader(), "picture")
    assert (info.value.name, info.value.inputs) == ("picture", ("x", "other"))
    assert info.value.fields == ("image", "label")
    assert isinstance(info.value, ValueError)
    with pytest.raises(
        ff.UnwiredInputError,
        match="the input `other` is no field .* inputs are `x`, `other`; .* are `ima",
    ):
        graph.set_data_loader(Loader(), "image")
    with pytest.raises(RuntimeError, match="no data loader was set"):
        graph.forward_batch({})  # a loader that was refused is not kept


@pytest.mark.parametrize(
    "read",
    [
        lambda graph: graph.epoch(0),
        lambda graph: graph.forward_batch({}),
        lambda graph: graph.data_num_batches,
        lambda graph: graph.data_batch_size,
    ],
)
def test_without_a_loader_the_way_to_set_one_is_shown(read: Any):
    with pytest.raises(
        RuntimeError, match=r'`graph.set_data_loader\(loader, "image"\)`'
    ):
        read(ff.Graph(TwoInputs()))


def test_epochs_are_those_of_the_loader():
    graph = ff.Graph(TwoInputs())
    graph.set_data_loader(Loader(), "image")

    assert (graph.data_num_batches, graph.data_batch_size) == (3, 4)
    assert [float(b["image"][0, 0]) for b in graph.epoch(2)] == [20, 21, 22]
    assert len(list(graph.epoch(0))) == 3


def test_a_field_that_a_batch_lacks_is_named():
    graph = ff.Graph(TwoInputs())
    graph.set_data_loader(Loader(), "image")

    with pytest.raises(
        ff.MissingFieldError, match="no field `image`; its fields are `l"
    ):
        graph.forward_batch(ff.Batch({"label": np.zeros(4, np.float32)}))


def test_the_loader_is_not_replaced_while_an_epoch_lasts():
    graph = ff.Graph(TwoInputs())
    graph.set_data_loader(Loader(), "image")
    message = "must not be replaced while an epoch is being iterated"

    for batch in graph.epoch(0):
        assert batch.size == 4
        with pytest.raises(RuntimeError, match=message):
            graph.set_data_loader(Loader(), "image")
    graph.set_data_loader(Loader(), "image")  # the epoch has ended
    batches = iter(graph.epoch(0))
    next(batches)
    with pytest.raises(RuntimeError, match=message):
        graph.set_data_loader(Loader(), "image")
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    graph.set_data_loader(Loader(), "image")
    for _ in graph.epoch(0):
        break  # and so does one that is dropped
    graph.set_data_loader(Loader(("image",)), "image")

    assert list(next(graph.epoch(0))) == ["image"]


def test_an_error_of_the_loader_ends_the_epoch():
    class Failing(Loader):
        def epoch(self, epoch: int) -> Iterator[ff.Batch]:
            yield from super().epoch(epoch)
            raise OSError("the disk is gone")

    graph = ff.Graph(TwoInputs())
    graph.set_data_loader(Failing(), "image")
    with pytest.raises(OSError, match="the disk is gone"):
        list(graph.epoch(0))

    graph.set_data_loader(Loader(), "image")


def test_the_loop_of_the_documentation_trains():
    graph = ff.Graph(TwoInputs(), max_grad_norm=1.0)
    graph.set_optimizer(optax.adamw)
    graph.set_scheduler(ff.schedules.cosine(1e-1, 1, 12))
    graph.set_data_loader(Loader(), "image")
    losses = []
    for epoch in range(4):
        for batch in graph.epoch(epoch):
            y = graph.forward_batch(batch)
            outcome = graph.step(((y - batch["label"][:, :2]) ** 2).mean())
            losses.append(outcome.loss / max(1.0, float(batch["image"][0, 0]) ** 2))

    assert graph.training_step == 12
    assert losses[-1] < losses[1] / 2
    assert len(graph.compiles) == 1


def test_an_epoch_is_a_context_that_ends_with_its_threads():
    graph = ff.Graph({"w": np.float32(2)}, apply=lambda model, x: model["w"] * x)
    rows = {"x": np.ones((64, 2), np.float32)}
    loader = ff.DataLoader(rows, 4, resident=False, prefetch=4)
    graph.set_data_loader(loader, "x")
    before = threading.active_count()

    with graph.epoch(0) as batches:
        for batch in batches:
            assert graph.forward_batch(batch).shape == (4, 2)
            break
    for thread in threading.enumerate()[before:]:
        thread.join(timeout=10)

    assert threading.active_count() == before
    graph.set_data_loader(loader, "x")
