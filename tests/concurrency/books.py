"""
What must hold between the table of holds and pgreaper's books, judged by SQL.

The judge is a trigger that writes down every change of a hold in the transaction that made it.  It knows nothing
of pgreaper's books, so a fault in them cannot hide in it: trail and witness must tell the same story.
"""

from tests.concurrency.sessions import Connection, rows

# The application of these tests never writes the state `expired`: whoever does is the reaper.
WITNESS = """
create table witness (
  change bigint generated always as identity,
  id bigint not null,
  old_status text, new_status text,
  old_deadline timestamptz, new_deadline timestamptz,
  early boolean,
  by text);

create function witness() returns trigger language plpgsql as $$
begin
  insert into public.witness (id, old_status, new_status, old_deadline, new_deadline, early, by)
  values (coalesce(new.id, old.id), old.status, new.status, old.expires_at, new.expires_at,
          old.expires_at > pgreaper._clock(), current_setting('application_name'));
  return null;
end $$;

-- Who touches an expired hold does not expire it again, unless it is the reaper that does.
create view witnessed as
select * from witness
where new_status = 'expired' and (old_status is distinct from 'expired' or by like 'reaper%');

create trigger witness after insert or update or delete on holds for each row execute function witness();
"""

SHARED = "an incarnation of a hold is in one active claim"
INVARIANTS = {
    "once: a hold's incarnation makes the transition at most once": """
        select key, deadline, count(*) from pgreaper.history where outcome = 'expired'
        group by policy, key, deadline having count(*) > 1""",
    "together: what is in the trail happened to the table": """
        select key, deadline from pgreaper.history where outcome = 'expired'
        except all
        select id::text, old_deadline from witnessed""",
    "together: what happened to the table is in the trail": """
        select id::text, old_deadline from witnessed
        except all
        select key, deadline from pgreaper.history where outcome = 'expired'""",
    "guarded: only what was held and due is expired": """
        select * from witnessed where old_status is distinct from 'held' or early is distinct from false""",
    "one row version: the reaper writes a hold once, to expire it": """
        select * from witness
        where by like 'reaper%' and old_status is not null and new_status is distinct from 'expired'""",
    "the table is as its last change left it": """
        select h.id, h.status, w.new_status from holds as h
        left join lateral (select * from witness as w where w.id = h.id order by w.change desc limit 1) as w on true
        where (h.status, h.expires_at) is distinct from (w.new_status, w.new_deadline)""",
    # An incarnation: what the application holds anew while it is leased is due anew, and may be claimed as such.
    SHARED: """
        select policy_id, key, deadline, count(*)
        from pgreaper.claims, unnest(keys, deadlines) as k (key, deadline) where finished_at is null
        group by policy_id, key, deadline having count(*) > 1""",
    "fenced: the claim that was taken back stays taken back": """
        select c.token, c.ending from pgreaper.events as e join pgreaper.claims as c on c.token = e.token
        where e.kind = 'taken-back' and c.ending is distinct from 'taken-back'""",
    "fenced: a claim that was given back or taken back expired nothing": """
        select c.token, c.ending, t.keys from pgreaper.transitions as t join pgreaper.claims as c on c.token = t.token
        where c.ending <> 'expired'""",
    "the claim counts what happened": """
        select c.token, c.expired, t.holds from pgreaper.claims as c
        left join (select token, sum(holds) as holds from pgreaper.transitions group by token) as t on t.token = c.token
        where c.ending = 'expired' and (c.expired <> coalesce(t.holds, 0)
          or c.holds <> c.expired + c.already_done + c.not_eligible + c.locked + c.retry + c.dead_letter)""",
    "nobody is charged without an event": """
        select f.key, f.attempts from pgreaper.failures as f
        where f.attempts > (select count(*) from pgreaper.events as e
          where (e.policy_id, e.key, e.deadline) = (f.policy_id, f.key, f.deadline)
            and e.kind in ('retry', 'dead-letter'))""",
    "charged: only for a lease that lapsed": """
        select key, error_class, sqlstate from pgreaper.failures where error_class <> 'LeaseExpired'""",
}

OPEN = """
select token::text from pgreaper.claims where finished_at is null
union all
select key from pgreaper.failures where not_before < 'infinity'"""
LOST = "select id, status, expires_at from holds where status = 'held' and expires_at <= pgreaper._clock()"


def violations(connection: Connection, *promises: str) -> list[str]:
    """Return which of these promises (else: of all) does not hold, with the rows that show it."""
    return [
        f"{promise}: {broken[:3]}"
        for promise in promises or INVARIANTS
        if (broken := rows(connection, INVARIANTS[promise]))
    ]


def settle(connection: Connection) -> None:
    """Let every lease lapse and every retry come due, and expire what is left."""
    for _ in range(100):
        connection.execute("update pgreaper.claims set claim_until = pgreaper._clock() where finished_at is null")
        connection.execute("update pgreaper.failures set not_before = pgreaper._clock() where not_before < 'infinity'")
        claim = rows(connection, "select token from pgreaper.reaper_claim('holds', rescan => true, worker => 'settle')")
        if claim:
            rows(connection, "select pgreaper.reaper_expire(%s)", claim[0]["token"])
        elif not rows(connection, OPEN):
            return


def lost(connection: Connection) -> list[str]:
    """After :func:`settle`: the holds that are due and that nothing will ever expire."""
    return [f"lost: {row}" for row in rows(connection, LOST)]
