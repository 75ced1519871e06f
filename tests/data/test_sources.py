"""Rows come out of every kind of source as they went in."""

from collections.abc import Mapping

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuelflow._errors import RowError
from fuelflow.data.loader import DataLoader

NUM_ROWS = 23
X = np.random.default_rng(0).normal(size=(NUM_ROWS, 2, 3)).astype(np.float32)
ROW = np.arange(NUM_ROWS)


class Rows:
    """A sequence of rows, as datasets for other libraries are written."""

    def __init__(self, num_rows=NUM_ROWS):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, number):
        return {"x": X[number], "row": int(ROW[number])}


class BatchedRows(Rows):
    def __getitem__(self, number):
        if number:
            raise AssertionError("rows are to be read together")
        return super().__getitem__(0)

    def __getitems__(self, numbers):
        return [Rows.__getitem__(self, number) for number in numbers]


class RowStream:
    """A stream that knows its length."""

    def __init__(self, num_rows, promised):
        self.num_rows, self.promised = num_rows, promised

    def __len__(self):
        return self.promised

    def __call__(self):
        return (Rows()[number] for number in range(self.num_rows))


def assert_whole(loader):
    """All rows come once, each with its own values."""
    batches = list(loader)
    seen = np.concatenate([np.asarray(batch["row"]) for batch in batches])
    assert sorted(seen.tolist()) == list(range(NUM_ROWS))
    values = np.concatenate([np.asarray(batch["x"]) for batch in batches])
    np.testing.assert_array_equal(values, X[seen])
    assert all(isinstance(batch["x"], jax.Array) for batch in batches)


@pytest.fixture
def h5(tmp_path):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"], file["row"] = X, ROW
        yield file


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("resident", [True, False])
def test_an_hdf5_file(h5, shuffle, resident):
    loader = DataLoader(h5, 5, shuffle=shuffle, resident=resident)

    assert isinstance(h5, Mapping)
    assert_whole(loader)


def test_an_hdf5_row_drawn_twice(h5):
    class Twice:
        def num_samples(self, num_rows):
            return 4

        def indices(self, num_rows, rng):
            return np.array([9, 2, 9, 4])

    loader = DataLoader(h5, 4, sampler=Twice())

    (batch,) = loader

    assert batch["row"].tolist() == [9, 2, 9, 4]
    np.testing.assert_array_equal(batch["x"], X[[9, 2, 9, 4]])


@pytest.mark.parametrize("resident", [True, False])
def test_a_memory_map(tmp_path, resident):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=X.shape)
    mapped[:] = X

    assert_whole(DataLoader({"x": mapped, "row": ROW}, 5, resident=resident))


@pytest.mark.parametrize(
    "values",
    [
        jnp.asarray(X),
        np.asfortranarray(X),
        np.repeat(X, 2, axis=0)[::2],
        np.flip(np.flip(X, 0).copy(), 0),
    ],
    ids=["on the device", "in columns", "with gaps", "backwards"],
)
@pytest.mark.parametrize("resident", [True, False])
def test_arrays_of_any_kind(values, resident):
    assert_whole(DataLoader({"x": values, "row": ROW}, 5, resident=resident))


def test_arrays_on_another_device_come_to_this_one():
    values = jax.device_put(X, jax.devices()[1])

    assert_whole(DataLoader({"x": values, "row": ROW}, 5, resident=True))


def test_fields_of_bfloat16_and_bool():
    arrays = {"half": jnp.arange(7, dtype=jnp.bfloat16), "flag": np.arange(7) > 3}
    loader = DataLoader(arrays, 7, shuffle=False, resident=False)

    (batch,) = loader

    assert batch["half"].dtype == jnp.bfloat16
    assert batch["half"].tolist() == list(range(7))
    assert batch["flag"].tolist() == [False] * 4 + [True] * 3


@pytest.mark.parametrize("prefetch", [0, "auto"])
@pytest.mark.parametrize("kind", [Rows, BatchedRows])
def test_a_sequence_of_rows(kind, prefetch):
    assert_whole(DataLoader(kind(), 5, prefetch=prefetch))


def test_a_sequence_of_rows_can_stay_on_the_device():
    loader = DataLoader(Rows(), 5, resident=True)

    assert_whole(loader)
    assert loader.epoch(0).stretch(2) is not None


def test_a_torch_dataset():
    torch = pytest.importorskip("torch")

    class Dataset(torch.utils.data.Dataset):
        def __len__(self):
            return NUM_ROWS

        def __getitem__(self, number):
            return {"x": torch.from_numpy(X[number]), "row": torch.tensor(number)}

    assert_whole(DataLoader(Dataset(), 5))
    assert_whole(DataLoader(torch.utils.data.Subset(Dataset(), range(NUM_ROWS)), 5))


def test_torch_tensors_as_fields():
    torch = pytest.importorskip("torch")
    tensors = {"x": torch.from_numpy(X), "row": torch.arange(NUM_ROWS)}

    assert_whole(DataLoader(tensors, 5))
    assert_whole(DataLoader(tensors, 5, resident=False))


def test_a_grain_source():
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.source(Rows()).map(lambda row: row | {"x": row["x"]})

    assert_whole(DataLoader(dataset, 5))


@pytest.mark.parametrize("style", [None, "numpy"])
def test_a_hugging_face_dataset(style):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"x": X.tolist(), "row": ROW.tolist()})

    assert_whole(DataLoader(dataset.with_format(style), 5))


def test_a_hugging_face_dataset_of_unequal_rows_names_the_row():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"x": [[1, 2], [3, 4], [5], [6, 7]]})
    loader = DataLoader(dataset, 4, shuffle=False)

    with pytest.raises(RowError, match=r"row 2 .* shape \(1,\) in the field `x`"):
        list(loader)


@pytest.mark.parametrize("prefetch", [0, 1, "auto"])
@pytest.mark.parametrize("promised", [NUM_ROWS, None])
def test_a_stream(promised, prefetch):
    stream = RowStream(NUM_ROWS, promised)
    source = stream if promised else stream.__call__
    loader = DataLoader(source, 5, shuffle=False, prefetch=prefetch)

    assert_whole(loader)
    assert_whole(loader)
    assert loader.num_rows == promised
    assert loader.epoch(0).num_batches == (promised and 5)


def test_a_stream_carries_weights_if_its_end_is_unknown():
    known = DataLoader(RowStream(20, 20), 5, shuffle=False)
    unknown = DataLoader(RowStream(20, 20).__call__, 5, shuffle=False)

    weights = [[batch.rows().weight for batch in loader] for loader in (known, unknown)]

    assert weights[0] == [None] * 4
    assert [weight.tolist() for weight in weights[1]] == [[1] * 5] * 4


@pytest.mark.parametrize(
    ("drop_last", "sizes"), [(None, [5] * 5), (False, [5] * 4 + [3]), (True, [5] * 4)]
)
def test_the_tail_of_a_stream(drop_last, sizes):
    loader = DataLoader(
        RowStream(23, 23).__call__, 5, shuffle=False, drop_last=drop_last
    )

    batches = list(loader)

    assert [batch.num_held for batch in batches] == sizes
    assert sum(batch.size for batch in batches) == (20 if drop_last else 23)


@pytest.mark.parametrize(
    ("num_rows", "message"),
    [
        (7, "row 7 of the source is missing: its length is 9"),
        (5, "row 5 of the source is missing: its length is 9"),
        (12, "row 9 of the source is one more than its length of 9"),
    ],
)
def test_a_stream_must_keep_its_promise(num_rows, message):
    loader = DataLoader(RowStream(num_rows, 9), 5, shuffle=False)

    with pytest.raises(RowError, match=message) as caught:
        list(loader)

    assert caught.value.row == min(num_rows, 9)


def test_fields_of_a_stream_are_known_before_it_is_iterated():
    loader = DataLoader(RowStream(5, 5), 2, shuffle=False)

    assert loader.field_names == ("x", "row")
    assert loader.epoch(0).num_batches == 3


def test_a_stream_is_read_by_one_thread_in_order():
    read = []

    def rows():
        for number in range(40):
            read.append(number)
            yield {"row": number}

    list(DataLoader(rows, 4, shuffle=False, prefetch=8))

    assert read == list(range(40))
