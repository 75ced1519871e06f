"""What processes tell each other, over real ones."""

from launching import JOINED, launched, said, write

PROGRAM = (
    JOINED
    + """
import os, signal, time
from fuelflow.devices.messages import (
    come_to, have_all_come_to, is_noticed, meet, read, write
)

say(is_noticed(), read("note"), have_all_come_to("here"))
meet("begun", 30)
if rank == 0:
    write("note", "first")
    come_to("here")
    start = time.monotonic()
    say(meet("alone", 0.5), 0.4 < time.monotonic() - start < 5)
    say(have_all_come_to("here"))
say(meet("there", 30))
if rank == 1:
    say(meet("alone", 0.5))
    write("note", "second")
    come_to("here")
say(meet("elsewhere", 30), read("note"), have_all_come_to("here"))
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
while not is_noticed():
    time.sleep(0.01)
say(is_noticed())
"""
)
BEFORE, MET, NOTED = "False None False", "True", ["True first True", "True"]


def test_processes_read_write_and_meet(tmp_path, capsys):
    path = write(tmp_path / "program.py", PROGRAM)

    status, out, err = launched(capsys, "-n", "2", "--devices-per-process", "1", path)

    assert status == 0, err
    assert said(0, out) == [BEFORE, "False True", "False", MET, *NOTED]
    assert said(1, out) == [BEFORE, MET, "False", *NOTED]
