"""Makes the pictures of the README: ``python notebooks/pictures.py [FOLDER [EPOCHS]]``.

The demo trains on eight devices made of this processor, watched by a `Monitor`. What it
was told is shown again as it stood at two thirds of the run: in a terminal, in a
notebook, and on the page, which headless Chromium draws.
"""

import argparse
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

import fuelflow as ff
from fuelflow.examples import digits, ranks
from fuelflow.examples.demo import Options
from fuelflow.watch.record.making import make_record
from fuelflow.watch.record.story import Story
from fuelflow.watch.screens.curves import Curves
from fuelflow.watch.screens.epoch_rows import EpochRows
from fuelflow.watch.screens.frame import Frame
from fuelflow.watch.screens.glyphs import UNICODE
from fuelflow.watch.screens.newest import NewestMetrics
from fuelflow.watch.screens.panel import panel_html
from fuelflow.watch.screens.styled import Lines

FOLDER = Path(__file__).parent / "pictures"
NUM_RANKS, EPOCHS = 8, 24
COLUMNS, ROWS, ROWS_ABOVE = 120, 38, 4
PAGE_SIZE = {"width": 1200, "height": 900}
PANEL_SIZE = {"width": 940, "height": 400}


def main(folder: Path, epochs: int) -> None:
    """Trains, and draws what was to be seen."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        monitor = watched(Path(name) / "digits", epochs)
        page = Path(name) / "page.html"
        monitor.save_html(page)
        records = monitor.records
        moment = max(
            record["time"]
            for record in records
            if record.kind == "step"
            and record["epoch"] <= 2 * epochs // 3
            and record["epoch_step"] < records[0]["steps_per_epoch"]
        )
        story = told(records, moment)
        (folder / "console.svg").write_text(console_svg(story, moment))
        panel = panel_html(story, Curves().of(story), NewestMetrics().of(story), moment)
        with browser() as chromium:
            for scheme in ("light", "dark"):
                shown = chromium.new_page(viewport=PAGE_SIZE, color_scheme=scheme)
                shown.goto(page.as_uri())
                shown.wait_for_selector("body[data-ready=true]")
                shown.screenshot(path=folder / f"page-{scheme}.png")
            shown = chromium.new_page(viewport=PANEL_SIZE)
            shown.set_content(f'<body style="font-family:sans-serif">{panel}')
            shown.screenshot(path=folder / "panel.png", full_page=True)
    for path in sorted(folder.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def watched(directory: Path, epochs: int) -> ff.Monitor:
    """The monitor of a run of the demo."""
    devices = ranks.find_devices(NUM_RANKS)
    options = Options(
        kind="plain", is_graph=False, epochs=epochs, batch_size=32, seed=0
    )
    monitor = ff.Monitor(directory=directory, display="none")
    with monitor:
        ranks.make_trainer(options, *digits.load(), devices, monitor).fit()
    return monitor


def told(records: Sequence[dict[str, Any]], moment: float) -> Story:
    """The run as it stood at a moment inside an epoch."""
    story = Story()
    for record in records:
        if record["time"] <= moment and record["kind"] != "phase":
            story.add(record)
    # Of the phases only the last is kept. Inside an epoch that was this one.
    story.add(make_record("phase", phase="training"))
    return story


def console_svg(story: Story, moment: float) -> str:
    """The live display of a terminal, and the last epochs that scrolled by above it."""
    console = Console(
        width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True
    )
    rows = EpochRows(UNICODE)
    lines = [line for each in story.epochs for line in rows.lines(each, COLUMNS)]
    lines = [*lines[:2], *lines[2:][-ROWS_ABOVE:], []]
    lines += Frame(UNICODE).draw(story, moment, COLUMNS, ROWS)
    console.print(Lines([*lines, []], UNICODE))
    svg = console.export_svg(
        title="python train.py", theme=DIMMED_MONOKAI, unique_id="console"
    )
    # Fonts from elsewhere, which a picture in a page is not given.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium: the system's if there is one, or else playwright's."""
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser")
    # Its sandbox refuses root, as whom a container runs.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=found, args=arguments)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes the pictures of the README.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("epochs", type=int, nargs="?", default=EPOCHS)
    given = parser.parse_args()
    main(given.folder, given.epochs)
