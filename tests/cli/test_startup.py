"""A cron job pays for what it imports: ``pgreaper work`` brings psycopg, click and little else."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import click
import pytest

from tests.cli.conftest import environment

HEAVY = {
    *("rich", "alembic", "sqlalchemy", "mako", "difflib"),
    *("pgreaper.records", "pgreaper.render", "pgreaper.targets", "pgreaper.schema", "pgreaper.alembic"),
    *("pgreaper.demo", "pgreaper.embedded", "pgreaper.cli.install", "pgreaper.handlers"),
    *("pgreaper.metrics", "prometheus_client", "http.server"),
}
CODE = """
import sys
from pgreaper.cli import main
code = main(sys.argv[1:])
print(code, *sorted(sys.modules), file=sys.stderr)
"""


def imported(dsn: Any, *arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], env=environment(dsn), capture_output=True, text=True, check=True
    )
    code, *modules = done.stderr.split()
    assert code == "0"
    return set(modules)


def test_work_imports_nothing_heavy(dsn, holds):
    holds.register()
    assert not HEAVY & imported(dsn, "work")
    assert not HEAVY & imported(dsn, "work", "--json")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_imports_no_command(dsn, arguments):
    assert {m for m in imported(None, *arguments) if m.startswith("pgreaper.cli.")} == {"pgreaper.cli.first"}


def test_status_in_a_pipe_does_without_rich(dsn, holds):
    assert "rich" not in imported(dsn, "status")


def test_every_listed_command_is_there():
    """The table of commands, the modules and the help texts agree."""
    from pgreaper.cli import COMMANDS, cli

    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert command.name == name
        assert command.help
