"""C108: a dump taken with work in flight is restored under other circumstances, and works at once."""

from __future__ import annotations

import re
import subprocess
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper import schema
from pgreaper.api import Reaper
from pgreaper.embedded import find_bindir
from pgreaper.errors import ReaperError
from tests.conftest import Holds
from tests.replication.conftest import value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def run(program: str, *arguments: str | Path) -> str:
    done = subprocess.run(
        [find_bindir() / program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.fixture
def new_owner(server: Any) -> Iterator[str]:
    """A role that may log in and is no superuser."""
    with psycopg.connect(server.url(server.maintenance_dbname), autocommit=True) as admin:
        admin.execute("create role pgreaper_after login")
        yield "pgreaper_after"
        admin.execute("drop role pgreaper_after")


def in_flight(url: str) -> None:
    """Expired, leased by a live session, failed, dead, and due; a trigger that finds its table by the search_path."""
    with psycopg.connect(url, autocommit=True) as db:
        holds = Holds(db)
        holds.due(10, overdue="1 minute")
        holds.register(lease="1 hour", max_attempts=2)
        db.execute(
            """
            create table log (id bigint);
            create function log_it() returns trigger language plpgsql as
              $$ begin insert into log values (new.id); return null; end $$;
            create trigger log_it after update on holds for each row execute function log_it();
            """
        )
        reaper = Reaper(db)
        first = reaper.claim("holds", batch=3, worker="one")
        reaper.fail(first[0].token, "1", error_class="Bad", transient=False)
        reaper.fail(first[0].token, "2", error_class="Slow", transient=True, retry_in="1 day")
        reaper.expire(first[0].token)
        assert reaper.claim_batch("holds", batch=2, worker="two", session=True) is not None
        reaper.pause("holds", reason="before the dump")
        reaper.resume("holds")


def goes_on(url: str, set_clock: Callable[..., None], *, admin: str) -> None:
    """What is due expires at once; what was leased comes back uncharged; the dead stay dead until they are replayed."""
    with psycopg.connect(url, autocommit=True) as db, psycopg.connect(admin, autocommit=True) as superuser:
        reaper = Reaper(db)
        reaper.require_version()
        assert [s.state for s in reaper.status()] == ["active"]
        assert reaper.sweep() == 5
        assert [letter.key for letter in reaper.dead_letters("holds")] == ["1"]
        # The session that has two of them is no session of this database; nor is its loss their fault.
        set_clock(timedelta(seconds=6), on=superuser)
        assert reaper.sweep() == 2
        assert db.execute("select key, error_class from pgreaper.failures order by key").fetchall() == [
            ("1", "Bad"),
            ("2", "Slow"),
        ]
        assert [o.key for o in reaper.replay("holds", key="1", reason="restored")] == ["1"]
        assert reaper.sweep() == 1
        assert value(db, "select count(*) = 9 and count(distinct id) = 9 from log")
        assert [h.outcome for h in reaper.history("holds", "3")] == ["expired"]
        assert db.execute("select invariant from pgreaper.reaper_verify() where not holds").fetchall() == []
        # And what is new takes new numbers in the books.
        db.execute("create table more (id bigint primary key, ends_at timestamptz, ended_at timestamptz)")
        reaper.register("more", "more", deadline_column="ends_at", stamp_column="ended_at", owner="tests")
        db.execute("insert into more values (1, now() - interval '1 minute')")
        assert reaper.sweep("more") == 1


@pytest.fixture
def source(new_database: Callable[[], str]) -> str:
    url = new_database()
    schema.install(url)
    in_flight(url)
    return url


def test_c108_under_another_owner(new_owner, source, new_database, set_clock, tmp_path):
    """``--no-owner`` into a database of a role that is no superuser: it owns all of it, and runs it at once."""
    target = new_database()
    with psycopg.connect(target, autocommit=True) as admin:
        admin.execute(f'alter database "{admin.info.dbname}" owner to {new_owner}')
        admin.execute(f"grant create on schema public to {new_owner}")
    theirs = re.sub(r"//[^@]*@", f"//{new_owner}@", target)
    run("pg_dump", "-Fc", "-f", tmp_path / "dump", source)
    run("pg_restore", "--no-owner", "--no-privileges", "--exit-on-error", "-d", theirs, tmp_path / "dump")
    goes_on(theirs, set_clock, admin=target)


def test_c108_over_an_older_state(source, new_database, set_clock, tmp_path):
    """``--clean --if-exists`` over a database that has pgreaper, and books of another day, already."""
    target = new_database()
    schema.install(target)
    in_flight(target)
    with psycopg.connect(target, autocommit=True) as db:
        Reaper(db).sweep()
    run("pg_dump", "-Fc", "-f", tmp_path / "dump", source)
    run("pg_restore", "--clean", "--if-exists", "--exit-on-error", "-d", target, tmp_path / "dump")
    assert schema.check(target).ok
    goes_on(target, set_clock, admin=target)


def test_c108_as_text_and_in_sections(source, new_database, set_clock, tmp_path):
    """A plain script through psql; and definitions, rows and indexes one after another."""
    script, parts = new_database(), new_database()
    run("pg_dump", "-f", tmp_path / "dump.sql", source)
    run(
        "psql",
        "--quiet",
        "--no-psqlrc",
        "--set=ON_ERROR_STOP=1",
        "--output=/dev/null",
        "-f",
        tmp_path / "dump.sql",
        script,
    )
    goes_on(script, set_clock, admin=script)

    run("pg_dump", "-Fc", "-f", tmp_path / "dump", source)
    for section in ("pre-data", "data", "post-data"):
        run("pg_restore", f"--section={section}", "--exit-on-error", "-d", parts, tmp_path / "dump")
    goes_on(parts, set_clock, admin=parts)


def test_c108_before_the_tables_are_there(source, new_database, set_clock, tmp_path):
    """Policies know their tables by name: the schema pgreaper alone can come first, and says what is missing."""
    target = new_database()
    run("pg_dump", "-Fc", "-f", tmp_path / "dump", source)
    with psycopg.connect(target, autocommit=True) as db:
        db.execute("create schema pgreaper")  # a restore of one schema does not create it
        run("pg_restore", "--schema=pgreaper", "--exit-on-error", "-d", target, tmp_path / "dump")
        ((state, reason),) = db.execute("select state, reason from pgreaper.status").fetchall()
        assert (state, "public.holds" in reason) == ("broken", True)
        with pytest.raises(ReaperError, match=r"public\.holds, the target of policy holds, does not exist"):
            Reaper(db).claim("holds")
        assert value(db, "select count(*) from pgreaper.failures") == 2
    run("pg_restore", "--schema=public", "--exit-on-error", "-d", target, tmp_path / "dump")
    goes_on(target, set_clock, admin=target)


def test_c108_without_the_roles_that_had_rights(source, new_database, server, set_clock, tmp_path):
    """Grants to a role that the new server lacks are all that fails; whoever owns the database goes on."""
    target = new_database()
    with psycopg.connect(source, autocommit=True) as db:
        db.execute("create role pgreaper_gone")
        db.execute("grant usage on schema pgreaper to pgreaper_gone")
        db.execute("grant select on all tables in schema pgreaper to pgreaper_gone")
    run("pg_dump", "-Fc", "-f", tmp_path / "dump", source)
    with psycopg.connect(source, autocommit=True) as db:
        db.execute("drop owned by pgreaper_gone")
        db.execute("drop role pgreaper_gone")
    restored = subprocess.run(
        [find_bindir() / "pg_restore", "-d", target, tmp_path / "dump"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    errors = [line for line in restored.stderr.splitlines() if "ERROR" in line]
    assert errors
    assert all('role "pgreaper_gone" does not exist' in line for line in errors)
    goes_on(target, set_clock, admin=target)
