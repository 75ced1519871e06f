"""Connections to the live page: how many there may be, and how long they may wait."""

import contextlib
import http.client
import logging
import resource
import socket
import urllib.parse

import pytest

from fuelflow.watch.pages import connections
from fuelflow.watch.pages.server import Server
from fuelflow.watch.record.log import RecordLog
from fuelflow.watch.record.resources import most_files

LONG = 60.0


@pytest.fixture
def server():
    server = Server(RecordLog(), title="a run")
    yield server
    server.stop()


@pytest.fixture
def connect():
    """Connect to a URL without a word."""
    with contextlib.ExitStack() as stack:

        def connected(url):
            port = urllib.parse.urlsplit(url).port
            return stack.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=20)
            )

        yield connected


def is_dropped(connection):
    """Whether the other side ends a connection, which is waited for."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def status(url, path="/"):
    parts = urllib.parse.urlsplit(url)
    asking = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    with contextlib.closing(asking):
        asking.request("GET", path)
        return asking.getresponse().status


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: loc"])
def test_who_does_not_ask_in_time_is_dropped(server, connect, monkeypatch, said):
    monkeypatch.setattr(connections, "HEAD_SECS", 0.1)
    connection = connect(server.start())
    connection.sendall(said)

    assert is_dropped(connection)


def test_silent_connections_make_room_the_oldest_first(server, connect, monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(connections, "HEAD_SECS", LONG)
    url = server.start()
    silent = [connect(url) for _ in range(12)]

    assert status(url) == 200
    assert all(is_dropped(each) for each in silent[:8])
    silent[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert silent[-1].recv(15) == b"HTTP/1.1 200 OK"


def test_readers_of_events_are_not_dropped_for_a_newer_one(
    server, connect, monkeypatch
):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    url = server.start()
    readers = [connect(url) for _ in range(2)]
    for reader in readers:
        reader.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert reader.recv(15) == b"HTTP/1.1 200 OK"

    newer = connect(url)
    assert is_dropped(newer)
    server.stop()
    for reader in readers:
        with reader.makefile("rb") as answer:
            assert answer.read().endswith(b"0\r\n\r\n")  # the end of it, as it should


def test_connections_take_a_quarter_of_the_open_files(server, connect, monkeypatch):
    monkeypatch.setattr(connections, "most_files", lambda: 8)
    monkeypatch.setattr(connections, "HEAD_SECS", LONG)
    url = server.start()
    first, *_ = [connect(url) for _ in range(3)]

    assert is_dropped(first)


def test_the_limit_of_open_files_is_that_of_the_process():
    assert most_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_trouble_with_connections_is_not_on_the_console(server, caplog, capfd):
    status(server.start())

    trouble = {"message": "accepting failed", "exception": OSError(24, "too many")}
    server._loop.call_exception_handler(trouble)
    assert [each for each in caplog.records if each.levelno > logging.DEBUG] == []
    assert "too many" not in "".join(capfd.readouterr())


def test_an_address_with_a_slash_is_not_sent_on(server):
    assert status(server.start(), "/events/") == 404
