"""The way to the next release, on a copy of the files with a second revision: retire, don't copy."""

import shutil
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from pgreaper import schema
from pgreaper.schema import Change, Source
from tests.migrations import catalog, history
from tests.migrations.conftest import Run

NewDatabase = Callable[[], str]

SECOND = """
from pgreaper import schema

revision = "0002"
down_revision = "0001"

CHANGED = ("functions/reaper_version.sql",)
ADDED = ("functions/_next_release.sql",)
FILES = (*CHANGED, *ADDED, "rights.sql")


def upgrade(op):
    schema.replace(op, "0001", revision, CHANGED)
    schema.apply(op, revision, (*ADDED, "rights.sql"))


def downgrade(op):
    schema.drop(op, revision, ADDED)
    schema.replace(op, revision, "0001", CHANGED)
    schema.apply(op, "0001", ("rights.sql",))
"""


# Everything that text(), a driver's parameters or an offline script could trip over.
AWKWARD = r"""-- awkward: a body; with a semicolon in its header's "quotes' and :names
create function pgreaper._awkward(a integer[] default '{1,2}') returns text language plpgsql as $function$
declare
  v_json jsonb := '{"a":true, "b": :1}';  -- :name :true %(percent)s %% \: $1 $$ ; don't
begin
  raise notice 'x % y', format('%I %s %L %%', 'a', a[:1], ' :name');
  return E'tab\t;' || '\d+' || v_json::text || a[1:2]::text || 'größer ☃';
end;
$function$;
comment on function pgreaper._awkward(integer[]) is '100 % :of "it''s"; yes';
"""


def test_c099_awkward_text(files: Source, new_database: NewDatabase, tmp_path: Path, psql: Run, monkeypatch):
    """Colons, percent signs, backslashes, dollars and semicolons arrive as written: online, by psql, by psycopg."""
    shutil.copytree(files.migrations, tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(files.sql, tmp_path / "sql")
    source = Source(tmp_path / "migrations")
    (source.sql / "functions" / "_awkward.sql").write_text(AWKWARD)
    manifest = source.sql / "install.sql"
    manifest.write_text(manifest.read_text().replace("\\ir rights.sql", "\\ir functions/_awkward.sql\n\\ir rights.sql"))
    history.write(source)
    monkeypatch.setattr(schema, "source", lambda: source)
    online, through_psql, through_psycopg = new_database(), new_database(), new_database()

    schema.install(online)
    assert psql(through_psql, "-v", "ON_ERROR_STOP=1", input=schema.install_sql()).returncode == 0
    with psycopg.connect(through_psycopg, autocommit=True) as connection:
        connection.execute(schema.install_sql())

    body = AWKWARD.split("$function$")[1].encode()
    for dsn in (online, through_psql, through_psycopg):
        assert catalog.sources(dsn)["pgreaper._awkward(integer[])"] == body
    assert catalog.schema(through_psql) == catalog.schema(through_psycopg) == catalog.schema(online)
    assert schema.check(online).ok
    assert schema.uninstall(online).changed


@pytest.fixture
def next_release(files: Source, tmp_path: Path) -> Source:
    """A second revision that replaces one function and adds one; the old text is retired."""
    shutil.copytree(files.migrations, tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(files.sql, tmp_path / "sql")
    source = Source(tmp_path / "migrations")
    history.write(source)
    record = source.migrations / "SHA256SUMS"
    record.write_text(record.read_text().replace("(unreleased)", "(0.1.0)"))

    version = source.sql / "functions" / "reaper_version.sql"
    retired = source.migrations / "retired" / "0001" / "functions" / "reaper_version.sql"
    retired.parent.mkdir(parents=True)
    shutil.move(version, retired)
    version.write_text(retired.read_text().replace("'0.1'", "'0.2'"))
    (source.sql / "functions" / "_next_release.sql").write_text(
        "create function pgreaper._next_release() returns text language sql as $function$ select '100%' $function$;\n"
    )
    (source.migrations / "versions" / "0002_second.py").write_text(SECOND)
    manifest = source.sql / "install.sql"
    manifest.write_text(
        manifest.read_text().replace("\\ir rights.sql", "\\ir functions/_next_release.sql\n\\ir rights.sql")
    )
    return source


@pytest.fixture
def released(next_release: Source, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which the next release is the one in use."""
    return lambda: monkeypatch.setattr(schema, "source", lambda: next_release)


def version(dsn: str) -> object:
    with psycopg.connect(dsn) as connection:
        return connection.execute("select pgreaper.reaper_version()").fetchone()


def test_upgrade_and_fresh_install_agree(
    new_database: NewDatabase, released: Callable[[], None], next_release: Source, psql: Run
):
    """From 0.1, from nothing, by the script and by the new install.sql: the same catalog."""
    upgraded, fresh, scripted, loaded = (new_database() for _ in range(4))
    schema.install(upgraded)
    released()

    assert schema.install(upgraded) == Change("0001", "0002")
    assert schema.install(fresh) == Change(None, "0002")
    assert psql(scripted, "-v", "ON_ERROR_STOP=1", input=schema.install_sql()).returncode == 0
    manifest = str(next_release.sql / "install.sql")
    assert psql(loaded, "-v", "ON_ERROR_STOP=1", "-1", "-f", manifest).returncode == 0

    expected = catalog.schema(fresh, version_table=True)
    assert catalog.schema(upgraded, version_table=True) == expected
    assert catalog.schema(scripted, version_table=True) == expected
    assert catalog.schema(loaded) == catalog.schema(fresh)
    assert (version(upgraded), version(fresh)) == (("0.2",), ("0.2",))
    assert schema.check(upgraded).ok


def test_an_old_installation_is_told_from_a_new_one(empty_dsn: str, released: Callable[[], None]):
    """The check of the new package says which revision is there and which it wants."""
    schema.install(empty_dsn)
    released()
    result = schema.check(empty_dsn)
    assert (result.ok, result.revision, result.expected) == (False, "0001", "0002")


def test_down_and_out_again(new_database: NewDatabase, released: Callable[[], None]):
    """0.2 can be taken out whole, leaving nothing."""
    upgraded = new_database()
    before = catalog.counts(upgraded)
    schema.install(upgraded)
    released()
    schema.install(upgraded)
    assert schema.uninstall(upgraded) == Change("0002", None)
    assert catalog.counts(upgraded) == before


def test_a_revision_means_the_same_for_ever(
    new_database: NewDatabase, next_release: Source, monkeypatch: pytest.MonkeyPatch
):
    """Revision 0001 of the next release installs, byte for byte, what it installed when it was released."""
    then, now = new_database(), new_database()
    schema.install(then)
    (next_release.migrations / "versions" / "0002_second.py").unlink()
    monkeypatch.setattr(schema, "source", lambda: next_release)
    schema.install(now)
    assert catalog.schema(now, version_table=True) == catalog.schema(then, version_table=True)
    assert catalog.sources(now) == catalog.sources(then)


def test_the_record_takes_the_second_revision(next_release: Source):
    """A new revision is asked for in the record, written on demand, and the released one stays as it was."""
    assert list(history.problems(next_release)) == [
        "the texts of revision 0001 have moved; refresh with: " + history.REFRESH,
        "revision 0002 is not recorded; refresh with: " + history.REFRESH,
    ]
    before = history.recorded(next_release)["0001"]

    history.write(next_release)

    assert list(history.problems(next_release)) == []
    after = history.recorded(next_release)
    assert (after["0001"].content, after["0001"].release) == (before.content, "0.1.0")
    assert after["0002"].release == history.UNRELEASED


def test_a_hosts_old_revision_does_not_take_a_new_release_back(empty_dsn: str, released: Callable[[], None]):
    """`upgrade(to="0001")` on a database that is at 0002 already changes nothing."""
    released()
    schema.install(empty_dsn)
    scripts = schema.source().scripts
    with schema.transaction(empty_dsn) as connection:
        context = schema._configure(scripts, schema.upgrade_steps(scripts, "0001"), connection)
        assert schema.run(context) == "0002"
        assert context.get_current_revision() == "0002"
