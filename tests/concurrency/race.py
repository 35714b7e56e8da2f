"""
The application against the reaper, for each hold within the same few milliseconds, and an audit of what both were told.

Each session of the application lays a hold that will be due in a few milliseconds and acts on it at once: it consumes
it by function, by the plain statement of the documents, or extends it.  Meanwhile one reaper sweeps, another claims
and expires, and commands come for whatever is held, all as fast as they can.  How soon the next hold is due follows
who won the last one, so that neither side wins always, on a busy machine too.  Every hold is a pair, and whoever wins,
both must have been told the truth: the answer, the row and the trail are compared one by one.

``python -m tests.concurrency.race`` runs 10,000 pairs on a server of its own.
"""

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg

from pgreaper import schema
from pgreaper.embedded import Cluster
from tests.concurrency.sessions import Connection, at_once, rows

SOON, SOONEST, LATEST = 0.004, 0.0005, 0.5
"""Seconds until a hold is due, to begin with and at least and at most."""
LATER = "2100-01-01 00:00:00+00"
FUNCTIONS = {
    "consume": "select outcome, state from pgreaper.reaper_consume('race', %s)",
    "extend": f"select outcome, state from pgreaper.reaper_extend('race', %s, '{LATER}')",
    # What docs/application.md shows to those who call no function.
    "plain": "with changed as (update race set status = 'consumed'"
    " where id = %s and status = 'held' and expires_at > clock_timestamp() returning status)"
    " select case when count(*) = 1 then 'consumed' else 'not-eligible' end as outcome, max(status) as state"
    " from changed",
}
TABLE = """
create table race (id bigint primary key, status text not null default 'held', expires_at timestamptz not null,
                   consumed_at timestamptz, written integer not null default 0);
create index on race (expires_at) where status = 'held';
create function race_counts() returns trigger language plpgsql as
  $$ begin new.written := old.written + 1; return new; end $$;
create trigger counts before update on race for each row execute function race_counts();
"""


@dataclass(slots=True)
class Told:
    """What the application was told of each hold, by way; keys that the reapers' own answers call expired."""

    application: dict[int, tuple[str, str, str | None]] = field(default_factory=dict)
    expired: list[int] = field(default_factory=list)
    conflicts: Counter[str] = field(default_factory=Counter)


def lay(db: Connection) -> None:
    """The table and the policy."""
    db.execute(TABLE)
    db.execute(
        "select pgreaper.reaper_register('race', 'race', 'expires_at', 'status', held => '{held}',"
        " expired => 'expired', consumed => 'consumed',"
        " consumed_stamp_column => 'consumed_at', owner => 'tests')"
    )


def run(connect: Callable[[], Connection], pairs: int, applications: int = 2, seed: int | None = None) -> Told:
    """Let them race; returns when no hold is due any more."""
    told, lock = Told(), threading.Lock()
    finished = threading.Event()
    watch = connect()

    def apply(connection: Connection, first: int) -> None:
        chance = random.Random(None if seed is None else seed + first)
        soon = SOON
        for number in range(first, pairs + 1, applications):
            connection.execute(
                "insert into race (id, expires_at) values (%s, clock_timestamp() + %s * interval '1 second')",
                (number, soon * chance.uniform(0.5, 1.5)),
            )
            way = chance.choice(list(FUNCTIONS))
            key = number if way == "plain" else str(number)
            time.sleep(chance.uniform(0, SOON))
            (row,) = rows(connection, FUNCTIONS[way], key)
            with lock:
                told.application[number] = (way, row["outcome"], row["state"])
            soon = min(max(soon * (1.1 if row["outcome"] == "not-eligible" else 1 / 1.1), SOONEST), LATEST)

    def sweep(connection: Connection) -> None:
        while not finished.is_set():
            connection.execute("call pgreaper.reaper_sweep('race', batch => 20)")

    def expire(connection: Connection) -> None:
        rescan = 0
        while not finished.is_set():
            rescan += 1
            claim = rows(
                connection,
                "select token from pgreaper.reaper_claim('race', batch => 20, rescan => %s) limit 1",
                rescan % 10 == 0,
            )
            if claim:
                answer = rows(connection, "select key, outcome from pgreaper.reaper_expire(%s)", claim[0]["token"])
                told.expired += [int(row["key"]) for row in answer if row["outcome"] == "expired"]
                told.conflicts.update(row["outcome"] for row in answer)

    def command(connection: Connection) -> None:
        while not finished.is_set():
            answer = rows(
                connection,
                "select key, outcome from pgreaper.reaper_expire_keys('race',"
                " array(select id::text from race where status = 'held' and expires_at < %s"
                "       order by id desc limit 20))",
                LATER,
            )
            told.expired += [int(row["key"]) for row in answer if row["outcome"] == "expired"]
            told.conflicts.update(row["outcome"] for row in answer)

    def all_applications() -> None:
        try:
            at_once([partial(apply, connect(), first) for first in range(1, applications + 1)])
            # Whatever the application was told is due has to go, too.
            limit = time.monotonic() + 60
            while time.monotonic() < limit and watch.execute(
                "select exists (select from race where status = 'held' and expires_at <= clock_timestamp())"
            ).fetchone() != (False,):
                time.sleep(0.01)
        finally:
            finished.set()

    reapers = [partial(reaper, connect()) for reaper in (sweep, expire, command)]
    everybody: list[Callable[[], None]] = [all_applications, *reapers]
    at_once(everybody)
    return told


def audit(db: Connection, told: Told, pairs: int) -> tuple[list[str], Counter[str]]:
    """Compare what was told with the rows and the trail; what does not fit, and who won how often."""
    found: list[str] = []
    wins: Counter[str] = Counter()
    trail = Counter(int(key) for (key,) in db.execute("select unnest(keys) from pgreaper.transitions").fetchall())
    table = {
        id_: rest
        for id_, *rest in db.execute(
            "select id, status, expires_at = %s, written, (consumed_at >= expires_at) is not true from race", (LATER,)
        )
    }
    for number in range(1, pairs + 1):
        status, later, written, in_time = table[number]
        way, outcome, state = told.application[number]
        if outcome == "consumed":
            fits = (status, later, trail[number], state) == ("consumed", False, 0, "consumed")
        elif outcome == "extended":
            fits = (status, later, trail[number], state) == ("held", True, 0, "held")
        else:
            # Told that it has expired, or that it is due and will.
            fits = (status, later, trail[number], outcome) == ("expired", False, 1, "not-eligible")
            fits = fits and (state in ("expired", "held") or way == "plain")
        if not fits or not in_time or written != 1:
            found.append(
                f"hold {number}: {way} was told {outcome} ({state}); the row is {status}, later: {later},"
                f" written {written} times, {trail[number]} times in the trail, in time: {in_time}"
            )
        wins[outcome if outcome != "not-eligible" else f"expired, {way} came too late ({state})"] += 1
    if missing := set(told.expired) - set(trail):
        found.append(f"a worker was told that these expired, and the trail has none of them: {sorted(missing)[:5]}")
    if twice := [key for key, times in Counter(told.expired).items() if times > 1]:
        found.append(f"two reapers were told that these expired by their doing: {sorted(twice)[:5]}")
    found += [f"verify: {row}" for row in rows(db, "select * from pgreaper.reaper_verify('race') where not holds")]
    return found, wins


def main() -> int:
    """Run it on a server of its own; 1: something did not fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--applications", type=int, default=3, help="sessions of the application")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    with Cluster(settings={"fsync": False, "max_wal_size": "1GB"}) as cluster, ExitStack() as stack:
        dsn = cluster.dsn
        schema.install(dsn)

        def connect() -> psycopg.Connection[Any]:
            connection = psycopg.connect(dsn, autocommit=True)
            stack.callback(connection.close)
            return connection

        db = connect()
        lay(db)
        began = time.monotonic()
        told = run(connect, options.pairs, options.applications, options.seed)
        found, wins = audit(db, told, options.pairs)
        sys.stdout.write(f"{options.pairs:,} pairs in {time.monotonic() - began:.1f} s\n")
        for what, count in sorted(wins.items()):
            sys.stdout.write(f"{count:>8,}  {what}\n")
        for outcome, count in sorted(told.conflicts.items()):
            sys.stdout.write(f"{count:>8,}  told to the claiming worker: {outcome}\n")
        for line in found[:20]:
            sys.stdout.write(f"{line}\n")
        sys.stdout.write(
            "exactly one winner each, and both were told the truth\n" if not found else f"{len(found)} wrong\n"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
