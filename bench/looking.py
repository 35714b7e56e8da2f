"""
What looking costs: time and buffers of every view and figure on a large installation.

    python bench/looking.py [--millions 10]

Ten million rows in the target (a hundred thousand of them dead letters at the head of the index, as many due
behind them), ten million expired holds in the trail, the claims that did it.  Printed as a table for RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import psycopg

from pgreaper.embedded import Cluster

SQL = Path(__file__).parent.parent / "sql"
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
select pgreaper.reaper_register('bookings', 'bookings', 'hold_until', 'status', held => '{held}', expired => 'expired', owner => 'bench');
insert into pgreaper.failures (policy_id, key, deadline, attempts, first_seen_at, failed_at, not_before, error_class)
select 1, id::text, hold_until, 1, now() - interval '2 days', now() - interval '2 days', 'infinity', 'ConstraintViolation'
  from bookings where id <= %(dead)s;
update pgreaper.cursors set position = (select max(deadline) from pgreaper.failures);
insert into pgreaper.transitions (policy_id, token, worker, at, state, holds, keys, deadlines, first_deadline, last_deadline, lateness)
select 1, gen_random_uuid(), 'pgreaper/host/' || b %% 16, now() - (%(rows)s / 500 - b) * interval '0.15 s', 'expired', 500,
       array_agg(k::text), array_agg(now() - interval '90 days' + k * interval '0.1 s'),
       now() - interval '90 days' + min(k) * interval '0.1 s', now() - interval '90 days' + max(k) * interval '0.1 s',
       array_fill(0, array[12]) || array[500] || array_fill(0, array[17])
  from generate_series(1, %(rows)s / 500) as b, generate_series(b * 500, b * 500 + 499) as k
 group by b;
insert into pgreaper.claims (token, policy_id, worker, first_deadline, last_deadline, holds, attempt, claimed_at, claim_until,
                             started_at, finished_at, ending, expired)
select t.token, 1, t.worker, t.first_deadline, t.last_deadline, 500, 1, t.at - interval '9 ms', t.at + interval '60 s', t.at,
       t.at + interval '2 ms', 'expired', 500
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
    "reaper_next_due": "select pgreaper.reaper_next_due('bookings')",
    "reaper_history of one hold": "select * from pgreaper.reaper_history('bookings', '5000001')",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=10)
    rows = int(parser.parse_args().millions * 1_000_000)
    with Cluster(settings={"max_wal_size": "8GB", "shared_buffers": "512MB", "fsync": False}) as cluster:
        with psycopg.connect(cluster.dsn, autocommit=True) as db:
            for line in (SQL / "install.sql").read_text().splitlines():
                if line.startswith("\\ir "):
                    db.execute((SQL / line.split()[1]).read_bytes())
            began = time.monotonic()
            for statement in LAY.split(";\n"):
                values = {"dead": DEAD, "held": DEAD + DUE, "rows": rows}
                db.execute((statement % values).encode())
            db.execute("vacuum analyze")
            print(f"laid in {time.monotonic() - began:.0f} s\n\n| look | ms, warm | buffers |\n|---|---:|---:|")
            for name, query in LOOKS.items():
                times, buffers = [], 0
                for _ in range(3):
                    plan = db.execute(f"explain (analyze, buffers, format json) {query}").fetchone()[0][0]
                    times.append(plan["Execution Time"])
                    buffers = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
                print(f"| `{name}` | {min(times):.1f} | {buffers:,} |", flush=True)
            print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
