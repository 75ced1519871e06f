"""Facts compared over real processes, and over the only one."""

import math

import numpy as np
import pytest
from launching import JOINED, launched, said, write

from fuelflow import _errors
from fuelflow.devices.agreement import require_agreement

PROGRAM = (
    JOINED
    + """
from fuelflow.devices.agreement import require_agreement

def compare(facts):
    try:
        require_agreement(facts)
    except ValueError as error:
        say(type(error).__name__, error.different, error)
    else:
        say("agreed")

nan = float("nan")
compare({"seed": 3, "code": "abc", "rate": 0.1, "nan": nan, "no": 0}
        if rank else {"no": 0, "nan": nan, "rate": 0.1, "code": "abc", "seed": 3})
compare({"seed": rank, "code": "abc"})
compare({"seed": 3, f"only {rank}": "x" * 1000 * rank})
compare({"rows": [1, 1.0][rank]})
compare({"rows": [1, "1"][rank]})
compare([{}, {"rows": 1}][rank])
compare({})
"""
)
SAID = [
    "agreed",
    "DisagreementError {'seed': ('0', '1')} the processes of this run do not agree: ",
    f"`only 1` is missing on process 0 and '{'x' * 29}…{'x' * 29}' on process 1.",
    "`rows` is 1 on process 0 and 1.0 on process 1.",
    "`rows` is 1 on process 0 and '1' on process 1.",
    "`rows` is missing on process 0 and 1 on process 1.",
    "agreed",
]


def test_every_process_hears_what_differs(tmp_path, capsys):
    path = write(tmp_path / "program.py", PROGRAM)

    status, out, err = launched(capsys, "-n", "2", "--devices-per-process", "2", path)

    assert status == 0, err
    for rank in (0, 1):
        for line, expected in zip(said(rank, out), SAID, strict=True):
            assert expected in line


def test_one_process_agrees_with_itself():
    facts = {"seed": 0, "rate": math.nan, "code": "", "flag": np.float64(1)}

    assert require_agreement(facts) is None


@pytest.mark.parametrize("value", [None, b"x", [1], np.int64(1)])
def test_other_kinds_of_facts_are_refused(value):
    with pytest.raises(TypeError, match=f"`rows` must be a .*{type(value).__name__}"):
        require_agreement({"rows": value})


def test_processes_that_have_the_same_are_told_together():
    different = {"seed": ["0", "1", "0", None], "rows": ["7", "7", "7", "8"]}

    error = _errors.DisagreementError(different)

    assert error.different["rows"] == ("7", "7", "7", "8")
    assert (
        "`seed` is 0 on processes 0, 2 and 1 on process 1 and missing on process 3, "
        "`rows` is 7 on processes 0, 1, 2 and 8 on process 3." in str(error)
    )
