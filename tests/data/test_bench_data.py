"""The loader's benchmark runs at its smoke size and writes the rows it promises."""

import json
import math
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_data_benchmark_runs_and_writes_its_rows(tmp_path):
    written = tmp_path / "data.json"
    done = subprocess.run(
        [sys.executable, "bench/data.py", "--smoke", "--json", str(written)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    rows = json.loads(written.read_text())["rows"]
    assert {row["against"] for row in rows} >= {"numpy.take, batch by batch"}
    for row in rows:
        assert math.isfinite(row["ratio"])
        assert row["ratio"] > 0
        assert row["target"]
