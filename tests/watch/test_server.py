"""The live page: what it is asked, whom it answers, and that nothing waits for it."""

import contextlib
import http.client
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

import pytest
import watch_browser
from watch_records import (
    end_record,
    epoch_record,
    event_record,
    make_run,
    run_record,
    step_record,
)

from fuelflow.watch.pages import feed, readers, server
from fuelflow.watch.pages.server import Server
from fuelflow.watch.record.log import RecordLog


@pytest.fixture(scope="module")
def browser():
    with watch_browser.chromium() as browser:
        yield browser


@pytest.fixture
def serve():
    """Serve some records: the log, and the URL; stopped after the test."""
    servers = []

    def started(records=(), **where):
        log = RecordLog()
        for record in records:
            log.append(record)
        servers.append(Server(log, title="a run"))
        return log, servers[-1].start(**where)

    yield started
    for each in servers:
        each.stop()


@contextlib.contextmanager
def answer(url, path=None, *, method="GET", **headers):
    """The answer to one request."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    whole = f"{parts.path}?{parts.query}" if parts.query else parts.path
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path or whole, headers=names)
    got = connection.getresponse()
    try:
        yield got
    finally:
        got.close()
        connection.close()


def status(url, path=None, **options):
    with answer(url, path, **options) as got:
        return got.status


def messages(got):
    """The events of an answer as they come: kind, id, and value."""
    fields = {}
    for line in got:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "event" in fields:
            yield fields["event"], fields["id"], json.loads(fields["data"])
            fields = {}


def test_a_run_is_followed_from_a_late_start_to_its_end(serve, browser):
    records = make_run(6, 4)
    middle = len(records) // 2
    log, url = serve(records[:middle])

    opened = watch_browser.Opened(browser, url)
    opened.page.wait_for_selector(".pill.live")
    opened.page.wait_for_selector("#curves .scatterlayer")
    half = opened.trace("Loss", "epoch mean")
    for record in records[middle:]:
        log.append(record)
    opened.page.wait_for_selector(".pill.good")

    assert half["x"] == [20, 40, 60]
    mean, steps = opened.trace("Loss", "epoch mean"), opened.trace("Loss", "steps")
    assert mean["x"] == [20, 40, 60, 80, 100, 120]
    assert mean["y"][-1] == pytest.approx(records[-3]["metrics"]["avg_loss"], rel=1e-6)
    assert steps["x"] == list(range(1, 121))
    assert steps["y"][-1] == pytest.approx(step_record(120)["loss"], rel=1e-6)
    assert len(opened.trace("Waiting for data", "rank 2")["x"]) == 6
    assert opened.page.locator("#events tbody tr").count() == 1
    assert "saved step 120 (× 6)" in opened.text("#events")
    assert "6 of 6 epochs done" in opened.text("header")
    assert opened.complaints == []
    assert all(asked.startswith(url) for asked in opened.requests)
    opened.page.close()


def test_a_zoom_stays_while_records_come(serve, browser):
    log, url = serve(make_run(3)[:-1])
    opened = watch_browser.Opened(browser, url)
    opened.page.wait_for_selector("#curves .scatterlayer")
    box = opened.page.locator("#curves .nsewdrag").first.bounding_box()
    y = box["y"] + box["height"] / 2
    opened.page.mouse.move(box["x"] + 100, y)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + 200, y, steps=4)
    opened.page.mouse.up()
    zoomed = opened.chart("Loss")["xrange"]

    log.append(epoch_record(3))
    opened.page.wait_for_selector("text=4 of 3 epochs done")
    after = opened.chart("Loss")

    assert zoomed[1] - zoomed[0] < 30
    assert after["xrange"] == zoomed
    assert after["traces"][1]["x"][-1] == 80
    opened.page.close()


def test_a_page_says_that_it_lost_the_run_and_finds_it_again(browser):
    log = RecordLog()
    for record in make_run(2)[:-1]:
        log.append(record)
    first = Server(log, title="a run")
    url = first.start()
    port = urllib.parse.urlsplit(url).port
    assert port is not None
    opened = watch_browser.Opened(browser, url)
    opened.page.wait_for_selector(".pill.live")

    first.stop()
    opened.page.wait_for_selector(".pill.bad >> text=connection lost")
    log.append(epoch_record(2))
    again = Server(log, title="a run")
    again.start(port=port)
    opened.page.wait_for_selector(".pill.live")
    opened.page.wait_for_selector("text=3 of 2 epochs done")

    assert opened.trace("Loss", "epoch mean")["x"] == [20, 40, 60]
    log.append(end_record())
    opened.page.wait_for_selector(".pill.good")
    opened.page.close()
    again.stop()


def test_a_reader_gets_all_at_first_and_then_what_is_new(serve):
    log, url = serve(make_run(2)[:-1])

    with answer(url, "/events") as got:
        events = messages(got)
        kind, _, all_of_it = next(events)
        log.append(step_record(41))
        log.append(epoch_record(2))
        added = [next(events)[2]]
        if not added[0]["epochs"]:  # the second record came after a look at the first
            added.append(next(events)[2])

    assert kind == "reset"
    assert all_of_it["epochs"]["epoch"] == [0, 1]
    assert added[0]["steps"]["step"] == [41]
    assert added[-1]["epochs"]["epoch"] == [2]
    assert added[-1]["run"] is None


def test_a_reader_that_comes_back_gets_what_it_missed(serve):
    log, url = serve(make_run(2)[:-1])
    with answer(url, "/events") as got:
        _, last, _ = next(messages(got))
    log.append(event_record(text="meanwhile"))

    with answer(url, "/events", Last_Event_ID=last) as got:
        kind, _, value = next(messages(got))

    assert kind == "add"
    assert [each["text"] for each in value["events"]] == ["meanwhile"]
    assert value["steps"] == {}


@pytest.mark.parametrize("last", ["", "x", "0123abcd-5", "-", "0123abcd-²"])
def test_a_reader_of_another_server_gets_all(serve, last):
    _, url = serve(make_run(1))

    with answer(url, "/events", Last_Event_ID=last.encode()) as got:
        kind, _, _ = next(messages(got))

    assert kind == "reset"


def test_a_run_that_goes_on_is_sent_anew(serve):
    log, url = serve(make_run(3))

    with answer(url, "/events") as got:
        events = messages(got)
        next(events)
        log.append(run_record(epochs=5, epoch=2, step=40))
        kind, _, value = next(events)

    assert kind == "reset"
    assert value["epochs"]["epoch"] == [0, 1]
    assert value["end"] is None


def test_a_reader_that_has_been_sent_much_gets_all_in_fewer_rows(serve, monkeypatch):
    monkeypatch.setattr(readers, "MAX_ADDED", 3)
    monkeypatch.setattr(feed, "_SHARED_SECS", 0.0)
    log, url = serve([run_record()])

    kinds = []
    with answer(url, "/events") as got:
        events = messages(got)
        for step in range(1, 6):
            kinds.append(next(events)[0])
            log.append(step_record(step))

    assert kinds[0] == "reset"
    assert "reset" in kinds[1:]
    assert "add" in kinds[1:]


@pytest.mark.parametrize(
    "path",
    ["/records.jsonl", "/../etc/passwd", "/%2e%2e/server.py", "//", "/page.js", "/x"],
)
def test_nothing_else_is_served(serve, path):
    _, url = serve(make_run(1))

    assert status(url, path) == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
@pytest.mark.parametrize("path", ["/", "/events"])
def test_nothing_is_taken(serve, method, path):
    _, url = serve(make_run(1))

    assert status(url, path, method=method) == 405


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:1", 200),
        ("localhost", 200),
        ("localhost:8888", 200),
        ("[::1]:80", 200),
        ("example.com", 403),
        ("127.0.0.1.example.com", 403),
        ("localhost.example.com:80", 403),
        ("", 403),
    ],
)
def test_a_page_of_another_site_cannot_ask(serve, host, expected):
    _, url = serve(make_run(1))

    assert [status(url, path, Host=host) for path in ("/", "/events")] == [expected] * 2


def test_beyond_this_host_a_token_is_asked_for(serve):
    _, url = serve(make_run(1), host="0.0.0.0")
    parts = urllib.parse.urlsplit(url)
    here = f"http://127.0.0.1:{parts.port}/"
    token = urllib.parse.parse_qs(parts.query)["token"][0]

    assert parts.hostname == socket.gethostname().lower()
    assert len(token) >= 24
    for path in ("/", "/events"):
        assert status(here, f"{path}?token={token}", Host="example.com") == 200
        for wrong in ("", "?token=", f"?token={token[:-1]}", "?token=%ff%C3%A9"):
            assert status(here, path + wrong) == 403


def test_a_page_beyond_this_host_follows_with_its_token(serve, browser):
    _, url = serve(make_run(2), host="0.0.0.0")
    parts = urllib.parse.urlsplit(url)

    opened = watch_browser.Opened(
        browser, f"http://127.0.0.1:{parts.port}/?{parts.query}"
    )
    opened.page.wait_for_selector(".pill.good")

    assert opened.trace("Loss", "epoch mean")["x"] == [20, 40]
    assert opened.complaints == []
    opened.page.close()


def dead_reader(port):
    """A connection that asks for the events and never takes an answer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", port))
    connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return connection


def test_dead_readers_are_dropped(serve, monkeypatch):
    monkeypatch.setattr(readers, "SEND_SECS", 0.2)
    monkeypatch.setattr(server, "MAX_READERS", 10)
    long = event_record(text="long " * 2_000_000)  # more than a socket holds
    _, url = serve([*make_run(1), long])
    port = urllib.parse.urlsplit(url).port
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(dead_reader(port))
        deadline = time.monotonic() + 20
        refused = 0
        while status(url, "/events") == 503:
            refused += 1
            assert time.monotonic() < deadline
        with answer(url, "/events") as got:
            kind, _, value = next(messages(got))

    assert refused > 0  # they had all places
    assert kind == "reset"
    assert value["num_events"] == 2


def test_a_hundred_dead_readers_keep_nobody_waiting(serve):
    log, url = serve(make_run(3))
    port = urllib.parse.urlsplit(url).port
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(dead_reader(port))
        with answer(url, "/events") as got:
            events = messages(got)
            next(events)
            start = time.perf_counter()
            log.append(event_record(text="new"))
            appended = time.perf_counter() - start
            _, _, value = next(events)
            secs = time.perf_counter() - start

    assert value["events"][0]["text"] == "new"
    assert appended < 0.05  # microseconds, if no reader holds the log
    assert secs < 5  # two and a half seconds between two looks, for so many


def test_it_stops_at_once_with_readers_and_frees_its_port(serve):
    log = RecordLog()
    log.append(run_record())
    one = Server(log, title="a run")
    before = set(threading.enumerate())
    url = one.start()
    with answer(url, "/events") as got:
        next(messages(got))
        start = time.perf_counter()
        one.stop()
        secs = time.perf_counter() - start
        rest = got.read()

    one.stop()
    assert secs < 2
    assert rest.strip() == b""
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        status(url)
    with pytest.raises(RuntimeError, match="started once"):
        one.start()


def test_a_server_that_was_never_started_stops():
    before = threading.enumerate()
    Server(RecordLog(), title="a run").stop()

    assert threading.enumerate() == before


def test_a_port_that_is_taken_is_named(serve):
    _, url = serve()
    port = urllib.parse.urlsplit(url).port

    with pytest.raises(OSError, match=rf"on 127\.0\.0\.1:{port}: .*in use"):
        serve(port=port)


def test_it_takes_over_neither_signals_nor_the_console(serve, caplog, capfd):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    caplog.set_level(logging.DEBUG)

    _, url = serve(make_run(1))
    assert status(url) == 200
    assert status(url, "/x") == 404

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert [each for each in caplog.records if "uvicorn" in each.name] == []
    assert capfd.readouterr() == ("", "")


def test_a_page_is_kept_by_no_cache_and_named_to_no_other_site(serve):
    _, url = serve()

    with answer(url) as got:
        headers = {name.lower(): value for name, value in got.getheaders()}
        page = got.read().decode()

    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"
    assert re.search(r"connect-src &#x27;self&#x27;|connect-src 'self'", page)


@pytest.mark.parametrize("package", ["uvicorn", "starlette"])
def test_without_its_packages_it_names_the_extra(package):
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from fuelflow.watch.record.log import RecordLog\n"
        "from fuelflow.watch.pages.server import Server\n"
        "Server(RecordLog(), title='a run').start()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.stderr.endswith("pip install 'fuelflow[report]'\n")
