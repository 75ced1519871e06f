"""The ``fuelflow`` command. What is slow to import is imported where it is needed."""

import argparse
import contextlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

_DEMO = """\
Train a small convolutional network on handwritten digits: 1,437 real images of
8 by 8 pixels to learn from, and 360 others, held out, to try it on after each epoch.
Some ten seconds on two cores. Needs scikit-learn: pip install 'fuelflow[examples]'.
"""
_COLUMNS = """\
columns:
  loss           mean over the steps of the epoch
  train          accuracy in those steps, before each update and with dropout
  held out       accuracy on digits it never learned from
  lr             learning rate, which rises for a tenth of the run and then falls
  grad norm      norm of the gradient, before it is clipped to 1
  steps/s        by the wall clock, without compiling
  misread        how many of the held-out digits are read wrong
"""
_LAUNCH = """\
Start N processes of a program that calls fuelflow.initialize(), on this host: what
several hosts would do, to try before there are several. Each line they write begins
with the number of its process. Where JAX sees GPUs they are parted among the processes;
otherwise each makes CPU devices (JAX_PLATFORMS=cpu asks for that).
"""
_ENDS = """\
The first process that fails ends the others, and its exit code is that of the command
(128 + the number of a signal). Ctrl-C is passed on to all; a second one kills them.
"""


_INSPECT = """\
What is in a directory of checkpoints: a line for each, and of the newest its steps,
metrics, versions, and arrays by name. Nothing is loaded, and no model is needed.
"""
_REPORT = """\
Write one page of a run, from the records in its directory, that any browser shows
without a network: curves, ranks, what held epochs back, parameters and events. Several
runs are drawn on the same axes. Needs plotly: pip install 'fuelflow[report]'.
"""


class _Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: What follows the command's name; by default that of this process.

    Returns:
        The exit status: 0, or 1 if a package is missing.

    Raises:
        SystemExit: With status 2 for wrong arguments, with 0 after ``--help``.
    """
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    return options.command(options)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fuelflow",
        description="Training loops for JAX and Flax: see them at work.",
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small network on handwritten digits, in some ten seconds",
        description=_DEMO,
        epilog=_COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    launch = commands.add_parser(
        "launch",
        help="start several processes of a script on this host, to develop against",
        usage="%(prog)s -n N [OPTION ...] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description=_LAUNCH,
        epilog=_ENDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect = commands.add_parser(
        "inspect",
        help="show what is in a directory of checkpoints, or compare two",
        description=_INSPECT,
    )
    report = commands.add_parser(
        "report",
        help="write a page of a run, or of several on the same axes",
        description=_REPORT,
    )
    _add_demo_options(demo)
    _add_inspect_options(inspect)
    _add_launch_options(launch)
    _add_report_options(report)
    return parser


def _add_demo_options(demo: argparse.ArgumentParser) -> None:
    kinds = demo.add_mutually_exclusive_group()
    for kind, text in (
        ("linen", "train a flax.linen module instead of a flax.nnx one"),
        ("plain", "train a dict of arrays, in JAX alone"),
    ):
        kinds.add_argument(
            f"--{kind}", action="store_const", dest="kind", const=kind, help=text
        )
    demo.add_argument(
        "--graph",
        action="store_true",
        help="write the loss line by line, in a lazy graph: the same numbers",
    )
    demo.add_argument(
        "--serve",
        type=_integer_from(0, 65535),
        nargs="?",
        const=0,
        metavar="PORT",
        help="show the run on a page in the browser, live (default: any free port)",
    )
    demo.add_argument(
        "--devices",
        type=_integer_from(1),
        metavar="N",
        help="spread each step over this many devices; those of a CPU are made up",
    )
    for name, least, default, text in (
        ("epochs", 1, 15, "passes over the digits"),
        ("batch-size", 1, 32, "digits in one step"),
        ("seed", 0, 0, "of first parameters, dropout and order"),
    ):
        demo.add_argument(
            f"--{name}",
            type=_integer_from(least),
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )
    demo.set_defaults(command=_demo, kind="nnx", refuse=demo.error)


def _add_launch_options(launch: argparse.ArgumentParser) -> None:
    for names, least, text in (
        (("-n", "--num-processes"), 1, "how many processes"),
        (("--devices-per-process",), 1, "GPUs of each, or without GPUs CPU devices"),
        (("--port",), 1, "where process 0 is met (default: any that is free)"),
    ):
        launch.add_argument(
            *names,
            type=_integer_from(least),
            required="-n" in names,
            metavar="N",
            help=text,
        )
    launch.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module, as python -m does; what follows goes to it",
    )
    launch.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="run a script; what follows goes to it",
    )
    launch.set_defaults(command=_launch, refuse=launch.error)


def _add_inspect_options(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument("path", metavar="DIR", help="checkpoints, or one of them")
    inspect.add_argument(
        "other", metavar="DIR", nargs="?", help="what to compare with: DIR as well"
    )
    inspect.add_argument(
        "--verify",
        action="store_true",
        help="read all files, and compare them with their checksums",
    )
    inspect.set_defaults(command=_inspect, refuse=inspect.error)


def _add_report_options(report: argparse.ArgumentParser) -> None:
    report.add_argument(
        "runs", metavar="RUN_DIR", nargs="+", help="the directory of a run"
    )
    report.add_argument(
        "-o",
        dest="output",
        metavar="FILE",
        help="the page to write (default: report.html, in the directory of one run)",
    )
    report.add_argument(
        "--open", action="store_true", help="show the page in a browser"
    )
    report.set_defaults(command=_report)


def _version() -> str:
    try:
        return f"fuelflow {importlib.metadata.version('fuelflow')}"
    except importlib.metadata.PackageNotFoundError:
        return "fuelflow, run from its source without being installed"


def _integer_from(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A converter of text to an integer, of 32 bits, that is not too small or large."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(
                f"must be an integer from {least} to {most}, got {text}"
            )
        return number

    return convert


def _demo(options: argparse.Namespace) -> int:
    from fuelflow.devices.place import Place

    is_one_of_several = bool(Place.from_environment().known)
    with _ended_by_interrupt():
        if options.serve is not None:
            if options.devices is None and not is_one_of_several:
                options.devices = 1
            return _demo_in_browser(options)
        if options.devices is not None or is_one_of_several:
            return _demo_on_ranks(options)
        return _demo_on_one_device(options)


def _demo_on_one_device(options: argparse.Namespace) -> int:
    from fuelflow.examples.screen import Screen

    with Screen() as screen:
        screen.wait("loading")
        from fuelflow.examples import demo

        loaded = _load_digits(options)
        if loaded is None:
            return 1
        train, held_out = loaded
        demo.run(_demo_options(options), train, held_out, screen)
    return 0


def _demo_on_ranks(options: argparse.Namespace) -> int:
    from fuelflow.examples import ranks

    if options.graph:
        options.refuse("argument --graph: not allowed on several devices")
    try:
        devices = ranks.find_devices(options.devices)
        loaded = _load_digits(options)
        if loaded is None:
            return 1
        train, held_out = loaded
        ranks.run(_demo_options(options), train, held_out, devices)
    except ranks.UnfitDevicesError as error:
        options.refuse(str(error))
    return 0


def _demo_in_browser(options: argparse.Namespace) -> int:
    from fuelflow.examples import ranks, watched

    if options.graph:
        options.refuse("argument --serve: not allowed with argument --graph")
    loaded = _load_digits(options)
    if loaded is None:
        return 1
    try:
        devices = ranks.find_devices(options.devices)
        train, held_out = loaded
        watched.run(_demo_options(options), train, held_out, devices, options.serve)
    except ranks.UnfitDevicesError as error:
        options.refuse(str(error))
    except (ModuleNotFoundError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _load_digits(options: argparse.Namespace) -> Any:
    """The digits to learn from and those held out; None if they cannot be had."""
    from fuelflow.examples import digits

    try:
        train, held_out = digits.load()
    except ModuleNotFoundError as error:
        if error.name != "sklearn":
            raise
        print(error, file=sys.stderr)
        return None
    num_digits = len(train["label"])
    if options.batch_size > num_digits:
        options.refuse(
            f"argument --batch-size: must be at most {num_digits}, the number of "
            f"digits to learn from, got {options.batch_size}"
        )
    return train, held_out


def _demo_options(options: argparse.Namespace) -> Any:
    from fuelflow.examples import demo

    return demo.Options(
        kind=options.kind,
        is_graph=options.graph,
        epochs=options.epochs,
        batch_size=options.batch_size,
        seed=options.seed,
    )


def _launch(options: argparse.Namespace) -> int:
    from fuelflow.devices import launch

    try:
        planned = launch.Launch(
            command=options.module or options.script,
            is_module=options.module is not None,
            num_processes=options.num_processes,
            devices_per_process=options.devices_per_process,
            port=options.port,
        )
        environments = planned.environments(os.environ)
    except ValueError as error:
        options.refuse(str(error))
        raise  # not reached: refusing ends the command
    return launch.run(planned, environments)


def _inspect(options: argparse.Namespace) -> int:
    from fuelflow._errors import DamagedCheckpointError
    from fuelflow.checkpoint.inspect import compare, describe

    if options.other is not None and options.verify:
        options.refuse("argument --verify: not allowed with two directories")
    try:
        if options.other is None:
            print(describe(options.path, verify=options.verify))
        else:
            print(compare(options.path, options.other))
    except (DamagedCheckpointError, FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _report(options: argparse.Namespace) -> int:
    from fuelflow._errors import DamagedCheckpointError
    from fuelflow.watch.pages.report import write_report

    try:
        path = write_report(options.runs, options.output)
    except (
        DamagedCheckpointError,
        ModuleNotFoundError,
        OSError,
        ValueError,
    ) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    if options.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return 0


@contextlib.contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process, and leaves the terminal as it was.

    A KeyboardInterrupt would not do: raised in a callback of jax it is lost, and if
    Python shuts down while jax compiles, it may crash.
    """
    previous = signal.signal(signal.SIGINT, _end_process)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _end_process(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    if sys.stdout.isatty():
        # What a live display leaves behind: its line, and no cursor.
        os.write(sys.stdout.fileno(), b"\r\x1b[2K\x1b[?25h")
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
