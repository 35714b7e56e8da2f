"""The listener's loop, over a pipe: what each message is told, and what trouble of the database does to them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgreaper.errors import DatabaseUnavailable, UnknownPolicy
from pgreaper.listen import Wish, _Pendings
from pgreaper.queues import Received
from tests.conftest import Holds
from tests.listen.conftest import command


def keys(told: list[tuple[Any, Any]]) -> list[Any]:
    """The keys of these messages."""
    return [message["key"] for message, _ in told]


def refusing(db, when, what="raise check_violation"):
    db.execute(
        f"create function refuses() returns trigger language plpgsql as $$ begin {what}; return new; end $$;"
        f" create trigger refuses before update on holds for each row when ({when}) execute function refuses()"
    )


# -- what a message is told


def test_holds_expire_and_their_messages_are_done(holds, listen, trail):
    """In any order and repeated: one transition each, every message is acknowledged."""
    ids = holds.due(30)
    holds.register()
    asked = [*reversed(ids), *ids[:5]]
    run, queue, _ = listen(*(command(n) for n in asked), batch=10)
    assert trail() == dict.fromkeys(ids, 1)
    assert sorted(keys(queue.of("done"))) == sorted(asked)
    assert (run.received, run.done, run.put_off, run.exit_code) == (35, 35, 0, 0)
    assert run.outcomes["expired"] == 30


def test_nothing_is_acknowledged_before_the_commit(holds, listen, gate, wait_until):
    """While the transition runs the queue has been told nothing."""
    holds.due(1)
    holds.register()

    def script(beside):
        beside.say(command(1))
        wait_until(f"select {gate.WAITING}")
        assert beside.queue.told == []
        gate.open()
        beside.wait_for(lambda: beside.queue.told)

    run, queue, _ = listen(script=script)
    assert holds.states() == {1: "expired"}
    assert keys(queue.of("done")) == [1]
    assert run.exit_code == 0


def test_an_early_command_waits_in_the_queue_until_the_deadline(db, holds, listen):
    """It is put off for what the database's clock has left, and expires right after its deadline, not before."""
    holds.register(grace="1 second")

    def script(beside):
        db.execute("insert into holds (expires_at) values (clock_timestamp() + interval '500 ms')")
        beside.say(command(1))
        beside.wait_for(lambda: beside.queue.of("done"))

    run, queue, _ = listen(script=script)
    ((_, seconds),) = queue.of("later")
    assert 0 < seconds <= 1.501
    ((late,),) = db.execute("select at - deadlines[1] from pgreaper.transitions").fetchall()
    assert timedelta(seconds=1) <= late < timedelta(seconds=2)
    assert (run.done, run.put_off, run.exit_code) == (1, 1, 0)


def test_the_databases_clock_decides(holds, listen, set_clock):
    """However wrong this machine's clock is: what is early is put off for as long as it is there."""
    holds.ahead(1, within="1 hour")
    holds.register()
    set_clock(timedelta(minutes=59))
    run, queue, _ = listen(command(1), max_seconds=1)
    ((_, seconds),) = queue.of("later")
    assert 50 < seconds < 61
    assert run.ended == "max-seconds"


def test_what_the_application_ended_is_acknowledged(db, holds, listen):
    """Consumed, gone and never there: nothing is left to do, and nothing failed."""
    holds.due(2)
    holds.register()
    db.execute("update holds set status = 'consumed' where id = 1; delete from holds where id = 2")
    run, queue, _ = listen(command(1), command(2), command(77))
    assert keys(queue.of("done")) == [1, 2, 77]
    assert run.exit_code == 0
    assert run.outcomes == {"not-eligible": 3}


def test_poison_is_rejected_and_the_rest_is_done(db, holds, listen, trail):
    """No command, no such policy, no possible key, a character that the database lacks: each for itself."""
    ids = holds.due(4)
    holds.register()
    poison = [
        b"{",
        command("x"),
        command("1", policy="nobody"),
        command("\u20ac"),
        rb'{"policy": "holds", "key": "\u0000"}',
    ]
    run, queue, lines = listen(*poison, *(command(n) for n in ids), command(3, policy="nobody"))
    assert trail() == dict.fromkeys(ids, 1)
    assert sorted(reason for _, reason in queue.of("reject")) == [
        "Malformed", "Malformed", "UnknownPolicy", "UnknownPolicy", "WrongKey", "WrongKey",
    ]  # fmt: skip
    assert run.rejected == {"Malformed": 2, "UnknownPolicy": 2, "WrongKey": 2}
    assert run.exit_code == 1
    said = "\n".join(lines)
    assert "nobody" not in said
    assert "\u20ac" not in said
    assert said.count("rejected") == 3


def test_a_key_that_cannot_be_sent_does_not_keep_the_others(new_database, install, listen, dsn):
    """A database of another encoding has no such character: the call is halved until the key stands alone."""
    url = new_database()
    with psycopg.connect(url, autocommit=True) as db:
        name = db.info.dbname
    with psycopg.connect(url.replace(name, "postgres"), autocommit=True) as admin:
        admin.execute(f"drop database {name}")
        admin.execute(f"create database {name} template template0 encoding latin1 locale 'C'")
    install(url)
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("create table holds (id text primary key, status text default 'held', expires_at timestamptz)")
        db.execute("insert into holds select g, 'held', '-infinity' from generate_series(1, 8) as g")
        db.execute("select pgreaper.reaper_register('holds', 'holds', deadline_column => 'expires_at',"
                   " status_column => 'status', held => '{held}', expired => 'expired', owner => 'tests')")  # fmt: skip
    messages = [*(command(n) for n in range(1, 9)), command("\u20ac")]
    run, _, _ = listen(*messages, url=url)
    assert run.outcomes == {"expired": 8, "wrong-key": 1}


def test_a_message_with_many_keys_waits_for_all_of_them(db, holds, listen, trail):
    """It is done when none has to wait any more; a wrong key rejects it only then."""
    holds.due(2)
    holds.register()
    db.execute("insert into holds (expires_at) values (clock_timestamp() + interval '300 ms')")
    run, queue, _ = listen(b'{"policy": "holds", "keys": [1, 2, 3, "x"]}', b'{"policy": "holds", "keys": []}', batch=2)
    assert trail() == {1: 1, 2: 1, 3: 1}
    assert [what for what, _, _ in queue.told] == ["done", "later", "reject"]
    assert run.exit_code == 1


def test_keys_that_are_over_are_not_asked_for_again(db, connect, holds, listen, trail):
    """While one of its keys is locked the others of a message cost nothing: no further conflict is in the trail."""
    holds.due(3)
    holds.register()
    other = connect(autocommit=False)
    other.execute("select from holds where id = 2 for update")

    def script(beside):
        beside.say(b'{"policy": "holds", "keys": [1, 2, 3]}')
        beside.wait_for(lambda: len(beside.queue.of("later")) >= 3)
        other.rollback()
        beside.wait_for(lambda: beside.queue.of("done"))
        # Another message is another command.
        beside.say(b'{"policy": "holds", "keys": [1, 2, 3]}')
        beside.wait_for(lambda: len(beside.queue.of("done")) == 2)

    run, _, _ = listen(script=script)
    assert trail() == {1: 1, 2: 1, 3: 1}
    assert (run.outcomes["expired"], run.outcomes["already-done"]) == (3, 3)
    assert db.execute("select count(*) from pgreaper.events where kind = 'already-done'").fetchone() == (3,)


def test_of_too_many_messages_that_wait_the_oldest_is_forgotten():
    """A listener's memory is bounded: by keys, and a message is one more; what is settled frees its own."""
    pendings = _Pendings(4)
    wish = Wish("p", ("a", "b"))
    one, two, three = (Received(b"", 1, None) for _ in range(3))
    assert [pendings.waits(one, ["a"], tried=True) for _ in range(3)] == [1, 2, 3]
    pendings.waits(two, ["b"], tried=False)
    assert (pendings.open(one, wish), pendings.open(two, wish)) == (["b"], ["a"])
    pendings.waits(three, [], tried=True)
    assert (pendings.open(one, wish), pendings.open(two, wish)) == (("a", "b"), ["a"])
    pendings.forget([two, three])
    pendings.waits(one, ["a", "b"], tried=True)
    assert pendings.open(one, wish) == []
    # The newest is remembered, however large.
    pendings.waits(two, "abcdefgh", tried=True)
    assert (pendings.open(one, wish), pendings.open(two, wish)) == (("a", "b"), [])


def test_a_message_may_have_more_keys_than_a_call(holds, listen):
    """They are asked for in several."""
    holds.register()
    keys = ",".join(map(str, range(10_001)))
    run, _, _ = listen(b'{"policy": "holds", "keys": [%s]}' % keys.encode(), batch=20_000)
    assert run.outcomes == {"not-eligible": 10_001}
    assert (run.done, run.exit_code) == (1, 0)


def test_only_accepted_policies(db, holds, listen):
    """With --policy a command for another one is none of this listener's, be it registered or not."""
    holds.due(2)
    holds.register()
    holds.register("others")
    run, queue, _ = listen(command(1), command(2, policy="others"), policies=["holds"])
    assert holds.states() == {1: "expired", 2: "held"}
    assert [reason for _, reason in queue.of("reject")] == ["UnknownPolicy"]
    with pytest.raises(UnknownPolicy, match=r"no policy hold$") as caught:
        listen(policies=["hold"])
    assert caught.value.hint == "Did you mean holds?"
    assert run.exit_code == 1


# -- what has to wait


def test_a_locked_hold_comes_again(connect, holds, listen, trail):
    """Soon, and less and less soon; the others expire meanwhile."""
    holds.due(2)
    holds.register()
    other = connect(autocommit=False)
    other.execute("select from holds where id = 1 for update")

    def script(beside):
        beside.say(command(1), command(2))
        beside.wait_for(lambda: len(beside.queue.of("later")) >= 4)
        assert trail() == {2: 1}
        other.rollback()
        beside.wait_for(lambda: len(beside.queue.of("done")) == 2)

    run, queue, _ = listen(script=script)
    assert trail() == {1: 1, 2: 1}
    for turn, (_, seconds) in enumerate(queue.of("later")):
        assert 0.1 * 2**turn <= seconds <= 0.2 * 2**turn
    assert run.exit_code == 0


def test_a_locked_table_is_told_by_name(connect, holds, listen, trail):
    """Nothing of it can be done: its commands come again, and a run that ends says 75."""
    holds.due(1)
    holds.register()
    other = connect(autocommit=False)
    other.execute("lock table holds in access exclusive mode")
    run, queue, lines = listen(command(1), once=True)
    assert [seconds for _, seconds in queue.of("later")] == [30]
    assert run.exit_code == 75
    assert any(f"is locked by backend {other.info.backend_pid}" in line for line in lines)
    other.rollback()
    listen(command(1))
    assert trail() == {1: 1}


def test_a_run_that_ends_leaves_what_is_locked_or_rests(db, connect, holds, listen):
    """
    It would turn on the spot: such messages come again after its end, early ones at their time.

    A pipe loses them then, which is told, with 75.
    """
    holds.due(1)
    holds.ahead(1, within="5 minutes")
    holds.register()
    holds.register("resting")
    db.execute("select pgreaper.reaper_pause('resting')")
    other = connect(autocommit=False)
    other.execute("select from holds where id = 1 for update")
    run, queue, lines = listen(command(1), command(1, policy="resting"), command(2), once=True)
    seconds = [seconds for _, seconds in queue.of("later")]
    assert sorted(seconds)[:2] == [30, 30]
    assert 290 < max(seconds) < 301
    assert (run.ended, run.put_off, run.lost, run.exit_code) == ("drained", 3, 3, 75)
    (lost,) = [line for line in lines if "lost" in line]
    assert lost.startswith("3 commands not done, and lost with this run: ")
    assert all(key in lost for key in ("holds 1", "resting 1", "holds 2"))


def test_a_dead_letter_is_acknowledged_and_a_retry_comes_in_time(db, holds, listen, trail):
    """What the books have with an owner need not stay in the queue; what is to be tried again comes when it may be."""
    holds.due(3)
    holds.register(backoff_base="1 second", backoff_cap="1 second")
    # A sequence counts what is rolled back, too.
    db.execute("create sequence seen")
    refusing(db, "old.id < 3", "if old.id = 1 then raise check_violation; end if;"
             " if nextval('public.seen') < 3 then raise sqlstate '40001'; end if")  # fmt: skip
    run, queue, lines = listen(*(command(n) for n in (1, 2, 3)))
    assert trail() == {2: 1, 3: 1}
    assert sorted(keys(queue.of("done"))) == [1, 2, 3]
    assert {message["key"] for message, _ in queue.of("later")} == {2}
    assert all(0.3 < seconds <= 1.501 for _, seconds in queue.of("later"))
    assert run.outcomes["dead-letter"] == 1
    assert run.exit_code == 1
    assert any("dead letters" in line for line in lines)


def test_a_policy_that_fails_does_not_stop_the_others(db, holds, listen, trail):
    """Its messages are put off and it is left alone for a while; nobody is rejected, and it goes on by itself."""
    holds.due(3)
    holds.register()
    db.execute("create table gone (like holds including all)")
    holds.register("broken", target="gone")
    db.execute("insert into gone (expires_at) values ('-infinity')")
    db.execute("alter table gone rename to elsewhere")

    def script(beside):
        beside.say(command(1, policy="broken"), command(1), command(2))
        beside.hears("policy broken: ")
        # It rests: this one is put off without another try.
        beside.say(command(2, policy="broken"), command(3))
        beside.wait_for(lambda: len(beside.queue.of("done")) == 3)
        beside.wait_for(lambda: len(beside.queue.of("later")) == 2)
        db.execute("alter table elsewhere rename to gone")
        beside.hears("policy broken works again")
        beside.wait_for(lambda: len(beside.queue.of("done")) == 5)

    run, queue, lines = listen(script=script)
    assert holds.states() == dict.fromkeys((1, 2, 3), "expired")
    assert queue.of("reject") == []
    assert sum("does not exist" in line for line in lines) == 1
    assert run.policies["broken"].failures == 1


def test_a_hold_that_is_too_slow_is_found_by_halving(db, dsn, holds, listen, trail):
    """The others expire; the slow one is charged alone and becomes a dead letter, so that its message ends too."""
    ids = holds.due(8)
    holds.register(max_attempts=1)
    refusing(db, "old.id = 5", "perform pg_sleep(20)")
    run, queue, _ = listen(*(command(n) for n in ids), url=f"{dsn}&options=-c%20statement_timeout%3D400")
    assert trail() == {n: 1 for n in ids if n != 5}
    assert db.execute("select key, error_class from pgreaper.dead_letters").fetchall() == [("5", "StatementTimeout")]
    assert sorted(keys(queue.of("done"))) == ids
    assert run.exit_code == 1


def test_a_batch_that_takes_long_keeps_its_messages(holds, listen, gate, wait_until):
    """They are prolonged at a third of their time, for twice as long as it has taken, and not when they are done."""
    holds.due(3)
    holds.register()

    def script(beside):
        beside.say(*(command(n) for n in (1, 2, 3)))
        wait_until(f"select {gate.WAITING}")
        beside.wait_for(lambda: len(beside.queue.of("keep")) >= 3)
        gate.open()
        beside.wait_for(lambda: len(beside.queue.of("done")) == 3)
        kept = len(beside.queue.of("keep"))
        beside.say(command(77))
        beside.wait_for(lambda: len(beside.queue.of("done")) == 4)
        assert len(beside.queue.of("keep")) == kept

    _, queue, _ = listen(script=script, visibility=0.3)
    for number, seconds in queue.of("keep"):
        assert number == 3
        assert 0.3 <= seconds < 5


def test_long_batches_make_the_next_ones_smaller(db, holds, listen):
    """A batch aims at a second, so that a signal and the next command wait no longer; it grows back."""
    ids = holds.due(40)
    holds.register()
    refusing(db, "old.id <= 20", "perform pg_sleep(0.08)")
    batches: list[int] = []

    def script(beside):
        receive = beside.queue.receive

        def counted(limit, *, wait):
            batches.append(limit)
            return receive(limit, wait=wait)

        beside.queue.receive = counted
        beside.say(*(command(n) for n in ids[:20]))
        beside.wait_for(lambda: len(beside.queue.of("done")) == 20)
        beside.wait_for(lambda: batches and batches[-1] < 20)
        beside.say(*(command(n) for n in ids[20:]))
        beside.wait_for(lambda: len(beside.queue.of("done")) == 40)
        beside.wait_for(lambda: batches[-1] == 20)

    listen(script=script, batch=20)
    assert min(batches) < 20


# -- trouble of the database


def test_a_lost_connection_loses_no_command(db, holds, listen, gate, trail, wait_until):
    """Cut off in mid-transition: what was in hand goes back to the queue, and comes again on a new connection."""
    ids = holds.due(20)
    holds.register()

    def script(beside):
        beside.say(*(command(n) for n in ids))
        wait_until(f"select {gate.WAITING}")
        gate.open()
        db.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'pgreaper/%'")
        beside.hears("connected again")
        beside.wait_for(lambda: len(beside.queue.of("done")) == 20)

    run, _, _ = listen(script=script)
    assert trail() == dict.fromkeys(ids, 1)
    assert run.reconnects == 1
    assert run.exit_code == 0


def test_a_restart_in_mid_stream(cluster, install, listen):
    """The database goes away and comes back: nothing is received meanwhile, everything expires once."""
    install(cluster.dsn)
    with psycopg.connect(cluster.dsn, autocommit=True) as db:
        holds = Holds(db)
        ids = holds.due(400)
        holds.register()

    def script(beside):
        beside.say(*(command(n) for n in ids[:200]))
        beside.wait_for(lambda: beside.queue.of("done"))
        cluster.stop("immediate")
        beside.say(*(command(n) for n in ids[150:]))
        beside.hears("trying again in")
        assert beside.queue.of("later"), "the queue has them back before the database is waited for"
        cluster.start()
        beside.wait_for(lambda: {*keys(beside.queue.of("done"))} == {*ids}, 40)

    run, _, _ = listen(script=script, url=cluster.dsn, batch=50)
    with psycopg.connect(cluster.dsn, autocommit=True) as db:
        assert db.execute("select count(*) from holds where status = 'expired'").fetchone() == (400,)
        found = db.execute("select count(*), count(distinct k) from pgreaper.transitions, unnest(keys) as k").fetchone()
    assert found == (400, 400)
    assert run.exit_code == 0


def test_a_run_that_ends_says_what_is_wrong_with_the_database(listen):
    """Unreachable at the start: raised at once, 75; the messages were not even taken."""
    with pytest.raises(DatabaseUnavailable) as caught:
        listen(command(1), url="postgresql://127.0.0.1:1/none", once=True)
    assert caught.value.exit_code == 75


# -- signals


def test_a_signal_finishes_the_batch(holds, listen, gate, wait_until):
    """What is in hand is expired and acknowledged, what is not is left; exit 0."""
    ids = holds.due(10)
    holds.register()

    def script(beside):
        beside.say(*(command(n) for n in ids))
        wait_until(f"select {gate.WAITING}")
        beside.stop()
        beside.hears("stopping: finishing the batch in hand")
        gate.open()

    run, queue, _ = listen(script=script, batch=5)
    assert run.ended == "signal"
    assert run.exit_code == 0
    assert run.received == run.done == len(queue.of("done"))
    assert list(holds.states().values()).count("expired") == run.done < 10
