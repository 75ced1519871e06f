"""The benchmark runs at its smoke size and writes the rows that it promises."""

import json
import math
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_step_benchmark_runs_and_writes_its_rows(tmp_path):
    written = tmp_path / "step.json"
    done = subprocess.run(
        [sys.executable, "bench/step.py", "--smoke", "--json", str(written)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    rows = json.loads(written.read_text())["rows"]
    assert rows
    for row in rows:
        assert row["name"]
        assert math.isfinite(row["ratio"])
        assert row["ratio"] > 0
        assert "target" in row
