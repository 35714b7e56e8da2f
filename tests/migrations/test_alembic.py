"""Alembic's own commands on our env.py, through pytest-alembic's checks."""

from collections.abc import Iterator
from typing import Any

import pytest
from pytest_alembic import Config
from pytest_alembic.tests import (  # noqa: F401 - pytest collects them here
    test_single_head_revision,
    test_up_down_consistency,
    test_upgrade,
)
from sqlalchemy import create_engine
from sqlalchemy.engine import Engine
from sqlalchemy.pool import NullPool

from pgreaper.schema import Source


@pytest.fixture
def alembic_config(files: Source) -> Config:
    return Config(config_options={"script_location": str(files.migrations)})


@pytest.fixture
def alembic_engine(empty_dsn: str) -> Iterator[Engine]:
    engine = create_engine(empty_dsn.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    yield engine
    engine.dispose()


def test_current_changes_nothing(alembic_runner: Any, empty_dsn: str):
    """`alembic current` on an empty database creates no schema and no version table."""
    from tests.migrations import catalog

    assert alembic_runner.current == "base"
    assert catalog.schema(empty_dsn, version_table=True) == {}
