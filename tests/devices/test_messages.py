"""What processes tell each other, over real ones."""

from launching import JOINED, launched, said, write

PROGRAM = (
    JOINED
    + """
import os, signal, time
from fuelflow.devices.messages import answers_of_all, is_noticed

say(is_noticed())
say(sorted(answers_of_all("name", f"rank {rank}", 30)))
if rank == 0:
    start = time.monotonic()
    say(answers_of_all("early", "yes", 0.5), 0.4 < time.monotonic() - start < 5)
say(answers_of_all("ready", "yes", 30))
if rank == 1:
    say(answers_of_all("early", "yes", 0.5))
say(psum(1.0))
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
while not is_noticed():
    time.sleep(0.01)
say(is_noticed())
"""
)
SAID = ["False", "['rank 0', 'rank 1']", "['yes', 'yes']", "2.0", "True"]


def test_processes_hear_each_other_and_who_does_not_answer_in_time(tmp_path, capsys):
    path = write(tmp_path / "program.py", PROGRAM)

    status, out, err = launched(capsys, "-n", "2", "--devices-per-process", "1", path)

    assert status == 0, err
    assert said(0, out) == [*SAID[:2], "None True", *SAID[2:]]
    assert said(1, out) == [*SAID[:3], "None", *SAID[3:]]
