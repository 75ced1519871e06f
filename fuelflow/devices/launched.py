"""What each process of `fuelflow launch` starts with, run by its path.

It then becomes the user's program. So it imports nothing but the standard library: the
program may still set what JAX reads from the environment when it is imported.

    python launched.py LAUNCHER (script | module) NAME [ARGUMENT ...]

LAUNCHER is the number of a pipe that nobody writes to and only the launcher holds open.
"""

import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import NoReturn


def main() -> None:
    """Runs the user's program as Python itself would, and ends with it or its launcher.

    A program that fails ends at once, without what it registered with `atexit`: there
    JAX would wait up to five minutes for the others, who may be waiting for this one.
    """
    launcher, kind, name, *arguments = sys.argv[1:]
    os.set_inheritable(int(launcher), False)
    threading.Thread(target=_end_with, args=(int(launcher),), daemon=True).start()
    sys.argv = [name, *arguments]
    try:
        _run(kind, name)
    except SystemExit as end:
        if status := _status(end.code):
            _leave(status)
        raise
    except BaseException as error:  # noqa: BLE001 - shown as Python would show it
        error.__traceback__ = _of_the_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        is_interrupt = isinstance(error, KeyboardInterrupt)
        _leave(128 + signal.SIGINT if is_interrupt else 1)


def _run(kind: str, name: str) -> None:
    if not sys.flags.safe_path:  # Python put the folder of this file there
        here = Path(name).resolve().parent if kind == "script" else Path.cwd()
        sys.path[0] = str(here)
    if kind == "module":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


def _end_with(launcher: int) -> None:
    """Kills this process and its whole group once the launcher is gone."""
    while os.read(launcher, 1):
        pass
    os.kill(0, signal.SIGKILL)


def _status(code: object) -> int:
    """The exit status of ``sys.exit(code)``; a text is shown."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _of_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that led into the program."""
    while traceback and traceback.tb_frame.f_code.co_filename in (
        __file__,
        "<frozen runpy>",
    ):
        traceback = traceback.tb_next
    return traceback


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
