"""A page that follows a run: served to browsers while it trains."""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any

from fuelflow.step.checks import checked_count
from fuelflow.watch.pages.feed import Feed
from fuelflow.watch.pages.page import make_page
from fuelflow.watch.pages.readers import Readers
from fuelflow.watch.record.log import RecordLog

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger("fuelflow")

MAX_READERS = 200
_TICK_SECS = 0.5
_MOST_PER_SEC = 40  # messages to readers
_STOP_SECS = 3.0
_LAST_PORT = 65_535
_ANY_HOST = frozenset({"", "0.0.0.0", "::"})
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server:
    """Serves the page of a run, and sends it what is new over server-sent events.

    It has two threads of its own, and nothing that it does is waited for by others.
    There are two addresses, the page and its events; no file is ever served. On the
    loopback interface a request must be addressed to it by name, so that no page of
    another site can have a browser ask for it; on any other the URL has a token.

    Args:
        log: The records of the run.
        title: What the run is called until it says so itself, as plain text.
    """

    def __init__(self, log: RecordLog, *, title: str) -> None:
        self._log = log
        self._title = title
        self._feed = Feed(log)
        self._readers = Readers(self._feed)
        self._token: str | None = None
        self._page = b""
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._server: uvicorn.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Begins to serve, and returns the URL to open.

        Args:
            host: The address to listen on; ``"0.0.0.0"`` for all of this host's.
            port: The port, or 0 for any that is free.

        Raises:
            ModuleNotFoundError: If a package of ``fuelflow[report]`` is missing.
            OSError: If the port is taken, or the host is none of this machine's.
            RuntimeError: If it was started before.
            TypeError: If the host is no text, or the port no integer.
            ValueError: If there is no such port.
        """
        if self._threads:
            raise RuntimeError("a server is started once; make another")
        _check_place(host, port)
        server = self._make_server()
        self._token = None if _is_loopback(host) else secrets.token_urlsafe(24)
        ending = f"?token={self._token}" if self._token else ""
        page = make_page([], title=self._title, live=f"events{ending}")
        self._page = page.encode()
        listening = _listen(host, port)
        self._server = server
        self._threads = [
            threading.Thread(target=run, args=args, name=name, daemon=True)
            for name, run, args in (
                ("fuelflow page", self._serve, (server, listening)),
                ("fuelflow page news", self._watch_log, ()),
            )
        ]
        for thread in self._threads:
            thread.start()
        # A browser asks one host, not all of them.
        name = socket.gethostname() if host in _ANY_HOST else host
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}:{listening.getsockname()[1]}/{ending}"

    def stop(self) -> None:
        """Ends all connections and both threads; a second call does nothing.

        Readers are sent what is new before.
        """
        self._stopping.set()
        if self._server is not None:
            self._server.should_exit = True
        self._tell_readers(is_last=True)
        for thread in self._threads:
            thread.join(_STOP_SECS)

    def _make_server(self) -> "uvicorn.Server":
        try:
            import uvicorn

            from fuelflow.watch.pages.connections import BACKLOG, Connection

            application = self._make_application()
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "a live page is served with starlette and uvicorn: "
                "pip install 'fuelflow[report]'",
                name=error.name,
            ) from error
        # The console is the run's: nothing is logged there.
        config = uvicorn.Config(
            application,
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            # One request each: what comes after a first one would be timed by nobody.
            headers=[("connection", "close")],
            http=Connection,
            backlog=BACKLOG,
            timeout_graceful_shutdown=1,
        )
        return uvicorn.Server(config)

    def _make_application(self) -> "Starlette":
        from starlette.applications import Starlette
        from starlette.routing import Route

        application = Starlette(
            routes=[
                Route("/", self._answer_page),
                Route("/events", self._answer_events),
            ]
        )
        # Nobody is sent on before it is known who asks.
        application.router.redirect_slashes = False
        return application

    def _serve(self, server: "uvicorn.Server", listening: socket.socket) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._loop.set_exception_handler(_note)
            await server.serve(sockets=[listening])

        with listening:
            try:
                asyncio.run(serve())
            finally:
                self._loop = None

    def _watch_log(self) -> None:
        number = 0
        while not self._stopping.is_set():
            if self._log.wait(number, timeout=_TICK_SECS):
                number = self._log.newest
                self._feed.update()
                self._tell_readers()
            # Not for each record, nor at once again when the log is closed; and more
            # seldom with more readers, so that many cost no more than a few.
            self._stopping.wait(max(_TICK_SECS, self._readers.num / _MOST_PER_SEC))

    def _tell_readers(self, *, is_last: bool = False) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just been closed
                loop.call_soon_threadsafe(lambda: self._readers.tell(is_last=is_last))

    async def _answer_page(self, request: "Request") -> "Response":
        from starlette.responses import HTMLResponse

        return self._refusal(request) or HTMLResponse(self._page, headers=_HEADERS)

    async def _answer_events(self, request: "Request") -> Any:
        from starlette.responses import PlainTextResponse

        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        if self._readers.num >= MAX_READERS:
            return PlainTextResponse("too many readers\n", 503)
        event_id = request.headers.get("last-event-id") or ""
        return self._readers.answer(event_id, _HEADERS)

    def _refusal(self, request: "Request") -> "Response | None":
        """The answer to who has no token, or came by another site's name."""
        from starlette.responses import PlainTextResponse

        if request.method != "GET":
            return PlainTextResponse("only GET\n", 405)
        if self._token is None:
            name = request.headers.get("host") or ""
            if _is_loopback(_without_port(name)):
                return None
            return PlainTextResponse("ask by a name of this host\n", 403)
        given = request.query_params.get("token") or ""
        if hmac.compare_digest(given.encode(), self._token.encode()):
            return None
        return PlainTextResponse("the address lacks its token\n", 403)


def _check_place(host: str, port: int) -> None:
    if not isinstance(host, str):
        raise TypeError(f"`host` must be a name or an address, got {host!r}")
    if checked_count("port", port, least=0) > _LAST_PORT:
        raise ValueError(f"`port` must be at most {_LAST_PORT}, got {port}")


def _note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Takes note of trouble with a connection, where it is in nobody's way."""
    del loop
    logger.debug("%s", context["message"], exc_info=context.get("exception"))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(
            error.errno, f"no page can be served on {host}:{port}: {error.strerror}"
        ) from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    """The name in a Host header, ``[::1]:80`` or ``localhost:80``."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
