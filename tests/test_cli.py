"""The command: what it says, what it refuses, and how it ends."""

import importlib.metadata
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from fuelflow.cli import main

COMMAND = (sys.executable, "-m", "fuelflow.cli")
EPOCH = re.compile(
    r"^ +(?P<number>\d+) +(?P<loss>[\d.]+) +(?P<train>[\d.]+)% +(?P<held_out>[\d.]+)%"
    r" +(?P<lr>[\d.e+-]+) +(?P<grad_norm>[\d.]+) +(?P<rate>[\d,]+) +(?P<misread>\d+)$",
    re.MULTILINE,
)
VERDICT = re.compile(
    r"(?P<accuracy>[\d.]+)% of the held-out digits read right. "
    r"Took (?P<secs>[\d.]+) s, (?P<compile_secs>[\d.]+) s of it compiling."
)
MISSING = "fuelflow demo needs scikit-learn: pip install 'fuelflow[examples]'\n"


def run(*command, **environment):
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def run_without(modules, *arguments):
    """The command in a Python that lacks some modules, and what it had imported."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({modules}))\n"
        f"from fuelflow.cli import main; sys.exit(main({arguments}))"
    )
    return run(sys.executable, "-c", program)


def epochs_in(text):
    return [
        {name: float(value.replace(",", "")) for name, value in row.groupdict().items()}
        for row in EPOCH.finditer(text)
    ]


class Terminal:
    """The command in a terminal of its own, 80 columns wide."""

    def __init__(self, *arguments):
        self.output = b""
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "COLUMNS": "80", "COLORTERM": "truecolor"},
        )
        os.close(theirs)

    def read_until(self, text):
        while text not in self.output and self._read():
            pass
        assert text in self.output

    def read_to_the_end(self):
        while self._read():
            pass
        os.close(self._ours)
        return self.process.wait()

    def _read(self):
        try:
            read = os.read(self._ours, 65536)
        except OSError:  # Linux's word for the other side being closed
            return False
        self.output += read
        return bool(read)


def test_alone_it_shows_its_help(capsys):
    status = main([])

    assert status == 0
    assert re.search(r"^ +demo +train a small network", capsys.readouterr().out, re.M)


def test_it_tells_the_installed_version(capsys, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", {"fuelflow": "1.2"}.__getitem__)

    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])

    assert capsys.readouterr().out == "fuelflow 1.2\n"


def test_the_demo_explains_its_options_and_columns(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["demo", "--help"])

    text = capsys.readouterr().out
    for option in ("--linen", "--plain", "--epochs N", "--batch-size N", "--seed N"):
        assert re.search(rf"^  {option} +\w+", text, re.M)
    for column in (
        "loss",
        "train",
        "held out",
        "lr",
        "grad norm",
        "steps/s",
        "misread",
    ):
        assert re.search(rf"^  {column} +\w+", text, re.M)
    assert "pip install 'fuelflow[examples]'" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x"], "fuelflow: argument COMMAND: invalid choice: 'x'"),
        (["demo", "--epochs", "0"], "argument --epochs: must be an integer from 1 to"),
        (
            ["demo", "--epochs", "1.5"],
            "argument --epochs: must be an integer from 1 to",
        ),
        (
            ["demo", "--batch-size", "0"],
            "argument --batch-size: must be an integer from",
        ),
        (
            ["demo", "--batch-size", "1438"],
            "argument --batch-size: must be at most 1437",
        ),
        (["demo", "--seed", "-1"], "argument --seed: must be an integer from 0 to"),
        (
            ["demo", "--seed", str(2**31)],
            "argument --seed: must be an integer from 0 to",
        ),
        (["demo", "--linen", "--plain"], "--plain: not allowed with argument --linen"),
        (
            ["demo", "--serve", "--graph"],
            "argument --serve: not allowed with argument --graph",
        ),
        (
            ["demo", "--serve", "65536"],
            "argument --serve: must be an integer from 0 to",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)

    said = capsys.readouterr()
    assert message in said.err
    assert arguments[-1] in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_help_needs_none_of_what_the_demo_needs():
    done = run_without(["flax", "rich", "sklearn"], "demo", "--help")

    assert (done.returncode, done.stderr) == (0, "")
    assert "--linen" in done.stdout


def test_a_missing_extra_is_one_line_that_names_it():
    done = run_without(["sklearn"], "demo")

    assert (done.returncode, done.stdout, done.stderr) == (1, "", MISSING)


def test_a_package_that_scikit_learn_lacks_is_not_called_the_extra():
    done = run_without(["scipy"], "demo")

    assert done.returncode == 1
    assert MISSING not in done.stderr
    assert "scipy" in done.stderr


def test_piped_the_demo_is_plain_text_and_learns():
    done = run(*COMMAND, "demo", PYTHONIOENCODING="ascii", COLUMNS="80")

    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    epochs, verdict = epochs_in(done.stdout), VERDICT.search(done.stdout)
    assert [epoch["number"] for epoch in epochs] == list(range(1, 16))
    assert verdict
    assert float(verdict["accuracy"]) == epochs[-1]["held_out"] > 97
    assert float(verdict["compile_secs"]) < float(verdict["secs"]) < 60
    assert epochs[-1]["loss"] < 0.1 < 1 < epochs[0]["loss"]
    misread = re.findall(r"\d as \d", done.stdout)
    assert len(misread) == min(epochs[-1]["misread"], 7)  # as 80 columns hold
    # Compiling takes far longer than the 44 steps, which would seem slow with it.
    assert epochs[0]["rate"] > 2 * 44 / float(verdict["compile_secs"])


@pytest.mark.parametrize("kind", ["--linen", "--plain"])
def test_the_other_kinds_of_model_learn_too(kind, capsys):
    status = main(["demo", kind, "--epochs", "5", "--seed", "1"])

    text = capsys.readouterr().out
    assert status == 0
    assert kind.removeprefix("--") in text
    assert epochs_in(text)[-1]["held_out"] > 95


def test_a_batch_may_be_as_large_as_the_data(capsys):
    status = main(["demo", "--plain", "--epochs", "1", "--batch-size", "1437"])

    assert status == 0
    assert "1 epochs of 1, each of 1437 digits" in capsys.readouterr().out


def test_in_a_terminal_there_is_a_bar_and_it_goes_away():
    terminal = Terminal("demo", "--plain", "--epochs", "2")

    status = terminal.read_to_the_end()

    text = terminal.output.decode()
    assert status == 0
    assert "building the model" in text
    assert "compiling" in text
    assert "training" in text
    assert text.count("█") > 4
    assert "▀" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    # What is left of the last bar is erased before the verdict.
    assert "\x1b[2K" in text[text.rindex("━") : text.rindex("read right")]


@pytest.mark.parametrize("moment", [b"loading", b"compiling"])
def test_an_interrupt_ends_the_demo_and_leaves_the_terminal_clean(moment):
    terminal = Terminal("demo", "--plain", "--epochs", "1000")
    terminal.read_until(moment)
    terminal.process.send_signal(signal.SIGINT)

    status = terminal.read_to_the_end()

    assert status == 130
    assert terminal.output.endswith(b"\r\x1b[2K\x1b[?25hinterrupted\r\n")
    assert b"Traceback" not in terminal.output
