"""reaper_claim_batch and reaper_expire_batch: a claim as a whole, for whoever needs no keys."""

from datetime import timedelta

import pytest


def claimed(core, **arguments):
    [found] = core.call("reaper_claim_batch", "token::text", "holds", "attempt", policy="p", **arguments)
    return found


def settled(core, token, **arguments):
    """Counts by outcome, and the next claim."""
    [(outcomes, counts, *following)] = core.call(
        "reaper_expire_batch", "outcomes", "counts", "f.token::text", "f.holds", token=token, **arguments
    )
    return dict(zip(outcomes, counts, strict=True)), tuple(following)


def test_it_is_the_claim_of_any_other_call(core, holds):
    """The same lease, token and number; and nothing due is a row without a token."""
    holds.due(3)
    core.register()
    token, number, attempt = claimed(core, batch=2, worker="w")
    assert (number, attempt) == (2, 1)
    assert core.rows("select token::text, holds, worker from pgreaper.leases") == [(token, 2, "w")]
    assert {hold.key for hold in core.claim()} == {"3"}
    assert claimed(core) == (None, None, None)


def test_every_outcome_is_counted(core, holds):
    """What became of a mixed batch is what reaper_expire() says of it, and so it stays when it is asked again."""
    holds.due(9)
    core.register(max_attempts=1)
    core.do(
        "create function no() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$",
        "create trigger no before update on holds for each row when (old.id = 9 and new.status = 'expired')"
        " execute function no()",
    )
    token, _, _ = claimed(core)
    core.do(
        "update holds set status = 'consumed' where id in (1, 2)",
        "delete from holds where id = 3",
        "update holds set status = 'expired' where id = 4",
    )
    first = core.expire(token, ["5", "6", "9"])
    assert [first[key][0] for key in "569"] == ["expired", "expired", "dead-letter"]
    # What was settled before counts too.
    told = {"expired": 4, "already-done": 1, "not-eligible": 3, "dead-letter": 1}
    assert settled(core, token) == (told, (None, None))
    assert settled(core, token, next=5) == (told, (None, None))
    assert core.rows("select expired, already_done, not_eligible, dead_letter from pgreaper.claims") == [(4, 1, 3, 1)]


def test_a_locked_hold_is_counted(committed, core, holds):
    """Nothing is recorded of it: the next round takes it."""
    holds.due(3)
    core.register()
    token, _, _ = claimed(core)
    with committed() as other:
        other.execute("begin")
        other.execute("select from holds where id = 2 for update")
        assert settled(core, token, next=9) == ({"expired": 2, "locked": 1}, (None, None))


def test_a_claim_that_came_to_nothing_is_asked_about_again(committed, core, holds):
    """All of it was locked: the books have nothing to tell, and nothing is claimed on their behalf."""
    holds.due(2)
    core.register()
    token, _, _ = claimed(core)
    with committed() as other:
        other.execute("begin")
        other.execute("select from holds for update")
        assert settled(core, token, next=9) == ({"locked": 2}, (None, None))
        other.execute("rollback")
    assert settled(core, token, next=9) == ({}, (None, None))
    assert core.claim()


def test_the_next_claim_comes_in_the_same_transaction(core, holds):
    """Of the same policy and worker, as large as asked for; none when nothing is left."""
    holds.due(7)
    core.register()
    token, _, _ = claimed(core, batch=2, worker="w")
    counts, (following, number) = settled(core, token, next=4)
    assert (counts, number) == ({"expired": 2}, 4)
    assert core.rows("select token::text, holds, worker from pgreaper.leases") == [(following, 4, "w")]
    counts, (last, number) = settled(core, following, next=4)
    assert (counts, number) == ({"expired": 4}, 1)
    assert settled(core, last, next=4) == ({"expired": 1}, (None, None))


@pytest.mark.parametrize("ending", ["released", "unknown"])
def test_a_lease_that_is_lost(core, holds, ending):
    """As with reaper_expire(): RP001, and nothing is claimed either."""
    holds.due(4)
    core.register()
    token, _, _ = claimed(core, batch=2)
    if ending == "released":
        core.call("reaper_release", token=token)
    else:
        token = "00000000-0000-0000-0000-000000000000"
    held = core.value("select count(*) from pgreaper.leases")
    assert core.refused("select pgreaper.reaper_expire_batch(%s, next => 2)", token).sqlstate == "RP001"
    assert core.value("select count(*) from pgreaper.leases") == held


def test_what_the_claim_raises_undoes_the_transition(core, holds):
    """Both or neither: whoever asks again without `next` has the transition."""
    holds.due(4)
    core.register()
    token, _, _ = claimed(core, batch=2)
    assert core.refused("select pgreaper.reaper_expire_batch(%s, next => 0)", token).sqlstate == "22023"
    assert set(holds.states().values()) == {"held"}
    assert settled(core, token) == ({"expired": 2}, (None, None))


def test_when_its_first_hold_was_settled(core, holds, set_clock):
    """A claim whose holds are settled one after the other started with the first."""
    holds.due(3)
    core.register()
    token, _, _ = claimed(core)
    set_clock(timedelta(seconds=20))
    core.expire(token, ["1"])
    set_clock(timedelta(seconds=40))
    assert settled(core, token)[0] == {"expired": 3}
    assert core.rows(
        "select round(extract(epoch from started_at - claimed_at)), round(extract(epoch from finished_at - started_at))"
        "  from pgreaper.claims"
    ) == [(20, 20)]


def test_the_cursor_stands_at_the_last_deadline(core, holds):
    """So does the lease say it, from the first to the last."""
    holds.due(5)
    core.register()
    claimed(core, batch=3)
    ends = "select min(expires_at), max(expires_at) from (select expires_at from holds order by 1 limit 3) as h"
    assert core.rows("select first_deadline, last_deadline from pgreaper.claims") == core.rows(ends)
    assert core.rows("select position from pgreaper.cursors") == [(core.rows(ends)[0][1],)]


def test_where_the_clocks_are_put_forward_later_may_be_sooner(core):
    """Half past two, which there never was, comes after three: the order of the column is not that of instants."""
    core.do(
        "create table bookings (id int primary key, until timestamp, status text not null default 'held')",
        "insert into bookings values (1, '2026-03-29 02:30'), (2, '2026-03-29 03:00')",
    )
    core.register(target="bookings", deadline_column="until", zone="Europe/Berlin")
    claimed(core)
    assert core.rows("select first_deadline, last_deadline from pgreaper.claims") == core.rows(
        "select '2026-03-29 01:00Z'::timestamptz, '2026-03-29 01:30Z'::timestamptz"
    )


@pytest.mark.parametrize("call", ["reaper_expire", "reaper_expire_batch"])
def test_a_trigger_that_changes_the_path_for_good_lets_no_stranger_in(committed, core, holds, call):
    """What comes after the transition means the server's own names, whatever the caller's path has."""
    holds.due(3)
    core.register()
    core.do(
        "create schema evil",
        "create function evil.unnest(text[]) returns setof text language sql as $$ select 'evil' $$",
        "create function evil.cardinality(text[]) returns int language sql as $$ select 77 $$",
        "create function path() returns trigger language plpgsql as"
        " $$ begin perform pg_catalog.set_config('search_path', 'public', false); return new; end $$",
        "create trigger path before update on holds for each row execute function path()",
    )
    token = core.claim()[0].token
    core.do("set search_path = evil, pg_catalog, public")
    if call == "reaper_expire":
        assert core.expire(token) == dict.fromkeys("123", ("expired", "expired"))
    else:
        assert settled(core, token) == ({"expired": 3}, (None, None))
