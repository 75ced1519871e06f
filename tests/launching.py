"""Programs started in several processes, and what becomes of them."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from fuelflow.cli import main

DEADLINE_SECS = 60  # of what takes a second or two, on a busy machine
COMMAND = (sys.executable, "-m", "fuelflow.cli", "launch")
# So that the test run's own settings do not count.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("XLA_FLAGS", "PYTHONUNBUFFERED")
}
# What a program starts with that is to compute with the others.
JOINED = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from fuelflow.devices.processes import initialize

initialize()
rank = jax.process_index()

def say(*words):
    # In one piece, on a line of its own: gloo's threads greet in several.
    sys.stdout.write(f"\\n> {' '.join(map(str, words))}\\n")

def psum(number):
    mesh = jax.make_mesh(
        (jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    local = np.full(jax.local_device_count(), number, np.float32)
    rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), local)
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()
    )
    return float(jax.jit(summed)(rows).addressable_data(0)[0])
"""


def write(path, text):
    path.write_text(text)
    return str(path)


def launched(capsys, *arguments):
    """The command in this process: its status, and the lines of both its streams."""
    status = main(["launch", *arguments])
    said = capsys.readouterr()
    return status, said.out.splitlines(), said.err.splitlines()


def run(num_processes, program, *arguments, **environment):
    """The command in a process of its own, ended."""
    return subprocess.run(
        [*COMMAND, "-n", str(num_processes), program, *arguments],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * DEADLINE_SECS,
    )


def of(number, lines):
    """What one process wrote."""
    mark = f"{number} | "
    return [line.removeprefix(mark) for line in lines if line.startswith(mark)]


def said(number, lines):
    """What one process said, without what gloo wrote."""
    return [line[2:] for line in of(number, lines) if line.startswith("> ")]


def report(*words):
    """Says what a process came to, in a way that `said` finds if it is of several."""
    line = " ".join(map(str, words))
    # In one piece, on a line of its own: gloo's threads greet in several.
    sys.stdout.write(f"\n> {line}\n" if jax.process_count() > 1 else f"{line}\n")


def wait_until(is_so):
    """Look again and again until something is so."""
    end = time.monotonic() + DEADLINE_SECS
    while not is_so():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def is_group_gone(number):
    """Whether no process of a group runs; its dead may still wait for a parent."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            state, _, group, *_ = path.read_text().rpartition(")")[2].split()
            if int(group) == number and state != "Z":
                return False
    return True


@contextlib.contextmanager
def started(*command: str, **options: Any) -> Iterator[Any]:
    """A process that is killed at the end if it still runs."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **{"env": ENVIRONMENT, **options},
    )
    try:
        with process:
            try:
                yield process
            finally:
                process.kill()
    finally:
        process.wait()
