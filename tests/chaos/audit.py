"""
The tables of the chaos run, and what must be true when it is over.

The judge is a witness: a trigger that writes down every change of a hold in the transaction that made it.  It
knows nothing of pgreaper's books, so a fault in them cannot hide in it.  ``pgreaper verify`` is asked apart.
"""

from typing import Any

import psycopg
from psycopg.rows import dict_row

# `holds` is plain; some of its holds are poison: their transition raises or is vetoed.  `slow` is partitioned (its
# rows are addressed by key) and its transitions take their time.  The application never writes `expired`.
TABLES = """
create table holds (
  id bigint primary key,
  status text not null default 'held',  -- held | consumed | expired
  expires_at timestamptz not null);
create index holds_due on holds (expires_at) where status = 'held';

create table slow (like holds including all) partition by hash (id);
create table slow_0 partition of slow for values with (modulus 2, remainder 0);
create table slow_1 partition of slow for values with (modulus 2, remainder 1);

-- A key is poison for ever, also when its hold is deleted and another one takes its place.
create function is_poison(id bigint) returns boolean language sql immutable return id % 89 = 0 or id % 149 = 0;
create function poison() returns trigger language plpgsql as $$
begin
  if new.id % 149 = 0 then
    return null;
  end if;
  raise exception 'poison';
end $$;
create trigger poison before update on holds for each row
  when (new.status = 'expired' and is_poison(new.id)) execute function poison();

create function takes_its_time() returns trigger language plpgsql as $$
begin
  perform pg_sleep(case when new.id % 40 = 0 then 0.1 else 0.003 end);
  return new;
end $$;
create trigger takes_its_time before update on slow for each row
  when (new.status = 'expired') execute function takes_its_time();

create table witness (
  change bigint generated always as identity,
  target text not null,
  id bigint not null,
  old_status text, new_status text,
  old_deadline timestamptz, new_deadline timestamptz,
  early boolean,
  by text);
create function witness() returns trigger language plpgsql as $$
begin
  insert into public.witness (target, id, old_status, new_status, old_deadline, new_deadline, early, by)
  values (tg_argv[0], coalesce(new.id, old.id), old.status, new.status, old.expires_at, new.expires_at,
          old.expires_at > clock_timestamp(), current_setting('application_name'));
  return null;
end $$;
create trigger witness after insert or update or delete on holds for each row execute function witness('holds');
create trigger witness after insert or update or delete on slow for each row execute function witness('slow');

create view rows_now as
select 'holds' as target, id, status, expires_at from holds
union all
select 'slow', id, status, expires_at from slow;

create view poison_keys as
select distinct target, id::text as key from witness where target = 'holds' and is_poison(id);
"""

# The leases are short, so that whoever is stopped or stalled for some seconds loses them.
REGISTER = """
select pgreaper.reaper_register(%(policy)s::text, %(policy)s::regclass, 'expires_at', 'status', array['held'],
  'expired', owner => 'chaos', objective => '2 seconds',
  batch => %(batch)s, rate_limit => %(rate)s, max_claims => %(claims)s,
  lease => case %(policy)s when 'slow' then interval '3 seconds' else '2 seconds' end,
  max_attempts => 8, backoff_base => '100 ms', backoff_cap => '2 seconds')
"""
PLAIN = {"batch": 40, "rate": None, "claims": None}
POLICIES = ("holds", "slow")

_TRAIL = "select policy, key, deadline from pgreaper.history where outcome = 'expired'"
_SEEN = "select target, id::text, old_deadline from witness where new_status = 'expired'"

_TWICE = (
    "select policy, key, deadline, count(*) from ({}) as t (policy, key, deadline) group by 1, 2, 3 having count(*) > 1"
)
DUPLICATES = _TWICE.format(_TRAIL)
DUPLICATES_SEEN = _TWICE.format(_SEEN)

# Held, and neither expired nor given up: when everybody has finished, nothing ever comes for these.
LOST = """
select n.target as policy, n.id::text as key, n.expires_at as deadline
  from rows_now as n
 where n.status = 'held'
   and not exists (select from pgreaper.failures as f join pgreaper.policies as p using (policy_id)
                    where (p.name, f.key, f.deadline) = (n.target, n.id::text, n.expires_at)
                      and f.not_before = 'infinity')
"""
OPEN = """
select p.name as policy, 'claim ' || c.token as key
  from pgreaper.claims as c join pgreaper.policies as p using (policy_id) where c.finished_at is null
union all
select p.name, f.key
  from pgreaper.failures as f join pgreaper.policies as p using (policy_id) where f.not_before < 'infinity'
"""

# Each of these finds nothing when its promise was kept.
PROMISES = {
    "once, says the trail": DUPLICATES,
    "once, says the witness": DUPLICATES_SEEN,
    "what is in the trail happened to the table": f"{_TRAIL} except all {_SEEN}",
    "what happened to the table is in the trail": f"{_SEEN} except all {_TRAIL}",
    "only what was held is expired, nothing consumed": """
        select target, id, old_status, by from witness
        where new_status = 'expired' and old_status is distinct from 'held'""",
    "nothing is expired early, nothing extended": """
        select target, id, old_deadline, by from witness
        where new_status = 'expired' and early is distinct from false""",
    "only pgreaper expires, and it writes a hold once": """
        select target, id, old_status, new_status, by from witness
        where (by like 'pgreaper%') <> (new_status is not distinct from 'expired')""",
    "the table is as its last change left it": """
        select n.target, n.id, n.status, w.new_status from rows_now as n
        full join (select distinct on (target, id) * from witness order by target, id, change desc) as w
          on (w.target, w.id) = (n.target, n.id)
        where (n.status, n.expires_at) is distinct from (w.new_status, w.new_deadline)""",
    "nothing is lost": LOST,
    "nothing is left open": OPEN,
    "every poison hold that is held is a dead letter, unless an operator discarded it": """
        select target, id::text, expires_at from rows_now where target = 'holds' and status = 'held' and is_poison(id)
        except select policy, key, deadline from pgreaper.dead_letters
        except select p.name, e.key, e.deadline from pgreaper.events as e join pgreaper.policies as p using (policy_id)
        where e.kind = 'discard'""",
    "every dead letter is a poison hold": """
        select policy, key, deadline, error_class, attempts from pgreaper.dead_letters
        where (policy, key) not in (select target, key from poison_keys)""",
    "no poison hold is expired": """
        select target, id, by from witness where target = 'holds' and new_status = 'expired' and is_poison(id)""",
    "no innocent hold was ever given up": """
        select p.name, e.key, e.error_class, e.attempts
        from pgreaper.events as e join pgreaper.policies as p using (policy_id)
        where e.kind = 'dead-letter' and (p.name, e.key) not in (select target, key from poison_keys)""",
    "innocent holds are charged for lost leases and by their handler only": """
        select p.name, e.key, e.kind, e.error_class, e.sqlstate
        from pgreaper.events as e join pgreaper.policies as p using (policy_id)
        where e.kind = 'retry' and e.error_class not in ('LeaseExpired', 'Retry')
          and (p.name, e.key) not in (select target, key from poison_keys)""",
    "nobody is charged without an event": """
        select p.name, f.key, f.attempts from pgreaper.failures as f join pgreaper.policies as p using (policy_id)
        where f.attempts > (select count(*) from pgreaper.events as e
          where (e.policy_id, e.key, e.deadline) = (f.policy_id, f.key, f.deadline)
            and e.kind in ('retry', 'dead-letter'))""",
    "a lease that was taken back stays taken back": """
        select p.name, c.token, c.ending from pgreaper.events as e
        join pgreaper.claims as c on c.token = e.token join pgreaper.policies as p on p.policy_id = c.policy_id
        where e.kind = 'taken-back' and c.ending is distinct from 'taken-back'""",
    "whose lease was taken back expired nothing afterwards": """
        select p.name, t.keys[1], c.token, t.at, c.finished_at from pgreaper.transitions as t
        join pgreaper.claims as c on c.token = t.token join pgreaper.policies as p on p.policy_id = c.policy_id
        where c.ending = 'taken-back' and t.at > c.finished_at + interval '2 seconds'""",
    "a claim counts what happened": """
        select p.name, c.token, c.expired, t.holds from pgreaper.claims as c
        join pgreaper.policies as p on p.policy_id = c.policy_id
        left join (select token, sum(holds) as holds from pgreaper.transitions group by token) as t on t.token = c.token
        where c.ending = 'expired' and (c.expired <> coalesce(t.holds, 0)
          or c.holds <> c.expired + c.already_done + c.not_eligible + c.locked + c.retry + c.dead_letter)""",
}

_FIGURES = """
select (select count(*) from witness where old_status is null) as inserted,
       (select count(*) from witness where new_status = 'held' and old_status <> 'held') as held_again,
       (select count(*) from witness
         where new_status = 'held' and old_status = 'held' and new_deadline > old_deadline) as extended,
       (select count(*) from witness where new_status = 'consumed') as consumed,
       (select count(*) from witness where new_status is null) as deleted,
       (select count(*) from poison_keys) as poison,
       (select coalesce(sum(holds), 0)::bigint from pgreaper.transitions) as transitions,
       (select coalesce(sum(holds), 0)::bigint from pgreaper.transitions where token is null) as transitions_by_sweep,
       (select count(*) from pgreaper.events where kind in ('already-done', 'not-eligible')) as conflicts,
       (select count(*) from pgreaper.events where kind = 'retry') as retries,
       (select count(*) from pgreaper.events
         where kind = 'retry' and error_class = 'LeaseExpired') as retries_after_lost_lease,
       (select count(*) from pgreaper.claims) as claims,
       (select count(*) from pgreaper.events where kind = 'taken-back') as taken_back,
       (select count(*) from pgreaper.events where kind = 'suspend') as suspensions,
       (select count(*) from pgreaper.events where kind = 'replay') as replays,
       (select count(*) from pgreaper.events where kind = 'discard') as discards,
       (select count(*) from pgreaper.events where kind = 'pause') as pauses,
       (select count(*) from pgreaper.events where kind = 'dead-letter') as deaths,
       (select count(*) from pgreaper.dead_letters) as dead_letters
"""


def prepare(connection: psycopg.Connection[Any]) -> None:
    """Create the tables and register the policies."""
    connection.execute(TABLES)
    put_right(connection)


def put_right(connection: psycopg.Connection[Any]) -> None:
    """Register the policies plainly; none is paused."""
    for policy in POLICIES:
        connection.execute(REGISTER, {"policy": policy, **PLAIN})
        connection.execute("select pgreaper.reaper_resume(%s)", (policy,))


def is_quiet(connection: psycopg.Connection[Any]) -> bool:
    """
    Whether there is nothing left to do.

    A policy of which only poison is left is suspended for good reason: who could tell whether it is the holds or the
    policy?  The next customer's hold tells, so there is one.
    """
    suspended = connection.execute("select policy from pgreaper.status where state = 'suspended'").fetchall()
    for (policy,) in suspended:
        connection.execute(
            f"insert into {policy} (id, expires_at)"
            " select n, clock_timestamp() from generate_series(1000000001, 1000001000) as n"
            f" where not is_poison(n) and not exists (select from {policy} as h where h.id = n)"
            f"   and not exists (select from {policy} as h where h.id > 1000000000 and h.status = 'held')"
            " limit 1"
        )
    row = connection.execute(f"select not exists ({LOST}) and not exists ({OPEN})").fetchone()
    return row is not None and bool(row[0]) and not suspended


def broken(connection: psycopg.Connection[Any]) -> dict[str, list[str]]:
    """Which promises were not kept, each with the rows that show it."""
    found: dict[str, list[str]] = {}
    for promise, query in PROMISES.items():
        if rows := connection.execute(query).fetchall():
            found[promise] = [" ".join(str(value) for value in row) for row in rows]
    return found


def figures(connection: psycopg.Connection[Any]) -> dict[str, int]:
    """What happened, counted."""
    with connection.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(_FIGURES).fetchone()
        assert row is not None
    duplicates = connection.execute(f"select count(*) from ({DUPLICATES} union all {DUPLICATES_SEEN}) as d").fetchone()
    lost = connection.execute(f"select count(*) from ({LOST}) as l").fetchone()
    assert duplicates is not None
    assert lost is not None
    return row | {"duplicates": duplicates[0], "lost": lost[0]}
