"""reaper_fetch: the next events of a relay, leased to one process."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.contract.relays import Relay

PLACE = "select settled::text from pgreaper.relays where name = %s"
BLOCKS = """
select coalesce(sum(pg_stat_get_xact_blocks_fetched(oid)), 0)::int from pg_class
 where relnamespace = 'pgreaper'::regnamespace and relkind in ('r', 'i')
"""
MANY = """
set session_replication_role = replica;  -- nothing is counted
insert into pgreaper.transitions
  (policy_id, at, state, holds, keys, deadlines, first_deadline, last_deadline, lateness)
select p.policy_id, now(), 'expired', 1, array[g::text], array[now()], now(), now(), '{}'
  from pgreaper.policies as p, generate_series(1, %s) as g;
reset session_replication_role
"""


@pytest.fixture
def relay(core, holds):
    """Policy ``p`` on the holds, and its relay."""
    core.register()
    core.call("reaper_relay", policy="p")
    return Relay(core)


def expire(core, holds, n, *, batch=500, policy="p"):
    """Expire n new holds, so many a row of the trail; their keys in order."""
    ids = holds.due(n)
    core.run(policy, batch=batch)
    return [str(one) for one in ids]


def trail(core, *keys, policy="p"):
    """Append a row to the trail by hand; its id."""
    return core.value(
        "insert into pgreaper.transitions (policy_id, at, state, holds, keys, deadlines, first_deadline, last_deadline,"
        " lateness) select policy_id, pgreaper._clock(), 'expired', %s, %s, array_fill(now(), array[%s]), now(), now(),"
        " '{}' from pgreaper.policies where name = %s returning transition_id",
        len(keys), list(keys), len(keys), policy)  # fmt: skip


def test_an_event_tells_what_expired(core, holds, relay):
    """Key, deadline before the transition, time of it, state, and a name that says where in the trail it stands."""
    keys = expire(core, holds, 3)
    batch = relay.fetch(worker="w", lease="5 minutes")
    assert [event.key for event in batch] == keys
    transition = core.value("select max(transition_id) from pgreaper.transitions")
    assert [event.event for event in batch] == [f"{transition}.{n}" for n in (1, 2, 3)]
    assert {(event.state, event.attempt, event.payload) for event in batch} == {("expired", 1, None)}
    assert [(e.key, e.deadline, e.expired_at) for e in batch] == core.rows(
        "select key, deadline::text, at::text from pgreaper.history where outcome = 'expired' order by deadline"
    )
    assert core.rows("select token::text, worker, lease_until::text from pgreaper.deliveries") == [
        (batch[0].token, "w", batch[0].lease_until)
    ]
    assert core.value("select lease_until - leased_at from pgreaper.deliveries") == timedelta(minutes=5)


@pytest.mark.parametrize("per_row", [1, 7, 100])
def test_all_is_delivered_once_in_order_and_the_place_is_one_range(core, holds, relay, per_row):
    """Rows of the trail of any size, in batches of another size; afterwards the place is as small as at first."""
    keys = expire(core, holds, 60, batch=per_row)
    assert relay.drain(batch=11) == keys
    last = core.value("select max(transition_id) from pgreaper.transitions")
    assert core.value(PLACE, "p") == f"{{(,{(last + 1) << 20})}}"
    assert core.value("select count(*) from pgreaper.undelivered") == 0


def test_a_row_of_the_trail_is_split(core, holds, relay):
    """10,000 holds of one statement, a hundred at a time: the batch is never more than was asked for."""
    core.do("insert into holds (expires_at) select now() - interval '1 h' + g * interval '1 ms'"
            " from generate_series(1, 10000) as g")  # fmt: skip
    core.run(batch=10000)
    assert core.column("select holds from pgreaper.transitions") == [10000]
    first, second = relay.fetch(batch=100), relay.fetch(batch=100)
    assert [event.event.split(".")[1] for event in (first + second)] == [str(n) for n in range(1, 201)]
    assert relay.ack(second) == (100, 0, 0, 0)
    assert len(core.value(PLACE, "p")) < 100
    assert relay.ack(first, delivered=[first[50].event]) == (1, 0, 0, 99)
    keys = relay.drain(batch=5000)
    assert len(keys) == 9899
    assert keys[:50] == [event.key for event in first[:50]]
    assert "," in core.value(PLACE, "p")
    assert core.value("select count(*) from unnest((select settled from pgreaper.relays))") == 1


def test_a_relay_hears_of_its_policy_only(core, holds, relay):
    """Others' rows are passed over, also hundreds of them, and the place moves past them."""
    core.do("create table others (like holds including all)")
    core.register("q", "others")
    for n in range(1200):
        trail(core, f"q{n}", policy="q")
    mine = trail(core, "a")
    assert relay.keys() == ["a"]
    assert core.value(PLACE, "p") == f"{{(,{(mine + 1) << 20})}}"


def test_others_rows_move_the_place_in_steps(core, holds, relay, committed):
    """An idle relay writes nothing for few rows of others, and moves on past many: it must not read them each time."""
    core.do("create table others (like holds including all)")
    core.register("q", "others")
    for n in range(300):
        trail(core, f"q{n}", policy="q")
    with core.connection.transaction():
        assert relay.fetch() == []
        assert core.changed_nothing()
    for n in range(300):
        trail(core, f"q{n}", policy="q")
    before = core.value(PLACE, "p")
    assert relay.fetch() == []
    assert core.value(PLACE, "p") != before
    with core.connection.transaction():
        assert relay.fetch() == []
        assert core.changed_nothing()


def test_idle_is_free(core, holds, relay, committed):
    """A long trail behind: no transaction id and a handful of pages, also while another process has a lease."""
    core.do(MANY % 50000, "analyze pgreaper.transitions")
    core.do("update pgreaper.relays set read_at = pgreaper._clock(), settled = int8multirange(int8range(null,"
            " (select max(transition_id) + 1 from pgreaper.transitions) << 20))")  # fmt: skip
    trail(core, "leased", "too")
    batch = relay.fetch()
    assert len(batch) == 2
    relay.fetch()
    with core.connection.transaction():
        before = core.value(BLOCKS)
        assert relay.fetch() == []
        assert core.value(BLOCKS) - before < 40
        assert core.changed_nothing()
    relay.ack(batch)
    with core.connection.transaction():
        before = core.value(BLOCKS)
        assert relay.fetch() == []
        assert core.value(BLOCKS) - before < 40
        assert core.changed_nothing()


def test_far_behind_a_fetch_reads_what_it_takes(core, holds, relay):
    """50,000 rows wait: ten events cost a few pages, whatever the statistics say."""
    core.do(MANY % 50000)
    before = core.value(BLOCKS)
    assert len(relay.fetch(batch=10)) == 10
    assert core.value(BLOCKS) - before < 600


def names(batch):
    """Key and name of each event, sorted."""
    return sorted((event.key, event.event) for event in batch)


def test_one_of_a_hold_at_a_time(core, holds, relay):
    """The next event of a hold comes when the one before is delivered; other holds do not wait for it."""
    one, two, three = (trail(core, "a", "b") for _ in range(3))
    trail(core, "c")
    first = relay.fetch()
    assert [event.key for event in first] == ["a", "b", "c"]
    assert relay.fetch() == []
    assert core.value("select count(*) from pgreaper.undelivered where not_before is null") == 4
    assert core.value("select waiting from pgreaper.relay_status") == 7
    last = trail(core, "d", "b")
    second = relay.fetch()
    assert names(second) == [("d", f"{last}.1")]
    assert relay.ack(first, delivered=[event.event for event in first if event.key != "b"]) == (2, 0, 0, 1)
    # b came back: its first event is the first again, while a goes on.
    third = relay.fetch()
    assert names(third) == [("a", f"{two}.1"), ("b", f"{one}.2")]
    relay.ack(third)
    fourth = relay.fetch()
    assert names(fourth) == [("a", f"{three}.1"), ("b", f"{two}.2")]
    relay.ack(second)
    relay.ack(fourth)
    assert relay.drain() == ["b", "b"]
    assert core.value("select count(*) from pgreaper.undelivered") == 0


def test_a_hold_of_very_many_events(core, holds, relay):
    """A fetch that has something passes a bounded number of them; those of others come with the next."""
    core.do((MANY % 11000).replace("g::text", "'a'"))
    trail(core, "b")
    assert [event.key for event in relay.fetch()] == ["a"]
    assert 10000 <= core.value("select count(*) from pgreaper.undelivered") < 10600
    assert [event.key for event in relay.fetch()] == ["b"]
    assert core.value("select count(*) from pgreaper.undelivered") == 10999
    assert core.value("select waiting from pgreaper.relay_status") == 10002


def test_a_hold_that_waits_for_its_retry_holds_up_itself_only(core, holds, relay, set_clock):
    """Its later events wait with it, others pass; a dead one does not hold up the later ones of its hold."""
    first = trail(core, "a")
    relay.refuse(relay.fetch(), "a", transient=True)
    second, _ = trail(core, "a"), trail(core, "b")
    assert relay.drain() == ["b"]
    set_clock(timedelta(seconds=10))
    batch = relay.fetch()
    assert [(event.event, event.attempt) for event in batch] == [(f"{first}.1", 2)]
    assert relay.refuse(batch, "a") == (0, 0, 1, 0)
    batch = relay.fetch()
    assert [(event.event, event.attempt) for event in batch] == [(f"{second}.1", 1)]


def test_retries_come_first_in_their_order_and_leave_room(core, holds, relay, set_clock):
    """By the time at which they may be tried; half a batch at most, so that the trail goes on beside them."""
    trail(core, "a", "b", "c", "d")
    batch = relay.fetch()
    by_key = {event.key: event.event for event in batch}
    relay.ack(batch, refused=[by_key[key] for key in "dcba"], error_classes=["E"] * 4, transient=[True] * 4,
              retry_in=["10 s", "20 s", "30 s", "40 s"])  # fmt: skip
    trail(core, "e", "f", "g")
    set_clock(timedelta(minutes=1))
    assert relay.keys(batch=4) == ["d", "c", "e", "f"]
    assert relay.keys(batch=4) == ["b", "a", "g"]


def test_a_lapsed_lease_is_taken_over(core, holds, relay, set_clock):
    """The same events, the same names, the next attempt, counted; the old token is refused and changes nothing."""
    trail(core, "a", "b", "c")
    trail(core, "a")
    old = relay.fetch(lease="1 minute")
    set_clock(timedelta(seconds=61))
    new = relay.fetch()
    assert [event.event for event in new] == [event.event for event in old]
    assert {event.attempt for event in new} == {2}
    assert core.value("select redelivered from pgreaper.relays") == 3
    for call in ("reaper_ack(%s)", "reaper_keep(%s)"):
        assert core.refused(f"select pgreaper.{call}", old[0].token).sqlstate == "RP001"
    assert relay.ack(new) == (3, 0, 0, 0)
    assert relay.drain() == ["a"]


def test_a_lapsed_lease_is_taken_over_in_parts(core, holds, relay, set_clock):
    """A smaller batch takes a part; the rest is the next one's, and the old token has neither."""
    trail(core, "a", "b", "c")
    old = relay.fetch(lease="1 minute")
    set_clock(timedelta(seconds=61))
    part = relay.fetch(batch=2)
    assert core.refused("select pgreaper.reaper_ack(%s)", old[0].token).sqlstate == "RP001"
    rest = relay.fetch(batch=2)
    assert ([event.key for event in part], [event.key for event in rest]) == (["a", "b"], ["c"])
    relay.ack(part)
    relay.ack(rest)
    assert relay.drain() == []


def test_what_kills_its_process_is_found(core, holds, relay):
    """A batch that lapses again and again shrinks; the event that is alone at last is given up after twenty times."""
    trail(core, *(f"k{n:02}" for n in range(64)))
    killed, delivered = 0, []
    while batch := relay.fetch():
        if any(event.key == "k40" for event in batch):
            core.do("update pgreaper.deliveries set lease_until = '-infinity' where finished_at is null")
            killed += 1
            assert killed < 100
        else:
            relay.ack(batch)
            delivered += [event.key for event in batch]
    assert len(delivered) == 63
    assert killed <= 25
    assert core.rows("select key, error_class from pgreaper.dead_events") == [("k40", "LeaseExpired")]


def test_payload_is_what_the_row_has_now(core, holds, relay):
    """The columns that were asked for; NULL where the row is gone."""
    keys = expire(core, holds, 3)
    core.do(f"update holds set customer_email = 'new' where id = {keys[0]}", f"delete from holds where id = {keys[1]}")
    batch = relay.fetch(payload=["customer_email", "id"])
    assert [event.payload for event in batch] == [
        {"id": int(keys[0]), "customer_email": "new"},
        None,
        {"id": int(keys[2]), "customer_email": "u3@example.com"},
    ]
    assert [event.key for event in batch] == keys


def test_a_column_that_is_not_there_costs_no_lease(core, holds, relay):
    """42703 that names column and policy, with a remedy; nothing is leased."""
    keys = expire(core, holds, 2)
    error = core.refused("select * from pgreaper.reaper_fetch('p', payload => '{nonsense}')")
    assert (error.sqlstate, error.diag.message_primary) == (
        "42703",
        "column nonsense of public.holds, used by policy p, does not exist",
    )
    assert error.diag.message_hint
    assert relay.drain() == keys


def test_a_key_of_another_time_costs_no_other_its_payload(core, holds, relay):
    """A key that the key column cannot have any more has no payload; the others have theirs."""
    keys = expire(core, holds, 5)
    trail(core, "not a number")
    batch = relay.fetch(payload=["id"])
    assert [event.payload for event in batch] == [{"id": int(key)} for key in keys] + [None]
    assert core.value("select current_setting('search_path')") != "pg_catalog, pg_temp"


FAULTY = """
create function faulty(id bigint, told text) returns text language plpgsql as $$
begin
  if told = 'raise' then raise exception 'no' using errcode = current_setting('faulty.errcode'); end if;
  return told;
end $$;
create view shown as select id, status, expires_at, faulty(id, customer_email) as told from holds
"""


def faulty(core, errcode="22012"):
    """Policy and relay ``v`` on a view whose column raises where an address is ``raise``."""
    core.do(FAULTY, f"set faulty.errcode = '{errcode}'")
    core.register("v", "shown", key_columns=["id"])
    core.call("reaper_relay", policy="v")
    return Relay(core, "v")


@pytest.mark.parametrize("errcode", ["22012", "23514", "P0001", "42883", "XX000"])
def test_a_payload_that_raises_costs_its_own_event(core, holds, errcode, set_clock):
    """It is refused for now with its class, the others are delivered; once it can be read it is sent."""
    keys = [str(one) for one in holds.due(5)]
    core.do(f"update holds set customer_email = 'raise' where id in ({keys[0]}, {keys[3]})")
    relay = faulty(core, errcode)
    trail(core, *keys, "nonsense", policy="v")
    batch = relay.fetch(payload=["told"])
    assert [event.key for event in batch] == [keys[1], keys[2], keys[4], "nonsense"]
    assert all(event.payload["told"].endswith("@example.com") for event in batch[:3])
    assert batch[3].payload is None
    assert core.rows("select key, attempts, error_class from pgreaper.undelivered order by event") == [
        (keys[0], 1, f"Payload {errcode}"),
        (keys[3], 1, f"Payload {errcode}"),
    ]
    assert relay.ack(batch) == (4, 0, 0, 0)
    core.do("update holds set customer_email = 'mended'", f"delete from holds where id = {keys[3]}")
    set_clock(timedelta(minutes=1))
    batch = relay.fetch(payload=["told"])
    assert sorted((event.key, event.attempt, event.payload) for event in batch) == sorted(
        [(keys[0], 2, {"told": "mended"}), (keys[3], 2, None)]
    )


def test_a_payload_that_never_can_be_read_is_given_up(core, holds):
    """After twenty times, and then the next of its hold is looked at; a fetch goes past those that raise."""
    bad, good = (str(one) for one in holds.due(2))
    core.do(f"update holds set customer_email = 'raise' where id = {bad}")
    relay = faulty(core)
    first, second = (trail(core, bad, policy="v") for _ in range(2))
    for _ in range(20):
        assert relay.fetch(payload=["told"]) == []
        core.do("update pgreaper.undelivered set not_before = pgreaper._clock() where not_before < 'infinity'")
    assert core.rows("select event, key, attempts, error_class from pgreaper.dead_events") == [
        (f"{first}.1", bad, 20, "Payload 22012")
    ]
    assert core.value("select refused from pgreaper.relays where name = 'v'") == 1
    assert core.column(f"select attempts from pgreaper.undelivered where event >> 20 = {second}") == [1]
    trail(core, good, policy="v")
    assert relay.keys(batch=1, payload=["told"]) == [good]


def test_very_many_payloads_that_raise(core, holds):
    """A fetch passes them for a second, books how far it came, and a later one reaches what can be read."""
    good = holds.due(1)
    core.do("insert into holds (customer_email, expires_at) select 'raise', now() from generate_series(1, 1500)")
    relay = faulty(core)
    core.do((MANY % 1500).replace("array[g::text]", f"array[(g + {good[0]})::text]"))
    trail(core, str(good[0]), policy="v")
    assert relay.fetch(batch=5, payload=["told"]) == []
    assert 5 <= core.value("select count(*) from pgreaper.undelivered") < 1500
    batches = (relay.fetch(batch=1000, payload=["told"]) for _ in range(20))
    assert [event.key for event in next(filter(None, batches))] == [str(good[0])]


def test_what_no_payload_can_be_read_for_is_no_event_s_fault(core, holds):
    """A right that is missing is told, and nobody is charged."""
    keys = [str(one) for one in holds.due(3)]
    relay = faulty(core)
    trail(core, *keys, policy="v")
    core.do("revoke execute on function faulty from public")
    core.do("create role poor", "grant usage on schema public to poor", "grant select, update on shown, holds to poor")
    core.call("reaper_grant", role="poor", kind="worker")
    core.do("set local role poor")
    error = core.refused("select * from pgreaper.reaper_fetch('v', payload => '{told}')")
    core.do("reset role")
    assert error.sqlstate == "42501"
    assert core.value("select count(*) from pgreaper.undelivered") == 0
    assert relay.drain() == keys


def test_a_trail_that_was_emptied(core, holds, relay):
    """What was leased or refused is told from the notes or forgotten, and the relay goes on with what comes."""
    trail(core, "a", "b")
    relay.refuse(relay.fetch(), "a", "b")
    trail(core, "c", "d")
    leased = relay.fetch()
    trail(core, "c")
    assert relay.fetch() == []
    core.do("truncate pgreaper.transitions")
    core.call("reaper_resend", relay="p")
    assert relay.drain() == ["a", "b"]
    core.do("update pgreaper.deliveries set lease_until = '-infinity' where finished_at is null")
    assert relay.drain() == ["c"]
    assert core.refused("select pgreaper.reaper_ack(%s)", leased[0].token).sqlstate == "RP001"
    trail(core, "e")
    assert relay.drain() == ["e"]


def test_a_trail_that_counts_from_the_start_again(core, holds, relay):
    """Its new ids lie where everything was settled: they are delivered all the same, and the status says when."""
    for n in range(20):
        trail(core, f"k{n}")
    assert len(relay.drain()) == 20
    trail(core, "leased")
    relay.fetch()
    core.do("truncate pgreaper.transitions restart identity")
    assert relay.drain() == []
    for n in range(3):
        trail(core, f"k{n}")
    assert relay.drain() == ["k0", "k1", "k2"]
    assert core.value("select restarted_at is not null from pgreaper.relay_status") is True
    trail(core, "k0")
    assert relay.drain() == ["k0"]


EMPTY = "truncate pgreaper.transitions restart identity"


@pytest.fixture
def young(core, holds):
    """A relay on a trail whose numbers are small, so that a new one soon passes them."""
    core.register()
    core.do(EMPTY)
    core.call("reaper_relay", policy="p")
    return Relay(core)


@pytest.mark.parametrize("more", [0, 1, 5])
def test_a_new_trail_that_has_come_as_far_as_the_old_one(core, holds, young, more):
    """Nobody looked before its numbers reached those that are settled: the rows are others, so they are delivered."""
    for n in range(3):
        trail(core, f"k{n}")
    assert len(young.drain()) == 3
    core.do(EMPTY)
    keys = [f"n{n}" for n in range(3 + more)]
    for key in keys:
        trail(core, key)
    assert young.drain() == keys
    assert core.value("select restarted_at is not null from pgreaper.relay_status") is True
    assert young.drain() == []


def test_a_new_trail_whose_last_used_number_is_a_hole(core, holds, young):
    """The row before the hole tells."""
    for n in range(3):
        trail(core, f"k{n}")
    assert len(young.drain()) == 3
    core.do(EMPTY)
    new = [trail(core, f"n{n}") for n in range(5)]
    core.do(f"delete from pgreaper.transitions where transition_id = {new[2]}")
    assert young.drain() == ["n0", "n1", "n3", "n4"]


def numbered(core, number, key, like, at="t.at"):
    """Append a row of one hold with this number, otherwise like another one."""
    core.do("insert into pgreaper.transitions overriding system value"
            " select (jsonb_populate_record(t, jsonb_build_object("
            f"'transition_id', {number}, 'holds', 1, 'keys', array['{key}'], 'at', {at}))).*"
            f" from pgreaper.transitions as t where transition_id = {like}")  # fmt: skip


def test_a_late_row_is_no_new_trail(core, holds, relay):
    """A number that commits late may have a later time than those after it; what is settled is not sent again."""
    trail(core, "a")
    late = core.value("select nextval('pgreaper.transitions_transition_id_seq')")
    last = trail(core, "b")
    # A cache: nobody can say that the hole is one.
    core.do("alter sequence pgreaper.transitions_transition_id_seq cache 2")
    assert relay.drain() == ["a", "b"]
    numbered(core, late, "late", last, at="pgreaper._clock()")
    core.do(f"delete from pgreaper.transitions where transition_id = {last}")
    assert relay.drain() == ["late"]
    assert core.value("select restarted_at from pgreaper.relay_status") is None


@pytest.mark.parametrize("lapsed", [True, False])
def test_a_trail_that_was_emptied_under_a_lease(core, holds, young, lapsed):
    """No event of the new trail is taken for a leased one: each comes with what it tells, and the old token is lost."""
    trail(core, "a", "b")
    trail(core, "same")
    old = young.fetch()
    core.do(EMPTY)
    for key in ("c", "same", "d"):
        trail(core, key)
    if lapsed:
        core.do("update pgreaper.deliveries set lease_until = '-infinity'")
    assert core.refused("select pgreaper.reaper_ack(%s)", old[0].token).sqlstate == "RP001"
    batch = young.fetch()
    assert [(event.key, event.attempt, event.deadline is None) for event in batch] == [
        ("c", 1, False),
        ("same", 1, False),
        ("d", 1, False),
    ]
    assert young.ack(batch) == (3, 0, 0, 0)


def test_a_lapsed_event_is_known_by_its_place_and_key(core, holds, relay):
    """A row with that number that is shorter, or of other holds, is not the one that was leased."""
    first, second, third = trail(core, "a", "b"), trail(core, "c"), trail(core, "d")
    relay.fetch()
    core.do("update pgreaper.deliveries set lease_until = '-infinity'",
            f"delete from pgreaper.transitions where transition_id in ({first}, {second})")  # fmt: skip
    numbered(core, first, "a", third)
    numbered(core, second, "x", third)
    batch = relay.fetch()
    assert [(event.key, event.attempt, event.deadline is None) for event in batch] == [("a", 2, False), ("d", 2, False)]


LONG = "select string_agg(md5(g::text), '') from generate_series(1, 400) as g"


def test_a_key_longer_than_an_index_takes(core, holds, relay, set_clock):
    """12,800 characters that do not compress: refused, parked, promoted and tried again as any other."""
    key = core.value(LONG)
    trail(core, key, "a")
    batch = relay.fetch()
    trail(core, key)
    assert relay.fetch() == []
    assert relay.refuse(batch, key, transient=True) == (1, 1, 0, 0)
    set_clock(timedelta(minutes=1))
    assert relay.keys() == [key]
    assert relay.drain() == [key]


def test_a_sequence_that_was_set_to_what_the_table_holds(core, holds, relay):
    """After a failover ids that were rolled back come again: what was seen last is where the relay looks from."""
    trail(core, "a")
    with core.connection.transaction(force_rollback=True):
        trail(core, "gone")
    assert relay.drain() == ["a"]
    relay.fetch()
    core.do("select setval(pg_get_serial_sequence('pgreaper.transitions', 'transition_id'),"
            " (select max(transition_id) + 1 from pgreaper.transitions), false)")  # fmt: skip
    trail(core, "b")
    assert relay.drain() == ["b"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"batch": 0}, "batch must be between 1 and 10000, not 0"),
        ({"batch": 10001}, "batch must be between 1 and 10000, not 10001"),
        ({"batch": None}, "batch must be between 1 and 10000, not NULL"),
        ({"lease": "0"}, "a lease must be positive"),
        ({"lease": None}, "a lease must be positive"),
    ],
)
def test_nonsense_is_refused(core, holds, relay, arguments, told):
    """22023, with what is wrong; nothing is leased."""
    trail(core, "a")
    names = ", ".join(f"{name} => %s" for name in arguments)
    error = core.refused(f"select * from pgreaper.reaper_fetch('p', {names})", *arguments.values())
    assert (error.sqlstate, told in str(error)) == ("22023", True)
    assert relay.drain() == ["a"]


def test_no_such_relay(core, holds):
    """RP002, with the remedy."""
    for name in ("nobody", None):
        error = core.refused("select * from pgreaper.reaper_fetch(%s)", name)
        assert (error.sqlstate, error.diag.message_primary) == ("RP002", f"there is no relay {name or 'NULL'}")
        assert "reaper_relay()" in error.diag.message_hint


@pytest.mark.parametrize("level", ["isolation level repeatable read", "read only"])
def test_where_it_cannot_work(core, holds, committed, relay, level):
    """RP004: with an old snapshot it would skip; a read-only node cannot lease."""
    trail(core, "a")
    with core.connection.transaction(force_rollback=True):
        core.do(f"set transaction {level}")
        assert core.refused("select * from pgreaper.reaper_fetch('p')").sqlstate == "RP004"
