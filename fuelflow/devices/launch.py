"""Several processes of one program on this host, to develop against.

Nothing here imports JAX: only the processes do.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from fuelflow.devices import launched, shares
from fuelflow.devices.children import Child, Ended
from fuelflow.devices.place import Place
from fuelflow.devices.relay import prefixes, write

# How long processes may take to end: those whose peer has failed, and those that a
# person or a scheduler asked to end, who may have a checkpoint to write.
FAILED_GRACE_SECS = 3.0
ASKED_GRACE_SECS = 10.0

_HOST = "127.0.0.1"
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to start.

    Attributes:
        command: A script or the name of a module, and its arguments.
        is_module: Whether it is a module, as after ``python -m``.
        num_processes: How many processes of it.
        devices_per_process: Devices of each; None for an equal share of the GPUs, or
            without any as many CPU devices as each makes by itself.
        port: The coordinator's port; None for any that is free.

    Raises:
        ValueError: If there is no such script or module, or a number is out of range.
    """

    command: Sequence[str]
    is_module: bool = False
    num_processes: int
    devices_per_process: int | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_processes", "devices_per_process"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"`{name}` must be at least 1, got {number}")
        if self.port is not None and not 0 < self.port < 2**16:
            raise ValueError(f"`port` must be at most {2**16 - 1}, got {self.port}")
        if not self.command:
            raise ValueError(
                "needs a script, or after -m a module: "
                "fuelflow launch -n 2 [OPTION ...] train.py [ARGUMENT ...]"
            )
        name = self.command[0]
        if self.is_module:
            _require_module(name)
        elif not _is_script(Path(name)):
            raise ValueError(
                f"there is no script {name}; the options of launch come before it"
            )

    def command_line(self, watched: int) -> list[str]:
        """The command of each process, which ends when the watched pipe does."""
        kind = "module" if self.is_module else "script"
        return [sys.executable, launched.__file__, str(watched), kind, *self.command]

    def environments(self, environment: Mapping[str, str]) -> list[dict[str, str]]:
        """The environment of each process, made from that of the launcher.

        Raises:
            ValueError: If the devices of this host are too few.
        """
        devices = shares.device_settings(
            environment,
            self.num_processes,
            self.devices_per_process,
            shares.count_gpus(environment),
        )
        address = f"{_HOST}:{self.port or _free_port()}"
        common = {
            **environment,
            # JAX's own choice would be all interfaces of this host.
            "JAX_COORDINATOR_BIND_ADDRESS": address,
            "PYTHONUNBUFFERED": "1",
            **_without_proxies(environment),
        }
        places = [
            Place(
                coordinator_address=address,
                num_processes=self.num_processes,
                process_id=process_id,
            )
            for process_id in range(self.num_processes)
        ]
        return [
            {**common, **place.to_environment(), **settings}
            for place, settings in zip(places, devices, strict=True)
        ]


class _Asked(NamedTuple):
    """Someone asked the launcher to end."""

    signal: signal.Signals


class _Unheard(NamedTuple):
    """Nobody reads the output any more."""


_Events = queue.SimpleQueue[Ended | _Asked | _Unheard]


def run(launch: Launch, environments: Sequence[Mapping[str, str]]) -> int:
    """Starts the processes, passes on what they write, and waits for all of them.

    The first that fails ends the others: they are sent SIGTERM, and after a while
    SIGKILL, with all that they have started. SIGINT (Ctrl-C), SIGTERM and SIGHUP are
    passed on, and a second one kills: processes that end well all the same, as after a
    save, make that a good end. If this process is killed, they are too.

    Args:
        launch: What to start.
        environments: What `Launch.environments` made for each process.

    Returns:
        The exit status: 0 if all ended well; or that of the process that failed first,
        for a signal to it 128 and its number; or if they did not end well when the
        launcher was asked to end, 128 and the number of that signal.
    """
    marks = prefixes(launch.num_processes, coloured=_is_coloured())
    events: _Events = queue.SimpleQueue()
    watched, held = os.pipe()  # nothing is written: its end is the launcher's
    children: list[Child] = []
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, held)
        stack.callback(os.close, watched)
        stack.enter_context(_asked_by_signals(events))
        stack.callback(_kill, children)
        for number, environment in enumerate(environments):
            child = Child(
                number,
                launch.command_line(watched),
                environment,
                inherited=watched,
                prefix=marks[number],
                events=events,
                on_broken=lambda: events.put(_Unheard()),
            )
            children.append(child)
        status, verdict = _wait(children, events)
    if verdict:
        write(sys.stderr.buffer, f"fuelflow launch: {verdict}\n".encode())
    return status


def _wait(children: Sequence[Child], events: _Events) -> tuple[int, str | None]:
    """The exit status once all have ended, and why they did not end by themselves."""
    num_running, status, verdict, deadline = len(children), 0, None, None
    is_asked, have_failed = False, False

    def end(number: signal.Signals, grace_secs: float) -> float:
        for child in children:
            child.send(number)
        return time.monotonic() + grace_secs

    while num_running:
        try:
            event = events.get(timeout=_secs_until(deadline))
        except queue.Empty:
            deadline = end(signal.SIGKILL, FAILED_GRACE_SECS)
            continue
        match event:
            case Ended():
                num_running -= 1
                have_failed = have_failed or event.status != 0
                if event.status and verdict is None:
                    status = event.status
                    verdict = event.described + _others(num_running)
                    deadline = end(signal.SIGTERM, FAILED_GRACE_SECS)
            case _Asked() if verdict is None:
                is_asked, status = True, 128 + event.signal
                verdict = f"ended by {event.signal.name}"
                deadline = end(event.signal, ASKED_GRACE_SECS)
            case _Asked():
                deadline = end(signal.SIGKILL, FAILED_GRACE_SECS)
            case _Unheard() if verdict is None:
                status = 128 + signal.SIGPIPE
                verdict = "ended, as nobody reads the output any more"
                deadline = end(signal.SIGTERM, FAILED_GRACE_SECS)
    if is_asked and not have_failed:
        return 0, f"{verdict}, which all took well"
    return status, verdict


def _others(num_running: int) -> str:
    if not num_running:
        return ""
    return "; the other was ended" if num_running == 1 else "; the others were ended"


def _secs_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _kill(children: Sequence[Child]) -> None:
    for child in children:
        child.send(signal.SIGKILL)
    for child in children:
        child.join()


@contextlib.contextmanager
def _asked_by_signals(events: _Events) -> Iterator[None]:
    """Signals that ask the launcher to end become events."""

    def ask(number: int, frame: FrameType | None) -> None:
        del frame
        events.put(_Asked(signal.Signals(number)))

    # One that is ignored, as under nohup, stays so.
    heard = [n for n in _ASKING if signal.getsignal(n) is not signal.SIG_IGN]
    previous = [(number, signal.signal(number, ask)) for number in heard]
    try:
        yield
    finally:
        for number, handler in previous:
            signal.signal(number, handler)


def _is_coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.socket() as server:
        server.bind((_HOST, 0))
        return server.getsockname()[1]


def _without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings with which no proxy is asked for the way to this host itself.

    The channel between the processes would ask one (gRPC reads these variables).
    """
    if not any(name.lower().endswith("_proxy") for name in environment):
        return {}
    excepted = {
        name: ",".join(filter(None, [environment.get(name), _HOST, "localhost"]))
        for name in ("no_proxy", "no_grpc_proxy")
        if name == "no_proxy" or name in environment
    }
    return {**excepted, "JAX_CHECK_PROXY_ENVS": "0"}  # its warning is out of place


def _is_script(path: Path) -> bool:
    return path.is_file() or (path / "__main__.py").is_file()


def _require_module(name: str) -> None:
    """Refuses a module that Python would not find, without importing its packages."""
    path = [str(Path.cwd()), *sys.path]
    spec, parts = None, name.split(".")
    for number, part in enumerate(parts):
        full_name = ".".join(parts[: number + 1])
        spec = importlib.machinery.PathFinder.find_spec(full_name, path)
        if spec is None and number == 0 and part.isidentifier():
            spec = importlib.util.find_spec(part)  # an editable install, for one
        if spec is None:
            raise ValueError(f"there is no module {full_name}")
        path = list(spec.submodule_search_locations or ())
    if path and not importlib.machinery.PathFinder.find_spec(f"{name}.__main__", path):
        raise ValueError(f"the package {name} has no module __main__ to run")
