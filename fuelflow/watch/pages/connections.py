"""Connections to a page: so many at most, and none that only stays silent."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from fuelflow.watch.record.resources import most_files

MAX_CONNECTIONS = 256
# How many are taken at once from those that wait for it.
BACKLOG = 16
HEAD_SECS = 5.0
ANSWER_SECS = 60.0
# Whose readers stay; `Readers` drops those that take nothing more.
EVENTS = "/events"


class Connection(H11Protocol):
    """A connection that has some seconds to ask, and a minute to take its answer.

    All of them have a quarter of the files that the process may have open, at most. If
    there are too many, the oldest one that has not asked yet makes room; if each has
    asked, the newest is refused.
    """

    _since = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Takes the connection, if there is room."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_SECS, self._look)
        if len(self.connections) > min(MAX_CONNECTIONS, most_files() // 4):
            connections = [
                each for each in self.connections if isinstance(each, type(self))
            ]
            silent = [each for each in connections if not each.has_asked]
            min(silent, key=lambda each: each._since).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is no more."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def has_asked(self) -> bool:
        """Whether there was a whole request."""
        return self.cycle is not None

    def drop(self) -> None:
        """Ends it at once, whatever is still to be sent."""
        self.connections.discard(self)
        self.transport.abort()

    def _look(self) -> None:
        """Ends it if it has not asked yet, or been answered for long."""
        is_late = self.loop.time() >= self._since + ANSWER_SECS
        follows = self.has_asked and not self.cycle.response_complete
        follows = follows and self.scope["path"] == EVENTS
        if not self.has_asked or (is_late and not follows):
            self.drop()
        else:
            self._timer = self.loop.call_later(ANSWER_SECS, self._look)
