"""A position continues with the very next row, in whatever way batches are made."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelflow._errors import PositionError, RowError
from fuelflow.data.loader import DataLoader
from fuelflow.data.samplers import WeightedSampler

ROADS = [
    {"resident": True},
    {"resident": False},
    {"resident": False, "prefetch": 0},
    {"resident": False, "prefetch": 5},
]


def make_loader(batch_size=4, num_rows=23, **options):
    return DataLoader({"row": np.arange(num_rows)}, batch_size, **options)


def seen(batches):
    return [row for batch in batches for row in batch["row"].tolist()]


def after(loader, epoch, num_batches):
    """The state after some batches, as another process would read it."""
    batches = loader.epoch(epoch)
    for _ in range(num_batches):
        next(batches)
    state = json.loads(json.dumps(loader.state()))
    batches.close()
    return state


@settings(max_examples=60)
@given(
    roads=st.tuples(st.sampled_from(ROADS), st.sampled_from(ROADS)),
    num_batches=st.integers(0, 6),
    epoch=st.integers(0, 2),
    batch_size=st.sampled_from([4, 1, 5, 30]),
)
def test_a_run_can_continue_after_any_batch(roads, num_batches, epoch, batch_size):
    before, afterwards = (make_loader(**road) for road in roads)
    expected = seen(before.epoch(epoch))
    state = after(before, epoch, num_batches)

    other = make_loader(batch_size, **roads[1])
    for loader in (afterwards, other):
        loader.restore(state)
        rest = seen(loader.epoch(epoch))
        assert rest == expected[4 * num_batches :]
        assert seen(loader.epoch(epoch))[:4] == expected[:4]  # from its beginning


@pytest.mark.parametrize("road", ROADS)
def test_batches_after_a_position_are_those_of_the_whole_run(road):
    loader = make_loader(
        device_transform=lambda fields, key: (
            {**fields, "bits": key_bits(key)}
            if fields["row"].shape == (4,)
            else {**fields, "bits": fields["row"]}
        ),
        **road,
    )

    def key_bits(key):
        import jax

        return jax.random.bits(key, (4,))

    expected = [batch["bits"].tolist() for batch in loader.epoch(1)]
    loader.restore(after(loader, 1, 3))

    rest = [batch["bits"].tolist() for batch in loader.epoch(1)]

    assert rest == expected[3:]


def test_what_is_made_ahead_is_not_counted():
    loader = make_loader(resident=False, prefetch=5)
    batches = loader.epoch(0)

    rows = [loader.state()["rows"]]
    rows.extend(loader.state()["rows"] for _ in batches)

    assert rows == [0, 4, 8, 12, 16, 20, 23]


def test_stretches_are_counted():
    loader = make_loader(resident=True)
    batches = loader.epoch(0)

    assert batches.stretch(3) is not None
    assert loader.state()["rows"] == 12
    assert seen(batches) == seen(loader.epoch(0))[12:]


def test_iterating_continues_where_the_position_is():
    loader = make_loader()
    expected = [seen(loader.epoch(epoch)) for epoch in range(4)]
    state = after(loader, 2, 2)

    loader.restore(state)

    assert seen(loader) == expected[2][8:]
    assert seen(loader) == expected[3]


def test_iterating_after_a_finished_epoch_goes_on_with_the_next():
    loader = make_loader(drop_last=True)
    state = after(loader, 1, 5)
    expected = seen(loader.epoch(2))

    loader.restore(state)

    assert state["is_done"]
    assert seen(loader) == expected


def test_a_finished_epoch_has_nothing_more():
    loader = make_loader(drop_last=True)
    loader.restore(after(loader, 1, 5))

    assert seen(loader.epoch(1)) == []
    assert len(seen(loader.epoch(1))) == 20


def test_rows_that_were_dropped_do_not_come_back_in_smaller_batches():
    state = after(make_loader(drop_last=True), 1, 5)
    smaller = make_loader(2, drop_last=True)

    smaller.restore(state)

    assert state["rows"] == 20
    assert seen(smaller.epoch(1)) == []


def test_other_epochs_start_at_their_beginning():
    loader = make_loader()
    expected = [seen(loader.epoch(epoch)) for epoch in range(2)]
    loader.restore(after(loader, 1, 2))

    assert seen(loader.epoch(0)) == expected[0]
    assert seen(loader.epoch(1)) == expected[1][8:]


def test_a_restored_position_is_the_position():
    loader = make_loader()
    state = after(loader, 1, 2)

    other = make_loader(3)
    other.restore(state)

    assert other.state() == state


def test_a_loader_that_was_not_iterated_is_at_the_beginning():
    state = make_loader().state()

    assert (state["epoch"], state["rows"], state["is_done"]) == (0, 0, False)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: make_loader(seed=1), "`seed` is 0, here 1"),
        (lambda: make_loader(num_rows=22), "`num_rows` is 23, here 22"),
        (
            lambda: DataLoader({"row": np.zeros((23, 2), np.int8)}, 4),
            r"`fields` is {'row': 'int64\[\]'}, here {'row': 'int8\[2\]'}",
        ),
        (
            lambda: make_loader(shuffle=False),
            "`sampler` is ShuffledSampler, here SequentialSampler",
        ),
    ],
)
def test_a_position_in_other_data_is_refused(other, message):
    state = after(make_loader(), 1, 2)

    with pytest.raises(PositionError, match=message) as caught:
        other().restore(state)

    assert caught.value.different
    assert isinstance(caught.value, ValueError)


def test_a_position_in_another_order_of_the_same_sampler_is_refused():
    one, other = (
        make_loader(sampler=WeightedSampler(np.linspace(low, 1, 23)))
        for low in (0.1, 0.2)
    )

    with pytest.raises(PositionError, match="`order` is"):
        other.restore(after(one, 0, 1))


def test_a_refused_position_changes_nothing():
    loader = make_loader()
    expected = seen(loader.epoch(0))

    with pytest.raises(PositionError):
        loader.restore(after(make_loader(seed=1), 0, 2))

    assert seen(loader.epoch(0)) == expected


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (3, TypeError, "what `DataLoader.state` returned, got a int"),
        ({"epoch": 1}, ValueError, "it lacks `fields`, `is_done`, `iterator`"),
    ],
)
def test_what_is_no_position_is_refused(state, error, message):
    with pytest.raises(error, match=message):
        make_loader().restore(state)


def rows(num_rows=23):
    return ({"row": number} for number in range(num_rows))


class Resumable:
    """An iterator that can be set to any row."""

    num_reads = 0

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == 23:
            raise StopIteration
        self.number += 1
        Resumable.num_reads += 1
        return {"row": self.number - 1}

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


@pytest.mark.parametrize("source", [rows, Resumable])
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("num_batches", [0, 1, 4, 6])
def test_a_stream_continues_with_the_next_row(source, prefetch, num_batches):
    loader = DataLoader(source, 4, shuffle=False, prefetch=prefetch)
    state = after(loader, 0, num_batches)

    other = DataLoader(source, 4, shuffle=False)
    other.restore(state)

    assert seen(other.epoch(0)) == list(range(23))[4 * num_batches :]


def test_an_iterator_with_a_state_is_not_read_again():
    loader = DataLoader(Resumable, 4, shuffle=False, prefetch=0)
    loader.restore(after(loader, 0, 4))
    Resumable.num_reads = 0

    rest = seen(loader.epoch(0))

    assert rest == list(range(16, 23))
    assert Resumable.num_reads == 7


def test_a_stream_that_has_become_shorter_is_refused():
    loader = DataLoader(rows, 4, shuffle=False)
    state = after(loader, 0, 4)
    shorter = DataLoader(lambda: rows(9), 4, shuffle=False)
    shorter.restore(state)

    with pytest.raises(RowError, match="row 9 of the source is missing: 16 were used"):
        list(shorter.epoch(0))


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        (
            "rows",
            11,
            ValueError,
            r"`state\['rows'\]` must be at most the 10 of an epoch",
        ),
        ("rows", -1, ValueError, r"`state\['rows'\]`"),
        ("rows", 2.5, TypeError, r"`state\['rows'\]` must be an integer, got 2.5"),
        ("epoch", -1, ValueError, r"`state\['epoch'\]`"),
        ("is_done", 1, TypeError, r"`state\['is_done'\]` must be a bool, got 1"),
    ],
)
def test_a_position_out_of_range_is_refused(name, value, error, text):
    loader = DataLoader({"x": np.arange(10)}, 4)
    before = loader.state()

    with pytest.raises(error, match=text):
        loader.restore({**before, name: value})
    assert loader.state() == before
