"""
What a relay does for each kind of queue: events a second, latency, duplicates, and what it costs the database.

Every event is looked for where it was sent: none may be missing, and what came twice is counted.  RabbitMQ is
Debian's, SQS is moto's server, Kafka the brokers that librdkafka carries, HTTP a small server in this process; all on
this machine, so the figures are the relay's and not a network's.  Run it from the repository's root:
``python -m bench.relay``.
"""

import argparse
import json
import os
import platform
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import psycopg

from pgreaper import queues
from pgreaper.connection import resolve
from pgreaper.embedded import Cluster
from pgreaper.queues import Message, Sent, Sink
from pgreaper.relay import Relay, Settings
from pgreaper.schema import install
from tests.queues.aws import SETTINGS
from tests.queues.broker import SERVER, Broker, Process, free_port
from tests.queues.conftest import Rabbit
from tests.queues.endpoint import Endpoint
from tests.queues.kafka_cluster import Kafka

TABLE = """
create table holds (
  id bigint generated always as identity primary key,
  data text not null default repeat('x', 100),
  status text not null default 'held',
  expires_at timestamptz not null
);
create index on holds (expires_at) where status = 'held';
select pgreaper.reaper_register('holds', 'holds', 'expires_at', 'status', array['held'], 'expired', 'bench');
"""

INSERT = """
insert into holds (expires_at)
select clock_timestamp() - interval '1 hour' + g * interval '1 microsecond' from generate_series(1, %s) as g
"""

AHEAD = """
insert into holds (expires_at) select clock_timestamp() + random() * interval '6 seconds' returning id
"""

LATENESS = """
select percentile_cont(array[0.5, 0.99, 1]) within group (order by extract(epoch from t.at - k.deadline))
  from pgreaper.transitions as t cross join lateral unnest(t.deadlines) as k (deadline)
"""

# What the database did so far: bytes of WAL, pages looked at, transactions.
LOAD = """
select pg_current_wal_lsn() - '0/0', blks_hit + blks_read, xact_commit + xact_rollback
  from pg_stat_database where datname = current_database()
"""

# By how much fewer events are enough, because the server here is a slow one.
KINDS = {"stdout": 1, "http": 5, "rabbitmq": 1, "sqs": 20, "kafka": 1}


@dataclass(frozen=True, slots=True)
class Place:
    """A queue to send to, and how to tell the idempotency keys of all that has arrived there."""

    url: str
    arrived: Callable[[], list[str]]
    file: Path | None = None


@contextmanager
def place(kind: str, folder: Path) -> Iterator[Place]:
    """A fresh queue of this kind."""
    if kind == "stdout":
        file = folder / f"events-{time.monotonic_ns()}"
        yield Place("stdout:", lambda: [identity(line) for line in file.read_bytes().splitlines()], file)
    elif kind == "http":
        with Endpoint() as endpoint:
            yield Place(endpoint.url, endpoint.identities)
    elif kind == "rabbitmq":
        with Broker() as broker:
            rabbit = Rabbit(broker)
            queue = rabbit.queue()
            yield Place(broker.url(queue), lambda: [identity(m.body) for m in rabbit.drain(queue)])
    elif kind == "sqs":
        yield from sqs(folder)
    else:
        kafka = Kafka()
        topic = kafka.topic("events", 4)
        try:
            yield Place(kafka.url(topic), lambda: [identity(r.value() or b"") for r in kafka.records(topic, 4)])
        finally:
            kafka.close()


def sqs(folder: Path) -> Iterator[Place]:
    """A queue in moto's server."""
    port = free_port()
    os.environ.update(SETTINGS)
    server = Process(
        sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port),
        env=dict(os.environ), log=folder / "moto", user=None,
    )  # fmt: skip
    try:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        endpoint = f"http://127.0.0.1:{port}"
        client: Any = boto3.client("sqs", region_name=SETTINGS["AWS_REGION"], endpoint_url=endpoint)
        url = client.create_queue(QueueName="events")["QueueUrl"]

        def arrived() -> list[str]:
            found: list[str] = []
            while some := client.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages"):
                found += [identity(message["Body"]) for message in some]
                handles = [{"Id": str(i), "ReceiptHandle": m["ReceiptHandle"]} for i, m in enumerate(some)]
                client.delete_message_batch(QueueUrl=url, Entries=handles)
            return found

        yield Place(f"sqs://events?endpoint={endpoint}", arrived)
    finally:
        server.end()


def identity(body: bytes | str) -> str:
    """The idempotency key in the body of an event."""
    return str(json.loads(body)["idempotency_key"])


# -- how many


def throughput(dsn: str, kind: str, events: int, folder: Path) -> str:
    """Relay so many events that wait, with one process; a row of the table."""
    with psycopg.connect(dsn, autocommit=True) as admin, place(kind, folder) as where:
        relay = f"{kind}-{time.monotonic_ns()}"
        admin.execute("select pgreaper.reaper_relay('holds', %s)", (relay,))
        expire(admin, events)
        before, used = load(admin), _children()
        command = [sys.executable, "-m", "pgreaper", "relay", "holds", "--once", "--name", relay, "--to", where.url]
        with (where.file or folder / "said").open("wb") as file:
            done = subprocess.run(
                [*command, "--log-format", "json", "--database-url", dsn],
                stdout=file,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        if done.returncode:
            raise SystemExit(f"{kind}: {done.stderr}")
        seconds, used = json.loads(done.stderr.splitlines()[-1])["seconds"], _children() - used
        after = load(admin)
        arrived = Counter(where.arrived())
        (delivered,) = one(admin, "select delivered from pgreaper.relays where name = %s", relay)
        if delivered != events or len(arrived) != events:
            raise SystemExit(f"{kind}: {events} events, {delivered} delivered, {len(arrived)} arrived")
        admin.execute("select pgreaper.reaper_unrelay(%s)", (relay,))
    wal, pages, _ = (b - a for a, b in zip(before, after, strict=True))
    return (
        f"| {kind} | {events:,} | {events / seconds:,.0f} | {arrived.total() - events} "
        f"| {1e6 * used / events:.0f} | {wal / events:.0f} | {pages / events:.2f} |"
    )


def expire(admin: "psycopg.Connection[Any]", holds: int) -> tuple[float, float]:
    """Make holds and expire them; seconds and bytes of WAL for each."""
    admin.execute("truncate holds")
    admin.execute(INSERT, (holds,))
    admin.execute("vacuum analyze holds")
    before, began = load(admin), time.monotonic()
    admin.execute("call pgreaper.reaper_sweep('holds')")
    return (time.monotonic() - began) / holds, (load(admin)[0] - before[0]) / holds


def load(admin: "psycopg.Connection[Any]") -> tuple[float, float, float]:
    """What the database has done so far, as far as sessions that ended or are idle have told."""
    time.sleep(1.1)  # A session tells at most once a second.
    wal, pages, transactions = one(admin, LOAD)
    return float(wal), float(pages), float(transactions)


def one(connection: "psycopg.Connection[Any]", query: str, *parameters: object) -> tuple[Any, ...]:
    """The row of a query."""
    row: tuple[Any, ...] | None = connection.execute(query, parameters or None).fetchone()
    assert row is not None  # noqa: S101
    return row


# -- how late


class Timed:
    """A sink that notes for each event how long after its expiry the queue has confirmed it."""

    def __init__(self, sink: Sink) -> None:
        self.name = sink.name
        self.latencies: list[float] = []
        self._sink = sink

    def send(self, messages: Sequence[Message], *, timeout: float) -> Sent:
        """Send, and look at the clock."""
        sent = self._sink.send(messages, timeout=timeout)
        now = datetime.now(UTC)
        for position in sent.confirmed:
            expired = datetime.fromisoformat(json.loads(messages[position].body)["expired_at"])
            self.latencies.append((now - expired).total_seconds())
        return sent

    def close(self) -> None:
        """Close the real one."""
        self._sink.close()


def latency(dsn: str, kind: str, rate: float, seconds: float, poll: float, folder: Path) -> str:
    """Expire holds one by one at a steady rate while a relay stays; a row of the table."""
    with psycopg.connect(dsn, autocommit=True) as admin, place(kind, folder) as where:
        admin.execute("truncate holds")
        relay = f"{kind}-{time.monotonic_ns()}"
        admin.execute("select pgreaper.reaper_relay('holds', %s)", (relay,))
        if kind == "stdout":
            _redirect(folder)
        sink = Timed(queues.sink(where.url))
        run = Relay(resolve(dsn), sink, Settings(policy="holds", name=relay, poll=poll), log=lambda _: None)
        feeder = threading.Thread(target=feed, args=(dsn, relay, rate, seconds, sink))
        feeder.start()
        run.run()
        feeder.join()
        admin.execute("select pgreaper.reaper_unrelay(%s)", (relay,))
    found = sorted(sink.latencies)
    p50, p99 = statistics.median(found), found[int(0.99 * len(found))]
    return f"| {kind} | {rate:g} | {poll:g} | {1000 * p50:.0f} / {1000 * p99:.0f} / {1000 * found[-1]:.0f} |"


def feed(dsn: str, relay: str, rate: float, seconds: float, sink: Timed) -> None:
    """Expire a hold at a time, then stop the relay when it has delivered them; the first one opens connections."""
    with psycopg.connect(dsn, autocommit=True) as connection:

        def expire_one() -> None:
            connection.execute(INSERT, (1,))
            connection.execute("call pgreaper.reaper_sweep('holds')")

        def wait_for(events: int) -> None:
            while one(connection, "select delivered from pgreaper.relays where name = %s", relay)[0] < events:
                time.sleep(0.02)

        expire_one()
        wait_for(1)
        sink.latencies.clear()
        began, done = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            expire_one()
            done += 1
            time.sleep(max(began + done / rate - time.monotonic(), 0.0))
        wait_for(1 + done)
    os.kill(os.getpid(), signal.SIGTERM)


def commands(dsn: str, kind: str, rate: float, seconds: float, folder: Path) -> str:
    """The other way round: a command for each hold, sent some seconds before its deadline; a row of the table."""
    with psycopg.connect(dsn, autocommit=True) as admin, place(kind, folder) as where:
        admin.execute("truncate holds, pgreaper.transitions")
        group = "&group=bench" if "?" in where.url else "?group=bench"
        source = where.url + (group if kind == "kafka" else "")
        command = [sys.executable, "-m", "pgreaper", "listen", "--from", source, "--database-url", dsn]
        listener = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert listener.stderr is not None  # noqa: S101
        sys.stderr.write(listener.stderr.readline())
        sink = queues.sink(where.url)
        began, done = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            (key,) = one(admin, AHEAD)
            body = json.dumps({"policy": "holds", "key": str(key)}).encode()
            headers = {"content-type": "application/json", "policy": "holds"}
            if not sink.send([Message(body, str(key), str(key), headers)], timeout=30).confirmed:
                raise SystemExit(f"{kind}: a command was not taken")
            done += 1
            time.sleep(max(began + done / rate - time.monotonic(), 0.0))
        sink.close()
        until = time.monotonic() + 60
        while one(admin, "select coalesce(sum(holds), 0) from pgreaper.transitions")[0] < done:
            if time.monotonic() > until:
                raise SystemExit(f"{kind}: not all commands were carried out")
            time.sleep(0.1)
        listener.send_signal(signal.SIGTERM)
        listener.communicate()
        (figures,) = one(admin, LATENESS)
    return f"| {kind} | {rate:g} | {' / '.join(f'{1000 * float(figure):.0f}' for figure in figures)} |"


def _redirect(folder: Path) -> None:
    """Where `stdout:` leads while nobody else writes there."""
    os.dup2(os.open(folder / "stdout", os.O_WRONLY | os.O_CREAT), 1)


def idle(dsn: str, poll: float, seconds: float) -> str:
    """A relay that has nothing to do; a row of the table."""
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("select pgreaper.reaper_relay('holds')")
        command = [sys.executable, "-m", "pgreaper", "relay", "holds", "--to", "stdout:", "--poll", str(poll)]
        relay = subprocess.Popen([*command, "--database-url", dsn], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(3)
        before, used, began = load(admin), _cpu(relay.pid), time.monotonic()
        time.sleep(seconds)
        after, used, waited = load(admin), _cpu(relay.pid) - used, time.monotonic() - began
        relay.send_signal(signal.SIGTERM)
        relay.communicate()
    wal, pages, transactions = (60 * (b - a) / waited for a, b in zip(before, after, strict=True))
    return f"| {poll:g} | {transactions:.0f} | {pages:.0f} | {wal:.0f} | {60 * used / waited:.2f} |"


def _children() -> float:
    """Seconds of processor time of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure on an embedded server and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--events", type=int, default=20_000, help="for each kind")
    parser.add_argument("--rate", type=float, default=20, help="events a second, for the latency")
    parser.add_argument("--seconds", type=float, default=15, help="how long each latency is measured")
    parser.add_argument("--poll", type=float, nargs="+", default=[0.2])
    parser.add_argument("--only", choices=["throughput", "latency", "commands", "idle"])
    options = parser.parse_args()
    say = os.fdopen(os.dup(1), "w", buffering=1)
    kinds = [kind for kind in options.kinds if kind != "rabbitmq" or SERVER.exists()]
    with Cluster(settings={"autovacuum": False}) as cluster, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install(cluster.dsn)
        with psycopg.connect(cluster.dsn, autocommit=True) as admin:
            admin.execute(TABLE)
            say.write(
                f"PostgreSQL {cluster.version} with its default settings but without autovacuum, which would be"
                f" measured too, Python {platform.python_version()}, {os.cpu_count()} cores for the server, the broker"
                " and the relay.\n"
            )
            if options.only in (None, "throughput"):
                each, wal = expire(admin, options.events)
                say.write(f"\nExpiring itself, by reaper_sweep: {1 / each:,.0f} a second, {wal:.0f} bytes of WAL.\n")
                say.write(
                    "\n| queue | events | a second | twice | the relay's processor, µs an event"
                    " | WAL bytes an event | pages an event |\n|---|---:|---:|---:|---:|---:|---:|\n"
                )
                for kind in kinds:
                    say.write(throughput(cluster.dsn, kind, options.events // KINDS[kind], folder) + "\n")
        if options.only in (None, "latency"):
            say.write("\n| queue | events a second | poll, s | p50 / p99 / max, ms |\n|---|---:|---:|---:|\n")
            for kind in kinds:
                for poll in options.poll:
                    say.write(latency(cluster.dsn, kind, options.rate, options.seconds, poll, folder) + "\n")
        if options.only in (None, "commands"):
            say.write("\n| commands from | a second | late p50 / p99 / max, ms |\n|---|---:|---:|\n")
            for kind in kinds:
                if kind not in ("stdout", "http"):
                    say.write(commands(cluster.dsn, kind, options.rate, options.seconds, folder) + "\n")
        if options.only in (None, "idle"):
            say.write(
                "\nIdle, in a minute:\n\n| poll, s | transactions | pages | WAL bytes | the relay's processor, s |\n"
                "|---:|---:|---:|---:|---:|\n"
            )
            for poll in options.poll:
                say.write(idle(cluster.dsn, poll, options.seconds) + "\n")


if __name__ == "__main__":
    main()
