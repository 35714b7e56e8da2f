"""
A job queue that expires holds, one job a hold, as its documentation says one does it well.

This module owns what runs inside the other libraries, and nothing of pgreaper: it is started by ``bench/peers.py``
with an interpreter that has them installed.  It knows three commands: ``install`` the queue's own tables, ``enqueue``
a job for every overdue hold, and ``work`` until no job is left.  ``work`` says ``ready`` when it has connected, begins
with the first line on its input, and answers with one line of JSON; so does ``enqueue``.  Times are those of the
monotonic clock, which all processes of a machine share.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import asyncpg
import procrastinate
import psycopg
import psycopg_pool
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Context, Job
from pgqueuer.queries import Queries
from pgqueuer.types import QueueExecutionMode

DUE = "select id from holds where status = 'held' and expires_at <= clock_timestamp() order by expires_at"

# The guard stands in the job too: between enqueueing and running, the hold may have been consumed or extended.
EXPIRE = """
update holds set status = 'expired'
 where id = {key} and status = 'held' and expires_at <= clock_timestamp()
"""

# Jobs in one call of the bulk enqueue.
CHUNK = 1_000


@dataclass(slots=True)
class Tally:
    """How many holds this process expired, and when the last of them was committed (monotonic seconds)."""

    expired: int = 0
    last: float = 0.0

    def count(self, rows: int) -> None:
        """One job is done."""
        self.expired += rows
        self.last = time.monotonic()


class Queue(Protocol):
    """What a job queue is asked to do."""

    async def install(self) -> None:
        """Lay the queue's own tables."""

    async def enqueue(self) -> int:
        """One job for every overdue hold; returns how many."""

    async def work(self, ready: Callable[[], Coroutine[Any, Any, None]], tally: Tally) -> None:
        """Run jobs until none is left, from when ``ready`` returns."""


async def autocommit(connection: psycopg.AsyncConnection) -> None:
    """Spare the queue a BEGIN and a COMMIT of their own around each of its statements."""
    await connection.set_autocommit(True)


class Procrastinate:
    """Deferred in batches; one process runs so many asynchronous jobs at once, and deletes those that succeeded."""

    def __init__(self, dsn: str, width: int) -> None:
        self.dsn = dsn
        self.width = width
        sizes = {"min_size": width, "max_size": width, "configure": autocommit}
        self.app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn, **sizes))
        self.pool = psycopg_pool.AsyncConnectionPool(dsn, **sizes, open=False)
        self.tally = Tally()
        self.task = self.app.task(name="expire", queue="holds")(self.expire)

    async def expire(self, key: int) -> None:
        """The job."""
        async with self.pool.connection() as connection:
            done = await connection.execute(EXPIRE.format(key="%s"), (key,))
        self.tally.count(done.rowcount)

    async def install(self) -> None:
        """Lay the queue's own tables."""
        async with self.app.open_async():
            await self.app.schema_manager.apply_schema_async()

    async def enqueue(self) -> int:
        """One job for every overdue hold; returns how many."""
        async with self.app.open_async(), self.pool:
            async with self.pool.connection() as connection:
                keys = [row[0] for row in await (await connection.execute(DUE)).fetchall()]
            for start in range(0, len(keys), CHUNK):
                await self.task.batch_defer_async(*({"key": key} for key in keys[start : start + CHUNK]))
        return len(keys)

    async def work(self, ready: Callable[[], Coroutine[Any, Any, None]], tally: Tally) -> None:
        """Run jobs until none is left, from when ``ready`` returns."""
        self.tally = tally
        async with self.app.open_async(), self.pool:
            await ready()
            await self.app.run_worker_async(
                queues=["holds"], concurrency=self.width, wait=False, delete_jobs="successful"
            )


async def as_it_is(_: asyncpg.Connection) -> None:
    """Spare the jobs the reset of a connection that asyncpg's pool does each time it gets one back."""


class PGQueuer:
    """Enqueued in batches; one process takes so many jobs at a time, and runs them on a pool of connections."""

    # Of the jobs' own statements, for each process.
    CONNECTIONS = 8

    def __init__(self, dsn: str, width: int) -> None:
        self.dsn = dsn
        self.width = width

    async def install(self) -> None:
        """Lay the queue's own tables, with the autovacuum settings that its checklist asks for."""
        connection = await asyncpg.connect(self.dsn)
        queries = Queries(AsyncpgDriver(connection))
        await queries.install()
        await queries.optimize_autovacuum()
        await connection.close()

    async def enqueue(self) -> int:
        """One job for every overdue hold; returns how many."""
        connection = await asyncpg.connect(self.dsn)
        queries = Queries(AsyncpgDriver(connection))
        keys = [row["id"] for row in await connection.fetch(DUE)]
        for start in range(0, len(keys), CHUNK):
            some = keys[start : start + CHUNK]
            await queries.enqueue(["expire"] * len(some), [str(key).encode() for key in some], [0] * len(some))
        await connection.close()
        return len(keys)

    async def work(self, ready: Callable[[], Coroutine[Any, Any, None]], tally: Tally) -> None:
        """Run jobs until none is left, from when ``ready`` returns."""
        connection = await asyncpg.connect(self.dsn)
        async with asyncpg.create_pool(
            self.dsn, min_size=self.CONNECTIONS, max_size=self.CONNECTIONS, reset=as_it_is
        ) as pool:
            queue = PgQueuer(AsyncpgDriver(connection), resources={"pool": pool})

            async def expire(job: Job, context: Context) -> None:
                done = await context.resources["pool"].execute(EXPIRE.format(key="$1"), int(job.payload))
                tally.count(int(done.removeprefix("UPDATE ")))

            queue.entrypoint("expire", accepts_context=True)(expire)
            await ready()
            await queue.run(batch_size=self.width, mode=QueueExecutionMode.drain, dequeue_timeout=timedelta(seconds=1))
        await connection.close()


QUEUES: dict[str, Callable[[str, int], Queue]] = {"procrastinate": Procrastinate, "pgqueuer": PGQueuer}


def answer(**values: float) -> None:
    """Tell the process that asked."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


async def starting_shot() -> None:
    """Say that everything is connected, and wait for the word to go."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    threading.Thread(target=end_with_the_other_side, daemon=True).start()


def end_with_the_other_side() -> None:
    """No worker goes on when nobody is there to hear of it."""
    while os.read(0, 1):
        pass
    os._exit(1)


async def run(queue: Queue, command: str) -> None:
    """Do one command."""
    if command == "install":
        await queue.install()
    elif command == "enqueue":
        started = time.monotonic()
        jobs = await queue.enqueue()
        answer(jobs=jobs, seconds=time.monotonic() - started)
    else:
        tally = Tally()
        await queue.work(starting_shot, tally)
        answer(expired=tally.expired, last=tally.last)


def main() -> None:
    """One command of one queue."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("queue", choices=sorted(QUEUES))
    parser.add_argument("command", choices=["install", "enqueue", "work"])
    parser.add_argument("dsn")
    parser.add_argument("--width", type=int, default=10, help="jobs at once, or jobs taken at a time, in one process")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    uvloop.run(run(QUEUES[options.queue](options.dsn, options.width), options.command))


if __name__ == "__main__":
    main()
