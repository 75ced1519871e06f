"""The notebooks run from clean, and are kept with what they show.

After an edit, ``python notebooks/renew.py`` renews what they show.
"""

import json
import re
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
RENEW = runpy.run_path(str(ROOT / "notebooks" / "renew.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

# Twice what they are made for: the cores of a test may be shared.
MOST_SECS = 120
MOST_BYTES = 600_000
A_PATH = re.compile(r"/(?:Users|home|opt|private|root|tmp|usr|var|work)/|[A-Z]:\\\\")


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def kinds_of_output(notebook: Any) -> list[list[str]]:
    """For each cell what it shows: text, pictures, values."""
    return [
        [
            "+".join([output.output_type, *sorted(output.get("data", ()))])
            for output in o
        ]
        for o in (cell.outputs for cell in code_cells(notebook))
    ]


def num_pictures(notebook: Any) -> int:
    return sum("image/png" in output.get("data", ()) for output in outputs_of(notebook))


def said_on_stderr(notebook: Any) -> str:
    return "".join(
        output.text for output in outputs_of(notebook) if output.get("name") == "stderr"
    )


def text_of(output: Any) -> str:
    """All of an output but its pictures, whose letters mean nothing."""
    bundle = {k: v for k, v in output.get("data", {}).items() if "image" not in k}
    rest = {k: v for k, v in output.items() if k != "data"}
    return json.dumps([rest, bundle])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Executes a notebook with this very interpreter, in an empty folder."""
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": launch, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    # Nothing of whoever runs the tests: neither their kernels nor their start-up files.
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "jupyter_config"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONWARNINGS", "default")  # shown, and so seen by the test
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # a user has the devices there are
    folder = tmp_path / "folder"
    folder.mkdir()

    def run_in_kernel(notebook: Any, **options: Any) -> Any:
        return RENEW["execute"](notebook, folder, **options)

    return run_in_kernel


def test_there_are_notebooks():
    names = ["lazy_graphs", "ranks_and_metrics", "training_loop", "watching_a_run"]

    assert [path.stem for path in NOTEBOOKS] == names


@pytest.mark.slow
@each_notebook
def test_a_notebook_runs_from_clean(path, run):
    kept = read(path)
    start = time.perf_counter()
    fresh = run(read(path))
    secs = time.perf_counter() - start

    assert secs < MOST_SECS
    assert num_pictures(fresh) >= 1
    assert said_on_stderr(fresh) == ""
    assert kinds_of_output(fresh) == kinds_of_output(kept), "renew it"


@each_notebook
def test_a_notebook_is_kept_with_what_it_shows(path):
    notebook = read(path)
    numbers = [cell.execution_count for cell in code_cells(notebook)]

    assert numbers == list(range(1, len(numbers) + 1))
    assert num_pictures(notebook) >= 1
    assert said_on_stderr(notebook) == ""
    assert all(output.output_type != "error" for output in outputs_of(notebook))


@each_notebook
def test_a_notebook_keeps_nothing_of_the_machine_it_ran_on(path):
    notebook = read(path)
    texts = [cell.source for cell in notebook.cells]
    texts += [text_of(output) for output in outputs_of(notebook)]

    assert [text for text in texts if A_PATH.search(text)] == []
    assert all(not cell.metadata for cell in notebook.cells), "timings are noise"
    assert "version" not in notebook.metadata.language_info
    assert notebook.metadata.kernelspec.name == "python3"
    assert path.stat().st_size < MOST_BYTES


SET_UP = """
import gc, threading
import jax, numpy as np, optax
import fuelflow as ff

source = {"x": np.zeros((4096, 1024), np.float32)}
loader = ff.DataLoader(source, 64, resident=False, prefetch=8)
graph = ff.Graph({"w": np.zeros(1024, np.float32)}, apply=lambda m, x: x @ m["w"])
graph.set_data_loader(loader, "x")

def train(batches):
    for batch in batches:
        raise RuntimeError

def train_with():
    with loader.epoch(0) as batches:
        train(batches)

def left(patience):
    gc.collect()
    threads = [t for t in threading.enumerate() if t.name.startswith("fuelflow-data")]
    for thread in threads:
        thread.join(patience)
    gc.collect()
    num_batches = sum(array.shape == (64, 1024) for array in jax.live_arrays())
    return sum(thread.is_alive() for thread in threads), num_batches
"""
BEGUN = "epoch = loader.epoch(0)\nbatch = next(epoch)"
PATIENCE = 10  # seconds that a thread may take to end on a busy machine


def left_by(cells: list[tuple[str, int]], run: Any) -> list[list[int]]:
    """The threads, and the batches on the device, that are left after each cell.

    Args:
        cells: A cell's source, and the seconds that its threads are given to end.
        run: The fixture.
    """
    sources = [SET_UP]
    for cell, patience in cells:
        sources += [cell, "batch = None", f"print(list(left({patience})))"]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources]
    )
    run(notebook, allow_errors=True)
    return [json.loads(cell.outputs[0].text) for cell in notebook.cells[3::3]]


@pytest.mark.slow
def test_an_epoch_dropped_in_a_notebook_leaves_nothing(run):
    dropped = [
        "for batch in loader.epoch(0):\n    break",
        "for batch in graph.epoch(0):\n    break",
        "for batch in loader.epoch(0):\n    raise RuntimeError",
        "for batch in graph.epoch(0):\n    raise RuntimeError",
        "for batch in loader.epoch(0):\n    raise KeyboardInterrupt",
        "for i, batch in enumerate(loader.epoch(0)):\n    raise RuntimeError",
        f"{BEGUN}\nepoch = None",
        f"{BEGUN}\nepoch.close()",
    ]
    cells = [*[(cell, PATIENCE) for cell in dropped], (BEGUN, 0)]
    *counts, (num_threads, num_batches) = left_by(cells, run)

    assert num_threads > 0, "or the check could not fail"
    assert num_batches > 1, "or the check could not fail"
    assert {
        cell: count
        for cell, count in zip(dropped, counts, strict=True)
        if count != [0, 0]
    } == {}


@pytest.mark.slow
def test_a_notebook_lets_go_of_an_epoch_when_its_traceback_goes(run):
    shown, raised, raised_again, left_as_context = left_by(
        [
            ("next(loader.epoch(0))", PATIENCE),  # kept by the notebook, as `Out[2]`
            ("train(loader.epoch(0))", 0),  # kept as the traceback's, by Python
            ("raise RuntimeError", PATIENCE),
            ("train_with()", PATIENCE),  # ends the epoch; the traceback has the batch
        ],
        run,
    )

    assert shown == [0, 1]
    assert raised[0] > 0
    assert raised_again == [0, 1]
    assert left_as_context == [0, 2]
