"""Real processes on loopback: joined, computing as one, and ending together."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from launching import DEADLINE_SECS, ENVIRONMENT, JOINED, launched, said, started, write

from fuelflow.devices.place import Place
from fuelflow.devices.processes import initialize

IMPORTED = "import jax\nfrom fuelflow.devices.processes import initialize\n"
CAUGHT = (
    "from fuelflow import FuelflowError\n"
    "def caught(*given, **options):\n"
    "    try: initialize(*given, **options)\n"
    "    except (FuelflowError, ValueError) as error: print(repr(error), flush=True)\n"
)


@pytest.fixture
def script(tmp_path):
    """Write a script and give its path."""
    return lambda text: write(tmp_path / "program.py", text)


@pytest.fixture
def address():
    """An address of this host with a port that is free."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{server.getsockname()[1]}"


def run(path, **environment):
    done = subprocess.run(
        [sys.executable, path],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECS,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


# Joined.


def test_two_processes_of_two_devices_compute_one_sum(script, capsys):
    path = script(
        JOINED + "say(jax.process_count(), jax.device_count(), psum(10**rank))"
    )

    status, out, err = launched(capsys, "-n", "2", "--devices-per-process", "2", path)

    assert status == 0, err
    for rank in (0, 1):
        assert said(rank, out) == [f"2 4 {2 * 1 + 2 * 10:.1f}"]


def test_one_launched_process_is_a_run_of_one(script, capsys):
    path = script(JOINED + "say(jax.process_count(), psum(3))")

    status, out, err = launched(capsys, "-n", "1", "--devices-per-process", "2", path)

    assert (status, said(0, out)) == (0, ["1 6.0"]), err


def test_arguments_come_before_the_environment(script, address):
    path = script(IMPORTED + "initialize(process_id=0)\nprint(jax.process_index())")

    status, out, err = run(
        path,
        JAX_COORDINATOR_ADDRESS=address,
        JAX_NUM_PROCESSES="1",
        JAX_PROCESS_ID="7",
    )

    assert (status, out) == (0, ["0"]), err


# Ending.


def test_one_that_is_killed_ends_the_others_in_their_computation(script, capsys):
    path = script(
        "import os, signal\n" + JOINED + "psum(1)\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "psum(2)\n"
    )
    start = time.monotonic()

    status, _, err = launched(capsys, "-n", "2", path)

    assert status == 128 + signal.SIGKILL
    assert err[-1] == (
        "fuelflow launch: process 1 was killed by signal 9 (SIGKILL); "
        "the other was ended"
    )
    # JAX itself would miss it after 100 s.
    assert time.monotonic() - start < DEADLINE_SECS / 2


def test_an_exit_code_is_kept_though_the_others_wait_for_its_process(script, capsys):
    path = script(JOINED + "if rank == 1: sys.exit(3)\npsum(2)\n")
    start = time.monotonic()

    status, _, err = launched(capsys, "-n", "2", path)

    assert status == 3
    assert "process 1 failed with exit code 3; the other was ended" in err[-1]
    # JAX's wait at exit would take 300 s.
    assert time.monotonic() - start < DEADLINE_SECS / 2


def test_an_error_ends_a_process_though_the_others_go_on(script, address):
    path = script(
        "import atexit\n" + JOINED + "print('joined', flush=True)\n"
        "if rank == 0: input()\n"
        "atexit.register(print, 'at exit')\n"
        "raise ValueError('words')\n"
    )
    places = [
        Place(coordinator_address=address, num_processes=2, process_id=rank)
        for rank in (0, 1)
    ]
    first, second = ({**ENVIRONMENT, **place.to_environment()} for place in places)
    command = (sys.executable, path)

    with (
        started(*command, env=first, stdin=subprocess.PIPE),
        started(*command, env=second) as process,
    ):
        written, _ = process.communicate(timeout=DEADLINE_SECS)

    assert process.returncode == 1
    assert written.splitlines()[-2:] == ["ValueError: words", "at exit"]


# Alone.


def test_without_arguments_cluster_and_launcher_nothing_is_done(script):
    path = script(
        IMPORTED + "import sys\nhook = sys.excepthook\n"
        "initialize()\n"
        "print(jax.distributed.is_initialized(), sys.excepthook is hook)\n"
        "jax.devices()\n"
        "initialize()\n"  # as a notebook's cell that is run again
    )

    status, out, err = run(path)

    assert (status, out, err) == (0, ["False True"], "")


# Refused.


def test_devices_that_were_used_before_are_refused(script, address):
    path = script(
        IMPORTED + CAUGHT + "jax.devices()\ncaught()\n"
        f"caught({address!r}, 1, 0)\n"
        "print(jax.distributed.is_initialized())\n"
    )

    status, out, err = run(path)

    assert status == 0, err
    for line in out[:2]:
        assert line.startswith("InitializeError('`initialize` must be called before")
    assert out[2:] == ["False"]


def test_another_call_is_refused_unless_it_says_the_same(script, address):
    path = script(
        IMPORTED + CAUGHT + f"initialize({address!r}, 1, 0)\n"
        f"initialize({address!r}, 1, 0)\n"
        "initialize()\n"
        f"caught({address!r}, 2, 1)\n"
    )

    status, out, err = run(path)

    assert status == 0, err
    (line,) = out
    assert re.search(
        "InitializeError.*initialized before, with .*num_processes=1, process_id=0, and"
        " cannot be again with .*num_processes=2, process_id=1: call",
        line,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_others_that_do_not_come_are_named_in_time(script, address, rank):
    path = script(
        IMPORTED + f"initialize({address!r}, 2, {rank}, timeout_secs=1)\n",
    )
    missing = (
        "not all 2 processes of the run came within 1 s: see whether each was started",
        f"no coordinator answered at {address} within 1 s: is process 0 running there",
    )
    start = time.monotonic()

    status, _, err = run(path)

    assert status == 1
    assert f"InitializeError: {missing[rank]}" in err
    # Sooner than JAX's own end, an abort.
    assert "Check failure" not in err
    assert time.monotonic() - start < DEADLINE_SECS / 2


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_port_that_is_taken_is_refused(script, host):
    with socket.socket() as server:
        server.bind((host, 0))
        server.listen()
        port = server.getsockname()[1]
        path = script(IMPORTED + CAUGHT + f"caught('127.0.0.1:{port}', 1, 0)")
        status, (line,), err = run(path)

    assert status == 0, err
    assert f"InitializeError(\"the coordinator's port {port} cannot be had" in line


def test_a_place_known_in_part_is_refused(script, address):
    path = script(
        IMPORTED + CAUGHT + f"caught({address!r})\n"
        f"caught(num_processes=2, process_id=1)\n"
        "initialize()\n"  # nothing has begun
    )

    status, out, err = run(path)

    assert status == 0, err
    for line, missing in zip(
        out,
        ("`num_processes` and `process_id`", "`coordinator_address`"),
        strict=True,
    ):
        assert line.startswith('ValueError("of this process')
        assert f"no cluster that tells {missing}: give all three, or none" in line


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (("10.0.0.1", 2, 0), ValueError, "`coordinator_address` must be .*'10.0.0.1'"),
        ((":1234", 2, 0), ValueError, "`coordinator_address` must be .*':1234'"),
        (("h:0", 2, 0), ValueError, "`coordinator_address` must be .*'h:0'"),
        (("h:1", 0, 0), ValueError, "`num_processes` must be at least 1, got 0"),
        (("h:1", 2, -1), ValueError, "`process_id` must be at least 0, got -1"),
        (("h:1", 2, 2), ValueError, "`process_id` must be less than .*, 2, .* got 2"),
        (("h:1", 2.0, 0), TypeError, "`num_processes` must be an integer, got 2.0"),
        (("h:1", 2, True), TypeError, "`process_id` must be an integer, got True"),
    ],
)
def test_wrong_places_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        initialize(*given)


@pytest.mark.parametrize("name", ["timeout_secs", "heartbeat_timeout_secs"])
def test_times_must_be_positive(name):
    times = {"timeout_secs": 300, "heartbeat_timeout_secs": 100, name: 0}

    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        initialize(
            timeout_secs=times["timeout_secs"],
            heartbeat_timeout_secs=times["heartbeat_timeout_secs"],
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("two", "variable JAX_NUM_PROCESSES must be an integer, got 'two'"),
        ("0", "`num_processes` must be at least 1, got 0"),
    ],
)
def test_wrong_variables_are_refused(text, message, monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", text)

    with pytest.raises(ValueError, match=message):
        initialize()


def test_a_place_is_told_and_read():
    place = Place(coordinator_address="[::1]:80", num_processes=3, process_id=2)

    assert Place.from_environment(place.to_environment()) == place
    assert Place.from_environment({}) == Place()
    assert os.environ.get("JAX_PROCESS_ID") is None
