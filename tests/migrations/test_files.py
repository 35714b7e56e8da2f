"""The files: every one installed by some revision, none changed once released, found wherever the package is."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pgreaper import schema
from pgreaper.schema import Source
from tests.migrations import history


def test_manifest_and_folder_agree(files: Source):
    """Every line of install.sql is a file, every file has one line, and rights come last."""
    manifest = files.manifest()
    present = {path.relative_to(files.sql).as_posix() for path in files.sql.rglob("*.sql")} - {"install.sql"}

    assert sorted(manifest) == sorted(present)
    assert (manifest[0], manifest[-1]) == ("schema.sql", "rights.sql")


def test_every_file_is_installed_by_a_revision(files: Source):
    """Each current file is in the list of some revision, and no revision lists what nobody has."""
    installed = {
        files.path(script.revision, name) for script in files.scripts.walk_revisions() for name in script.module.FILES
    }

    assert {path for path in installed if path.is_relative_to(files.sql)} == {
        files.sql / name for name in files.manifest()
    }, f"refresh with: {history.REFRESH}"
    assert all(path.is_file() for path in installed)


def test_history_is_as_recorded(files: Source):
    """No revision installs anything else than SHA256SUMS says."""
    assert list(history.problems(files)) == []


def test_sha256sum_reads_the_record(files: Source):
    """The record is one that anybody can check without our tools."""
    result = subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "migrations/SHA256SUMS"],
        cwd=history.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.fixture
def released(files: Source, tmp_path: Path) -> Source:
    """A copy of the files in which every revision counts as released."""
    shutil.copytree(files.migrations, tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(files.sql, tmp_path / "sql")
    copy = Source(tmp_path / "migrations")
    history.write(copy)
    sums = copy.migrations / "SHA256SUMS"
    sums.write_text(sums.read_text().replace("(unreleased)", "(0.1.0)"))
    return copy


def test_a_released_text_cannot_change(released: Source):
    """An edit to a file that a released revision installs is refused, and --write does not paper over it."""
    changed = released.sql / "functions" / "reaper_version.sql"
    changed.write_text(changed.read_text() + "\n-- better\n")
    before = (released.migrations / "SHA256SUMS").read_text()

    (problem,) = history.problems(released)
    assert "released revision 0001 (0.1.0)" in problem
    assert "sql/functions/reaper_version.sql" in problem
    with pytest.raises(SystemExit, match="released revision 0001"):
        history.write(released)
    assert (released.migrations / "SHA256SUMS").read_text() == before


def test_a_released_text_may_retire(released: Source):
    """The old text in retired/ keeps the revision as it was, whatever the current file says."""
    current = released.sql / "functions" / "reaper_version.sql"
    retired = released.migrations / "retired" / "0001" / "functions" / "reaper_version.sql"
    retired.parent.mkdir(parents=True)
    shutil.copy(current, retired)
    current.write_text(current.read_text().replace("0.1", "0.2"))

    history.write(released)

    assert list(history.problems(released)) == []
    assert "'0.1'" in released.read("0001", "functions/reaper_version.sql")


def test_a_text_retires_once(files: Source, tmp_path: Path):
    """It lies with the last revision that installs it; earlier ones find it there, later ones take the current file."""
    retired = tmp_path / "migrations" / "retired" / "0003" / "rights.sql"
    retired.parent.mkdir(parents=True)
    retired.touch()
    source = Source(tmp_path / "migrations")

    assert {r: source.path(r, "rights.sql") for r in ("0001", "0003", "0004")} == {
        "0001": retired,
        "0003": retired,
        "0004": tmp_path / "sql" / "rights.sql",
    }


def test_c096_a_released_revision_cannot_go(released: Source):
    """Deleting or renaming a released revision is refused: databases have its id in their version table."""
    script = next(iter(released.scripts.walk_revisions()))
    path = Path(script.path)
    path.write_text(path.read_text().replace('revision = "0001"', 'revision = "0001a"'))
    fresh = Source(released.migrations)

    assert "revision 0001 (0.1.0) is gone; ids are never deleted or reused" in list(history.problems(fresh))


def test_c098_revision_ids_fit_the_version_table(files: Source):
    """Alembic's column takes 32 characters; ours are numbers in order."""
    revisions = [script.revision for script in files.scripts.walk_revisions()][::-1]

    assert revisions == [f"{n:04d}" for n in range(1, len(revisions) + 1)]
    assert all(len(revision) <= 32 for revision in revisions)
    assert files.scripts.get_heads() == [revisions[-1]]


def test_c101_nothing_is_built_concurrently(files: Source):
    """One transaction holds everything, so no text may ask to run outside of one."""
    for name in files.manifest():
        for statement in schema.statements((files.sql / name).read_text()):
            assert not re.match(r"begin|start|commit|vacuum|reindex|.*\bindex concurrently\b", statement), name


def test_c044_no_file_writes_a_users_state(files: Source):
    """A file creates objects of schema pgreaper and touches nothing else."""
    allowed = re.compile(
        r"create (?:unique )?(?:index \w+ on|schema if not exists|table|type|function|procedure|view) pgreaper\b"
        r"|comment on \w+ pgreaper\b"
        r"|(?:revoke|grant) [\w, ]+ on (?:all \w+ in )?(?:schema pgreaper|\w+ pgreaper\.\w+)"
        r"|alter default privileges in schema pgreaper\b"
        r"|create trigger \w+ after insert (?:or update )?on pgreaper\."
        # Takes back what default privileges gave; nothing but REVOKE on schema pgreaper is in it.
        r"|do \$rights\$"
        r"|alter \w+ pgreaper\."
    )
    for name in files.manifest():
        for statement in schema.statements((files.sql / name).read_text()):
            assert allowed.match(statement), f"{name}: {statement[:80]}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("select 1; select 2;", ["select 1;", "select 2;"]),
        ("-- why; really\nselect 1;\n-- the end;\n", ["select 1;"]),
        ("select ';', \"a;b\", 'it''s;';", ["select ';', \"a;b\", 'it''s;';"]),
        ("do $$ begin; end $$; select $1;", ["do $$ begin; end $$;", "select $1;"]),
        ("do $a$ x; $$ y; $$ $a$;", ["do $a$ x; $$ y; $$ $a$;"]),
        ("/* a; b */ select 1", ["/* a; b */ select 1"]),
        ("", []),
    ],
)
def test_statements(text: str, expected: list[str]):
    """A semicolon inside a body, a string, a name or a comment ends nothing."""
    assert list(schema.statements(text)) == expected


def test_statements_lose_nothing(files: Source):
    """What is sent statement by statement is the file, but for the comments between."""
    for name in files.manifest():
        text = (files.sql / name).read_text()
        position = 0
        for statement in schema.statements(text):
            found = text.index(statement, position)
            assert not re.sub(r"--[^\n]*", "", text[position:found]).strip(), name
            position = found + len(statement)
        assert not re.sub(r"--[^\n]*", "", text[position:]).strip(), name
