"""Views: where a person looks at a run while it goes on, and which one suits where."""

import sys
from typing import Any, Literal, Protocol, get_args

from fuelflow.step.checks import checked_choice
from fuelflow.watch.record.story import Story

Display = Literal["auto", "console", "notebook", "plain", "none"]


class View(Protocol):
    """Shows a run. One thread at a time calls it, a few times each second."""

    def show(self, story: Story) -> None:
        """Shows the run as it stands."""
        ...

    def close(self, story: Story) -> None:
        """Shows the run a last time; until another begins nothing more is shown."""
        ...


class NoView:
    """Shows nothing."""

    def show(self, story: Story) -> None:
        """Does nothing."""

    def close(self, story: Story) -> None:
        """Does nothing."""


def choose_view(display: Display = "auto") -> View:
    """The view that was asked for.

    A notebook's is placed at once, in the cell that runs now.

    Args:
        display: ``"console"``: live, in a terminal. ``"notebook"``: live, below the
            cell. ``"plain"``: a line for each epoch. ``"none"``: nothing. ``"auto"``:
            whichever of the first three suits where the output goes.

    Raises:
        ValueError: If it is none of these.
    """
    checked_choice("display", display, get_args(Display))
    if display == "auto":
        display = _suitable()
    if display == "console":
        from fuelflow.watch.screens.console import ConsoleView

        return ConsoleView()
    if display == "notebook":
        from fuelflow.watch.screens.notebook import NotebookView

        return NotebookView()
    if display == "plain":
        from fuelflow.watch.screens.plain import PlainView

        return PlainView()
    return NoView()


def _suitable() -> Display:
    if _is_kernel(_shell()):
        return "notebook"
    from rich.console import Console

    from fuelflow.watch.screens.handed_over import goes_to_terminal

    # Settings such as FORCE_COLOR have rich take a pipe for a terminal.
    is_live = goes_to_terminal("stdout") and Console().is_interactive
    return "console" if is_live else "plain"


def _shell() -> Any:
    """The IPython shell that this runs in; None without one."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _is_kernel(shell: Any) -> bool:
    """Whether a shell's output is shown by a notebook and not by a terminal."""
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)
