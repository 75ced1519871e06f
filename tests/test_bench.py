"""Each benchmark runs at its smoke size and writes the rows that it promises."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("step", "loop.step, 8 leaves"),
        ("lazy", "graph.step, 8 leaves"),
        ("data", "streaming, batches of"),
        ("checkpoint", "blocked by a save, 1 MB of state"),
        ("page", "page of 20 epochs × 16 ranks"),
        pytest.param("ranks", "Trainer epoch", marks=pytest.mark.slow),
        pytest.param("watch", "Trainer epoch, everything on", marks=pytest.mark.slow),
    ],
)
def test_a_benchmark_runs_and_writes_its_rows(name, row, tmp_path):
    written = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, f"bench/{name}.py", "--smoke", "--json", str(written)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    rows = json.loads(written.read_text())["rows"]
    assert any(found["name"].startswith(row) for found in rows)
    for found in rows:
        assert math.isfinite(found["ratio"])
        assert found["ratio"] > 0
        assert found["target"]
