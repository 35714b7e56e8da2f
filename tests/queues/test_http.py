"""The HTTP sink against a real server: slow, refusing, overloaded, gone, encrypted."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING

import pytest

from pgreaper import queues
from pgreaper.queues import Refusal, Sent, Sink
from tests.queues.broker import free_port
from tests.queues.conftest import message, messages
from tests.queues.endpoint import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def open_sink() -> Iterator[Callable[[str], Sink]]:
    """A function that opens a sink, closed at the end."""
    opened: list[Sink] = []

    def open_sink(url: str) -> Sink:
        opened.append(queues.sink(url))
        return opened[-1]

    yield open_sink
    for sink in opened:
        sink.close()


@pytest.fixture
def sink(open_sink, endpoint) -> Sink:
    found: Sink = open_sink(endpoint.url)
    return found


def odd(request) -> bool:
    return int(json.loads(request.body)["key"]) % 2 == 1


def test_each_event_is_posted_with_its_key(endpoint, sink):
    """The whole URL, the body as it is, the idempotency key and the policy as headers; all confirmed."""
    sent = sink.send(messages(50), timeout=20)

    assert sent == Sent(frozenset(range(50)), {})
    assert sorted(endpoint.identities()) == sorted(m.identity for m in messages(50))
    first = next(r for r in endpoint.requests if r.identity == "holds/0/0")
    assert (first.path, first.body) == ("/hook?token=t", message(0).body)
    assert (first.headers["Content-Type"], first.headers["Pgreaper-Policy"]) == ("application/json", "holds")


def test_a_few_at_once_over_connections_that_are_kept(endpoint, sink):
    """Eight at most, on as many connections, also when an answer has a body; the next call uses them again."""
    together = threading.Barrier(8)

    def meet(request):
        if int(request.identity.split("/")[1]) < 8:
            together.wait(10)
        return 200

    endpoint.answer = meet

    for _ in range(3):
        assert len(sink.send(messages(100), timeout=20).confirmed) == 100
        together.reset()

    assert endpoint.at_once == 8
    assert endpoint.connections == 8


def test_user_and_password_of_the_url_are_basic_authentication(endpoint, open_sink):
    """They are decoded, and not part of what is asked for."""
    sink = open_sink(endpoint.url.replace("127", "ann:p%40ss@127"))

    assert sink.send(messages(1), timeout=10).confirmed == {0}
    assert endpoint.requests[0].headers["Authorization"] == "Basic YW5uOnBAc3M="
    assert endpoint.requests[0].headers["Host"] == f"127.0.0.1:{endpoint.port}"


@pytest.mark.parametrize("status", [400, 403, 404, 409, 410, 413, 422])
def test_what_the_endpoint_does_not_want_is_refused_for_good(endpoint, sink, status):
    """By its status alone; the others are confirmed."""
    endpoint.answer = lambda request: status if odd(request) else 200

    sent = sink.send(messages(4), timeout=20)

    refusal = Refusal(f"HTTP {status}", transient=False)
    assert sent == Sent(frozenset({0, 2}), {1: refusal, 3: refusal})


@pytest.mark.parametrize("status", [408, 425, 500, 502, 504])
def test_what_may_pass_is_refused_for_now(endpoint, sink, status):
    """Such an event is tried again, and no other is touched by it."""
    endpoint.answer = lambda request: status if odd(request) else 202

    sent = sink.send(messages(4), timeout=20)

    refusal = Refusal(f"HTTP {status}", transient=True)
    assert sent == Sent(frozenset({0, 2}), {1: refusal, 3: refusal})


@pytest.mark.parametrize("status", [429, 503])
def test_an_overloaded_endpoint_is_left_alone(endpoint, sink, status):
    """Those it answered so wait as long as it says; no more are sent, and the caller hears of trouble."""
    endpoint.answer = lambda request: status
    endpoint.headers = {"Retry-After": "120"}

    sent = sink.send(messages(100), timeout=20)

    assert (sent.trouble, sent.confirmed) == (f"HTTP {status}", frozenset())
    assert set(sent.refused.values()) == {Refusal(f"HTTP {status}", transient=True, retry_after=120.0)}
    assert len(sent.refused) == len(endpoint.requests) <= 8


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("0", 0, 0),
        ("1.5", 1.5, 1.5),
        ("-5", 0, 0),
        ("99999999999", 86400, 86400),
        ("nan", None, None),
        ("soon", None, None),
        (timedelta(hours=1), 3000, 3600),
        (timedelta(hours=-1), 0, 0),
        ("Thu, 99 Foo 2026 00:00:00 GMT", None, None),
    ],
)
def test_retry_after_is_seconds_or_a_date(endpoint, sink, header, least, most):
    """Within a day; what is neither says nothing."""
    endpoint.answer = lambda request: 500
    if isinstance(header, timedelta):
        header = format_datetime(datetime.now(UTC) + header, usegmt=True)
    endpoint.headers = {"Retry-After": header}

    found = sink.send(messages(1), timeout=20).refused[0].retry_after

    assert found is None if least is None else found is not None and least <= found <= most


@pytest.mark.parametrize("status", [301, 303, 307, 401, 405, 407])
def test_no_event_pays_for_a_wrong_url(endpoint, sink, status):
    """An endpoint that sends everybody elsewhere is trouble; when it takes others, the event is refused for good."""
    with Endpoint() as elsewhere:
        endpoint.headers = {"Location": elsewhere.url, "WWW-Authenticate": "Basic", "Proxy-Authenticate": "Basic"}
        endpoint.answer = lambda request: status
        everybody = sink.send(messages(100), timeout=20)
        asked = len(endpoint.requests)
        endpoint.answer = lambda request: status if odd(request) else 200
        some = sink.send(messages(2), timeout=20)

        assert everybody == Sent(frozenset(), {}, f"HTTP {status}")
        assert asked <= 8
        assert some == Sent(frozenset({0}), {1: Refusal(f"HTTP {status}", transient=False)})
        assert elsewhere.requests == []


def test_nobody_there_is_trouble(open_sink):
    """Nothing is refused; the class says what it was."""
    port = free_port()
    for url, trouble in (
        (f"http://127.0.0.1:{port}/", "ConnectionRefused"),
        ("http://nowhere.invalid/", "HostUnknown"),
    ):
        assert open_sink(url).send(messages(20), timeout=10) == Sent(frozenset(), {}, trouble)


def test_the_next_call_finds_an_endpoint_that_is_back(endpoint, sink):
    """Trouble of one call is over with it."""
    endpoint.answer = lambda request: "die"
    assert sink.send(messages(3), timeout=10) == Sent(frozenset(), {}, "ConnectionLost")

    endpoint.answer = lambda request: 200
    assert sink.send(messages(3), timeout=10) == Sent(frozenset({0, 1, 2}), {})


@pytest.mark.parametrize(
    ("answer", "error_class"), [("hang", "Timeout"), ("drip", "Timeout"), ("die", "ConnectionLost")]
)
def test_silence_is_the_events_fault_when_others_are_answered(endpoint, sink, answer, error_class):
    """It is tried again and pays for it, or it would come first for ever; when nobody is answered, nobody pays."""
    endpoint.answer = lambda request: answer if odd(request) else 200
    began = time.monotonic()
    one = sink.send(messages(2), timeout=2)
    endpoint.answer = lambda request: answer
    nobody = sink.send(messages(20), timeout=2)

    assert one == Sent(frozenset({0}), {1: Refusal(error_class, transient=True)})
    assert nobody == Sent(frozenset(), {}, error_class)
    assert time.monotonic() - began < 20


def test_the_time_of_a_call_is_for_all_of_it(endpoint, sink):
    """What was not answered by its end is unconfirmed: nobody is refused because the endpoint is slow."""

    def take_time(request):
        time.sleep(0.2)
        return 200

    endpoint.answer = take_time
    began = time.monotonic()
    sent = sink.send(messages(200), timeout=2)

    assert time.monotonic() - began < 4.5  # all of them take five seconds
    assert 0 < len(sent.confirmed) < 200
    assert (sent.refused, sent.trouble) == ({}, None)


def test_a_body_without_end_is_not_read(endpoint, sink):
    """The status is the answer."""
    endpoint.answer = lambda request: "huge"
    began = time.monotonic()

    assert sink.send(messages(1), timeout=20) == Sent(frozenset({0}), {})
    assert time.monotonic() - began < 15
    assert endpoint.sent < 50_000_000


def test_events_of_one_hold_keep_their_order(endpoint, sink):
    """Each waits for the one before; behind one that is to be tried again, none is sent."""
    batch = [message(i, key=str(i % 2)) for i in range(10)]
    endpoint.answer = lambda request: 500 if request.identity == "holds/1/5" else 200

    sent = sink.send(batch, timeout=20)

    assert sent == Sent(frozenset({0, 1, 2, 3, 4, 6, 8}), {5: Refusal("HTTP 500", transient=True)})
    for key in "01":
        mine = [identity for identity in endpoint.identities() if identity.startswith(f"holds/{key}/")]
        assert mine == sorted(mine)


def test_an_event_refused_for_good_does_not_hold_up_the_next(endpoint, sink):
    """The next one of its key is sent."""
    endpoint.answer = lambda request: 422 if request.identity == "holds/a/0" else 200

    sent = sink.send([message(0, key="a"), message(1, key="a")], timeout=20)

    assert sent == Sent(frozenset({1}), {0: Refusal("HTTP 422", transient=False)})


def test_a_certificate_that_nobody_vouches_for_is_trouble(certificates, open_sink, monkeypatch):
    """Nothing is posted to such an endpoint; SSL_CERT_FILE names who vouches for it."""
    with Endpoint(certificates) as endpoint:
        refused = open_sink(endpoint.url).send(messages(3), timeout=10)
        seen = list(endpoint.requests)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
        taken = open_sink(endpoint.url).send(messages(3), timeout=10)

    assert refused == Sent(frozenset(), {}, "TlsError")
    assert seen == []
    assert taken == Sent(frozenset({0, 1, 2}), {})


def test_nothing_of_it_is_logged(endpoint, open_sink, caplog):
    """Neither URL nor body reaches the log: they may be secret."""
    caplog.set_level("INFO")
    endpoint.answer = lambda request: 500
    open_sink(endpoint.url).send(messages(2), timeout=10)

    assert "token" not in caplog.text
