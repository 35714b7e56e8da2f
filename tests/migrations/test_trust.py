"""A schema pgreaper that somebody else made: nothing of it is called by whoever can do more than he."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from pgreaper import Reaper, schema
from pgreaper.cli import main
from pgreaper.errors import UntrustedSchema

if TYPE_CHECKING:
    from collections.abc import Iterator

    Connection = psycopg.Connection[Any]

# Everything that the commands look at first does what its maker may not do himself.
TRAP = """
set role {mallory};
create schema pgreaper;
create function pgreaper.spring() returns text language plpgsql as
  $$ begin execute 'alter role {mallory} superuser'; return '0001'; end $$;
create view pgreaper.schema_version as select pgreaper.spring()::varchar(32) as version_num;
create view pgreaper.policies as
  select pgreaper.spring() as name, 'public'::text as target_schema, 'x'::text as target_table;
create view pgreaper.status as select pgreaper.spring() as policy;
create function pgreaper.reaper_version() returns text language sql as
  'select replace(pgreaper.spring(), ''0001'', ''0.1'')';
grant all on schema pgreaper to public;
grant all on all tables in schema pgreaper to public;
reset role;
"""
COMMANDS = [
    "install", "install --check", "install --repair", "uninstall", "uninstall --force", "status", "check", "policies",
    "preview p", "work", "work --daemon", "register p holds --deadline d --owner o --status s --held h --expired e",
    "unregister p", "grant x --as worker", "revoke x", "pause p", "resume p", "dead list", "history p 1", "prune",
    "verify", "report --html /dev/null", "metrics", "cron status", "cron print",
]  # fmt: skip


class Strangers:
    """Roles of this test's own, in a database that has no pgreaper yet."""

    def __init__(self, dsn: str, worker_id: str, stack: ExitStack) -> None:
        self.dsn, self.worker_id, self.stack = dsn, worker_id, stack
        self.admin = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        self.database = self.admin.info.dbname

    def create(self, what: str, attributes: str = "") -> str:
        name = f"pgreaper_{what}_{self.worker_id}"
        self.admin.execute(f"create role {name} login {attributes}")
        self.stack.callback(self._drop, sql.Identifier(name))
        self.admin.execute(f"grant create on database {self.database} to {name}")
        return name

    def _drop(self, role: sql.Identifier) -> None:
        self.admin.execute(
            sql.SQL("alter database {} owner to current_user; drop owned by {r} cascade; drop role {r}").format(
                sql.Identifier(self.database), r=role
            )
        )

    def url(self, role: str) -> str:
        given = conninfo_to_dict(self.dsn)
        return f"postgresql://{role}@/{given['dbname']}?host={given['host']}&port={given['port']}"

    def is_superuser(self, role: str) -> bool:
        row = self.admin.execute("select rolsuper from pg_roles where rolname = %s", [role]).fetchone()
        assert row is not None
        return bool(row[0])


@pytest.fixture
def strangers(empty_dsn: str, worker_id: str) -> Iterator[Strangers]:
    with ExitStack() as stack:
        yield Strangers(empty_dsn, worker_id, stack)


@pytest.fixture
def trap(strangers: Strangers) -> str:
    mallory = strangers.create("mallory")
    strangers.admin.execute(TRAP.format(mallory=mallory))
    return mallory


def test_the_trap_works(strangers, trap):
    """What is refused below would have made its maker a superuser."""
    strangers.admin.execute("select pgreaper.reaper_version()")
    assert strangers.is_superuser(trap)


def test_no_command_of_a_superuser_calls_what_a_stranger_has_laid(strangers, trap, capsys, monkeypatch):
    """Refused with the owner's name, before a function is called; install, upgrade and uninstall as well."""
    monkeypatch.setenv("DATABASE_URL", strangers.dsn)
    me = strangers.admin.info.user
    for command in COMMANDS:
        code = main(command.split())
        out, err = capsys.readouterr()
        assert not strangers.is_superuser(trap), command
        fact = f"error: schema pgreaper belongs to role {trap}, whose code would run with the rights of {me}"
        assert (code, err.splitlines()[:1]) == (3 if "install" in command else 1, [fact]), command
        assert out == "" or "pgreaper_up 0.0" in out, command
        assert "hint: Nothing of it was called. If it is no installation of yours: drop schema pgreaper" in err
    # The two that find rather than refuse.
    assert main(["doctor", "--json"]) == 3
    assert '"code": "owner"' in capsys.readouterr().out
    assert main(["discover"]) == 0
    assert not strangers.is_superuser(trap)


def test_nor_does_the_text_for_psql_nor_a_hosts_alembic(strangers, trap):
    """The check is in the text itself, and in the connection that somebody else opened."""
    for text in (schema.install_sql(), schema.uninstall_sql()):
        with psycopg.connect(strangers.dsn, autocommit=True) as connection:
            with pytest.raises(psycopg.errors.DuplicateSchema, match=f"schema pgreaper belongs to role {trap}"):
                connection.execute(text.encode())
            connection.execute("rollback")
    assert not strangers.is_superuser(trap)


@pytest.mark.parametrize(
    "caller", ["superuser", "createrole", "owner", "program", "session", "taken", "worker", "bypassrls", "itself"]
)
def test_who_has_more_power_than_the_owner_is_refused_and_a_worker_is_not(strangers, caller):
    """An installation that a plain role made serves workers; not who has power over server, roles or database."""
    deploy = strangers.create("deploy")
    schema.install(strangers.url(deploy))
    strangers.admin.execute(f"grant {deploy} to {strangers.create('other')}")
    who = {
        "superuser": lambda: strangers.create("caller", "superuser"),
        "createrole": lambda: strangers.create("caller", "createrole"),
        "owner": lambda: strangers.create("caller"),
        "program": lambda: strangers.create("caller", "in role pg_execute_server_program"),
        "session": lambda: strangers.create("caller", "superuser"),
        "taken": lambda: strangers.create("caller", "superuser"),
        "worker": lambda: strangers.create("caller"),
        "bypassrls": lambda: strangers.create("caller", "bypassrls"),
        "itself": lambda: deploy,
    }[caller]()
    if caller == "owner":
        strangers.admin.execute(f"alter database {strangers.database} owner to {who}")
    with psycopg.connect(strangers.url(deploy), autocommit=True) as connection:
        connection.execute("select pgreaper.reaper_grant(%s, 'worker')", [who])
    with psycopg.connect(strangers.url(who), autocommit=True) as connection:
        if caller == "session":
            # A function could say RESET ROLE.
            connection.execute("set role pg_monitor")
        if caller == "taken":
            connection.execute(f"set role {deploy}")
        reaper = Reaper(connection)
        if caller in ("worker", "bypassrls", "itself"):
            assert reaper.server().version == reaper.version()
            reaper.registered()
            return
        for call in (reaper.server, reaper.version):
            with pytest.raises(
                UntrustedSchema, match=f"schema pgreaper belongs to role {deploy}, whose code would run"
            ):
                call()
        # What makes the owner trusted.
        connection.execute("reset role")
        strangers.admin.execute(f"alter database {strangers.database} owner to {deploy}")
        assert reaper.server().version == reaper.version()


def test_a_function_in_a_trusted_schema_that_a_stranger_owns(strangers, capsys, monkeypatch):
    """Told by install and doctor, which look at each object."""
    schema.install(strangers.dsn)
    mallory = strangers.create("mallory")
    strangers.admin.execute(f"alter function pgreaper.reaper_version() owner to {mallory}")
    monkeypatch.setenv("DATABASE_URL", strangers.dsn)
    for command in ("install", "install --check", "install --repair", "uninstall"):
        assert main(command.split()) == 3
        assert f"error: pgreaper.reaper_version belongs to role {mallory}, whose code" in capsys.readouterr().err
    assert main(["doctor"]) == 3
    assert f"pgreaper.reaper_version belongs to role {mallory}" in " ".join(capsys.readouterr().out.split())
