"""The output of several processes, passed on line by line with their numbers."""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, BinaryIO

# A \r that comes last may be the first half of \r\n.
_END = re.compile(rb"\r\n|\n|\r(?=[\s\S])")
_COLOURS = (36, 33, 32, 35, 34, 31)
# One line at a time, whichever stream it is for: both may be the same terminal.
_LOCK = threading.Lock()


class Relay(threading.Thread):
    """Passes on what is written into a pipe until all its writers are gone.

    Args:
        pipe: The end to read from, which it closes.
        sink: Where the lines go.
        prefix: What each of them begins with.
        on_broken: Called when the sink takes no more. What comes then goes nowhere,
            so that the writers are not held up.
    """

    def __init__(
        self,
        pipe: IO[bytes],
        sink: BinaryIO,
        prefix: bytes,
        on_broken: Callable[[], object],
    ) -> None:
        super().__init__(name=f"fuelflow-relay-{pipe.fileno()}", daemon=True)
        self._pipe = pipe
        self._sink = sink
        self._prefix = prefix
        self._on_broken = on_broken

    def run(self) -> None:
        """Passes the lines on."""
        with self._pipe:
            for line in lines(iter(lambda: os.read(self._pipe.fileno(), 65536), b"")):
                with _LOCK:
                    is_written = write(self._sink, self._prefix + line + b"\n")
                if not is_written:
                    self._on_broken()


def write(sink: BinaryIO, text: bytes) -> bool:
    """Whether a text could be written; if not, the sink goes nowhere from now on.

    Otherwise Python would try once more at its exit, and fail.
    """
    try:
        sink.write(text)
        sink.flush()
    except OSError:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sink.fileno())
        return False
    return True


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    r"""The lines of a stream without their ends, the last one also if it has none.

    A ``\r`` ends a line as well, so each state of a progress bar is one; no line is
    made of the nothing before it. Bytes are not decoded, and a character is not parted.

    Example:
        >>> list(lines([b"a\r", b"\n\r 10%\r", b" 20%\n\nb"]))
        [b'a', b' 10%', b' 20%', b'', b'b']
    """
    rest = b""
    for chunk in chunks:
        start, seen = 0, max(0, len(rest) - 1)
        rest += chunk
        for end in _END.finditer(rest, seen):
            line = rest[start : end.start()]
            if line or end[0] != b"\r":
                yield line
            start = end.end()
        rest = rest[start:]
    if rest := rest.rstrip(b"\r"):
        yield rest


def prefixes(num_processes: int, *, coloured: bool) -> list[bytes]:
    """What the lines of each process begin with: its number, and a bar.

    Example:
        >>> prefixes(2, coloured=False)
        [b'0 | ', b'1 | ']
    """
    width = len(str(num_processes - 1))
    texts = [f"{number:>{width}} |" for number in range(num_processes)]
    if coloured:
        texts = [
            f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{text}\x1b[0m"
            for number, text in enumerate(texts)
        ]
    return [f"{text} ".encode() for text in texts]
