"""The example handler against a real HTTP service: slow, hanging, refusing, dying, and saying no."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from examples.http_service import release
from pgreaper.api import DEAD_LETTER, EXPIRED, RETRY
from tests.driver.test_handlers import one, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Service:
    """
    A service on a free port of this machine.

    ``behaviour`` says what the n-th request meets: a status, or ``hang``, ``die`` (the work is done and the connection
    ends without an answer), ``cut`` (it ends in mid-answer).
    ``done`` are the idempotency keys under which it did something.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.done: Counter[str] = Counter()
        self.behaviour: Callable[[int], int | str] = lambda n: 204
        self.retry_after: str | None = None
        self.released = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                key = self.headers["Idempotency-Key"]
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append((key, body))
                answer = service.behaviour(len(service.requests))
                if answer == "hang":
                    service.released.wait(30)
                    return
                if answer in ("die", "cut"):
                    service.done[key] += key not in service.done
                    self.wfile.write(b"HTTP/1.0 2" if answer == "cut" else b"")
                    self.wfile.flush()
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                assert isinstance(answer, int)
                if answer == 204 and key in service.done:
                    answer = 409
                elif answer == 204:
                    service.done[key] += 1
                self.send_response(answer)
                if service.retry_after:
                    self.send_header("Retry-After", service.retry_after)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 64

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    service = Service()
    monkeypatch.setenv("SEATS_URL", service.url)
    yield service
    service.close()


@pytest.fixture
def due(holds):
    """Holds of a policy whose retries come within the second; budgets of five and one."""

    def due(n: int) -> None:
        holds.due(n)
        holds.register(payload_columns=["customer_email"], backoff_base="1 millisecond", backoff_cap="1 millisecond")

    return due


@pytest.fixture
def until_done(db, work):
    """A function that lets workers run until no retry is left; returns what became of the holds in all."""

    def until_done() -> Counter[str]:
        total: Counter[str] = Counter()
        for _ in range(20):
            run, _ = work(handler=release)
            total += run.outcomes
            ((left,),) = db.execute("select count(*) from pgreaper.failures where not_before < 'infinity'").fetchall()
            if not left:
                return total
        raise AssertionError("retries without end")

    return until_done


def test_the_service_hears_of_each_hold_before_it_expires(db, holds, due, work, service):
    """The key of the hold, its payload, and the idempotency key as a header."""
    due(20)

    run, _ = work(handler=release)

    assert (run.expired, run.exit_code) == (20, 0)
    assert sorted(service.done.values()) == [1] * 20
    assert {body["hold"] for _, body in service.requests} == {str(i) for i in holds.states()}
    assert {body["customer_email"] for _, body in service.requests} == {f"u{i}@example.com" for i in range(1, 21)}
    assert all(key.startswith(f"holds/{body['hold']}/20") for key, body in service.requests)


@pytest.mark.parametrize(
    ("trouble", "error_class"),
    [
        ("hang", "TimeoutError"),
        ("die", "Retry"),
        ("cut", "Retry"),
        (500, "Retry"),
        (429, "Retry"),
    ],
)
def test_trouble_that_passes_costs_an_attempt_and_then_the_hold_expires(
    db, holds, due, until_done, service, monkeypatch, trouble, error_class
):
    """One request meets it, the next does not: a retry with the same idempotency key, and the effect is there once."""
    due(1)
    service.behaviour = lambda n: trouble if n == 1 else 204

    monkeypatch.setenv("SEATS_TIMEOUT", "0.3" if trouble == "hang" else "10")

    outcomes = until_done()

    assert outcomes == {RETRY: 1, EXPIRED: 1}
    assert holds.states() == {1: "expired"}
    assert list(service.done.values()) == [1]
    assert len({key for key, _ in service.requests}) == 1
    events = db.execute("select kind, error_class from pgreaper.events where token is not null").fetchall()
    assert events == [("retry", error_class)]


def test_a_slow_service_is_waited_for(db, connect, holds, work, service):
    """It answers after more than a lease: one request, the lease is renewed meanwhile, nobody is charged."""
    holds.due(1)
    holds.register(lease="1 second")
    watcher = connect()

    def answer(n: int) -> int:
        wait_for(lambda: one(watcher, "select claim_until - claimed_at > '2.1 seconds' from pgreaper.claims"))
        return 204

    service.behaviour = answer
    run, _ = work(handler=release)

    assert (run.expired, run.exit_code, len(service.requests)) == (1, 0, 1)
    assert one(db, "select count(*) from pgreaper.events where token is not null") == 0


def test_a_service_that_is_down_uses_up_the_budget(db, holds, due, until_done, service, monkeypatch):
    """Nobody listens: five attempts, then a dead letter; nothing expires without the service having heard of it."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("SEATS_URL", f"http://127.0.0.1:{port}")
    due(1)

    outcomes = until_done()

    assert outcomes == {RETRY: 4, DEAD_LETTER: 1}
    assert holds.states() == {1: "held"}
    assert db.execute("select attempts, error_class from pgreaper.dead_letters").fetchall() == [(5, "URLError")]


def test_a_service_that_says_no_is_not_asked_again(db, holds, due, until_done, service):
    """404: a dead letter at once, under the name that the handler gave it."""
    due(1)
    service.behaviour = lambda n: 404

    assert until_done() == {DEAD_LETTER: 1}
    assert len(service.requests) == 1
    assert db.execute("select error_class from pgreaper.dead_letters").fetchall() == [("Refused",)]


def test_retry_after_is_heeded(db, due, work, service):
    """The service says when: not before then, whatever the policy's backoff is."""
    due(1)
    service.behaviour, service.retry_after = lambda n: 503, "120"

    work(handler=release)

    ((wait,),) = db.execute("select extract(epoch from not_before - failed_at)::int from pgreaper.failures").fetchall()
    assert wait == 120


def test_an_answer_that_got_lost_is_no_second_effect(holds, due, until_done, service):
    """The service did it and died before it said so; asked again it answers 409, and the hold expires."""
    due(3)
    service.behaviour = lambda n: "die" if n <= 3 else 204

    outcomes = until_done()

    assert outcomes[EXPIRED] == 3
    assert set(holds.states().values()) == {"expired"}
    assert sorted(service.done.values()) == [1, 1, 1]
