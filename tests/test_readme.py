"""Every Python block of the README is a script that runs."""

import subprocess
import sys
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = house.code_blocks(ROOT / "README.md", "python")


def test_the_readme_shows_code():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line-{block.line}")
def test_a_block_runs_as_a_script(block, tmp_path):
    script = tmp_path / "README.py"
    # Blank lines before it, so that a traceback counts the lines of the README.
    script.write_text("\n" * (block.line - 1) + block.code)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_blocks_are_cut_where_their_fences_are(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(
        "a\n```python\nx = 1\n\ny = 2\n```\n```sh\nls\n```\n```python\n```\n"
    )

    assert house.code_blocks(readme, "python") == [
        ("python", 3, "x = 1\n\ny = 2\n"),
        ("python", 11, ""),
    ]
