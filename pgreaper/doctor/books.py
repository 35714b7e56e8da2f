"""pgreaper's own tables: how large they are, and whether vacuum looks after them."""

from collections.abc import Iterator

from pgreaper.doctor.finding import WARNING, Finding, Look
from pgreaper.doctor.policy import bloated, disabled, size
from pgreaper.reading import Row
from pgreaper.text import plural


def vacuum(look: Look) -> Iterator[Finding]:
    """The books are small and change often."""
    for row in _tables(look):
        yield from disabled(row, None)
        yield from bloated(row, look.limits, None)


def growth(look: Look) -> Iterator[Finding]:
    """The trail, the events and the finished claims stay until somebody prunes them."""
    tables = _tables(look)
    total = sum(row.bytes for row in tables)
    if total <= look.limits.books:
        return
    largest = max(tables, key=lambda row: int(row.bytes))
    with look.reading():
        row = look.row(
            "select (extract(epoch from pgreaper._clock() - min(t.at)) / 86400)::int as days,"
            " to_regproc('pgreaper.reaper_prune') is not null as prunes from pgreaper.transitions as t"
        )
    since = f", of the last {plural(row.days, 'day')}" if row.days else ""
    yield Finding(
        "books", WARNING, None, "pgreaper",
        f"pgreaper's own tables have {size(total)}, {largest.name} alone {size(largest.bytes)}{since}: nothing removes"
        " what is old",
        commands=("pgreaper prune",) if row.prunes else (),
        advice="And schedule it." if row.prunes else "Delete what is old from pgreaper.transitions, events and claims.",
    )  # fmt: skip


def _tables(look: Look) -> list[Row]:
    with look.reading():
        return look.rows(
            "select 'pgreaper' as schema, c.relname::text as name, pg_total_relation_size(c.oid) as bytes,"
            " s.n_dead_tup as dead, s.n_live_tup as live,"
            " exists (select from pg_options_to_table(c.reloptions) as o"
            "          where o.option_name = 'autovacuum_enabled' and not o.option_value::boolean) as disabled"
            "  from pg_class as c left join pg_stat_all_tables as s on s.relid = c.oid"
            " where c.relnamespace = 'pgreaper'::regnamespace and c.relkind = 'r' order by 2"
        )


CHECKS = (vacuum, growth)
