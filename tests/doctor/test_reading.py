"""The transaction in which doctor and discover look."""

from __future__ import annotations

import psycopg
import pytest

from pgreaper.reading import Reader


def test_nothing_can_be_written(db):
    """Whatever a check may call."""
    reader = Reader(db, 5)
    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction), reader.reading():
        reader.rows("create table x ()")


def test_a_statement_ends_in_time(db):
    reader = Reader(db, 0.05)
    with pytest.raises(psycopg.errors.QueryCanceled), reader.reading():
        reader.rows("select pg_sleep(20)")


def test_a_lock_is_not_waited_for(db, connect, holds):
    holder = connect(autocommit=False)
    holder.execute("lock table holds in access exclusive mode")
    reader = Reader(db, 30)
    with pytest.raises(psycopg.errors.LockNotAvailable), reader.reading():
        reader.rows("select from public.holds")


def test_names_mean_what_the_system_means_by_them(db):
    """A schema in the role's search_path cannot put its own in place of them."""
    db.execute("create schema evil; create function evil.count(text) returns int language sql as 'select 666'")
    db.execute("create table evil.pg_class (relname text)")
    db.execute("set search_path = evil, pg_catalog")
    reader = Reader(db, 5)
    with reader.reading():
        assert reader.row("select count('x'::text) as n").n == 1
        assert reader.row("select 'pg_class'::regclass::oid = 1259 as it").it
    assert db.execute("show search_path").fetchone() == ("evil, pg_catalog",)
