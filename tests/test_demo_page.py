"""`fuelflow demo --serve`: the page of the demo, while it trains and after."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
import terminals

COMMAND = (sys.executable, "-m", "fuelflow")
ARGUMENTS = ("demo", "--plain", "--serve", "--epochs", "2")
PROGRAM = "import sys; from fuelflow.cli import main; sys.exit(main(sys.argv[1:]))"
URL = re.compile(r"http://127\.0\.0\.1:\d+/")
STAYS = "the page stays until Ctrl-C"
REPORT = r"pip install 'fuelflow\[report\]'\n"


@contextlib.contextmanager
def answer(url, path):
    """What the page's server says to a request."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request("GET", path)
    with connection.getresponse() as got:
        yield got
    connection.close()


def told(events):
    """What each event says, as they come."""
    for line in events:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


def read_until(text, lines):
    """The lines up to the one that holds a text."""
    read = []
    for line in lines:
        read.append(line)
        if re.search(text, line):
            return "".join(read)
    raise AssertionError(f"no {text} in {read}")


@pytest.mark.slow
def test_the_demo_is_followed_on_its_page_until_an_interrupt_ends_it(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        [*COMMAND, *ARGUMENTS],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        url = URL.findall(read_until(URL.pattern, demo.stdout))[0]
        with answer(url, "/") as got:
            page = got.status, got.read().decode()
        with answer(url, "/events") as events:
            lines = read_until(STAYS, demo.stdout)
            demo.send_signal(signal.SIGINT)
            news = list(told(events))
        out, err = demo.communicate()

    runs = [each["run"] for each in news if each["run"]]
    epochs = [epoch for each in news for epoch in each["epochs"].get("epoch", ())]
    assert page[0] == 200
    assert "<title>fuelflow</title>" in page[1]
    assert {(run["name"], run["epochs"]) for run in runs} == {("fuelflow", 2)}
    assert list(dict.fromkeys(epochs)) == [0, 1]
    assert news[-1]["end"]["reason"] == "done"
    assert re.findall(r"^epoch (\d):", lines, re.M) == ["0", "1"]
    assert (demo.returncode, out, err) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConnectionRefusedError), answer(url, "/"):
        pass


@pytest.mark.slow
def test_an_interrupt_of_a_demo_in_a_terminal_leaves_what_it_showed():
    terminal = terminals.Terminal(PROGRAM, *ARGUMENTS, "--epochs", "100000")
    terminal.read_until("evaluation")
    terminal.read_to_rest()
    terminal.process.send_signal(signal.SIGINT)

    status = terminal.read_to_the_end()

    screen = terminal.screen
    assert status == 130
    assert screen.is_cursor_shown
    assert screen.rows[-1] == "interrupted"
    assert URL.search("\n".join(screen.rows))
    assert "Traceback" not in "\n".join(screen.rows)


@pytest.mark.parametrize("package", ["plotly", "uvicorn"])
def test_a_missing_package_of_the_page_is_one_line(package):
    program = f"import sys; sys.modules[{package!r}] = None\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", program, *ARGUMENTS],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(f"a (live )?page .*: {REPORT}", done.stderr)
