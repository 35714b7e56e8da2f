"""pgreaper's own tables: how large they are, and whether vacuum looks after them."""

from collections.abc import Iterator

from pgreaper.commands import command
from pgreaper.doctor.finding import WARNING, Finding, Look
from pgreaper.doctor.policy import bloated, disabled, size
from pgreaper.reading import Row
from pgreaper.text import count, duration, plural, visible

# Days that `pgreaper prune` keeps unless told otherwise.
_CLAIMS = 7
_TRAIL = 90


def vacuum(look: Look) -> Iterator[Finding]:
    """The books are small and change often."""
    for row in _tables(look):
        yield from disabled(row, None)
        yield from bloated(row, look.limits, None)


def growth(look: Look) -> Iterator[Finding]:
    """The trail, the events and the finished claims stay until somebody prunes them."""
    with look.reading():
        row = look.row(
            "select (extract(epoch from pgreaper._clock() - min(o.claim)) / 86400)::int as claims,"
            " (extract(epoch from pgreaper._clock() - min(o.trail)) / 86400)::int as trail"
            "  from pgreaper.policies as p cross join lateral (select"
            "    (select min(c.finished_at) from pgreaper.claims as c"
            "      where c.policy_id = p.policy_id and c.finished_at is not null) as claim,"
            "    (select min(t.at) from pgreaper.transitions as t where t.policy_id = p.policy_id) as trail) as o"
        )
    tables = _tables(look)
    total = sum(row.bytes for row in tables)
    old = [
        f"{what} of {plural(days, 'day')} ago"
        for what, days, keep in (("claims", row.claims, _CLAIMS), ("transitions", row.trail, _TRAIL))
        if (days or 0) > 2 * keep
    ]
    largest = max(tables, key=lambda row: int(row.bytes))
    size_ = f"{size(total)}, {largest.name} alone {size(largest.bytes)}"
    if old:
        yield Finding(
            "books", WARNING, None, "pgreaper",
            f"nobody prunes pgreaper's own tables: they have {' and '.join(old)} ({size_})",
            commands=("pgreaper prune",), advice="And from now on every day, by cron or pg_cron.",
        )  # fmt: skip
    elif total > look.limits.books:
        yield Finding(
            "books", WARNING, None, "pgreaper", f"pgreaper's own tables have become large: {size_}",
            advice="Keep less: pgreaper prune --keep … --keep-claims …",
        )  # fmt: skip


def relays(look: Look) -> Iterator[Finding]:
    """What a relay has not delivered stays in the trail, whatever the age; so one that nobody runs is in the way."""
    with look.reading():
        rows = look.rows(
            "select r.relay, r.policy, r.waiting, r.waiting_capped, r.oldest_waiting, r.trouble"
            "  from pgreaper.relay_status as r where r.oldest_waiting > %(behind)s order by r.relay",
            behind=look.limits.relay,
        )
    for row in rows:
        trouble = f"; its queue: {visible(row.trouble, 60)}" if row.trouble else ""
        yield Finding(
            "relay", WARNING, row.policy, visible(row.relay),
            f"relay {visible(row.relay)} has not delivered {count(row.waiting, capped=row.waiting_capped)} events,"
            f" the oldest for {duration(row.oldest_waiting)}{trouble}",
            commands=(command("relays list", row.relay),),
            advice="Let `pgreaper relay` run, or mend its queue. `pgreaper relays remove` if nobody wants its events:"
            " until then they are kept from being pruned.",
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


CHECKS = (vacuum, growth, relays)
