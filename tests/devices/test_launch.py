"""The launcher: what each process gets, what is passed on, and that all of them end."""

import os
import signal
import sys
import time

import pytest
from launching import (
    COMMAND,
    DEADLINE_SECS,
    is_group_gone,
    launched,
    of,
    started,
    wait_until,
    write,
)

from fuelflow.cli import main
from fuelflow.devices import launch

# Which process it is, said by a program that needs no JAX.
NUMBERED = "import os, signal, sys\nnumber = int(os.environ['JAX_PROCESS_ID'])\n"
WAITING = NUMBERED + "print('group', os.getpgid(0))\nsignal.pause()\n"


@pytest.fixture
def script(tmp_path):
    """Write a script and give its path."""
    return lambda text: write(tmp_path / "program.py", text)


# What the processes get.


def test_arguments_after_the_script_go_to_the_script(script, capsys):
    path = script("import sys; print(sys.argv)")
    given = ["-n", "7", "--help", "-m", "x", "--", "--port", ""]

    status, out, _ = launched(capsys, "-n", "1", path, *given)

    assert (status, of(0, out)) == (0, [repr([path, *given])])


def test_a_module_is_run_as_python_would(tmp_path, capsys, monkeypatch):
    package = tmp_path / "package_of_this_test"
    package.mkdir()
    write(package / "__init__.py", "")
    write(package / "part.py", "NAME = 'part'")
    write(
        package / "__main__.py",
        "import sys; from . import part; print(__name__, part.NAME, sys.argv[1:])",
    )
    monkeypatch.chdir(tmp_path)

    status, out, _ = launched(capsys, "-n", "2", "-m", package.name, "-m", "-n", "1")

    assert status == 0
    for number in (0, 1):
        assert of(number, out) == ["__main__ part ['-m', '-n', '1']"]


def test_a_script_sees_what_it_sees_without_a_launcher(tmp_path, script, capsys):
    write(tmp_path / "sibling.py", "NAME = 'sibling'")
    path = script(
        "import sys, pickle, sibling\n"
        "class Own: pass\n"
        "assert isinstance(pickle.loads(pickle.dumps(Own())), Own)\n"
        "assert sys.modules['__main__'].Own is Own\n"
        "print(__name__, __file__, sibling.NAME, sys.path[0], 'jax' in sys.modules)\n"
        "print(repr(sys.stdin.read()))"
    )

    status, out, _ = launched(capsys, "-n", "1", path)

    assert (status, of(0, out)) == (
        0,
        [f"__main__ {path} sibling {tmp_path} False", "''"],
    )


def test_each_process_is_told_its_place_and_devices(script, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_force_host_platform_device_count=8")
    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    path = script(
        f"import os\nprint(*[os.environ[name] for name in {names}])\n"
        "print(os.environ['JAX_COORDINATOR_ADDRESS'])\n"
        "print(os.environ['JAX_COORDINATOR_BIND_ADDRESS'])\n"
    )

    status, out, _ = launched(capsys, "-n", "2", "--devices-per-process", "3", path)

    assert status == 0
    (first, address, bound), (second, *addresses) = of(0, out), of(1, out)
    assert (first, second) == ("2 0 3 --a=1", "2 1 3 --a=1")
    assert address.startswith("127.0.0.1:")
    assert {address, bound, *addresses} == {address}


def test_the_port_can_be_chosen(script, capsys):
    path = script("import os; print(os.environ['JAX_COORDINATOR_ADDRESS'])")

    _, out, _ = launched(capsys, "-n", "1", "--port", "4321", path)

    assert of(0, out) == ["127.0.0.1:4321"]


def test_no_proxy_is_asked_for_the_way_to_this_host(monkeypatch, script):
    monkeypatch.setenv("https_proxy", "http://10.0.0.1:1")
    monkeypatch.setenv("no_proxy", "a.example")
    plan = launch.Launch(command=[script("")], num_processes=1)

    (environment,) = plan.environments(os.environ)

    assert environment["no_proxy"] == "a.example,127.0.0.1,localhost"
    assert environment["JAX_CHECK_PROXY_ENVS"] == "0"


# What they write.


def test_lines_are_marked_and_streams_kept_apart(script, capsys):
    path = script(
        NUMBERED + "print('out', number)\nprint('é' * 40000)\n"
        "print('err', number, file=sys.stderr)\n"
        "sys.stdout.write('\\r 10%\\r 20%\\n')\n"
        "sys.stdout.write('no end')\n"
    )

    status, out, err = launched(capsys, "-n", "2", path)

    assert status == 0
    assert len(out) == 10
    for number in (0, 1):
        written = [f"out {number}", "é" * 40000, " 10%", " 20%", "no end"]
        assert of(number, out) == written
    assert sorted(err) == ["0 | err 0", "1 | err 1"]


def test_lines_come_while_the_processes_run(script):
    path = script(WAITING)

    with started(*COMMAND, "-n", "1", path) as process:
        line = process.stdout.readline()

    assert line.startswith("0 | group ")


def test_it_ends_when_nobody_reads_its_output(script):
    path = script("while True: print('again')")

    with started(*COMMAND, "-n", "2", path) as process:
        process.stdout.readline()
        process.stdout.close()
        status = process.wait(DEADLINE_SECS)

    assert status == 128 + signal.SIGPIPE


# How they end.


@pytest.mark.parametrize(
    ("ending", "status", "verdict"),
    [
        ("sys.exit(3)", 3, "process 1 failed with exit code 3"),
        ("sys.exit('words')", 1, "process 1 failed with exit code 1"),
        ("raise ValueError('words')", 1, "process 1 failed with exit code 1"),
        ("os.kill(os.getpid(), 9)", 137, "process 1 was killed by signal 9 (SIGKILL)"),
        ("os.abort()", 134, "process 1 was killed by signal 6 (SIGABRT)"),
    ],
)
def test_the_first_failure_ends_the_others_and_is_told(
    script, capsys, ending, status, verdict
):
    path = script(NUMBERED + f"if number == 1: {ending}\nsignal.pause()\n")

    got, _, err = launched(capsys, "-n", "3", path)

    assert got == status
    assert err[-1] == f"fuelflow launch: {verdict}; the others were ended"
    assert ("words" in "".join(of(1, err))) == ("words" in ending)


def test_a_traceback_begins_in_the_program(script, capsys):
    path = script("def fail():\n    raise ValueError('x')\nfail()\n")

    _, _, err = launched(capsys, "-n", "1", path)

    shown = [line for line in of(0, err) if line.startswith("  File")]
    assert shown == [
        f'  File "{path}", line 3, in <module>',
        f'  File "{path}", line 2, in fail',
    ]


def test_what_ignores_sigterm_is_killed(script, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "FAILED_GRACE_SECS", 0.5)
    os.mkfifo(tmp_path / "ready")
    path = script(
        NUMBERED + "signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True))\n"
        f"with open({str(tmp_path / 'ready')!r}, 'rw'[number == 0]): pass\n"
        "if number == 1: sys.exit(3)\n"
        "while True: signal.pause()\n"
    )

    status, out, err = launched(capsys, "-n", "2", path)

    assert (status, out) == (3, ["0 | no"])
    assert err == [
        "fuelflow launch: process 1 failed with exit code 3; the other was ended"
    ]


def test_what_a_process_leaves_behind_ends_with_it(script, capsys):
    path = script(
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(os.getpgid(0))\n"
    )

    status, out, _ = launched(capsys, "-n", "1", path)

    assert status == 0
    (group,) = of(0, out)
    wait_until(lambda: is_group_gone(int(group)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_everything(script, number):
    path = script(WAITING)

    with started(*COMMAND, "-n", "2", path) as process:
        groups = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.send_signal(number)
        last = process.stdout.readlines()[-1]
        status = process.wait(DEADLINE_SECS)

    assert status == 128 + number
    assert last == f"fuelflow launch: ended by {number.name}\n"
    assert [is_group_gone(group) for group in groups] == [True, True]


ENDING = """
import os, signal, sys
number = int(os.environ["JAX_PROCESS_ID"])

def end(*_):
    print("saved", flush=True)
    sys.exit(int(sys.argv[1 + number]))

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True: signal.pause()
"""


@pytest.mark.parametrize(
    ("codes", "status"), [(("0", "0"), 0), (("0", "7"), 128 + signal.SIGTERM)]
)
def test_a_signal_that_all_processes_took_well_is_a_good_end(script, codes, status):
    path = script(ENDING)

    with started(*COMMAND, "-n", "2", path, *codes) as process:
        assert (
            sorted(process.stdout.readline()[4:] for _ in range(2)) == ["ready\n"] * 2
        )
        process.send_signal(signal.SIGTERM)
        lines = process.stdout.readlines()
        assert process.wait(DEADLINE_SECS) == status

    assert [line for line in lines if "saved" in line] != []
    assert sum("saved" in line for line in lines) == 2
    assert lines[-1].startswith("fuelflow launch: ended by SIGTERM")


def test_a_second_interrupt_kills(script):
    path = script(
        "import os, signal\n"
        "signal.signal(signal.SIGINT, lambda *_: print('no', flush=True))\n"
        "print('group', os.getpgid(0))\n"
        "while True: signal.pause()\n"
    )

    with started(*COMMAND, "-n", "1", path) as process:
        group = int(process.stdout.readline().split()[-1])
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "0 | no\n"
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        status = process.wait(DEADLINE_SECS)
        secs = time.monotonic() - start

    assert status == 130
    assert secs < launch.ASKED_GRACE_SECS / 2
    assert is_group_gone(group)


def test_nothing_outlives_a_launcher_that_is_killed(script):
    path = script(
        "import os, signal, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print('group', os.getpgid(0))\nsignal.pause()\n"
    )

    with started(*COMMAND, "-n", "2", path) as process:
        groups = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.kill()
        process.wait(DEADLINE_SECS)

        wait_until(lambda: all(is_group_gone(group) for group in groups))

    assert [is_group_gone(group) for group in groups] == [True, True]


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "x.py"], "-n/--num-processes: must be an integer from 1 to"),
        (["-n", "2"], "needs a script, or after -m a module"),
        (["-n", "2", "-m"], "needs a script, or after -m a module"),
        (["-n", "2", "absent.py", "x"], "there is no script absent.py"),
        (["-n", "2", "-m", "absent_one", "x"], "there is no module absent_one"),
        (["-n", "2", "-m", "json.absent"], "there is no module json.absent"),
        (["-n", "2", "-m", "email"], "the package email has no module __main__"),
        (["x.py", "-n", "2"], "arguments are required: -n/--num-processes"),
        (["-n", "2", "--devices-per-process", "0", "x.py"], "must be an integer from"),
        (["-n", "2", "--port", "65536", "x.py"], "`port` must be at most 65535"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.py", "")

    with pytest.raises(SystemExit, match=r"^2$"):
        main(["launch", *arguments])

    said = capsys.readouterr()
    assert said.err.startswith("fuelflow launch: ")
    assert message in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize("name", ["json.tool", "this", "http.server"])
def test_a_module_of_the_library_is_found_without_being_imported(name, monkeypatch):
    monkeypatch.delitem(sys.modules, name, raising=False)

    launch.Launch(command=[name], is_module=True, num_processes=1)

    assert name not in sys.modules


def test_the_help_explains_the_options(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["launch", "--help"])

    text = capsys.readouterr().out
    for option in ("-n N", "--devices-per-process N", "--port N", "-m MODULE"):
        assert option in text
