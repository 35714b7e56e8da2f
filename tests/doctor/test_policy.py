"""
What ``pgreaper doctor`` finds about a policy: each finding is provoked for real, and gone once its remedy was pasted.
"""

from __future__ import annotations

import time
from datetime import timedelta

import psycopg
import pytest

from pgreaper.doctor import Limits, examine
from tests.doctor.conftest import grant_worker


@pytest.fixture
def bookings(holds, run):
    """Ten holds, registered, overdue ones expired: nothing is wrong."""
    holds.due(10)
    holds.ahead(10, within="1 day")
    holds.register()
    assert run("work").code == 0
    return holds


def found(db, code, **limits):
    """The findings of this code under other limits."""
    return [f for f in examine(db, limits=Limits(**limits)).findings if f.code == code]


def test_a_healthy_policy_has_no_finding(doctor, bookings):
    assert doctor.codes() == []


def test_the_worker_itself_sees_a_healthy_policy(doctor, bookings, db, worker):
    """With exactly a worker's rights: nothing but that other roles' sessions are hidden, and how to see them."""
    role, url = worker
    grant_worker(db, role)
    finding = doctor.heal("unseen", level="note", url=url, admin=doctor_url(db))
    assert role in finding["sql"][0]
    assert doctor.look(url=url) == []


def doctor_url(db):
    return f"postgresql://{db.info.user}@/{db.info.dbname}?host={db.info.host}&port={db.info.port}"


# -- indexes and plans


def test_c055_no_index(doctor, bookings, db):
    db.execute("drop index holds_due")
    finding = doctor.heal("index-missing", level="warning")
    assert finding["sql"] == ["create index concurrently on public.holds (expires_at) where status = 'held';"]


def test_no_index_on_partitions_and_behind_a_view(doctor, holds, db):
    db.execute(
        "create table parts (id bigint primary key, status text, expires_at timestamptz) partition by hash (id);"
        "create table p0 partition of parts for values with (modulus 2, remainder 0);"
        "create table p1 partition of parts for values with (modulus 2, remainder 1);"
        "drop index holds_due; create view mine as select * from holds where customer_email is null"
    )
    holds.register("parts", target="parts")
    holds.register("view", target="mine")
    assert doctor.codes() == ["index-missing", "index-missing"]
    assert doctor.codes("view") == ["index-missing"]
    for finding in doctor.look():
        if finding["code"] == "index-missing":
            doctor._paste(finding)
    assert doctor.codes() == []


@pytest.mark.parametrize(("by", "key"), [("hash (id)", "id"), ("range (expires_at)", "id, expires_at")])
def test_many_partitions(doctor, holds, db, by, key):
    """Each batch is planned for all of them, unless the deadline rules most of them out."""
    values = [
        f"with (modulus 100, remainder {n})"
        if by.startswith("hash")
        else f"from ('{2000 + n}-01-01') to ('{2001 + n}-01-01')"
        for n in range(100)
    ]
    db.execute(
        f"create table parts (id bigint, status text, expires_at timestamptz, primary key ({key})) partition by {by};"
        + "".join(f"create table part_{n} partition of parts for values {v};" for n, v in enumerate(values))
        + "create index on parts (expires_at) where status = 'held'"
    )
    holds.register("parts", target="parts", key_columns=key.split(", "))
    if by.startswith("range"):
        assert doctor.codes() == []
        return
    finding = doctor.only("partitions", level="note")
    assert "public.parts has 100 partitions, and none is ruled out by the deadline" in finding["fact"]
    db.execute(finding["advice"].partition(": ")[2])


def test_an_index_that_is_not_valid(doctor, bookings, db, connect):
    """What an interrupted CREATE INDEX CONCURRENTLY leaves behind; REINDEX mends it, its own leftover is dropped."""
    holder = connect(autocommit=False)
    holder.execute("insert into holds (expires_at) values (now() + interval '1 day')")
    impatient = connect()
    impatient.execute("set lock_timeout = '50ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        impatient.execute("create index concurrently holds_late on holds (expires_at) where status = 'held'")
    holder.rollback()
    finding = doctor.only("index-invalid", level="warning")
    assert finding["subject"] == "public.holds_late"
    assert finding["sql"] == ["reindex index concurrently public.holds_late;"]

    holder.execute("insert into holds (expires_at) values (now() + interval '1 day')")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        impatient.execute("reindex index concurrently holds_due")
    holder.rollback()
    remedies = {f["subject"]: f["sql"] for f in doctor.look() if f["code"] == "index-invalid"}
    assert remedies["public.holds_due_ccnew"] == ["drop index concurrently public.holds_due_ccnew;"]
    for finding in doctor.look():
        if finding["code"] == "index-invalid":
            doctor._paste(finding)
    assert "index-invalid" not in doctor.codes()


def test_an_index_that_is_never_used(doctor, bookings, db, connect):
    """While another one is; of two that nobody has used yet, none is in excess."""
    db.execute("create table quiet (id int primary key, status text, d timestamptz)")
    db.execute("create index on quiet (d) where status = 'held'; create index on quiet (d)")
    bookings.register("quiet", target="quiet", deadline_column="d")
    assert doctor.codes("quiet") == []
    db.execute("create index holds_spare on holds (expires_at, id)")
    flush(db, connect, "select idx_scan > 0 from pg_stat_user_indexes where indexrelname = 'holds_due'")
    finding = doctor.heal("index-unused", level="note")
    assert finding["sql"] == ["drop index concurrently public.holds_spare;"]
    assert db.execute("select to_regclass('holds_due') is not null").fetchone() == (True,)


def history(db):
    db.execute(
        "insert into holds (status, expires_at) select 'expired', now() - interval '100 days' + g * interval '1 s'"
        " from generate_series(1, 20000) as g"
    )
    db.execute("vacuum analyze holds")


def test_a_claim_that_reads_the_whole_table(doctor, bookings, db):
    """An index on the deadline alone holds the whole past as well.  Small tables may be read."""
    db.execute("drop index holds_due; create index holds_all on holds (expires_at)")
    history(db)
    assert found(db, "claim-scan") == []
    [finding] = found(db, "claim-scan", scan=2**16)
    assert finding.level == "warning"
    assert finding.sql == ("create index concurrently on public.holds (expires_at) where status = 'held';",)
    db.execute(finding.sql[0])
    assert found(db, "claim-scan", scan=2**16) == []


def test_a_claim_that_may_use_no_index(bookings, db, worker):
    """A planner setting of the role's: found as that role, by the plan of the claim's own statement."""
    role, url = worker
    grant_worker(db, role)
    history(db)
    for setting in ("enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan"):
        db.execute(f"alter role {role} in database {db.info.dbname} set {setting} = off")
    with psycopg.connect(url, autocommit=True) as session:
        [finding] = found(session, "claim-scan", scan=2**16)
    assert "enable_indexscan" in finding.fact
    for statement in finding.sql:
        db.execute(statement)
    with psycopg.connect(url, autocommit=True) as session:
        assert found(session, "claim-scan", scan=2**16) == []


# -- the target as it is now


def test_the_table_is_gone(doctor, bookings, db):
    """C093: a dropped table is told, the other policies are looked at all the same."""
    db.execute("create table other (like holds including all)")
    bookings.register("other", target="other")
    db.execute("drop table holds")
    assert doctor.codes() == ["target-missing"]
    doctor.heal("target-missing", level="error")


def test_a_column_is_gone(doctor, bookings, db):
    db.execute("alter table holds rename expires_at to until")
    finding = doctor.only("column-missing", level="error")
    assert "expires_at" in finding["fact"]
    assert doctor.codes() == ["column-missing"]


def test_the_deadline_has_lost_its_zone(doctor, bookings, db, run):
    """A policy without a zone over a column without one: nothing would ever be due."""
    db.execute("alter table holds alter expires_at type timestamp using expires_at at time zone 'UTC'")
    doctor.heal("zone", level="error")
    bookings.due(3)
    assert run("work", "--json").json["outcomes"]["expired"] == 3


def test_the_deadline_has_got_a_zone(doctor, holds, db):
    db.execute(
        "create table local (id int primary key, status text, at_local timestamp, note text, token text, word text,"
        " ended_at timestamptz, used_at timestamptz)"
    )
    every = {
        "grace": "90 seconds", "max_claims": 3, "set": '{"note": "it\'s over", "token": null, "word": "null"}',
        "payload_columns": ["status"], "lease": "7 minutes", "backoff_base": "3 seconds", "backoff_cap": "2 hours",
        "objective": "4 minutes", "batch": 77, "max_attempts": 9, "permanent_attempts": 2, "rate_limit": 12.5,
        "held": ["held", "kept"], "stamp_column": "ended_at", "consumed": "consumed",
        "consumed_stamp_column": "used_at", "restored": "kept", "restore_within": "3 hours",
    }  # fmt: skip
    holds.register("local", target="local", deadline_column="at_local", zone="Europe/Zurich", **every)
    db.execute("create index on local (at_local) where status in ('held', 'kept')")
    assert doctor.codes() == []
    everything = "select to_jsonb(p) - 'zone' from pgreaper.policies as p where name = 'local'"
    before = db.execute(everything).fetchone()
    db.execute("alter table local alter at_local type timestamptz using at_local at time zone 'Europe/Zurich'")
    doctor.heal("zone", level="warning")
    assert db.execute(everything).fetchone() == before


def test_the_deadline_is_none_any_more(doctor, bookings, db):
    db.execute("drop index holds_due; alter table holds alter expires_at type text")
    assert doctor.codes() == ["deadline-type"]


def test_the_states_are_others(doctor, holds, db):
    db.execute(
        "create type st as enum ('held', 'expired'); create table enums (id int primary key, status st, d timestamptz);"
        "create index on enums (d) where status = 'held'"
    )
    holds.register("enums", target="enums", deadline_column="d")
    assert doctor.codes() == []
    db.execute("alter type st rename value 'expired' to 'lapsed'")
    finding = doctor.only("states", level="error")
    assert "expired" in finding["fact"]
    db.execute("alter type st rename value 'lapsed' to 'expired'")
    assert doctor.codes() == []
    db.execute("drop table enums; create table enums (id int primary key, status int, d timestamptz)")
    assert "states" in doctor.codes()


def test_a_view_that_needs_the_search_path_of_its_user(doctor, holds, db):
    """Its functions find what they find in a claim; the system's own words stay the system's."""
    db.execute(
        "alter table holds alter expires_at drop not null; create table paid (id bigint);"
        "create function is_paid(bigint) returns boolean language plpgsql stable as"
        " 'begin return exists (select from paid where id = $1); end';"
        "create view unpaid as select * from holds where not is_paid(id);"
        "create schema evil; create function evil.count(text) returns int language sql as 'select 666'"
    )
    db.execute(f"alter database {db.info.dbname} set search_path = public, evil, pg_catalog")
    holds.register("view", target="unpaid")
    assert doctor.codes() == []
    db.execute("insert into holds (expires_at) values (null)")
    holds.due(1)
    assert doctor.codes() == ["null-deadline", "unserved"]


# -- rights


def test_c061_what_a_worker_lacks(doctor, bookings, db, worker, run):
    """Found before any claim, also by an administrator; each right by name, with the statement that gives it."""
    role, url = worker
    grant_worker(db, role, targets=False)
    finding = doctor.only("grants", level="error")
    assert role in finding["fact"]
    assert doctor.only("grants", level="error", url=url)["sql"] == finding["sql"]
    doctor.heal("grants", level="error")
    bookings.due(2)
    assert run("work", "--json", url=url).json["outcomes"]["expired"] == 2

    db.execute(f"revoke update (status) on holds from {role}")
    finding = doctor.only("grants", level="error")
    assert finding["sql"] == [f"grant update (status) on public.holds to {role};"]
    doctor._paste(finding)
    db.execute(f"revoke select on holds from {role}; grant select (id, status) on holds to {role}")
    finding = doctor.heal("grants", level="error")
    assert "expires_at" in finding["fact"]
    db.execute("create schema shop; alter table holds set schema shop")
    db.execute("update pgreaper.policies set target_schema = 'shop'")
    finding = doctor.heal("grants", level="error")
    assert finding["sql"] == [f"grant usage on schema shop to {role};"]
    assert "grants" not in doctor.codes(url=url)


def test_a_view_whose_owner_has_lost_a_right(doctor, holds, db, worker, dsn):
    """The worker lacks nothing itself; the view behind its policy cannot be read by anybody."""
    role, url = worker
    owner = f"{db.info.dbname}_owner"
    db.execute(f"create role {owner}; create view mine as select * from holds; alter view mine owner to {owner}")
    try:
        db.execute(f"grant select, update (status) on holds to {owner}")
        holds.register("view", target="mine")
        grant_worker(db, role)
        assert "target-broken" not in doctor.codes(url=url)
        db.execute(f"revoke all on holds from {owner}")
        assert "holds" in doctor.only("target-broken", level="error", url=url)["fact"]
        assert doctor.codes() == ["unchecked"]
    finally:
        db.execute(f"drop view mine; drop owned by {owner}; drop role {owner}")


def test_c061_a_schema_that_is_closed_to_the_worker(doctor, bookings, db, worker, run):
    """The usual order: a grant, then another table.  It is named, and hides neither the other policies nor itself."""
    role, url = worker
    grant_worker(db, role)
    db.execute("create schema shop; create table shop.carts (like holds including all)")
    bookings.register("carts", target="shop.carts")
    db.execute("drop index holds_due")
    found = {f["code"]: f for f in doctor.look(url=url) if f["code"] != "unseen"}
    assert sorted(found) == ["grants", "index-missing"]
    assert (found["index-missing"]["policy"], found["grants"]["policy"]) == ("holds", "carts")
    assert "usage of schema shop" in found["grants"]["fact"]
    assert run("doctor", "carts", url=url).code == 3
    assert run("doctor", "nosuch", url=url).code == 2
    doctor.heal("grants", level="error", url=url, admin=doctor_url(db))
    assert "unchecked" not in doctor.codes(url=url)


def test_c061_policies_that_cannot_be_read_are_no_note(doctor, bookings, db, worker):
    """Nothing is known of any policy then, and that is not healthy."""
    role, url = worker
    grant_worker(db, role)
    db.execute(f"revoke select on pgreaper.policies from {role}")
    assert "may not read the policies" in doctor.only("grants", level="error", url=url)["fact"]
    doctor.heal("grants", level="error", url=url, admin=doctor_url(db))


def test_c061_what_a_worker_lacks_beneath_a_view_of_the_callers_rights(doctor, holds, db, worker, run):
    """Each right by name, to the worker itself and an administrator; not of what the view does not read."""
    if db.info.server_version < 150000:
        pytest.skip("security_invoker came with PostgreSQL 15")
    role, url = worker
    db.execute("create view mine with (security_invoker) as select id, status, expires_at from holds")
    db.execute("create view other as select customer_email from holds")
    holds.register("view", target="mine")
    grant_worker(db, role)
    db.execute(f"revoke all on holds from {role}")
    finding = doctor.only("grants", level="error", url=url)
    assert "select (expires_at, id, status) on public.holds and update (status) on public.holds" in finding["fact"]
    assert finding["sql"] == [f"grant select, update (status) on public.holds to {role};"]
    assert doctor.only("grants", level="error")["sql"] == finding["sql"]
    assert "target-broken" not in doctor.codes(url=url)
    db.execute(f"grant select (id, status, expires_at), update (status) on holds to {role}")
    assert "grants" not in doctor.codes(url=url)
    db.execute(f"revoke update (status) on holds from {role}")
    doctor.heal("grants", level="error")
    holds.due(2)
    assert run("work", "--json", url=url).json["outcomes"]["expired"] == 2


QUOTES = ["it's", "two '' quotes' ", "a \"b\" 'c'", "$1", "'$1'", "back\\slash's"]


@pytest.mark.parametrize("word", QUOTES)
def test_quotes_in_names_and_states_are_no_fault(doctor, holds, db, word):
    """What a claim reads is what the doctor reads, whatever stands in quotes."""
    quoted = psycopg.sql.Identifier
    db.execute(
        psycopg.sql.SQL(
            "create table {t} ({k} int primary key, {s} text not null, {d} timestamptz not null);"
            "insert into {t} values (1, 'held', now() + interval '1 day');"
            "create index on {t} ({d}) where {s} = {held}"
        ).format(
            t=quoted(f"t {word}"), k=quoted(f"k {word}"), s=quoted(f"s {word}"), d=quoted(f"d {word}"),
            held=psycopg.sql.Literal(word),
        )
    )  # fmt: skip
    holds.register(
        "p", target=quoted(f"t {word}").as_string(db), deadline_column=f"d {word}", status_column=f"s {word}",
        held=[word, "held"], expired=f"{word} over",
    )  # fmt: skip
    db.execute(psycopg.sql.SQL("create index on {t} ({d})").format(t=quoted(f"t {word}"), d=quoted(f"d {word}")))
    assert doctor.codes() == []


def test_debug_shows_what_the_server_said(holds, db, run):
    """The hint of a broken target says so; without it no value of a row is shown, and JSON has none either way."""
    db.execute(
        "create function boom(text) returns boolean language plpgsql immutable as"
        " $$ begin raise exception 'secret %', $1 using errcode = '22012'; end $$;"
        "create view mine as select * from holds; "
    )
    holds.register("view", target="mine")
    db.execute("create or replace view mine as select * from holds where boom('mail')")
    quiet, loud = run("doctor"), run("doctor", "--debug", "--json")
    assert "target-broken" in quiet.out
    assert "--debug shows" in quiet.out
    assert "secret" not in quiet.out + quiet.err + loud.out
    assert "secret mail" in loud.err
    assert "policy view, target-broken" in loud.err


def test_row_level_security_would_hide_holds(doctor, bookings, db, worker):
    """Told to the worker itself, and to an administrator who sees every row."""
    role, url = worker
    grant_worker(db, role)
    db.execute("alter table holds enable row level security; create policy half on holds using (id % 2 = 0)")
    assert doctor.only("row-security", level="error", url=url)["subject"] == role
    doctor.heal("row-security", level="error")
    assert "row-security" not in doctor.codes(url=url)


def test_row_level_security_hides_holds_from_who_looks(doctor, bookings, db, worker):
    """Of a role that does not work, and so would see half of the figures."""
    role, url = worker
    db.execute("select pgreaper.reaper_grant(%s, 'reader')", [role])
    db.execute("alter table holds enable row level security; create policy half on holds using (id % 2 = 0)")
    assert doctor.only("row-security", level="error", url=url)["subject"] == role
    assert "row-security" not in doctor.codes()


@pytest.mark.parametrize("reads_as", ["its owner", "whoever asks"])
def test_row_level_security_behind_a_view(doctor, holds, db, worker, reads_as):
    """The table, the view and the role that sees half are named, whoever looks; the remedy is for that role."""
    if reads_as == "whoever asks" and db.info.server_version < 150000:
        pytest.skip("views with security_invoker came with PostgreSQL 15")
    role, url = worker
    owner = f"{db.info.dbname}_owner"
    db.execute(f"create role {owner}")
    try:
        options = "with (security_invoker)" if reads_as == "whoever asks" else ""
        db.execute(f"create view mine {options} as select * from holds; alter view mine owner to {owner}")
        db.execute(f"grant select, update (status) on holds to {owner}")
        holds.register("view", target="mine")
        grant_worker(db, role)
        assert "row-security" not in doctor.codes(url=url)
        db.execute("alter table holds enable row level security; create policy half on holds using (id % 2 = 0)")
        guilty = role if reads_as == "whoever asks" else owner
        finding = doctor.only("row-security", level="error", url=url)
        assert (finding["policy"], finding["subject"]) == ("view", guilty)
        assert "security of public.holds, which view public.mine reads, would hide holds from" in finding["fact"]
        assert doctor.heal("row-security", level="error")["subject"] == guilty
        assert "row-security" not in doctor.codes(url=url)
    finally:
        db.execute(f"drop view mine; drop owned by {owner}; drop role {owner}")


# -- triggers


def test_triggers_that_will_fire(doctor, bookings, db):
    db.execute(
        "create function note() returns trigger language plpgsql as 'begin return new; end';"
        "create trigger tell after update of status on holds for each row execute function note();"
        "create trigger early before update on holds for each statement execute function note();"
        "create trigger email before update of customer_email on holds for each row execute function note();"
        "create trigger birth after insert on holds for each row execute function note();"
        "create constraint trigger late after update on holds deferrable initially deferred for each row"
        " execute function note()"
    )
    fact = doctor.only("triggers", level="note")["fact"]
    assert fact.startswith("3 triggers")
    for words in ("tell (after each row", "early (before each statement", "late (at commit each row", "note()"):
        assert words in fact
    assert doctor.codes() == ["triggers"]
    db.execute("alter table holds disable trigger tell")
    assert doctor.only("triggers", level="note")["fact"].startswith("2 triggers")
    doctor.heal("trigger-disabled", level="note")
    assert doctor.only("triggers", level="note")["fact"].startswith("3 triggers")


# -- housekeeping


def test_autovacuum_is_off_for_the_target(doctor, bookings, db):
    db.execute("alter table holds set (autovacuum_enabled = false)")
    doctor.heal("autovacuum", level="warning")


def test_dead_row_versions(doctor, bookings, db, connect):
    """They are counted by the statistics; vacuum removes them."""
    db.execute("alter table holds set (autovacuum_enabled = false)")
    bookings.ahead(12_000)
    db.execute("update holds set customer_email = 'x'")
    flush(db, connect, "select n_dead_tup >= 12000 from pg_stat_user_tables where relname = 'holds'")
    finding = doctor.only("dead-rows", level="warning")
    assert "public.holds" in finding["fact"]
    doctor._paste(finding)
    flush(db, connect, "select n_dead_tup < 100 from pg_stat_user_tables where relname = 'holds'")
    assert "dead-rows" not in doctor.codes()


def flush(db, connect, condition):
    """Wait until the statistics say so: before 15 a session tells them with a statement, every half second at most."""
    end = time.monotonic() + 15
    watcher = connect()
    while watcher.execute(condition).fetchone() != (True,):
        db.execute("select pg_stat_force_next_flush()" if db.info.server_version >= 150000 else "select")
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def test_c020_rows_that_a_null_keeps_away(doctor, bookings, db):
    db.execute("alter table holds alter expires_at drop not null; alter table holds alter status drop not null")
    assert doctor.codes() == []
    db.execute("insert into holds (expires_at) values (null), (null)")
    assert doctor.only("null-deadline", level="note")["fact"].startswith("2 held rows have")
    db.execute("insert into holds (status, expires_at) values (null, now() - interval '1 h'), (null, 'infinity')")
    assert doctor.only("null-state", level="note")["fact"].startswith("1 row past the deadline has")
    assert doctor.codes() == ["null-deadline", "null-state"]
    db.execute("insert into holds (expires_at) select null from generate_series(1, 10001)")
    assert doctor.only("null-deadline", level="note")["fact"].startswith("10,000+ held rows")


def test_c020_of_a_large_table_the_statistics_tell(bookings, db):
    """It is not read from end to end to find out that there are none."""
    db.execute("alter table holds alter expires_at drop not null; analyze holds")
    assert found(db, "null-deadline", scan=0) == []
    db.execute("insert into holds (expires_at) values (null)")
    assert found(db, "null-deadline", scan=0) == []
    db.execute("insert into holds (expires_at) select null from generate_series(1, 50); analyze holds")
    assert [f.fact[:12] for f in found(db, "null-deadline", scan=0)] == ["51 held rows"]


# -- whether holds expire


def test_nobody_takes_due_holds(doctor, holds, db):
    holds.due(3)
    holds.register()
    finding = doctor.heal("unserved", level="error")
    assert finding["fact"].startswith("3 holds are due")
    assert "nothing has ever expired" in finding["fact"]
    assert holds.states() == {1: "expired", 2: "expired", 3: "expired"}


def test_nobody_takes_them_any_more(doctor, bookings, db, set_clock):
    """The schedule has stopped: what counts is that nothing happened since the oldest became due (C081)."""
    set_clock(timedelta(hours=30))
    finding = doctor.only("unserved", level="error")
    assert finding["fact"].startswith("10 holds are due")
    assert "nothing has expired for 1 d 6 h" in finding["fact"]


def test_they_are_served_but_late(doctor, bookings, db):
    """Something expired after the oldest had become due, so somebody is at it."""
    bookings.due(5, overdue="2 hours")
    finding = doctor.heal("late", level="warning")
    assert "objective" in finding["fact"]


def test_policies_that_rest(doctor, holds, db, run):
    """Paused: a note, and a warning once holds wait for it.  The remedy resumes it."""
    holds.ahead(1)
    holds.register()
    run("pause", "holds", "--reason", "moving house")
    assert "moving house" in doctor.only("paused", level="note")["fact"]
    holds.due(4)
    finding = doctor.only("paused", level="warning")
    assert "4 holds are due" in finding["fact"]
    assert doctor.codes() == ["paused"]
    doctor._paste(finding)
    assert doctor.codes() == ["unserved"]


def test_a_policy_whose_holds_all_fail_alike(doctor, bookings, db, run):
    """Suspended; there is nothing to paste, and with the cause the finding goes."""
    db.execute("alter table holds add constraint sorry check (status <> 'expired') not valid")
    bookings.due(200)
    run("work", "--once")
    finding = doctor.only("suspended", level="error")
    assert "23514" in finding["fact"]
    assert (finding["sql"], finding["commands"]) == ([], [])
    assert "unserved" not in doctor.codes()


def test_c023_whoever_keeps_due_holds_locked(bookings, db, connect):
    """The pid is named and the remedy ends it; below the limit nothing is said."""
    bookings.due(3)
    holder = connect(autocommit=False, application_name="psql of yesterday")
    holder.execute("update holds set customer_email = 'x' where status = 'held' and expires_at < now()")
    assert [f for f in found(db, "locked") if f.sql] == []
    [finding] = found(db, "locked", lock=timedelta(0))
    assert finding.fact.startswith(f"3 due holds are locked by pid {holder.info.backend_pid}")
    assert "psql of yesterday" in finding.fact
    db.execute(finding.sql[0])
    with pytest.raises(psycopg.OperationalError):
        holder.execute("select 1")
    assert found(db, "locked", lock=timedelta(0)) == []


def test_c023_late_holds_that_are_merely_locked(doctor, bookings, db, connect, worker):
    """More workers would pass them over as well; what is late and free is told as ever, also when some are locked."""
    role, url = worker
    grant_worker(db, role)
    ids = bookings.due(3, overdue="2 hours")
    holder = connect(autocommit=False)
    holder.execute("update holds set customer_email = 'x' where id = any (%s)", [ids])
    for address in (None, url):
        finding = doctor.only("locked", level="warning", url=address)
        assert f"pid {holder.info.backend_pid}" in finding["fact"]
        assert (finding["commands"], finding["sql"]) == ([], [])
        assert {"late", "unserved"}.isdisjoint(doctor.codes(url=address))
    bookings.due(1, overdue="30 minutes")
    assert "the oldest for 2 h" not in doctor.only("late", level="warning")["fact"]
    assert "locked" not in doctor.codes()
    holder.rollback()
    assert "the oldest for 2 h" in doctor.only("late", level="warning")["fact"]


def test_c006_a_lease_that_is_too_short(doctor, bookings, db, run):
    """Less than four times what a batch takes; the remedy changes the lease and nothing else."""
    db.execute(
        "create function slow() returns trigger language plpgsql as 'begin perform pg_sleep(0.4); return new; end';"
        "create trigger slow before update on holds for each row execute function slow()"
    )
    bookings.register(lease="1 second", stamp_column=None, grace="5 seconds", backoff_cap="2 hours")
    bookings.due(1)
    run("work")
    before = db.execute("select to_jsonb(p) - 'lease' from pgreaper.policies as p").fetchone()
    finding = doctor.heal("lease-short", level="warning")
    assert "--lease" in finding["commands"][0]
    assert db.execute("select to_jsonb(p) - 'lease' from pgreaper.policies as p").fetchone() == before


def test_a_lease_that_is_absurdly_long(doctor, bookings, db):
    bookings.register(lease="20 hours")
    doctor.heal("lease-long", level="warning")
    assert db.execute("select lease <= interval '1 hour' from pgreaper.policies").fetchone() == (True,)


def test_remedies_for_a_policy_with_an_awkward_name(doctor, holds, db, run):
    """A dash is no option, and quotes and line breaks survive the shell."""
    name = "-rf 'it'\n$HOME"
    holds.ahead(1)
    holds.register(name, lease="20 hours")
    run("pause", "--", name)
    doctor.heal("lease-long", level="warning")
    doctor.heal("paused", level="note")
    assert db.execute("select name, paused_at, lease < '1 hour' from pgreaper.policies").fetchall() == [
        (name, None, True)
    ]


def test_c075_leases_from_another_life(doctor, bookings, db):
    """As after a restore: a lease ends far in the future, and its worker is no more."""
    bookings.due(2)
    db.execute("select pgreaper.reaper_claim('holds', worker => 'gone', rescan => true)")
    db.execute("update pgreaper.claims set claim_until = now() + interval '6 hours' where finished_at is null")
    finding = doctor.heal("lease-beyond", level="warning")
    assert "2 holds" in finding["fact"]


def test_dead_letters_without_reaction(doctor, bookings, db, run, set_clock):
    """A note on the first day, then a warning; the remedy gives them a fresh budget."""
    db.execute("alter table holds add constraint sorry check (status <> 'expired' or id % 2 = 0) not valid")
    bookings.due(4)
    run("work")
    assert "2 dead letters" in doctor.only("dead-letters", level="note")["fact"]
    db.execute("update pgreaper.failures set failed_at = failed_at - interval '2 days'")
    finding = doctor.heal("dead-letters", level="warning")
    assert "wait for tests: ConstraintViolation" in finding["fact"]


# -- replication


def test_c110_updates_that_cannot_be_published(doctor, bookings, db):
    """The publication came after the registration."""
    db.execute("create table keyed (id int not null unique, status text, d timestamptz)")
    db.execute("create index on keyed (d) where status = 'held'")
    bookings.register("keyed", target="keyed", deadline_column="d", key_columns=["id"])
    assert doctor.codes() == []
    db.execute("create publication everything for table keyed")
    doctor.heal("replica-identity", level="error")


def test_c110_a_policy_on_a_subscriber(cluster_with_logical, run, paste):
    """A copy is left to the publisher; the remedy is for a switch-over."""
    from tests.doctor.conftest import Doctor

    doctor, url = Doctor(run, paste), cluster_with_logical
    finding = doctor.heal("subscriber", level="note", url=url)
    assert finding["sql"] == ["alter subscription copy disable;"]
    assert doctor.codes(url=url) == ["unserved"]


@pytest.fixture
def cluster_with_logical(install):
    """Two databases of one server: the second subscribes to the first and has a policy and an overdue hold."""
    from pgreaper.embedded import Cluster

    with Cluster(settings={"wal_level": "logical"}) as server:
        table = "create table holds (id int primary key, status text, expires_at timestamptz)"
        with psycopg.connect(server.url("postgres"), autocommit=True) as db:
            db.execute("create database subscriber")
            db.execute(table)
            db.execute("create publication holds for table holds")
            db.execute("select pg_create_logical_replication_slot('copy', 'pgoutput')")
        url = server.url("subscriber")
        install(url)
        with psycopg.connect(url, autocommit=True) as db:
            db.execute(table)
            db.execute("create index on holds (expires_at) where status = 'held'")
            db.execute("insert into holds values (1, 'held', now() - interval '1 day')")
            db.execute(
                "select pgreaper.reaper_register('holds', 'holds', 'expires_at', 'status', '{held}', 'expired', 'me')"
            )
            db.execute(
                f"create subscription copy connection 'host={server.host} port={server.port} user={server.superuser}"
                " dbname=postgres' publication holds with (create_slot = false, slot_name = 'copy')"
            )
        yield url
