"""From the built wheel, in an environment that has never seen the checkout: the same files, the same database."""

import os
import re
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pgreaper import schema
from pgreaper.schema import Source
from tests.migrations import catalog, history
from tests.migrations.conftest import INSTALL, REMOVE, make_host, run

NewDatabase = Callable[[], str]


@dataclass
class Installed:
    """An environment with the wheel in it."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def package(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages/pgreaper")
        return found


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build sdist, then wheel from it; install the wheel with the drivers that hosts use."""
    room = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", room / "dist", history.ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (room / "dist").glob("postgres_reaper-*.whl")

    # The versions of the lock file, without its hashes: pip wants hashes for all or none.
    pins = re.findall(r"^([\w.-]+==[^\s\\]+)", (history.ROOT / "requirements.lock").read_text(), re.MULTILINE)
    (room / "constraints.txt").write_text("\n".join(pins))
    venv.create(room / "env")
    environment = Installed(room / "env")
    # Our own pip, for to give it one takes seconds; and Python compiles what it imports, which is a small part.
    pip = f"{sys.executable} -m pip --python={environment.python} --quiet --disable-pip-version-check --no-input"
    done = run(
        *pip.split(), "install", "--no-compile", "--constraint", room / "constraints.txt",
        wheel, "psycopg2-binary", "asyncpg", "greenlet", cwd=room,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return environment


def test_the_wheel_holds_the_files(installed: Installed, files: Source):
    """Every file of sql/ and migrations/ is in the wheel, unchanged."""
    for folder, inside in ((files.sql, "_sql"), (files.migrations, "_migrations")):
        ours = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}
        theirs = installed.package / inside
        packed = {
            p.relative_to(theirs): p.read_bytes() for p in theirs.rglob("*") if p.is_file() and p.suffix != ".pyc"
        }
        assert packed == ours


def test_install_from_the_wheel(installed: Installed, new_database: NewDatabase, tmp_path: Path):
    """Install, check, the text for psql and uninstall do from the wheel what they do from the checkout."""
    theirs, ours = new_database(), new_database()
    untouched = catalog.counts(theirs)
    schema.install(ours)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {
        "PGREAPER_DATABASE_URL": theirs
    }
    command = installed.folder / "bin" / "pgreaper"

    def pgreaper(*arguments: str) -> str:
        done = run(command, *arguments, cwd=tmp_path, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert pgreaper("install", "--sql") == schema.install_sql()
    assert pgreaper("install") == "pgreaper is installed (revision 0001)\n"
    assert catalog.schema(theirs, version_table=True) == catalog.schema(ours, version_table=True)
    assert catalog.sources(theirs) == catalog.sources(ours)
    pgreaper("install", "--check")
    pgreaper("uninstall")
    assert catalog.counts(theirs) == untouched


@pytest.mark.parametrize(
    ("driver", "template"),
    [("psycopg", "generic"), ("psycopg2", "generic"), ("psycopg", "async"), ("asyncpg", "async")],
)
def test_c099_every_driver_of_a_host(
    installed: Installed, new_database: NewDatabase, tmp_path: Path, driver: str, template: str
):
    """A host's env.py, plain or async, on any driver: function bodies byte for byte, and down again without a trace."""
    theirs, ours = new_database(), new_database()
    before = catalog.counts(theirs)
    schema.install(ours)
    host = make_host(tmp_path / "host", theirs, driver=driver, template=template, python=installed.python)
    host.revision("op.execute('create table shop (note text)')", "op.execute('drop table shop')")
    host.revision(INSTALL + "\nop.execute(\"insert into shop values ('50% off')\")", REMOVE)

    host.succeed("upgrade", "head")

    assert catalog.sources(theirs) == catalog.sources(ours)
    assert catalog.schema(theirs, version_table=True) == catalog.schema(ours, version_table=True)
    host.succeed("downgrade", "host1")
    assert catalog.schema(theirs, version_table=True) == {}
    assert catalog.counts(theirs).keys() == before.keys()
