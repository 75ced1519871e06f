"""Programs in a terminal of their own, and what that terminal shows."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

PATIENCE_SECS = 120.0
_CODE = re.compile(r"\x1b\[(\?)?([\d;]*)([A-Za-z])")


class Screen:
    """The rows that a terminal shows, those that scrolled away among them.

    Knows the codes that are used here, and refuses others.
    """

    def __init__(self, width):
        self.width = width
        self.is_cursor_shown = True
        self._rows = [""]
        self._at = [0, 0]

    @property
    def rows(self):
        """The rows down to the last that is not blank."""
        return "\n".join(row.rstrip() for row in self._rows).rstrip().split("\n")

    def feed(self, text):
        while text:
            if code := _CODE.match(text):
                self._obey(*code.groups())
                text = text[code.end() :]
            else:
                self._put(text[0])
                text = text[1:]

    def _put(self, letter):
        row, column = self._at
        if letter == "\r":
            self._at = [row, 0]
        elif letter == "\n":
            self._move_to(row + 1, column)
        else:
            assert letter.isprintable(), f"{letter!r} in {self._rows[row]!r}"
            if column == self.width:
                self._move_to(row + 1, 0)
                row, column = self._at
            old = self._rows[row].ljust(column + 1)
            self._rows[row] = old[:column] + letter + old[column + 1 :]
            self._at = [row, column + 1]

    def _move_to(self, row, column):
        self._rows += [""] * (row + 1 - len(self._rows))
        self._at = [row, column]

    def _obey(self, private, numbers, letter):
        if private:
            assert numbers == "25", numbers
            self.is_cursor_shown = letter == "h"
        elif letter == "A":
            self._at[0] -= int(numbers or 1)
        elif letter == "K":
            assert numbers == "2"
            self._rows[self._at[0]] = ""
        else:
            assert letter == "m", letter


class Terminal:
    """A Python program in a terminal."""

    def __init__(self, program, *arguments, width=80, height=24, stderr=None, **env):
        self.output = b""
        self.width = width
        self._ours, theirs = pty.openpty()
        size = struct.pack("HHHH", height, width, 0, 0)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
        unwanted = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PYTHONUNBUFFERED")
        kept = {name: v for name, v in os.environ.items() if name not in unwanted}
        usual = {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs if stderr is None else stderr,
            env={**kept, **usual, **env},
            start_new_session=True,
        )
        os.close(theirs)

    def read_until(self, text):
        while text not in self.output.decode(errors="replace"):
            assert self._read(), self.output.decode(errors="replace")

    def read_to_rest(self):
        """Reads what is drawn now, up to where the cursor is shown again."""
        while not self.output.endswith(b"\x1b[?25h"):
            assert self._read(), self.output.decode(errors="replace")

    def read_to_the_end(self):
        """Reads what is left; returns how the program ended."""
        while self._read():
            pass
        os.close(self._ours)
        return self.process.wait()

    @property
    def screen(self):
        """What it shows by now."""
        screen = Screen(self.width)
        screen.feed(self.output.decode())
        return screen

    def _read(self):
        if not select.select([self._ours], [], [], PATIENCE_SECS)[0]:
            self.process.kill()
            raise TimeoutError(self.output.decode(errors="replace"))
        try:
            read = os.read(self._ours, 65536)
        except OSError:  # Linux's word for the other side being closed
            return False
        self.output += read
        return bool(read)
