"""What a run is called that has no directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAY = "from fuelflow.watch.record.making import run_name; print(run_name(None))"
IN_A_KERNEL = f"import sys; sys.modules['ipykernel.kernelapp'] = None; {SAY}"


@pytest.mark.parametrize(
    ("arguments", "notebook", "name"),
    [
        (["folder/train.py"], "", "train"),
        (["-m", "package"], "", "package"),
        (["-m", "package.module"], "", "package.module"),
        (["-c", SAY], "", "run"),
        (["-c", IN_A_KERNEL], "notes/digits 2.ipynb", "digits 2"),
        (["-c", IN_A_KERNEL], "", "notebook"),
    ],
)
def test_a_run_is_called_as_what_was_started(arguments, notebook, name, tmp_path):
    for file in ("folder/train.py", "package/__main__.py", "package/module.py"):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(SAY)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JPY_SESSION_NAME": notebook},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"{name}\n"
