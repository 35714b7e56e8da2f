"""What only a pooler shows: shared server connections, startup parameters, its own failures."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper.api import Reaper
from pgreaper.connection import Unreachable, connect, refused_parameter, resolve
from pgreaper.errors import InvalidInput, LeaseLost

if TYPE_CHECKING:
    from pathlib import Path

    from tests.pooler.conftest import Pooler

# What a daemon that has trouble with the environment, and nothing else, says.
LINES = re.compile(r"(pgreaper: (.* is up, .*|.*; trying again in [\d.]+ m?s|connected again)\n)+")
SETTLED = "select not exists (select from holds where status = 'held' and expires_at < now())"

# What an application that gets the server connection next would find: settings, and what lives on a session.
FOOTPRINT = """
select jsonb_build_object(
  'settings', (select jsonb_object_agg(name, setting) from pg_settings
                where name in ('lock_timeout', 'statement_timeout', 'idle_in_transaction_session_timeout', 'jit',
                               'search_path', 'role', 'session_authorization', 'TimeZone', 'DateStyle',
                               'IntervalStyle', 'default_transaction_isolation', 'default_transaction_read_only',
                               'client_min_messages')),
  'changed', (select jsonb_agg(name order by name) from pg_settings
               where source = 'session' and name !~ '^transaction_'
                 -- The pooler sets these for each client, as the client wants them.
                 and name not in ('client_encoding', 'DateStyle', 'TimeZone', 'application_name',
                                  'standard_conforming_strings')),
  'own', concat(current_setting('pgreaper.search_path', true), current_setting('pgreaper.lock_timeout', true)),
  'user', current_user,
  'temporary', (select count(*) from pg_class where relnamespace = pg_my_temp_schema()),
  'advisory', (select count(*) from pg_locks where locktype = 'advisory'),
  'prepared', (select count(*) from pg_prepared_statements),
  'cursors', (select count(*) from pg_cursors where name <> ''),
  'listening', (select count(*) from pg_listening_channels()))
"""


def footprint(url: str) -> tuple[int, dict[str, Any]]:
    """The backend that serves the next transaction, and what it carries along."""
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as application:
        pid, found = application.execute(f"select pg_backend_pid(), ({FOOTPRINT})").fetchone()  # type: ignore[misc]
    return pid, found


def clean(found: dict[str, Any]) -> bool:
    return (
        found["changed"] is None
        and not found["own"]
        and all(found[what] == 0 for what in ("temporary", "advisory", "prepared", "cursors", "listening"))
    )


def settled(db: psycopg.Connection[Any]) -> bool:
    return db.execute(SETTLED).fetchone() == (True,)


def late(db: psycopg.Connection[Any]) -> None:
    """One more hold that is due, beyond the cursor, so that no rescan is waited for."""
    db.execute("insert into holds (expires_at) values (now() - interval '1 second')")


def wait_for(check, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            pytest.fail("that never came about")
        time.sleep(0.01)


def test_these_tests_go_through_the_pooler(db, pooler):
    """Or all of this folder proves nothing: libpq was told another backend than the one that answers."""
    ((pid,),) = db.execute("select pg_backend_pid()").fetchall()
    assert pid != db.info.backend_pid
    assert [p["pool_mode"] for p in pooler.show("pools") if p["database"].startswith("pgreaper")] == ["transaction"]


def test_c063_four_daemons_on_two_server_connections(db, holds, past, pooler, start, wait_until):
    """More than a hundred polls each, and holds all the time: no error, no prepared statement, one transition each."""
    holds.register()
    daemons = [start("work", "--daemon", "--poll", "0.02") for _ in range(4)]
    wait_for(lambda: sum(d.popen.poll() is None for d in daemons) == 4 and _clients(pooler) >= 4)

    def transactions() -> int:
        (mine,) = [s for s in pooler.show("stats_totals") if s["database"] == past.info.dbname]
        return int(mine["xact_count"])

    began = transactions()
    for _ in range(10):
        holds.due(20, overdue="1 minute")
        reached = transactions() + 80
        wait_for(lambda reached=reached: transactions() > reached)
    wait_for(lambda: transactions() - began > 4 * 200)
    wait_until(SETTLED)
    for daemon in daemons:
        daemon.popen.send_signal(signal.SIGTERM)
    results = [daemon.end()[0] for daemon in daemons]

    assert [r.code for r in results] == [0] * 4
    assert all(len(r.err.splitlines()) == 1 for r in results), [r.err for r in results]
    keys = [key for (key,) in past.execute("select unnest(keys) from pgreaper.transitions")]
    assert len(keys) == len(set(keys)) == 200
    assert (pooler.log().count("ERROR"), past.execute("select count(*) from pgreaper.failures").fetchone()) == (0, (0,))


def _clients(pooler: Pooler) -> int:
    return sum(1 for c in pooler.show("clients") if c["application_name"].startswith("pgreaper/"))


COMMANDS = [
    ["register", "holds", "holds", "--deadline", "expires_at", "--status", "status", "--held", "held",
     "--expired", "expired", "--owner", "tests"],
    ["preview", "holds"], ["status"], ["status", "holds"], ["policies"], ["pause", "holds"], ["resume", "holds"],
    ["work"], ["history", "holds", "1"], ["verify"],
    ["dead", "list"], ["dead", "show", "holds", "2"], ["dead", "replay", "holds", "--key", "2", "--reason", "mended"],
    ["dead", "discard", "holds", "--key", "3", "--reason", "gone"],
    ["install"], ["install", "--check"], ["unregister", "holds"],
]  # fmt: skip
# What they find is their own tests' business.
LOOKS = [["doctor"], ["discover"], ["cron", "status"]]


@pytest.mark.parametrize("pooler", [{"default_pool_size": "1"}], indirect=True)
def test_c066_every_command_leaves_nothing_behind(pooler, new_database, pgreaper):
    """One server connection, an install, every command, an uninstall: the next client finds it as new."""
    name = new_database().partition("?")[0].rpartition("/")[2]
    url = pooler.url(name)
    pid, before = footprint(url)
    installed = pgreaper("install", url=url)
    assert (installed.code, installed.err) == (0, ""), installed
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as application:
        application.execute(
            """
            create table holds (id bigint primary key, status text not null, expires_at timestamptz not null);
            insert into holds select g, 'held', now() - interval '10 seconds' from generate_series(1, 3) as g;
            create function bad() returns trigger language plpgsql as
              $$ begin if new.id > 1 then raise check_violation; end if; return new; end $$;
            create trigger bad before update on holds for each row execute function bad();
            """
        )
    for command in COMMANDS:
        result = pgreaper(*command, url=url)
        # Two holds are refused by the trigger: the run says so.
        assert result.code == (1 if command == ["work"] else 0), (command, result)
        assert footprint(url) == (pid, before), command
    for command in LOOKS:
        assert pgreaper(*command, url=url).code in (0, 1, 3), command
        assert footprint(url) == (pid, before), command
    assert pgreaper("uninstall", "--force", url=url).code == 0
    assert footprint(url) == (pid, before)
    assert clean(before)


@pytest.mark.parametrize("pooler", [{"default_pool_size": "1"}], indirect=True)
@pytest.mark.parametrize("end", ["drained", "failed", "terminated", "killed"])
def test_c066_runs_leave_nothing_behind(dsn, past, holds, start, end):
    """However a run ends: the application that is served next finds no setting, no lock, no transaction of ours."""
    holds.due(300, overdue="10 minutes")
    holds.register(batch=50)
    if end == "failed":
        past.execute(
            "create function bad() returns trigger language plpgsql as $$ begin raise check_violation; end $$;"
            "create trigger bad before update on holds for each row execute function bad();"
        )
    elif end in ("terminated", "killed"):
        past.execute(
            "create function slow() returns trigger language plpgsql as"
            " $$ begin perform pg_sleep(0.05); return new; end $$;"
            "create trigger slow before update on holds for each row execute function slow();"
        )
    pid, before = footprint(dsn)
    worker = start("work", "--shutdown-timeout", "5")
    if end in ("terminated", "killed"):
        asleep = "select exists (select from pg_stat_activity where wait_event = 'PgSleep')"
        wait_for(lambda: past.execute(asleep).fetchone() == (True,))
        worker.popen.send_signal(signal.SIGTERM if end == "terminated" else signal.SIGKILL)
    result, _ = worker.end()
    assert result.code == {"drained": 0, "failed": 1, "terminated": 0, "killed": -9}[end], result

    after_pid, after = footprint(dsn)
    assert after == before
    assert clean(after)
    # Killed in mid-statement: the pooler does not give that server connection to anybody else.
    assert (after_pid == pid) == (end != "killed")
    # The backend of a killed worker ends with its statement; nothing waits in a transaction.
    open_ = """select count(*) from pg_stat_activity
                where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle'"""
    wait_for(lambda: past.execute(open_).fetchone() == (0,))


SHOWN = """
create table seen (name text, value text);
create function look() returns trigger language plpgsql as $$
begin
  insert into seen
  select s, current_setting(s) from unnest(array['statement_timeout', 'lock_timeout', 'TimeZone', 'work_mem']) as s;
  return new;
end $$;
create trigger look before update on holds for each row execute function look();
"""
WANTED = "-c statement_timeout=7s --work-mem=1234kB -c TimeZone=Asia/Tokyo -c lock_timeout=9s"


@pytest.mark.parametrize("ignored", [False, True])
def test_c065_settings_in_the_url(new_pooler, postgresql, past, pgreaper, ignored, monkeypatch):
    """A pooler that refuses ``options`` and one that drops them: the run has the settings, the next client does not."""
    from tests.conftest import Holds

    pooler = new_pooler(default_pool_size="1", **({"ignore_startup_parameters": "options"} if ignored else {}))
    holds = Holds(past)
    holds.due(1, overdue="10 seconds")
    holds.register()
    past.execute(SHOWN)
    plain = pooler.url(postgresql.info.dbname)
    url = f"{plain}&options={WANTED.replace(' ', '%20').replace('=', '%3D')}"
    pid, before = footprint(plain)

    assert pgreaper("work", url=url).out.startswith("holds: 1 expired")

    seen = dict(past.execute("select name, value from seen").fetchall())
    # lock_timeout is pgreaper's own inside its functions: it gives way before the application does.
    assert seen == {
        "statement_timeout": "7s",
        "lock_timeout": "200ms",
        "TimeZone": "Asia/Tokyo",
        "work_mem": "1234kB",
    }
    assert footprint(plain) == (pid, before)

    monkeypatch.setenv("PGOPTIONS", WANTED)
    with connect(resolve(plain)) as connection:
        assert set(connection.local_settings) == {"statement_timeout", "work_mem", "TimeZone", "lock_timeout"}


def test_c065_a_statement_timeout_that_a_pooler_keeps_back_still_bites(new_pooler, postgresql, past):
    """Not only shown: enforced.  And a sweep, which cannot have it, says so instead of running without."""
    pooler = new_pooler(ignore_startup_parameters="options")
    url = pooler.url(postgresql.info.dbname, options="-c%20statement_timeout%3D100ms")
    past.execute("create or replace function pgreaper.reaper_version() returns text language sql as"
                 " $$ select '0.1' from pg_sleep(10) $$")  # fmt: skip
    with connect(resolve(url)) as connection:
        began = time.monotonic()
        with pytest.raises(Exception, match="cancelled"):
            Reaper(connection).version()
        assert time.monotonic() - began < 9
        assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
        with pytest.raises(InvalidInput, match="statement_timeout cannot be set"):
            Reaper(connection).sweep()


def test_c065_a_direct_connection_needs_no_such_help(direct):
    """Options that the server has taken cost no statement more."""
    with connect(resolve(f"{direct}&options=-c%20statement_timeout%3D7s")) as connection:
        assert connection.local_settings == {}
        assert connection.execute("show statement_timeout").fetchone() == ("7s",)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("-e", "more than settings"),
        ("-c no_such_setting=1", "no_such_setting"),
        ("-c statement_timeout=soon", "statement_timeout"),
    ],
)
def test_c065_options_that_cannot_be_made_good(dsn, pgreaper, options, says):
    """Told, with what to do, and no run without them."""
    result = pgreaper("work", url=f"{dsn}&options={options.replace(' ', '%20').replace('=', '%3D')}")
    assert result.code == 2
    assert says in result.err
    assert "hint: " in result.err


def test_c065_another_parameter_that_the_pooler_refuses(dsn, monkeypatch):
    """libpq sends some of the PG… variables too; the message names the parameter, the hint what to do."""
    monkeypatch.setenv("PGGEQO", "off")
    with pytest.raises(Unreachable, match="unsupported startup parameter: geqo") as refused:
        connect(resolve(dsn))
    assert "ignore_startup_parameters" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("words", "parameter"),
    [
        ("FATAL:  unsupported startup parameter: options", "options"),
        ("FATAL:  unsupported startup parameter in options: statement_timeout", "options"),
        ("FATAL:  unsupported startup parameter: geqo", "geqo"),
        ("FATAL:  no such database: options", None),
    ],
)
def test_c065_the_words_of_older_and_newer_poolers(words, parameter):
    """PgBouncer looks into ``options`` since 1.20, and says so."""
    assert refused_parameter(words) == parameter


# -- leases behind a pooler


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that calls of the handler ``waiting:for_the_gate`` wait for."""
    gate = tmp_path / "gate"
    (tmp_path / "waiting.py").write_text(
        "import pathlib, time\n"
        "def for_the_gate(call):\n"
        f"    while not pathlib.Path({str(gate)!r}).exists():\n"
        "        time.sleep(0.01)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    return gate


def leased(past: psycopg.Connection[Any]) -> Any:
    return past.execute("select session_pid, claim_until from pgreaper.claims where finished_at is null").fetchone()


def test_a_killed_workers_holds_wait_for_the_lease(holds, past, direct, start, wait_until, set_clock, gate):
    """Behind a pooler no session stands for a worker: its holds are neither taken early nor lost."""
    holds.due(2, overdue="10 seconds")
    holds.register(lease="1 minute")
    worker = start("work", "--handler", "waiting:for_the_gate", "--concurrency", "1")
    wait_until("select count(*) = 1 from pgreaper.claims where finished_at is null")
    assert leased(past)[0] is None
    worker.popen.kill()
    worker.end()

    with psycopg.connect(direct, autocommit=True) as connection:
        other = Reaper(connection)
        assert other.claim("holds", rescan=True) == []
        set_clock(timedelta(seconds=30))
        assert other.claim("holds", rescan=True) == []
        set_clock(timedelta(seconds=130))
        assert [h.key for h in other.claim("holds", rescan=True)] in ([], ["1"], ["1", "2"])
        ((taken, attempts),) = past.execute(
            "select count(*), min(attempts) from pgreaper.failures where error_class = 'LeaseExpired'"
        ).fetchall()
        assert (taken, attempts) == (2, 1)


def test_a_live_workers_holds_are_kept_whatever_its_backend_is(
    holds, past, direct, start, wait_until, pooler, set_clock, gate
):
    """Server connections are replaced under a worker that is busy: its lease goes on, nobody gets its holds."""
    holds.due(2, overdue="10 seconds")
    holds.register(lease="1 minute")
    worker = start("work", "--handler", "waiting:for_the_gate", "--concurrency", "2")
    wait_until("select count(*) = 1 from pgreaper.claims where finished_at is null")

    pooler.tell("reconnect")
    past.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid() and application_name like 'pgreaper/%'"
    )
    with psycopg.connect(direct, autocommit=True) as connection:
        other = Reaper(connection)
        for seconds in (0, 10, 20, 30):  # a claim bound to a session would be gone after five
            set_clock(timedelta(seconds=seconds), on=past)
            assert other.claim("holds", rescan=True) == []
    set_clock(timedelta(0), on=past)
    gate.touch()
    result, _ = worker.end()
    assert (result.code, holds.states()) == (0, {1: "expired", 2: "expired"}), result
    assert past.execute("select count(*) from pgreaper.failures").fetchone() == (0,)


def test_a_direct_claim_and_a_pooled_one_differ(dsn, direct, holds, past, work):
    """The same worker on both ways: only the direct connection binds its claims to its session."""
    seen = []
    bound = "select session_pid is not null from pgreaper.claims order by claimed_at desc limit 1"
    for url in (dsn, direct):
        holds.connection.execute("truncate holds restart identity")
        holds.due(1, overdue="10 seconds")
        holds.register()
        run, _ = work(url=url)
        assert run.expired == 1
        seen.append(past.execute(bound).fetchone())
    assert seen == [(False,), (True,)]


# -- the pooler's own failures


def test_statement_pooling(new_pooler, postgresql, past, pgreaper):
    """Single statements are all that a run needs, so it works; what needs a transaction says why it fails."""
    from tests.conftest import Holds

    pooler = new_pooler(pool_mode="statement")
    url = pooler.url(postgresql.info.dbname)
    holds = Holds(past)
    holds.due(3, overdue="10 seconds")
    holds.register()
    assert pgreaper("work", url=url).out.startswith("holds: 3 expired")
    refused = pgreaper("install", url=url)
    assert (refused.code, refused.out) == (1, "")
    assert "error: the pooler refused: transaction blocks not allowed in statement pooling mode" in refused.err
    assert "hint: This needs transactions: pool_mode must be transaction or session" in refused.err


def test_c036_a_full_pooler_is_waited_for(new_pooler, postgresql, past, work):
    """No more connections allowed: the worker waits for its place, one line a step, and then works."""
    from tests.conftest import Holds

    pooler = new_pooler(max_client_conn="1")
    url = pooler.url(postgresql.info.dbname)
    holds = Holds(past)
    holds.due(3, overdue="10 seconds")
    holds.register()
    occupant = psycopg.connect(url, autocommit=True)
    with pytest.raises(Unreachable, match="no more connections allowed") as full:
        connect(resolve(url))
    assert (full.value.waiting, full.value.exit_code) == (True, 75)

    with ExitStack() as stack:
        stack.callback(occupant.close)
        import threading

        threading.Timer(0.5, occupant.close).start()
        run, lines = work(url=url)
    assert (run.exit_code, run.expired) == (0, 3)
    assert lines
    assert all("no more connections allowed" in line and "trying again in" in line for line in lines[:-1] or lines)


@pytest.mark.parametrize("pooler", [{"query_wait_timeout": "1"}], indirect=True)
def test_a_paused_pooler(pooler, past, postgresql, holds, pgreaper, start, wait_until, dsn):
    """PAUSE, as before a restart of the server: a run exits 75, a daemon backs off and goes on after RESUME."""
    holds.due(1, overdue="10 seconds")
    holds.register()
    daemon = start("work", "--daemon", "--poll", "0.2")
    wait_until(SETTLED)
    holds.connection.close()
    pooler.tell(f"pause {past.info.dbname}")
    late(past)
    once = pgreaper("work")
    assert (once.code, once.out) == (75, ""), once
    wait_for(lambda: len(pooler.show("clients")) >= 1 and "query_wait_timeout" in pooler.log())
    pooler.tell(f"resume {past.info.dbname}")
    wait_for(lambda: settled(past))
    daemon.popen.send_signal(signal.SIGTERM)
    result, _ = daemon.end()
    assert result.code == 0, result
    assert past.execute("select count(*) from pgreaper.failures").fetchone() == (0,)
    assert LINES.fullmatch(result.err), result.err


def test_a_pooler_that_is_restarted(pooler, past, holds, start, pgreaper, wait_until):
    """Gone and back: the daemon goes on, a run meanwhile exits 75."""
    holds.due(1, overdue="10 seconds")
    holds.register()
    daemon = start("work", "--daemon", "--poll", "0.2")
    wait_until(SETTLED)
    holds.connection.close()
    backends = [server["remote_pid"] for server in pooler.show("servers")]
    pooler.stop()
    # A claim that was on its way is made, and its reply is lost: it would wait for its lease.
    alive = "select count(*) from pg_stat_activity where pid = any(%s)"
    wait_for(lambda: past.execute(alive, [backends]).fetchone() == (0,))
    late(past)
    once = pgreaper("work")
    assert (once.code, "the database cannot be reached" in once.err) == (75, True), once
    pooler.start()
    wait_for(lambda: settled(past))
    daemon.popen.send_signal(signal.SIGTERM)
    result, _ = daemon.end()
    assert result.code == 0, result
    assert result.err.splitlines()[-1] == "pgreaper: connected again"


def test_a_server_that_the_pooler_cannot_log_in_to(new_pooler, cluster, install, pgreaper, start):
    """The server is down behind a pooler that is up: exit 75 with the pooler's words; a daemon waits for it."""
    from tests.conftest import Holds, Server

    install(cluster.dsn)
    pooler = new_pooler()
    pooler.server = Server(host=cluster.host, port=cluster.port, user=cluster.superuser)
    pooler.write(query_wait_timeout="3")
    pooler.tell("reload")
    url = pooler.url("postgres")
    with psycopg.connect(cluster.dsn, autocommit=True) as db:
        holds = Holds(db)
        holds.due(1, overdue="10 seconds")
        holds.register()
        daemon = start("work", "--daemon", "--poll", "0.2", url=url)
        wait_for(lambda: settled(db))
    cluster.stop()
    once = pgreaper("work", url=url)
    assert (once.code, once.out) == (75, ""), once
    again = pgreaper("work", url=url)
    assert again.code == 75
    # New clients are refused, those that were let in wait for so long.
    assert "server_login_retry" in again.err or "query_wait_timeout" in again.err, again.err
    cluster.start()
    with psycopg.connect(cluster.dsn, autocommit=True) as db:
        late(db)
        wait_for(lambda: settled(db), seconds=40)
        assert db.execute("select count(*) from pgreaper.failures").fetchone() == (0,)
    daemon.popen.send_signal(signal.SIGTERM)
    result, _ = daemon.end()
    assert result.code == 0
    # Whether its statement waited in the pooler or was refused there.
    assert LINES.fullmatch(result.err), result.err


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_c016_a_role_that_repeats_reads_behind_a_pooler(holds, past, pooler, work, level):
    """The level is asked for in each transaction, and never set on a session that others share."""
    holds.due(30, overdue="1 minute")
    holds.register(batch=7)
    past.execute(f"alter database {past.info.dbname} set default_transaction_isolation = '{level}'")
    pooler.tell("reconnect")
    run, lines = work()
    assert (run.expired, run.exit_code, lines) == (30, 0, [])
    _, found = footprint(pooler.url(past.info.dbname))
    assert found["settings"]["default_transaction_isolation"] == level
    assert clean(found)


def test_c114_what_binding_on_the_server_trips_over(reaper, holds):
    """Percent signs, quotes and numbers in arguments travel as arguments, whatever the type on the other side."""
    for name in ("100% %s %I %(x)s", "o'clock", '"quoted"', "a;select 1", "§ ✓"):
        reaper.register(name, "holds", deadline_column="expires_at", status_column="status", held=["held", "50%"],
                        expired="expired", owner="%L", grace=timedelta(seconds=1.5), lease="90 seconds")  # fmt: skip
        assert reaper.pause(name, reason="100 %")
        assert {p.policy: p.pause_reason for p in reaper.policies()}[name] == "100 %"
        assert reaper.resume(name)
        reaper.unregister(name)
    holds.due(2, overdue="1 hour")
    holds.register()
    (hold, *_) = reaper.claim("holds", batch=2, worker="%s")
    # A key is text there: a number is what people have in hand.
    assert [o.outcome for o in reaper.expire(hold.token, keys=[1])] == ["expired"]
    assert reaper.history("holds", "1")[0].worker == "%s"
    with pytest.raises(LeaseLost):
        reaper.renew("00000000-0000-0000-0000-000000000000")
