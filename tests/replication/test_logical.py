"""Logical replication: two copies that can be written to, and one of them expires holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgreaper import schema
from pgreaper.api import Reaper
from pgreaper.embedded import Cluster
from pgreaper.errors import RegistrationRefused
from tests.conftest import Holds
from tests.replication.conftest import FAST, until, value

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET: dict[str, Any] = {
    "deadline_column": "expires_at",
    "status_column": "status",
    "held": ["held"],
    "expired": "expired",
}


@pytest.fixture(scope="module")
def logical() -> Iterator[Cluster]:
    """A server whose databases can publish to and subscribe from one another."""
    with Cluster(settings=FAST | {"wal_level": "logical"}) as cluster:
        schema.install(cluster.url("template1"))
        yield cluster


@dataclass
class Copies:
    """A publisher, ``blue``, and its subscriber, ``green``: the same tables and the same pgreaper."""

    cluster: Cluster
    blue: psycopg.Connection[Any]
    green: psycopg.Connection[Any]

    @property
    def green_url(self) -> str:
        return self.cluster.url("green")

    def subscribe(self, publication: str = "shop", *, copy: bool = False) -> None:
        """Let green follow blue.  Within one server the slot must be there first: creating it would wait for us."""
        self.blue.execute("select pg_create_logical_replication_slot('green', 'pgoutput')")
        self.green.execute(
            f"create subscription green connection 'host={self.cluster.host} port={self.cluster.port} dbname=blue"
            f" user=postgres' publication {publication}"
            f" with (create_slot = false, slot_name = 'green', copy_data = {str(copy).lower()})"
        )
        until(self.green, "select bool_and(srsubstate = 'r') from pg_subscription_rel")


@pytest.fixture
def copies(logical: Cluster) -> Iterator[Copies]:
    with psycopg.connect(logical.dsn, autocommit=True) as admin:
        for name in ("blue", "green"):
            admin.execute(f"create database {name}")
        blue, green = (psycopg.connect(logical.url(name), autocommit=True) for name in ("blue", "green"))
        yield Copies(logical, blue, green)
        for (name,) in green.execute("select subname from pg_subscription").fetchall():
            green.execute(f"alter subscription {name} disable")
            green.execute(f"alter subscription {name} set (slot_name = none)")
            green.execute(f"drop subscription {name}")
        until(blue, "select not coalesce(bool_or(active), false) from pg_replication_slots")
        blue.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
        blue.close()
        green.close()
        for name in ("blue", "green"):
            admin.execute(f"drop database {name} with (force)")


@pytest.fixture
def shop(copies: Copies) -> Copies:
    """Holds and a policy on both sides, as a restored dump leaves them; green follows blue."""
    for side in (copies.blue, copies.green):
        Holds(side).register()
    copies.blue.execute("create publication shop for table holds")
    copies.subscribe()
    return copies


def due(connection: psycopg.Connection[Any], *ids: int) -> None:
    connection.cursor().executemany(
        "insert into holds (id, expires_at) overriding system value values (%s, now() - interval '10 seconds')",
        [(i,) for i in ids],
    )


STATES = "select array_agg(status order by id) from holds"


def test_c110_a_subscriber_is_passive(shop, pgreaper):
    """A policy whose rows come through a subscription is left to the publisher, and works when that ends."""
    due(shop.blue, 1, 2, 3)
    until(shop.green, "select count(*) = 3 from holds")

    ran = pgreaper("work", url=shop.green_url)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    (told,) = pgreaper("work", "--json", url=shop.green_url).json["policies"]
    assert told["resting"].startswith("passive: its rows come through subscription green")
    reaper = Reaper(shop.green)
    assert reaper.claim_batch("holds", rescan=True) is None
    assert reaper.sweep() == 0
    assert reaper.next_due() is None
    assert value(shop.green, STATES) == ["held"] * 3
    (status,) = reaper.status()
    assert (status.state, status.due) == ("passive", 3)
    assert status.reason == "the rows come through subscription green, whose publisher expires them"

    assert Reaper(shop.blue).sweep() == 3
    until(shop.green, f"select ({STATES}) = array['expired', 'expired', 'expired']")
    assert value(shop.green, "select count(*) from pgreaper.transitions") == 0

    # The switch-over: no step of pgreaper's own.
    shop.green.execute("alter subscription green disable")
    due(shop.green, 4)
    assert reaper.status()[0].state == "active"
    assert reaper.next_due() == 0
    assert pgreaper("work", url=shop.green_url).out.startswith("holds: 1 expired")
    assert value(shop.green, STATES)[3] == "expired"


def test_c110_what_the_copy_has_not_heard_of_yet_is_not_expired(shop):
    """Why: the customer has consumed the hold, and the copy is late."""
    due(shop.blue, 1)
    until(shop.green, "select count(*) = 1 from holds")
    # Somebody reads the row on the copy's side, so that the change cannot be applied yet.
    with psycopg.connect(shop.green_url) as reader:
        reader.execute("lock table holds in exclusive mode")
        shop.blue.execute("update holds set status = 'consumed'")
        until(shop.green, "select exists (select from pg_locks where relation = 'holds'::regclass and not granted)")
        assert value(reader, STATES) == ["held"]
        assert Reaper(shop.green).claim_batch("holds", rescan=True) is None
    until(shop.green, f"select ({STATES}) = array['consumed']")


def test_c110_a_view_and_partitions(copies):
    """A policy is passive for the table that its update would write, not for another that its view asks."""
    for side in (copies.blue, copies.green):
        side.execute(
            """
            create table parts (id bigint primary key, status text, expires_at timestamptz) partition by range (id);
            create table parts_low partition of parts for values from (0) to (100);
            create table payments (hold bigint primary key);
            create table local (id bigint primary key, status text, expires_at timestamptz);
            create view unpaid as
              select * from parts as p where not exists (select from payments as y where y.hold = p.id);
            create view local_unpaid as
              select * from local as l where not exists (select from payments as y where y.hold = l.id);
            """
        )
        for name in ("parts", "parts_low", "local", "unpaid", "local_unpaid"):
            keys = ["id"] if "unpaid" in name else None
            Reaper(side).register(name, name, **TARGET, owner="tests", key_columns=keys)
    copies.blue.execute("create publication shop for table parts, payments")
    copies.subscribe()

    assert {s.policy: s.state for s in Reaper(copies.green).status()} == {
        "parts": "passive",
        "parts_low": "passive",
        "unpaid": "passive",
        "local": "active",
        "local_unpaid": "active",
    }
    assert {s.state for s in Reaper(copies.blue).status()} == {"active"}


def test_c110_a_worker_with_its_rights_and_no_others(shop):
    """Whether a subscription feeds a table is for every role to see; a reader's status says it as well."""
    shop.green.execute("create role pgreaper_small")
    try:
        for kind in ("worker", "reader"):
            shop.green.execute("select pgreaper.reaper_grant('pgreaper_small', %s)", [kind])
        shop.green.execute("create view seen as select * from holds")
        Reaper(shop.green).register("seen", "seen", **TARGET, owner="tests", key_columns=["id"])
        shop.green.execute("select pgreaper.reaper_grant('pgreaper_small', 'worker')")
        due(shop.green, 1)
        shop.green.execute("set role pgreaper_small")
        reaper = Reaper(shop.green)
        for policy in ("holds", "seen"):
            assert reaper.claim_batch(policy, rescan=True) is None
            assert reaper.next_due([policy]) is None
            assert reaper.sweep(policy) == 0
        assert {s.state for s in reaper.status()} == {"passive"}
        # Who may only look cannot ask what the view would write; nothing else is hidden from it.
        shop.green.execute("reset role")
        shop.green.execute("revoke update on seen from pgreaper_small")
        shop.green.execute("revoke update (status) on seen from pgreaper_small")
        shop.green.execute("set role pgreaper_small")
        assert {s.policy: s.state for s in reaper.status()} == {"holds": "passive", "seen": "active"}
    finally:
        shop.green.execute("reset role")
        shop.green.execute("drop owned by pgreaper_small")
        shop.green.execute("drop role pgreaper_small")


def test_c110_a_paused_policy_stays_paused(shop):
    """What a person said goes first."""
    reaper = Reaper(shop.green)
    reaper.pause("holds", reason="moving")
    assert (reaper.status()[0].state, reaper.status()[0].reason) == ("paused", "moving")


def test_c110_published_updates_need_a_replica_identity(copies, pgreaper):
    """A key that serves pgreaper need not serve the publication: refused now, with the statement that helps."""
    blue = copies.blue
    blue.execute("create table slots (code text not null, status text, expires_at timestamptz)")
    blue.execute("create unique index slots_code on slots (code)")
    reaper = Reaper(blue)
    reaper.register("before", "slots", **TARGET, owner="tests", key_columns=["code"])  # nothing is published: fine
    blue.execute("create publication shop for table slots")

    with pytest.raises(RegistrationRefused, match=r"updates of (public\.)?slots are published") as refused:
        reaper.register("after", "slots", **TARGET, owner="tests", key_columns=["code"])
    assert refused.value.hint == "alter table public.slots replica identity using index slots_code;"
    told = pgreaper("register", "after", "slots", "--deadline", "expires_at", "--status", "status", "--held", "held",
                    "--key", "code", "--expired", "expired", "--owner", "tests",
                    url=copies.cluster.url("blue"))  # fmt: skip
    assert (told.code, refused.value.hint in told.err) == (2, True)

    blue.execute(refused.value.hint)
    reaper.register("after", "slots", **TARGET, owner="tests", key_columns=["code"])
    copies.green.execute("create table slots (code text primary key, status text, expires_at timestamptz)")
    copies.subscribe()
    blue.execute("insert into slots values ('a', 'held', now() - interval '1 minute')")
    assert reaper.sweep("after") == 1
    until(copies.green, "select status = 'expired' from slots")


def test_c110_the_server_says_what_it_would_refuse(copies):
    """Partitions, views, row filters, tables without any key: whatever the server knows, and no trigger fires."""
    blue = copies.blue
    blue.execute(
        """
        create table parts (id bigint not null, status text, expires_at timestamptz) partition by range (id);
        create table parts_low partition of parts for values from (0) to (100);
        create view seen as select * from parts_low;
        create table filtered (id bigint primary key, status text, expires_at timestamptz);
        create table "Odd ""name" (id bigint, status text);
        create function fires() returns trigger language plpgsql as $$ begin raise 'fired'; end $$;
        create trigger fires before update on "Odd ""name" for each statement execute function fires();
        """
    )

    def said(target: str) -> tuple[str | None, str | None]:
        ((reason, remedy),) = blue.execute("select * from pgreaper._unpublishable(%s::regclass, 'status')", [target])
        return reason, remedy

    targets = ("parts", "parts_low", "seen", "filtered", '"Odd ""name"')
    assert {said(target) for target in targets} == {(None, None)}
    filters = int(value(blue, "show server_version_num")) >= 150000
    blue.execute(
        f"""create publication shop for table parts, "Odd ""name",
              filtered {"where (status = 'held')" if filters else ""}"""
    )
    full = "alter table public.parts_low replica identity full;"
    assert [said(target)[1] for target in ("parts", "parts_low", "seen")] == [full, full, full]
    reason, remedy = said('"Odd ""name"')
    assert (remedy, "replica identity" in str(reason)) == (
        'alter table public."Odd ""name" replica identity full;',
        True,
    )
    assert (said("filtered")[0] is not None) == filters
    assert said("filtered")[1] is None
    blue.execute(full)
    blue.execute(str(remedy))
    assert {said(target) for target in targets if target != "filtered"} == {(None, None)}


def test_c110_books_in_the_publication(copies):
    """FOR ALL TABLES publishes the books too: all that pgreaper does goes through, and green can go on with them."""
    blue, green = Reaper(copies.blue), Reaper(copies.green)
    holds = Holds(copies.blue)
    Holds(copies.green)
    copies.blue.execute("create publication shop for all tables")
    copies.subscribe()
    holds.register(max_attempts=1)
    due(copies.blue, *range(1, 8))
    first = blue.claim("holds", batch=3)
    blue.fail(first[0].token, "1", error_class="Bad", transient=False)
    blue.fail(first[0].token, "2", error_class="Bad", transient=False)
    blue.expire(first[0].token)
    blue.replay("holds", key="1", reason="mended")
    blue.discard("holds", key="2", reason="gone")
    blue.sweep()
    copies.blue.execute("delete from pgreaper.events where kind = 'register'")  # as retention will
    blue.pause("holds")
    blue.resume("holds")
    until(copies.green, "select count(*) = 6 from holds where status = 'expired'")
    until(copies.green, "select count(*) = 1 from pgreaper.events where kind = 'resume'")
    assert copies.green.execute("select * from pgreaper.policies").fetchall() == (
        copies.blue.execute("select * from pgreaper.policies").fetchall()
    )
    assert green.claim_batch("holds", rescan=True) is None
    assert green.status()[0].state == "passive"

    # The switch-over.  Sequences are not replicated: docs/replication.md has the statement.
    copies.green.execute("alter subscription green disable")
    copies.green.execute(SEQUENCES)
    due(copies.green, 8)
    assert green.sweep() == 1
    assert [h.outcome for h in green.history("holds", "3")] == ["expired"]
    assert copies.green.execute("select invariant from pgreaper.reaper_verify() where not holds").fetchall() == []


# The statement that the document gives for it.
DOCUMENT = Path(__file__).parents[2] / "docs" / "replication.md"
SEQUENCES = re.findall(r"```sql\n(select setval.*?)```", DOCUMENT.read_text(), re.DOTALL)[0]
