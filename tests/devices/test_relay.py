"""Output passed on in whole lines, however it comes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelflow.devices.relay import lines, prefixes

TEXTS = st.lists(st.sampled_from([b"a", "é".encode(), b"\r", b"\n", b"\r\n"]))


@given(TEXTS, st.data())
def test_lines_do_not_depend_on_how_the_bytes_come(parts, data):
    text = b"".join(parts)
    ends = data.draw(st.sets(st.integers(0, len(text))))
    cuts = [0, *sorted(ends), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(cuts)]

    assert list(lines(chunks)) == list(lines([text]))


@given(TEXTS)
def test_no_character_is_lost_and_no_end_kept(parts):
    text = b"".join(parts)

    got = list(lines([text]))

    assert b"".join(got) == text.replace(b"\r", b"").replace(b"\n", b"")
    # Every end is one line's; of those that a \r alone ends, the empty are left out.
    kept = text.replace(b"\r\n", b"\n").replace(b"\r", b"\0").split(b"\n")
    expected = [
        piece
        for row in kept[:-1]
        for piece in ([p for p in row.split(b"\0")[:-1] if p] + [row.split(b"\0")[-1]])
    ] + [piece for piece in kept[-1].split(b"\0") if piece]
    assert got == expected


@pytest.mark.parametrize(("num_processes", "last"), [(10, b"9 | "), (11, b"10 | ")])
def test_marks_are_equally_wide(num_processes, last):
    marks = prefixes(num_processes, coloured=False)

    assert marks[-1] == last
    assert {len(mark) for mark in marks} == {len(last)}


def test_coloured_marks_end_their_colour():
    assert prefixes(2, coloured=True) == [
        b"\x1b[36m0 |\x1b[0m ",
        b"\x1b[33m1 |\x1b[0m ",
    ]
