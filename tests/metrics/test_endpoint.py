"""A daemon's endpoint: it answers whatever the database does, asks it seldom, and costs other runs nothing."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import psycopg
import pytest

from pgreaper import metrics
from tests.cli.conftest import environment
from tests.conftest import Holds
from tests.metrics.conftest import one, samples, scrape


def test_it_tells_of_the_policies_and_of_the_worker(holds, serving):
    """The same page as `pgreaper metrics`, and how the daemon itself is doing."""
    holds.due(1200)
    holds.register()
    daemon = serving()
    found = daemon.until("pgreaper_outcomes_total", 1200, policy="holds", outcome="expired")
    assert one(found, "pgreaper_worker_batches_total") >= 3
    assert one(found, "pgreaper_worker_failures_total") == 0
    assert one(found, "pgreaper_worker_reconnects_total") == 0
    assert 0 < one(found, "pgreaper_worker_busy_seconds_total") < 60
    assert abs(one(found, "pgreaper_worker_clock_skew_seconds")) < 1
    assert one(found, "process_open_fds") > 3


def test_an_outage_is_an_answer(cluster, install, serving):
    """The server stops: 200 and `pgreaper_up 0`, and the worker's figures; it is back: up, and one reconnect."""
    install(cluster.dsn)
    with psycopg.connect(cluster.dsn, autocommit=True) as db:
        Holds(db).register()
    daemon = serving("--poll=0.5", url=cluster.dsn)
    daemon.until("pgreaper_up", 1)
    cluster.stop()
    down = daemon.until("pgreaper_up", 0)
    assert not {name for name, _ in down if name in ("pgreaper_due", "pgreaper_outcomes_total")}
    assert one(down, "pgreaper_worker_batches_total") == 0
    cluster.start()
    daemon.until("pgreaper_up", 1)
    daemon.until("pgreaper_worker_reconnects_total", 1)
    daemon.popen.popen.send_signal(signal.SIGTERM)
    result, _ = daemon.popen.end()
    assert result.code == 0
    assert "metrics cannot be read" in result.err
    assert "metrics can be read again" in result.err


def test_it_answers_before_there_is_a_database(serving):
    """A daemon that waits for its first connection is scraped already."""
    daemon = serving(url="postgresql://u:s3cret@127.0.0.1:1/d")
    page = scrape(daemon.url)
    assert one(page, "pgreaper_up") == 0
    assert "s3cret" not in page


def test_a_mute_database_does_not_hang_a_scrape(holds, proxy, source):
    """Whoever accepts the connection and says nothing costs the time that connecting may take."""
    holds.register()
    proxy.mute(new=True)
    began = time.monotonic()
    reading = source(proxy.url).latest()
    assert reading.trouble is not None
    assert time.monotonic() - began < 10


def test_a_reader_that_nobody_answers_is_given_up(db, holds, proxy, source, connect, wait_for_lock, monkeypatch):
    """The network dies in the middle of a reading: scrapes are answered in time, and later ones read again."""
    holds.register()
    monkeypatch.setattr(metrics, "_ANSWER_WITHIN", 1.0)
    monkeypatch.setattr(metrics, "_GIVE_UP_AFTER", 2.0)
    monkeypatch.setattr(metrics, "_FRESH", 0.0)
    monkeypatch.setattr(metrics, "_ALL_WITHIN", 600.0)
    asked = source(proxy.url)
    locker = connect(autocommit=False)
    locker.execute("lock table pgreaper.totals in access exclusive mode")
    first = threading.Thread(target=asked.latest)
    first.start()
    ((pid,),) = wait_for(db, "select pid from pg_stat_activity where application_name ~ '^pgreaper-metrics/'"
                             " and wait_event_type = 'Lock'")  # fmt: skip
    proxy.mute()
    locker.rollback()
    first.join(10)
    began = time.monotonic()
    while asked.latest().trouble is not None:
        assert time.monotonic() - began < 30
        time.sleep(0.2)
    assert pid


def wait_for(db, query):
    end = time.monotonic() + 15
    while not (rows := db.execute(query).fetchall()):
        assert time.monotonic() < end, query
        time.sleep(0.02)
    return rows


def test_however_many_scrape_the_database_is_asked_once(holds, source):
    """A reading serves everybody for some seconds, those too who come while it is being made."""
    holds.register()
    asked = source()
    found = []
    crowd = [threading.Thread(target=lambda: found.append(asked.latest())) for _ in range(20)]
    for each in crowd:
        each.start()
    for each in crowd:
        each.join(30)
    assert len(found) == 20
    assert len({id(reading) for reading in found}) == 1
    assert asked.latest() is found[0]


def test_a_reading_is_not_served_for_ever(holds, source, monkeypatch):
    """After some seconds the next scrape reads anew."""
    holds.register()
    asked = source()
    first = asked.latest()
    monkeypatch.setattr(metrics, "_FRESH", 0.0)
    assert asked.latest() is not first


def test_it_leaves_no_session_behind(db, holds, source):
    """Between two readings there is no connection, and a worker is nobody who only reads metrics."""
    holds.register()
    assert source().latest().trouble is None
    query = "select count(*) from pg_stat_activity where datname = current_database() and application_name like %s"
    end = time.monotonic() + 10
    while db.execute(query, ("pgreaper-metrics/%",)).fetchone()[0]:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_reading_writes_nothing(db, holds, source):
    """No transaction id: looking must not become the load."""
    holds.due(10)
    holds.register()
    current = "select pg_snapshot_xmax(pg_current_snapshot())::text"
    before = db.execute(current).fetchone()
    assert source().latest().trouble is None
    assert db.execute(current).fetchone() == before


def test_a_port_that_is_taken(holds, start):
    """1, at once, with the address and what to do; nothing was expired."""
    holds.due(1)
    holds.register()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result, _ = start("work", "--daemon", f"--metrics-port={port}", "--metrics-address=127.0.0.1").end()
    assert result.code == 1
    assert result.err.splitlines() == [
        f"error: metrics cannot be served on 127.0.0.1:{port}: address already in use",
        "hint: Name another --metrics-port, or a --metrics-address of this machine.",
    ]
    assert set(holds.states().values()) == {"held"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("work --metrics-port 0", "--metrics-port is for a --daemon"),
        ("work --daemon --metrics-address ::1", "--metrics-address is for a --metrics-port"),
        ("work --daemon --metrics-port 65536", "65536 is not a port"),
        ("work --daemon --metrics-port -1", "-1 is not a port"),
    ],
)
def test_misuse(in_process, arguments, message):
    """2, and a sentence."""
    result = in_process(*arguments.split())
    assert result.code == 2
    assert message in result.err


def test_what_is_asked_for(holds, source):
    """/metrics, with GET and HEAD; everything else is not there; IPv6 as well."""
    holds.register()
    for host in ("127.0.0.1", "::1") if socket.has_ipv6 and has_ipv6() else ("127.0.0.1",):
        endpoint = metrics.Endpoint(lambda: metrics.page(source().latest()), host=host, port=0)
        try:
            assert one(scrape(endpoint.url), "pgreaper_due", policy="holds") == 0
            assert one(scrape(endpoint.url + "?x=1"), "pgreaper_up") == 1
            with socket.create_connection((host, int(endpoint.url.split(":")[-1].split("/")[0])), timeout=15) as line:
                line.sendall(b"HEAD /metrics HTTP/1.0\r\n\r\n")
                said = b"".join(iter(lambda line=line: line.recv(65536), b""))  # type: ignore[misc]
            assert said.startswith(b"HTTP/1.0 200 ")
            assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n" in said
            assert said.endswith(b"\r\n\r\n"), "no body"
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                scrape(endpoint.url.replace("/metrics", "/other"))
            refused.value.close()
        finally:
            endpoint.close()


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_clients_that_say_nothing_do_not_keep_others_out(monkeypatch):
    """Idle connections fill the room: more are refused, and each is dropped in time, so scrapes work again."""
    assert metrics._Handler.timeout <= 30
    monkeypatch.setattr(metrics._Handler, "timeout", 1.0)
    endpoint = metrics.Endpoint(lambda: b"x 1\n", host="127.0.0.1", port=0)
    port = int(endpoint.url.split(":")[2].split("/")[0])
    idle = []
    try:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        end = time.monotonic() + 20
        while True:
            try:
                assert samples(scrape(endpoint.url))
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.05)
        threads = [t for t in threading.enumerate() if "process_request_thread" in t.name]
        assert len(threads) <= metrics._REQUESTS
    finally:
        for each in idle:
            each.close()
        endpoint.close()


def test_a_plain_run_does_not_pay_for_it(dsn, holds):
    """`pgreaper work` loads neither this module nor prometheus_client nor an HTTP server."""
    holds.register()
    code = "import sys; from pgreaper.cli import main; main(['work']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(dsn), capture_output=True, text=True, check=True
    )
    assert {m for m in done.stdout.split() if m.startswith(("prometheus_client", "pgreaper.metrics", "http."))} == set()
