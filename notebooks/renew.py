"""Runs the notebooks and keeps what they show: ``python notebooks/renew.py``."""

import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

TIMEOUT = 120  # seconds; they are made to take a minute at most on two idle cores


def execute(notebook: Any, folder: Path, **options: Any) -> Any:
    """The notebook with its outputs, run from clean in a folder.

    Raises:
        CellExecutionError: If a cell raises.
    """
    client = nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
        **options,
    )
    notebook = client.execute()
    # The kernel writes down which Python it is, which is noise in every later change.
    notebook.metadata.language_info = {"name": "python", "file_extension": ".py"}
    return notebook


def main() -> None:
    """Runs each notebook and writes it back."""
    for path in sorted(Path(__file__).parent.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(nbformat.read(path, as_version=4), Path(folder))
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
