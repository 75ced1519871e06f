"""One self-contained page that shows a run, or several on the same axes."""

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fuelflow.watch.pages.digest import Digest
from fuelflow.watch.record.files import replace

Records = Sequence[Mapping[str, Any]]

# In the order in which they are put on the page: each uses what comes before it.
_SCRIPTS = (
    "text.js",
    "theme.js",
    "model.js",
    "charts.js",
    "curves.js",
    "ranks.js",
    "timing.js",
    "histograms.js",
    "tables.js",
    "header.js",
    "live.js",
    "main.js",
)


def make_page(records: Records, *, title: str, live: str | None = None) -> str:
    """A page of one run, as HTML that needs no other file and no network.

    Args:
        records: What is known of the run, in order; see `Record`.
        title: What it is called, as plain text.
        live: Where the page gets further records from, relative to its own address; it
            then begins with those given here. None for a page that does not change.

    Raises:
        ModuleNotFoundError: If plotly, which draws the curves, is not installed.
    """
    return _filled({title: records}, title, live)


def make_comparison(runs: Mapping[str, Records], *, title: str) -> str:
    """A page of several runs by name, on the same axes.

    Args:
        runs: The records of each run, in order, by the run's name.
        title: What all of them are called, as plain text.

    Raises:
        ModuleNotFoundError: If plotly, which draws the curves, is not installed.
    """
    return _filled(runs, title, None)


def save_page(path: str | os.PathLike[str], records: Records, *, title: str) -> None:
    """Writes the page of one run; a page that was there is replaced all at once.

    Args:
        path: The file to write.
        records: See `make_page`.
        title: See `make_page`.

    Raises:
        ModuleNotFoundError: If plotly, which draws the curves, is not installed.
        OSError: If the file cannot be written.
    """
    write_page(Path(path), make_page(records, title=title))


def write_page(path: Path, page: str) -> None:
    """Writes a page beside its place, and then moves it there.

    Raises:
        OSError: If it cannot be written.
        ValueError: If there is a directory or a device.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory for the page {path}")
    replace(path, page)


def plain_json(value: Any) -> str:
    """JSON that neither ends the element it stands in nor any line of its own."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # Half of a pair, which UTF-8 cannot write.
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _filled(runs: Mapping[str, Records], title: str, live: str | None) -> str:
    plotly, script = _plotly(), _script()
    page = {
        "title": title,
        "live": live,
        "runs": [
            {"label": label, **Digest(records).to_dict()}
            for label, records in runs.items()
        ],
    }
    parts = {
        "policy": _policy(plotly, script, is_live=live is not None),
        "title": html.escape(title),
        "style": _asset("page.css"),
        "page": plain_json(page),
        "plotly": plotly,
        "script": script,
    }
    # In one pass, so that nothing inside of a part is taken for the name of another.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def _policy(*scripts: str, is_live: bool) -> str:
    """What the browser allows the page: its own scripts, and nothing from elsewhere."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'"
        for each in scripts
    )
    rules = {
        "default-src": "'none'",
        "script-src": hashes,
        "style-src": "'unsafe-inline'",  # plotly places its labels by style attributes
        "img-src": "data: blob:",
        "connect-src": "'self'" if is_live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


@cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a page draws its curves with plotly: pip install 'fuelflow[report]'",
            name=error.name,
        ) from error
    return get_plotlyjs()


@cache
def _script() -> str:
    body = "\n".join(_asset(name) for name in _SCRIPTS)
    return f'(() => {{\n"use strict";\n{body}\n}})();\n'


@cache
def _asset(name: str) -> str:
    folder = resources.files("fuelflow.watch.pages") / "assets"
    return (folder / name).read_text(encoding="utf-8")
