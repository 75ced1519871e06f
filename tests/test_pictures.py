"""The README's pictures: a script makes them, and they are there."""

import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "notebooks" / "pictures"
A_PICTURE = re.compile(r'(?:!\[[^\]]+\]\(|src(?:set)?=")([^)"]+)')
MOST_BYTES = 250_000


def size_of(path):
    """Width and height of a PNG, as its header has them."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", head[16:24])


def test_the_readme_shows_the_pictures_that_are_kept():
    shown = A_PICTURE.findall((ROOT / "README.md").read_text())

    assert {ROOT / name for name in shown} == set(KEPT.iterdir())


def test_kept_pictures_are_small_and_ask_nobody_for_anything():
    assert all(path.stat().st_size < MOST_BYTES for path in KEPT.iterdir())
    assert "url(http" not in (KEPT / "console.svg").read_text().replace('"', "")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_the_script_makes_every_picture_that_is_kept(tmp_path):
    script = ROOT / "notebooks" / "pictures.py"
    subprocess.run(
        [sys.executable, str(script), str(tmp_path / "pictures"), "8"], check=True
    )

    made = {path.name: path for path in (tmp_path / "pictures").iterdir()}
    assert set(made) == {path.name for path in KEPT.iterdir()}
    svg = made["console.svg"].read_text()
    for word in ("epochs", "of&#160;8", "rank&#160;7", "accuracy", "training"):
        assert word in svg, word
    for name in ("page-light.png", "page-dark.png", "panel.png"):
        width, height = size_of(made[name])
        assert width >= 900
        assert height >= 400
        # A blank one, or one of an error, is far smaller.
        assert made[name].stat().st_size > 20_000
