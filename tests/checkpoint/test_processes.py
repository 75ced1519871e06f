"""Several processes save and restore as one."""

import subprocess
from pathlib import Path

import launching
import numpy as np
from saved_problems import CASES, batches_of, run

from fuelflow.checkpoint.checkpointer import Checkpointer

PROGRAM = f"""
import sys
sys.path[:0] = {[str(Path(launching.__file__).parent)]!r}
from fuelflow.devices.processes import initialize

initialize()
import jax
import numpy as np
import fuelflow as ff
from fuelflow._errors import SaveError
from fuelflow.checkpoint.checkpointer import Checkpointer
from fuelflow.checkpoint.record import RunRecord
from saved_problems import CASES, Case, batches_of, run, with_sums

def own(state):
    # The bytes that the first device of this process has.
    leaves = jax.tree.leaves((state.params, state.opt_state, state.sums))
    return [np.asarray(leaf.addressable_data(0)).tobytes() for leaf in leaves]

directory = sys.argv[1]
case = CASES["dict-8"]
case = Case(case.make_model, case.loss_fn, jax.device_count())
loop = case.make_loop()
loader = case.make_loader(loop)
batches = batches_of(loader)
state = with_sums(loop, loop.init(case.make_model(), seed=7))
checkpointer = Checkpointer(directory, every_secs=1e-9)
checkpointer.prepare()
state = run(loop, state, batches, 3)
checkpointer.save(state, RunRecord(position=loader.state()))
state = run(loop, state, batches, 6)
expected = own(state)

restored = checkpointer.restore(loop, state)
loader.restore(restored.record.position)
state = run(loop, restored.state, batches_of(loader), 6)
assert own(state) == expected
print("resumed", restored.step, len(loop.compiles))

due = [checkpointer.is_due(step) for step in range(4, 68)]
print("due", due.count("every_secs"))

import shutil
if jax.process_index() == 0:
    shutil.move(directory, directory + ".moved")
checkpointer.save(state)
try:
    checkpointer.wait()
except SaveError as error:
    print("failed", type(error).__name__)
"""


def test_two_processes_save_resume_and_fail_together(tmp_path):
    script = launching.write(tmp_path / "program.py", PROGRAM)
    directory = tmp_path / "runs"
    done = subprocess.run(
        [*launching.COMMAND, "-n", "2", script, str(directory)],
        capture_output=True,
        text=True,
        env=launching.ENVIRONMENT,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    for process in (0, 1):
        said = launching.of(process, done.stdout.splitlines())
        assert [line for line in said if "Gloo" not in line] == [
            "resumed 3 1",
            "due 2",
            "failed SaveError",
        ]

    # What two processes wrote, this one goes on with.
    case = CASES["dict-0"]
    loop = case.make_loop()
    moved = Checkpointer(f"{directory}.moved")
    restored = moved.restore(loop, case.make_model())
    assert restored.step == 3
    sums = restored.state.sums
    assert sums is not None
    assert np.asarray(sums.num_rows).tolist() == [96]
    loader = case.make_loader(loop)
    loader.restore(restored.record.position)
    state = run(loop, restored.state, batches_of(loader), 1)
    assert int(state.step) == 4
