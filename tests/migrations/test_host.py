"""Called from a host application's own Alembic: their connection, their transaction, their version table left alone."""

from collections.abc import Callable

import psycopg
import pytest
from alembic import op

from pgreaper import schema
from pgreaper.alembic import downgrade, include_name, upgrade
from pgreaper.errors import InvalidInput, VersionMismatch
from tests.migrations import catalog
from tests.migrations.conftest import INSTALL, REMOVE, Host, Run

NewDatabase = Callable[[], str]

HOLDS = """\
op.execute("create type st as enum ('held', 'done')")
op.execute("create table holds (id bigint primary key, status st, expires_at timestamptz)")"""


def versions(dsn: str) -> tuple[list[str], list[str]]:
    """The host's revisions and ours."""
    with psycopg.connect(dsn) as connection:
        theirs = connection.execute("select version_num from public.alembic_version").fetchall()
        if connection.execute("select to_regclass('pgreaper.schema_version') is null").fetchone() == (True,):
            return [v for (v,) in theirs], []
        ours = connection.execute("select version_num from pgreaper.schema_version").fetchall()
    return [v for (v,) in theirs], [v for (v,) in ours]


def test_online(host: Host, empty_dsn: str, new_database: NewDatabase):
    """From the host's revision the same is installed as by the command, and both version tables are right."""
    host.revision(HOLDS)
    host.revision(INSTALL, REMOVE)
    host.revision("op.execute('alter table holds add note text')", "op.execute('alter table holds drop note')")

    host.succeed("upgrade", "head")

    assert versions(empty_dsn) == (["host3"], ["0001"])
    alone = new_database()
    schema.install(alone)
    assert catalog.schema(empty_dsn, version_table=True) == catalog.schema(alone, version_table=True)
    assert catalog.sources(empty_dsn) == catalog.sources(alone)

    host.succeed("downgrade", "host1")
    assert versions(empty_dsn) == (["host1"], [])
    assert catalog.schema(empty_dsn, version_table=True) == {}
    host.succeed("upgrade", "head")
    assert versions(empty_dsn) == (["host3"], ["0001"])


def test_c099_offline(host: Host, empty_dsn: str, new_database: NewDatabase, psql: Run):
    """`alembic upgrade head --sql` of the host contains ours, once, in their transaction; psql makes the same of it."""
    host.revision(HOLDS)
    host.revision(INSTALL, REMOVE)
    host.revision("op.execute(\"comment on table holds is '100 % :name'\")")

    text = host.succeed("upgrade", "head", "--sql")
    assert (text.count("BEGIN;"), text.count("COMMIT;")) == (1, 1)
    done = psql(empty_dsn, "-v", "ON_ERROR_STOP=1", input=text)
    assert (done.returncode, done.stderr) == (0, "")

    online = new_database()
    schema.install(online)
    assert versions(empty_dsn) == (["host3"], ["0001"])
    assert catalog.sources(empty_dsn) == catalog.sources(online)
    assert catalog.schema(empty_dsn, version_table=True) == catalog.schema(online, version_table=True)

    text = host.succeed("downgrade", "head:host1", "--sql")
    done = psql(empty_dsn, "-v", "ON_ERROR_STOP=1", input=text)
    assert (done.returncode, done.stderr) == (0, "")
    assert versions(empty_dsn) == (["host1"], [])
    assert catalog.schema(empty_dsn, version_table=True) == {}


def test_the_hosts_revision_goes_on_as_before(host: Host, empty_dsn: str):
    """After our call `op` is still the host's, so are its settings, and a percent sign is still one."""
    host.revision(HOLDS)
    host.revision(
        "op.execute(\"set local lock_timeout = '7s'\")\n"
        + INSTALL
        + """
op.add_column("holds", __import__("sqlalchemy").Column("note", __import__("sqlalchemy").Text()))
op.execute("insert into holds (id, note) values (1, '50% off')")
op.execute("insert into holds (id, note) select 2, current_setting('lock_timeout')")
op.execute("insert into holds (id, note) select 3, current_setting('search_path')")"""
    )

    host.succeed("upgrade", "head")

    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("select note from holds order by id").fetchall() == [
            ("50% off",),
            ("7s",),
            ('"$user", public',),
        ]


@pytest.mark.parametrize(
    "edit",
    [
        ("", ""),
        ("target_metadata=target_metadata\n", "target_metadata=target_metadata, transaction_per_migration=True\n"),
        (
            "        with context.begin_transaction():\n            context.run_migrations()\n\n\nif",
            """\
        connection.exec_driver_sql('select pg_advisory_lock(42)')
        with connection.begin_nested(), context.begin_transaction():
            context.run_migrations()
        connection.commit()


if""",
        ),
    ],
    ids=["default", "transaction_per_migration", "outer_lock"],
)
def test_c101_a_failing_revision_takes_ours_back(host: Host, empty_dsn: str, edit: tuple[str, str]):
    """When the host's step fails after our call, nothing of ours stays half, and a re-run works."""
    host.edit_env(*edit)
    host.revision(HOLDS)
    host.revision(INSTALL + "\nif not __import__('os').path.exists('fixed'): op.execute('select 1/0')", REMOVE)

    failed = host.alembic("upgrade", "head")
    assert failed.returncode != 0
    assert "division by zero" in failed.stderr
    assert catalog.schema(empty_dsn, version_table=True) == {}

    (host.folder / "fixed").touch()
    host.succeed("upgrade", "head")
    assert versions(empty_dsn) == (["host2"], ["0001"])
    assert schema.check(empty_dsn).ok


def test_c101_an_autocommit_block_is_refused(host: Host, empty_dsn: str):
    """Called where no transaction would hold it together, the installation does not begin."""
    host.revision(
        "from pgreaper.alembic import upgrade as pgreaper_upgrade\n"
        "with op.get_context().autocommit_block():\n    pgreaper_upgrade(to='0001')"
    )
    failed = host.alembic("upgrade", "head")
    assert failed.returncode != 0
    assert "pgreaper is installed and removed inside one transaction only" in failed.stderr
    assert catalog.schema(empty_dsn, version_table=True) == {}


def test_c044_a_new_enum_value_in_the_same_upgrade(host: Host, empty_dsn: str):
    """The host adds 'expired' to its enum and installs us in one transaction: no text of ours uses the value."""
    host.revision(HOLDS)
    # Committed: a value of a type that was created in the same transaction may be used at once.
    host.succeed("upgrade", "heads")
    host.revision("op.execute(\"alter type st add value 'expired'\")")
    host.revision(INSTALL, REMOVE)
    used = host.revision("op.execute(\"select 'expired'::st\")")

    trap = host.alembic("upgrade", "heads")
    assert "UnsafeNewEnumValueUsage" in trap.stderr, "the case is real"
    assert versions(empty_dsn) == (["host1"], [])

    (host.folder / "alembic" / "versions" / f"{used}.py").unlink()
    host.succeed("upgrade", "heads")

    assert versions(empty_dsn) == (["host3"], ["0001"])
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("insert into holds values (1, 'held', now() - interval '1 hour')")
        connection.execute(
            "select pgreaper.reaper_register('holds', 'holds', 'expires_at', 'status', '{held}', 'expired', 'me')"
        )
        connection.execute("call pgreaper.reaper_sweep('holds')")
        assert connection.execute("select status::text from holds").fetchall() == [("expired",)]


def test_c044_a_policy_may_not_name_the_value_before_it_is_committed(host: Host, empty_dsn: str):
    """Registered by the host in that very upgrade: the words say what to do, and nothing of the upgrade stays."""
    host.revision(HOLDS)
    host.revision(INSTALL, REMOVE)
    host.succeed("upgrade", "heads")
    host.revision("op.execute(\"alter type st add value 'expired'\")")
    host.revision(
        "op.execute(\"select pgreaper.reaper_register('holds', 'holds', 'expires_at', 'status',"
        " '{held}', 'expired', 'me')\")"
    )

    refused = host.alembic("upgrade", "heads")

    assert "New enum values must be committed before they can be used." in refused.stderr
    assert versions(empty_dsn) == (["host2"], ["0001"])


METADATA = """\
import sqlalchemy
target_metadata = sqlalchemy.MetaData()
sqlalchemy.Table("shop", target_metadata, sqlalchemy.Column("id", sqlalchemy.Integer, primary_key=True))
"""
CREATE_SHOP = "import sqlalchemy as sa\nop.create_table('shop', sa.Column('id', sa.Integer, primary_key=True))"


@pytest.mark.parametrize("include_schemas", [False, True])
def test_c095_autogenerate_wants_nothing(host: Host, empty_dsn: str, include_schemas: bool):
    """With pgreaper installed the host's autogenerate has an empty diff, with one schema and with all of them."""
    host.edit_env("target_metadata = None\n", METADATA)
    if include_schemas:
        host.edit_env(
            "target_metadata=target_metadata\n",
            "target_metadata=target_metadata, include_schemas=True, include_name=include_name\n",
        )
        host.edit_env(
            "from alembic import context\n", "from alembic import context\nfrom pgreaper.alembic import include_name\n"
        )
    host.revision(CREATE_SHOP)
    host.revision(INSTALL, REMOVE)
    host.succeed("upgrade", "head")

    assert "No new upgrade operations detected" in host.succeed("check")
    host.succeed("revision", "--autogenerate", "-m", "innocent")
    (generated,) = host.folder.glob("alembic/versions/*_innocent.py")
    assert "op." not in generated.read_text().split("def upgrade")[1]


def test_c095_the_helper_is_what_keeps_it_empty(host: Host, empty_dsn: str):
    """The case is real: with all schemas and without our helper autogenerate wants to drop our tables."""
    host.edit_env("target_metadata = None\n", METADATA)
    host.edit_env("target_metadata=target_metadata\n", "target_metadata=target_metadata, include_schemas=True\n")
    host.revision(CREATE_SHOP)
    host.revision(INSTALL, REMOVE)
    host.succeed("upgrade", "head")

    assert "remove_table" in host.alembic("check").stderr
    assert not include_name("pgreaper", "schema", {})
    assert include_name(None, "schema", {})
    assert include_name("pgreaper", "table", {"schema_name": None})


WITHOUT_PACKAGE = "import sys; sys.modules['pgreaper'] = None"


def test_c096_the_hosts_alembic_goes_on_after_uninstall(host: Host, empty_dsn: str, pgreaper: Run):
    """Removed by the command, then the package deleted: the host's alembic still knows where it is and goes on."""
    host.revision(HOLDS)
    host.revision(INSTALL, REMOVE)
    host.succeed("upgrade", "head")

    assert pgreaper(empty_dsn, "uninstall").returncode == 0
    host.revision("op.execute('alter table holds add note text')")

    assert "host2" in host.succeed("current", code=WITHOUT_PACKAGE)
    host.succeed("upgrade", "head", code=WITHOUT_PACKAGE)
    assert versions(empty_dsn) == (["host3"], [])


def test_c096_deleting_the_package_first_breaks_nothing_of_the_hosts(host: Host, empty_dsn: str):
    """The package deleted without any uninstall: the host's version table never named a revision of ours."""
    host.revision(HOLDS)
    host.revision(INSTALL, REMOVE)
    host.succeed("upgrade", "head")
    host.revision("op.execute('alter table holds add note text')")

    host.succeed("upgrade", "head", code=WITHOUT_PACKAGE)
    assert versions(empty_dsn) == (["host3"], ["0001"])


def test_c097_the_hosts_downgrade_keeps_unfinished_work(host: Host, empty_dsn: str):
    """The host's own downgrade is stopped by an active lease too, and the host stays where it was."""
    host.revision(HOLDS)
    host.revision(INSTALL, REMOVE)
    host.succeed("upgrade", "head")
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("insert into holds values (1, 'held', now() - interval '1 hour')")
        connection.execute(
            "select * from pgreaper.reaper_register('holds', 'holds', 'expires_at', 'status', '{held}', 'done', 'me')"
        )
        connection.execute("select * from pgreaper.reaper_claim('holds', 1)")

    failed = host.alembic("downgrade", "host1")

    assert failed.returncode != 0
    assert "0 dead letters, 1 active leases" in failed.stderr
    assert versions(empty_dsn) == (["host2"], ["0001"])


def test_c107_installed_by_the_command_already(host: Host, empty_dsn: str):
    """The host's revision finds the work done and goes on."""
    schema.install(empty_dsn)
    host.revision(INSTALL, REMOVE)
    host.succeed("upgrade", "head")
    assert versions(empty_dsn) == (["host1"], ["0001"])


def test_c104_the_hosts_loggers_survive(host: Host, empty_dsn: str):
    """A host that upgrades in its own process, without a fileConfig of its own, logs as before."""
    env = host.env_py.read_text()
    host.env_py.write_text(env.replace("    fileConfig(config.config_file_name)", "    pass"))
    host.revision(INSTALL, REMOVE)
    code = (
        "import atexit, logging; log = logging.getLogger('shop'); logging.basicConfig(level=20);"
        "atexit.register(lambda: log.info('still here'))"
    )
    result = host.alembic("upgrade", "head", code=code)
    assert (result.returncode, "INFO:shop:still here" in result.stderr) == (0, True), result.stderr


def test_misuse():
    """A wrong target or place is one sentence with a remedy."""
    with pytest.raises(InvalidInput, match="'head' is no revision of pgreaper"):
        upgrade(to="head")
    with pytest.raises(VersionMismatch, match="has no revision 0999, its newest is "):
        upgrade(to="0999")
    for call in (lambda: upgrade(to="0001"), lambda: downgrade(to="base")):
        with pytest.raises(InvalidInput, match="inside a migration only"):
            call()
    with pytest.raises(NameError):
        op.get_context()
