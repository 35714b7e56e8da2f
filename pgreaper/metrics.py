"""
What pgreaper tells Prometheus.

Owns the names of the metrics (``docs/metrics.md`` lists them), how they are read and how they are served.  What they
say comes from the view ``pgreaper.metrics``, so it is the same whoever looks, and no worker has to be alive for it; a
daemon's endpoint adds how the daemon itself is doing.

A database that is away, or mute, costs a scrape some seconds at most and is an answer too: ``pgreaper_up 0``.  One
policy whose target takes too long to look at does not hide the others.  However often somebody scrapes,
the database is asked once in some seconds, on a short connection of its own.
"""

import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from psycopg import IsolationLevel

from pgreaper import __version__
from pgreaper.api import ALREADY_DONE, DEAD_LETTER, EXPIRED, NOT_ELIGIBLE, RETRY, Reaper
from pgreaper.connection import Address, connect, worker_name
from pgreaper.errors import DatabaseUnavailable, QueryCancelled, ReaperError, translate
from pgreaper.text import duration

if TYPE_CHECKING:
    from pgreaper.records import PolicyMetrics, RelayStatus
    from pgreaper.worker import Vitals

_R = TypeVar("_R")

STATES: Final = ("active", "paused", "passive", "suspended", "broken")
"""Every state of a policy, as the view ``status`` has them."""

# Seconds.  All of it is less than the ten that Prometheus waits by default.
_CONNECT_WITHIN: Final = 3
_ALL_WITHIN: Final = 3.0
_EACH_WITHIN: Final = 1.0
_READ_WITHIN: Final = 7.0
_ANSWER_WITHIN: Final = 8.0
# A reading serves every scrape for so long.
_FRESH: Final = 5.0
# A reader that nobody answers is given up then, so that the next one may try.
_GIVE_UP_AFTER: Final = 30.0
_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# So many requests at once are served; a client has so many seconds for its part.
_REQUESTS: Final = 16
_REQUEST_WITHIN: Final = 10.0


@dataclass(frozen=True, slots=True)
class Reading:
    """
    One look at the database.

    ``at``: Unix time of this machine; ``seconds``: how long it took.  ``trouble`` is why there is nothing to tell;
    ``unread`` are policies that could not be looked at in time, each with its owner.
    """

    at: float
    seconds: float
    version: str | None = None
    policies: "tuple[PolicyMetrics, ...]" = ()
    relays: "tuple[RelayStatus, ...]" = ()
    unread: dict[str, str] = field(default_factory=dict)
    trouble: ReaperError | None = None


class Source:
    """
    Readings of one database.

    :meth:`latest` may be called by any number of threads.  ``log`` receives a sentence when reading begins to fail,
    and when it works again.
    """

    def __init__(self, address: Address, *, log: Callable[[str], None] | None = None) -> None:
        # Whoever names a limit of his own has it.
        hurried = {"connect_timeout": str(_CONNECT_WITHIN), "tcp_user_timeout": "10000"}
        self._address = Address({**hurried, **address.parameters}, address.source)
        self._log = log
        self._name = worker_name().replace("pgreaper/", "pgreaper-metrics/", 1)[:63]
        self._lock = threading.Lock()
        self._last: tuple[float, Reading] | None = None
        self._run: _Run | None = None
        self._told: str | None = None

    def latest(self) -> Reading:
        """A reading that is some seconds old at most; one with ``trouble`` when none comes in time."""
        with self._lock:
            now = time.monotonic()
            if self._last is not None and now - self._last[0] < _FRESH:
                return self._last[1]
            if self._run is None or self._run.over.is_set():
                self._run = _Run(now)
                threading.Thread(target=self._read, args=(self._run,), name="metrics", daemon=True).start()
            run = self._run
        if run.over.wait(max(run.began + _ANSWER_WITHIN - time.monotonic(), 0.0)) and run.reading is not None:
            return run.reading
        if time.monotonic() - run.began > _GIVE_UP_AFTER:
            run.give_up()
        return Reading(time.time(), _ANSWER_WITHIN, trouble=self._tell(_mute()))

    def _read(self, run: "_Run") -> None:
        try:
            run.reading = reading = self._look(run)
            self._tell(reading.trouble)
            with self._lock:
                self._last = (time.monotonic(), reading)
        finally:
            run.over.set()

    def _look(self, run: "_Run") -> Reading:
        at = time.time()
        try:
            with closing(connect(self._address, name=self._name)) as connection:
                run.attach(connection)
                connection.read_only = True
                connection.isolation_level = IsolationLevel.READ_COMMITTED  # a standby knows no serializable one
                found = self._ask(connection, run.began + _READ_WITHIN)
        except ReaperError as error:
            found = Reading(at, 0.0, trouble=error)
        except psycopg.Error as error:
            found = Reading(at, 0.0, trouble=translate(error))
        except OSError as error:  # no file descriptor is left, for example
            trouble = DatabaseUnavailable(f"the connection failed: {error.strerror}", hint="Try again later.")
            found = Reading(at, 0.0, trouble=trouble)
        finally:
            run.detach()
        return replace(found, at=at, seconds=time.monotonic() - run.began)

    def _ask(self, connection: "psycopg.Connection[Any]", until: float) -> Reading:
        reaper = Reaper(connection)
        version = _bounded(reaper, _EACH_WITHIN, lambda: reaper.version())
        reaper.require_version(version)
        relays: tuple[RelayStatus, ...] = ()
        with suppress(QueryCancelled):
            relays = tuple(_bounded(reaper, _EACH_WITHIN, lambda: reaper.relays()))
        with suppress(QueryCancelled):
            return Reading(0.0, 0.0, version, tuple(_bounded(reaper, _ALL_WITHIN, lambda: reaper.metrics())), relays)
        # One of them takes too long.  Which one?
        found: list[PolicyMetrics] = []
        unread: dict[str, str] = {}
        owners = "select name, owner from pgreaper.policies where unregistered_at is null order by name"
        for policy, owner in _bounded(reaper, _EACH_WITHIN, lambda: reaper.rows(owners)):
            seconds = min(_EACH_WITHIN, until - time.monotonic())
            try:
                if seconds <= 0:
                    unread[policy] = owner
                else:
                    found += _bounded(reaper, seconds, lambda policy=policy: reaper.metrics(policy))  # type: ignore[misc]
            except QueryCancelled:
                unread[policy] = owner
        return Reading(0.0, 0.0, version, tuple(found), relays, unread)

    def _tell(self, trouble: ReaperError | None) -> ReaperError | None:
        """Say when it begins and when it is over; the same trouble once."""
        message = trouble.message if trouble else None
        if self._log is not None and message != self._told:
            self._log(f"metrics cannot be read: {message}" if message else "metrics can be read again")
        self._told = message
        return trouble


class _Run:
    """One reader at work: since when, what it found, and a second handle of its socket to end it with."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.over = threading.Event()
        self.reading: Reading | None = None
        self._lock = threading.Lock()
        self._line: socket.socket | None = None

    def attach(self, connection: "psycopg.Connection[Any]") -> None:
        with self._lock:
            self._line = socket.socket(fileno=os.dup(connection.fileno()))

    def detach(self) -> None:
        with self._lock:
            line, self._line = self._line, None
        if line is not None:
            line.close()

    def give_up(self) -> None:
        """Break the connection under it: its call then fails, as on any lost one."""
        with self._lock, suppress(OSError):
            if self._line is not None:
                self._line.shutdown(socket.SHUT_RDWR)


def _bounded(reaper: Reaper, seconds: float, call: Callable[[], _R]) -> _R:
    """Read within so many seconds, or raise QueryCancelled; in a transaction that is as this module wants it."""
    with reaper.connection.transaction():
        reaper.rows("select set_config('statement_timeout', %s::text, true)", str(max(int(seconds * 1000), 1)))
        return call()


def _mute() -> DatabaseUnavailable:
    return DatabaseUnavailable(
        f"the database did not answer within {duration(_ANSWER_WITHIN)}", hint="Try again later."
    )


class Families(Collector):
    """A reading as Prometheus' metrics; ``vitals`` are those of the worker that serves it, if one does."""

    def __init__(self, reading: Reading, vitals: "Vitals | None" = None) -> None:
        self._reading = reading
        self._vitals = vitals

    def collect(self) -> Iterable[Metric]:
        """Make the families, in the order in which the page has them."""
        yield _gauge("pgreaper_build_info", "The version of pgreaper that tells this.", {"version": __version__}, 1)
        up = self._reading.trouble is None
        yield _gauge("pgreaper_up", "Whether the database answered when it was last asked.", {}, up)
        yield _gauge("pgreaper_read_timestamp_seconds", "Unix time of that.", {}, self._reading.at)
        yield _gauge("pgreaper_read_seconds", "How long asking took.", {}, self._reading.seconds)
        if self._vitals is not None:
            yield from _of_worker(self._vitals)
        if up:
            version = self._reading.version or ""
            yield _gauge("pgreaper_schema_info", "The version of pgreaper's SQL.", {"version": version}, 1)
            yield from _of_policies(self._reading)
            yield from _of_relays(self._reading.relays)


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), float(value))
    return family


def _of_worker(v: "Vitals") -> Iterator[Metric]:
    name = "pgreaper_worker_"
    yield CounterMetricFamily(name + "batches", "Batches that this worker claimed.", v.batches)
    yield CounterMetricFamily(name + "failures", "Batches of this worker that failed as a whole.", v.failures)
    yield CounterMetricFamily(name + "reconnects", "Lost connections that it replaced.", v.reconnects)
    yield CounterMetricFamily(name + "busy_seconds", "Time that it spent on batches.", v.busy)
    if v.skew is not None:
        text = "By how much its clock is ahead of the database's; nothing is decided by it."
        yield GaugeMetricFamily(name + "clock_skew_seconds", text, v.skew)


# Metric, help, attribute of the record.  What is None has no sample.
_GAUGES: Final = (
    ("due", "Holds that are due, under no living lease and have not failed; at most 10000.", "due"),
    ("oldest_due_seconds", "How long the longest waiting hold has been due; 0: none waits.", "oldest_due_seconds"),
    ("objective_seconds", "The lateness that is promised.", "objective_seconds"),
    ("leased", "Holds under a lease.", "leased"),
    ("retrying", "Holds that failed and wait for their retry; at most 10000.", "retrying"),
    ("dead_letters", "Holds that were given up; at most 10000.", "dead"),
    ("oldest_dead_letter_seconds", "Age of the oldest dead letter; 0: there is none.", "oldest_dead_letter_seconds"),
    ("paused_seconds", "For how long the policy has been paused; 0: it is not.", "paused_seconds"),
    ("last_success_timestamp_seconds", "Unix time of the last transition.", "last_success_timestamp_seconds"),
    ("clock_skew_seconds", "By how much a worker's clock was ahead of the database's in the last 5 minutes; the worst.",
     "clock_skew_seconds"),
)  # fmt: skip
_OUTCOMES: Final = (
    (EXPIRED, "expired_total"),
    (ALREADY_DONE, "already_done_total"),
    (NOT_ELIGIBLE, "not_eligible_total"),
    (RETRY, "retry_total"),
    (DEAD_LETTER, "dead_letter_total"),
)


def _of_policies(reading: Reading) -> Iterator[Metric]:
    policies = reading.policies
    owners = GaugeMetricFamily("pgreaper_policy_info", "Whose a policy's dead letters are.", labels=["policy", "owner"])
    state = GaugeMetricFamily("pgreaper_policy_state", "1 for the state of a policy.", labels=["policy", "state"])
    for policy, owner in [*((p.policy, p.owner) for p in policies), *reading.unread.items()]:
        owners.add_metric([policy, owner], 1)
    for policy, found in [*((p.policy, p.state) for p in policies), *((name, "broken") for name in reading.unread)]:
        for each in STATES:
            state.add_metric([policy, each], float(each == found))
    yield owners
    yield state
    for name, text, attribute in _GAUGES:
        gauge = GaugeMetricFamily(f"pgreaper_{name}", text, labels=["policy"])
        for p in policies:
            if (value := getattr(p, attribute)) is not None:
                gauge.add_metric([p.policy], value)
        yield gauge
    outcomes = CounterMetricFamily("pgreaper_outcomes", "What became of holds.", labels=["policy", "outcome"])
    taken_back = CounterMetricFamily("pgreaper_leases_taken_back", "Leases that were taken back.", labels=["policy"])
    text = "Lateness of transitions; there is no sum."
    lateness = HistogramMetricFamily("pgreaper_lateness_seconds", text, labels=["policy"])
    for p in policies:
        for outcome, attribute in _OUTCOMES:
            outcomes.add_metric([p.policy, outcome], getattr(p, attribute))
        taken_back.add_metric([p.policy], p.taken_back_total)
        buckets = [(_bound(b), float(n)) for b, n in zip(p.lateness_bounds, p.lateness_counts, strict=True)]
        lateness.add_metric([p.policy], buckets, sum_value=None)
        lateness.add_sample("pgreaper_lateness_seconds_count", {"policy": p.policy}, buckets[-1][1])
    yield outcomes
    yield taken_back
    yield lateness


def _of_relays(relays: "Sequence[RelayStatus]") -> Iterator[Metric]:
    gauges: list[tuple[str, str, Callable[[RelayStatus], float]]] = [
        ("waiting", "Events that its queue has not confirmed; counting stops at 10000 rows of the trail.",
         lambda r: r.waiting),
        ("oldest_seconds", "How long ago the oldest of them expired; 0: none waits.",
         lambda r: r.oldest_waiting.total_seconds() if r.oldest_waiting else 0.0),
        ("dead_events", "Events that were given up; at most 10000.", lambda r: r.dead),
        ("trouble", "Whether its queue, or the way to it, had trouble when it was last tried.",
         lambda r: r.trouble is not None),
    ]  # fmt: skip
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(f"pgreaper_relay_{name}", text, labels=["policy", "relay"])
        for relay in relays:
            gauge.add_metric([relay.policy, relay.relay], float(value(relay)))
        yield gauge
    for name, text, attribute in (
        ("delivered", "Events that its queue confirmed.", "delivered"),
        ("redelivered", "Events that were handed out again because a lease had lapsed.", "redelivered"),
    ):
        counter = CounterMetricFamily(f"pgreaper_relay_{name}", text, labels=["policy", "relay"])
        for relay in relays:
            counter.add_metric([relay.policy, relay.relay], getattr(relay, attribute))
        yield counter


def _bound(seconds: float) -> str:
    """A bucket's bound as the database writes it, so that all who export it name it alike."""
    return "+Inf" if seconds == float("inf") else f"{seconds:.15g}"


def page(reading: Reading, vitals: "Vitals | None" = None) -> bytes:
    """The metrics in Prometheus' text format; of a worker, with what the system tells about its process."""
    registry = CollectorRegistry()
    registry.register(Families(reading, vitals))
    if vitals is not None:
        ProcessCollector(registry=registry)
    return generate_latest(registry)


def write(path: Path, text: bytes) -> None:
    """
    Put a page where the node exporter finds it: all of it or nothing, and readable for it whatever the umask is.

    Raises OSError.
    """
    # Not *.prom: the node exporter must not see it before its time.
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_bytes(text)
        new.chmod(0o644)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


class Endpoint:
    """
    Serves ``/metrics`` from threads of its own until :meth:`close`.

    ``port`` 0: any free one.  Raises ReaperError when it cannot listen there.
    """

    def __init__(self, content: Callable[[], bytes], *, host: str, port: int) -> None:
        try:
            family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._server = _Server(family, where, content)
        except OSError as error:
            told = (error.strerror or "it is not an address").lower()
            raise ReaperError(
                f"metrics cannot be served on {_place(host, port)}: {told}",
                hint="Name another --metrics-port, or a --metrics-address of this machine.",
            ) from None
        self.url = f"http://{_place(host, self._server.server_address[1])}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _place(host: str, port: object) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, family: int, where: Any, content: Callable[[], bytes]) -> None:
        self.address_family = family
        self.content = content
        self._room = threading.BoundedSemaphore(_REQUESTS)
        super().__init__(where, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks a name server who we are.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_WITHIN

    def version_string(self) -> str:
        return f"pgreaper/{__version__}"

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/metrics":
            self._answer(200, _CONTENT_TYPE, self.server.content())
        else:
            self._answer(404, "text/plain; charset=utf-8", b"The metrics are at /metrics.\n")

    do_HEAD = do_GET  # noqa: N815  http.server looks for this name

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is http.server's
        """Scrapes are no events either."""


def serve(
    address: Address,
    *,
    host: str,
    port: int,
    vitals: "Callable[[], Vitals]",
    log: Callable[[str], None] | None = None,
) -> Endpoint:
    """Serve the metrics of a database and of the worker that these vitals are of."""
    source = Source(address, log=log)
    return Endpoint(lambda: page(source.latest(), vitals()), host=host, port=port)
