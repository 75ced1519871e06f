"""What a loader cannot take is refused by name, before work starts."""

import pickle

import numpy as np
import pytest

from fuelflow._errors import PositionError, RowError
from fuelflow.data.loader import DataLoader

GOOD = {"x": np.arange(6)}


class Rows:
    """A sequence of given rows."""

    def __init__(self, *rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def stream():
    return iter([{"x": 1}])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "`batch_size` must be at least 1, got 0"),
        ({"batch_size": 2.0}, TypeError, "`batch_size` must be an integer, got 2.0"),
        ({"batch_size": True}, TypeError, "`batch_size` must be an integer, got True"),
        (
            {"batch_size": 7, "drop_last": True},
            ValueError,
            "at most the 6 rows of an epoch with drop_last=True, got 7: all rows would",
        ),
        ({"seed": -1}, ValueError, "`seed` must be at least 0, got -1"),
        ({"seed": "a"}, TypeError, "`seed` must be an integer, got 'a' of type str"),
        ({"shuffle": 1}, TypeError, "`shuffle` must be True, False or None, got 1"),
        ({"drop_last": "no"}, TypeError, "`drop_last` must be True, False or None"),
        ({"resident": "yes"}, ValueError, '`resident` must be True, False or "auto"'),
        ({"resident": 1}, ValueError, "`resident` must be .*, got 1"),
        ({"prefetch": -1}, ValueError, "`prefetch` must be at least 0, got -1"),
        ({"prefetch": 1.5}, TypeError, "`prefetch` must be an integer, got 1.5"),
        ({"prefetch": "all"}, ValueError, '`prefetch` must be a number .* or "auto"'),
        (
            {"sampler": 3},
            TypeError,
            "must have the methods `num_samples` and `indices`",
        ),
        (
            {"sampler": Rows(), "shuffle": False},
            ValueError,
            "`shuffle` must be left out where a `sampler` is given, got False",
        ),
        (
            {"resident": True, "transform": dict},
            ValueError,
            "`resident` must not be True with a `transform`, .* `device_transform`",
        ),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        DataLoader(GOOD, **{"batch_size": 2, **options})


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ({}, ValueError, "`source` must have at least one field, got none"),
        ({3: GOOD["x"]}, TypeError, "a field's name must be a string, got 3"),
        ({"x": np.zeros((0, 3))}, ValueError, "at least one row, got none"),
        (
            {"x": np.zeros(3), "y": np.zeros(4), "z": np.zeros(3)},
            ValueError,
            "must have the same rows: `x` has 3, `y` has 4, `z` has 3",
        ),
        ({"x": np.zeros(())}, ValueError, "`x` must have a leading row axis, got a sc"),
        (
            {"x": np.array(["a", "b"])},
            TypeError,
            "`x` must be numeric, got dtype <U1: encode it as numbers, or leave it out",
        ),
        ({"x": np.array([None])}, TypeError, "`x` must be numeric, got dtype object"),
        ({"x": [1, 2]}, TypeError, "`x` must be a NumPy .* convert it with numpy.asar"),
        (
            {"x": {"y": np.zeros(3)}},
            TypeError,
            "`x` must be an array, got a dict: a so",
        ),
        ({"x": np.zeros(3, ">f4")}, TypeError, "must be in this machine's byte order"),
        (np.zeros(3), TypeError, r'name its fields, got a bare ndarray: write {"x": '),
        ("rows", TypeError, "name its fields, got a bare str"),
        (
            stream(),
            TypeError,
            "an iterator can be used for one epoch only, pass the fu",
        ),
        ({1, 2}, TypeError, r"got a set: pass `lambda: iter\(source\)` to read it"),
        (3, TypeError, "a function that gives an iterator of rows, got a int$"),
        (Rows(), ValueError, "`source` must have at least one row, got none"),
        (Rows({}), ValueError, "each row of the source must have at least one field"),
        (Rows((1, 2)), TypeError, "each row of the source must be a mapping .* tuple"),
        (Rows({"x": "a"}), TypeError, "`x` must be numeric, got dtype <U1"),
    ],
)
def test_wrong_sources_are_refused(source, error, message):
    with pytest.raises(error, match=message):
        DataLoader(source, 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"x": [1, 2]}, r"row 2 .* has shape \(2,\) in the field `x`, the first has "),
        (
            {"x": 0.5},
            "row 2 .* dtype float64 in the field `x`, which does not fit .*64",
        ),
        ({"y": 1}, "row 2 .* must have the fields of the first, `x`, got `y`"),
        (3, "row 2 of the source must be a mapping, got a int"),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_row_unlike_the_first_is_refused_by_its_number(row, message, is_stream):
    rows = Rows({"x": 0}, {"x": 1}, row, {"x": 3})
    source = (lambda: iter(rows.rows)) if is_stream else rows
    loader = DataLoader(source, 2, shuffle=False)

    with pytest.raises(RowError, match=message) as caught:
        list(loader)

    assert caught.value.row == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`shuffle` must be False for a stream, got None: its rows come in its"),
        ({"shuffle": True}, "`shuffle` must be False for a stream, got True"),
        ({"shuffle": False, "sampler": 3}, "`sampler` must not be given for a stream"),
        ({"shuffle": False, "resident": True}, "`resident` must not be True for a str"),
    ],
)
def test_a_stream_has_its_own_order_and_no_place_on_the_device(options, message):
    with pytest.raises(ValueError, match=message):
        DataLoader(stream, 2, **options)


def test_a_stream_without_a_length_has_none():
    loader = DataLoader(stream, 2, shuffle=False)

    with pytest.raises(TypeError, match="a stream without a `__len__` has no length"):
        len(loader)


def test_rows_that_do_not_fit_on_the_device_are_refused():
    huge = np.broadcast_to(np.float32(0), (2**16, 2**30))  # takes no memory

    with pytest.raises(ValueError, match=r"268435456.0 MiB of rows with \d+.\d MiB of"):
        DataLoader({"x": huge}, 2, resident=True)


def test_more_rows_than_an_int32_counts_are_refused_on_the_device():
    many = np.broadcast_to(np.int8(0), (2**31,))

    with pytest.raises(ValueError, match="for 2147483648 rows: on the device their nu"):
        DataLoader({"x": many}, 2, resident=True)


@pytest.mark.parametrize(
    ("epoch", "error"), [(-1, ValueError), (0.5, TypeError), (None, TypeError)]
)
def test_an_epoch_is_a_count(epoch, error):
    with pytest.raises(error, match="`epoch` must be"):
        DataLoader(GOOD, 2).epoch(epoch)


@pytest.mark.parametrize(
    "error", [RowError(3, "is missing"), PositionError([("seed", 0, 1)])]
)
def test_the_errors_can_be_sent_to_another_process(error):
    copy = pickle.loads(pickle.dumps(error))

    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
