"""What is locked, for how long, and in which order; each of these showed a fault once."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.concurrency.sessions import Connection, Session, drain, rows
from tests.concurrency.test_leases import PATIENT
from tests.conftest import Holds

CLAIM = "select * from pgreaper.reaper_claim('holds', batch => %s)"
EXPIRE = "select key, outcome, state from pgreaper.reaper_expire(%s)"
SWEEP = "call pgreaper.reaper_sweep('holds')"
# Lock cycles are found at once, and not hidden by somebody's giving way.
WATCHFUL = {"options": "-c deadlock_timeout=20ms"}
# A door in the transition: whoever holds the advisory lock keeps it shut.
DOOR = """
create function door() returns trigger language plpgsql as
$$ begin perform pg_advisory_xact_lock_shared(1); return null; end $$;
create trigger z_door after update of status on holds for each statement execute function door();
"""


@pytest.fixture
def doorman(db: Connection, session: Callable[..., Session]) -> Session:
    """A session that keeps transitions waiting, after they wrote the holds, until it commits."""
    db.execute(PATIENT)
    db.execute(DOOR)
    doorman = session(autocommit=False)
    doorman.run("select pg_advisory_xact_lock(1)")
    return doorman


def test_a_sweep_that_took_leases_back_does_not_keep_claims_waiting(
    db: Connection,
    witnessed: Holds,
    session: Callable[..., Session],
    doorman: Session,
    set_clock: Callable[..., None],
):
    """The cursor is free while the user's triggers run: taking back and expiring are two transactions of a sweep."""
    witnessed.register()
    witnessed.due(4)
    sweeper, worker = session(**WATCHFUL), session(**WATCHFUL)
    rows(db, CLAIM, 1)
    set_clock(timedelta(minutes=5))

    swept = sweeper.starts_waiting(SWEEP)
    assert sweeper.blockers() == {doorman.pid}
    claim = worker.start(CLAIM, 2)
    assert worker.settle(), "the claim waits for the sweep"
    doorman.connection.commit()

    claim.result()
    assert swept.result(timeout=30)[0]["expired"] == 3
    assert [row["key"] for row in rows(db, "select key from pgreaper.events where kind = 'retry'")] == ["1"]


def test_a_sweep_does_not_wait_for_a_claim_to_take_leases_back(
    db: Connection, witnessed: Holds, session: Callable[..., Session], set_clock: Callable[..., None]
):
    """Somebody has the cursor: then it is their turn to take back, and the sweep goes on with what is due."""
    witnessed.register()
    witnessed.due(4)
    sweeper, worker = session(**WATCHFUL), session(autocommit=False)
    rows(db, CLAIM, 1)
    set_clock(timedelta(minutes=5))
    worker.run("select from pgreaper.cursors for update")

    swept = sweeper.start(SWEEP)
    assert sweeper.settle(), "the sweep waits for the cursor"

    assert swept.result()[0]["expired"] == 3
    worker.connection.rollback()


@pytest.mark.parametrize("rate_limit", [None, 100])
def test_a_sweep_and_a_claim_that_close_the_same_failures(
    db: Connection,
    witnessed: Holds,
    session: Callable[..., Session],
    doorman: Session,
    set_clock: Callable[..., None],
    rate_limit: int | None,
):
    """Both find retries whose holds were consumed: neither waits for the other, let alone in a circle."""
    witnessed.register(backoff_base="0", backoff_cap="0", rate_limit=rate_limit)
    witnessed.due(4)
    sweeper, worker = session(**WATCHFUL), session(**WATCHFUL)
    rows(db, CLAIM, 2)
    set_clock(timedelta(minutes=5))
    rows(db, CLAIM, 100)  # takes back; leases one of the two again, on its second attempt
    set_clock(timedelta(minutes=10))
    rows(db, CLAIM, 100)
    db.execute("delete from pgreaper.claims where finished_at is null")
    doorman.connection.commit()
    db.execute("update holds set status = 'consumed' where id in (1, 2)")
    doorman.run("select pg_advisory_xact_lock(1)")
    assert rows(db, "select count(*) from pgreaper.failures where not_before <= pgreaper._clock()")[0]["count"] == 2

    swept = sweeper.starts_waiting(SWEEP)
    assert sweeper.blockers() == {doorman.pid}
    claim = worker.start(CLAIM, 2)
    assert worker.settle(), "the claim waits for the sweep"
    doorman.connection.commit()

    assert claim.exception(timeout=30) is None
    assert swept.result(timeout=30)
    assert drain(db, "rest") is not None
    assert rows(db, "select * from pgreaper.failures") == []
    assert witnessed.states() == {1: "consumed", 2: "consumed", 3: "expired", 4: "expired"}


# An equality operator of the user's, for the status' own type, that a door can be put into: the one way to
# stop a scan between its snapshot and the lock of a row, which is where the fault was.
HOOK = """
create type hold_state;
create function hold_state_in(cstring) returns hold_state immutable strict language internal as 'textin';
create function hold_state_out(hold_state) returns cstring immutable strict language internal as 'textout';
create type hold_state (input = hold_state_in, output = hold_state_out, like = text, collatable = true);
alter table holds alter status drop default;
drop index holds_due;
alter table holds alter status type hold_state using status::hold_state, alter status set default 'held';
create table hooked (n int);
create function same_state(a hold_state, b hold_state) returns boolean language plpgsql volatile as $$
begin
  if a::text = 'parked' and exists (select from public.hooked) then
    perform pg_advisory_xact_lock_shared(1);
  end if;
  return a::text = b::text;
end $$;
create operator = (leftarg = hold_state, rightarg = hold_state, function = same_state);
create function before(hold_state, hold_state) returns boolean immutable strict language internal as 'text_lt';
create function compared(hold_state, hold_state) returns integer immutable strict language internal as 'bttextcmp';
create operator < (leftarg = hold_state, rightarg = hold_state, function = before);
create operator class hold_states default for type hold_state using btree as
  operator 1 <, operator 3 =, function 1 compared(hold_state, hold_state);
"""


def test_a_row_that_changes_in_the_instant_of_its_lock_is_not_taken_for_a_veto(
    db: Connection, holds: Holds, session: Callable[..., Session]
):
    """The application commits a harmless change between the snapshot and the lock: the hold is expired, not charged."""
    db.execute(HOOK)
    db.execute(PATIENT)
    holds.register(held=["held", "parked"])
    holds.due(2)
    db.execute("update holds set status = 'parked' where id = 1")
    reaper, application, doorman = session(), session(autocommit=False), session(autocommit=False)
    for node in ("seqscan", "bitmapscan"):  # visits the holds in the order of their keys
        reaper.run(f"set enable_{node} = off")
    token = reaper.run(CLAIM, 2)[0]["token"]
    db.execute("update holds set customer_email = 'moved' where id = 1")  # its hint leads nowhere now
    application.run("update holds set customer_email = 'changed' where id = 2")  # its hint leads to a locked row
    doorman.run("select pg_advisory_xact_lock(1)")
    db.execute("insert into hooked values (1)")

    answer = reaper.starts_waiting(EXPIRE, token)
    assert reaper.blockers() == {doorman.pid}  # in the second pass, at hold 1, with its snapshot taken
    application.connection.commit()
    doorman.connection.commit()

    assert {row["key"]: row["outcome"] for row in answer.result(timeout=30)} == {"1": "expired", "2": "expired"}
    assert rows(db, "select * from pgreaper.failures") == []


def test_a_release_and_an_expire_of_one_claim_that_suspends_the_policy(
    db: Connection, holds: Holds, session: Callable[..., Session]
):
    """An expire may need the cursor after its claim, so a release takes the two in that order as well."""
    holds.register()
    holds.due(20)
    db.execute(PATIENT)
    db.execute(
        "create function broken() returns trigger language plpgsql as"
        " $$ begin perform pg_advisory_xact_lock_shared(1); raise exception 'broken'; end $$;"
        "create trigger broken before update of status on holds for each row execute function broken()"
    )
    expiring, releasing, doorman = session(**WATCHFUL), session(**WATCHFUL), session(autocommit=False)
    token = rows(db, CLAIM, 20)[0]["token"]
    doorman.run("select pg_advisory_xact_lock(1)")

    expired = expiring.starts_waiting(EXPIRE, token)
    released = releasing.starts_waiting("select pgreaper.reaper_release(%s) as given_back", token)
    assert releasing.blockers() == {expiring.pid}
    doorman.connection.commit()

    assert {row["outcome"] for row in expired.result(timeout=30)} == {"retry"}
    assert released.result(timeout=30) == [{"given_back": 0}]
