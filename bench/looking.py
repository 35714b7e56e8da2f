"""
What looking costs: time and buffers of every view and figure on a large installation.

``python bench/looking.py [--millions 10]`` lays ten million rows in the target (a hundred thousand of them dead
letters at the head of the index, as many due behind them), ten million expired holds in the trail and the claims
that did it, and prints a table.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import psycopg

from pgreaper.embedded import Cluster
from pgreaper.schema import install

DEAD = 100_000
DUE = 100_000

LAY = """
create table bookings (id bigint primary key, tenant integer not null, note text, attributes jsonb,
                       status text not null, hold_until timestamptz not null);
insert into bookings
select g, g %% 100, 'booking ' || g, jsonb_build_object('seats', g %% 7, 'channel', 'web', 'ref', md5(g::text)),
       case when g <= %(held)s or g %% 2 = 0 then 'held' else 'expired' end,
       case when g <= %(dead)s then now() - interval '3 days' + g * interval '1 ms'
            when g <= %(held)s then now() - interval '1 hour' + g * interval '1 ms'
            when g %% 2 = 0 then now() + interval '1 day' + g * interval '1 ms'
            else now() - interval '30 days' + g * interval '0.1 s' end
  from generate_series(1, %(rows)s) as g;
create index on bookings (hold_until) where status = 'held';
select pgreaper.reaper_register('bookings', 'bookings', 'hold_until', 'status',
                                held => '{held}', expired => 'expired', owner => 'bench');
insert into pgreaper.failures
  (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)
select 1, id::text, hold_until, 1, now() - interval '2 days', now() - interval '2 days', 'infinity', 'Refused'
  from bookings where id <= %(dead)s;
update pgreaper.cursors set position = (select max(deadline) from pgreaper.failures);
insert into pgreaper.transitions
  (policy_id, token, worker, at, state, holds, keys, deadlines, first_deadline, last_deadline, lateness)
select 1, gen_random_uuid(), 'pgreaper/host/' || b %% 16, now() - (%(rows)s / 500 - b) * interval '0.15 s',
       'expired', 500,
       array_agg(k::text), array_agg(now() - interval '90 days' + k * interval '0.1 s'),
       now() - interval '90 days' + min(k) * interval '0.1 s', now() - interval '90 days' + max(k) * interval '0.1 s',
       array_fill(0, array[12]) || array[500] || array_fill(0, array[17])
  from generate_series(1, %(rows)s / 500) as b, generate_series(b * 500, b * 500 + 499) as k
 group by b;
insert into pgreaper.claims
  (token, policy_id, worker, first_deadline, last_deadline, holds, attempt, claimed_at, claim_until, started_at,
   finished_at, ending, expired)
select t.token, 1, t.worker, t.first_deadline, t.last_deadline, 500, 1, t.at - interval '9 ms', t.at + interval '60 s',
       t.at, t.at + interval '2 ms', 'expired', 500
  from pgreaper.transitions as t;
"""

LOOKS = {
    "status": "select * from pgreaper.status",
    "metrics": "select * from pgreaper.metrics",
    "backlog": "select * from pgreaper.backlog",
    "activity": "select * from pgreaper.activity",
    "leases": "select * from pgreaper.leases",
    "dead_letters, newest 50": "select * from pgreaper.dead_letters order by died_at desc limit 50",
    "reaper_preview": "select * from pgreaper.reaper_preview('bookings')",
    "_agenda, rescan": "select * from pgreaper._agenda(rescan => '{bookings}')",
    "_moot, 1000 dead letters": "select cardinality(m.keys) from pgreaper.policies as p,"
    " lateral pgreaper._moot(p, pgreaper._target(p), clock_timestamp()) as m",
    "reaper_next_due": "select pgreaper.reaper_next_due('bookings')",
    "reaper_history of one hold": "select * from pgreaper.reaper_history('bookings', '5000001')",
}


def lay(db: "psycopg.Connection[tuple[Any, ...]]", rows: int) -> None:
    """Fill the target and the books."""
    values = {"dead": DEAD, "held": DEAD + DUE, "rows": rows}
    for statement in LAY.split(";\n"):
        db.execute((statement % values).encode())
    db.execute("vacuum analyze")


def on_cpu(db: "psycopg.Connection[tuple[Any, ...]]") -> float:
    """Milliseconds that the backend has had a processor; how busy the machine is does not matter."""
    return int(Path(f"/proc/{db.info.backend_pid}/schedstat").read_text().split()[0]) / 1e6


def cost(db: "psycopg.Connection[tuple[Any, ...]]", query: str) -> tuple[float, float, int]:
    """Milliseconds on a processor, milliseconds by the clock, and shared buffers of a query: the best of three."""
    runs = []
    for _ in range(3):
        before = on_cpu(db)
        [(plans,)] = db.execute(f"explain (analyze, buffers, format json) {query}".encode()).fetchall()
        plan = plans[0]["Plan"]
        buffers = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        runs.append((on_cpu(db) - before, plans[0]["Execution Time"], buffers))
    return min(runs)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=10)
    rows = int(parser.parse_args().millions * 1_000_000)
    settings: dict[str, str | int | bool] = {"max_wal_size": "8GB", "shared_buffers": "512MB", "fsync": False}
    with Cluster(settings=settings) as cluster, psycopg.connect(cluster.dsn, autocommit=True) as db:
        install(cluster.dsn)
        began = time.monotonic()
        lay(db, rows)
        lines = [f"{rows:,} rows, laid in {time.monotonic() - began:.0f} s", ""]
        lines += ["| look | ms of a processor | ms, warm | buffers |", "|---|---:|---:|---:|"]
        for name, query in LOOKS.items():
            processor, milliseconds, buffers = cost(db, query)
            lines.append(f"| `{name}` | {processor:.1f} | {milliseconds:.1f} | {buffers:,} |")
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
