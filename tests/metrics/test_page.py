"""`pgreaper metrics`: the page tells what the view tells, in words of Prometheus, and hides nothing that failed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from pgreaper import metrics
from pgreaper.connection import resolve
from tests.conftest import Holds
from tests.metrics.conftest import one, samples
from tests.replication.conftest import connect, in_step

UNREACHABLE = "postgresql://u:s3cret@127.0.0.1:1/d"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/metrics.md"


def everything(db, holds):
    """Each figure is something: expired, leased, retrying, dead, due."""
    holds.due(20)
    holds.register(permanent_attempts=1, objective="30 seconds")
    claim = "select token from pgreaper.reaper_claim('holds', {}, skew => '2.5 seconds')"
    ((token,), *_) = db.execute(claim.format(5)).fetchall()
    db.execute("update holds set status = 'consumed' where id = 2")
    db.execute("update holds set status = 'expired' where id = 3")
    db.execute("select pgreaper.reaper_fail(%s, '4', 'Timeout', true)", (token,))
    db.execute("select pgreaper.reaper_fail(%s, '5', 'Refused', false)", (token,))
    db.execute("select count(*) from pgreaper.reaper_expire(%s)", (token,))
    db.execute(claim.format(3))
    # A relay whose queue is away.
    db.execute("select pgreaper.reaper_relay('holds', 'audit', backfill => true)")
    ((token, *_),) = db.execute("select * from pgreaper.reaper_fetch('audit')").fetchall()
    db.execute("select pgreaper.reaper_ack(%s, delivered => '{}', trouble => 'ConnectionRefused')", (token,))


def test_the_page_tells_what_the_view_tells(db, holds, in_process):
    """Each column of the view has its metric, with the value that it has there."""
    everything(db, holds)
    result = in_process("metrics")
    assert (result.code, result.err) == (0, "")
    found = samples(result.out)

    def value(name, **labels):
        return one(found, f"pgreaper_{name}", policy="holds", **labels)

    assert one(found, "pgreaper_up") == 1
    assert [value(name) for name in ("due", "leased", "retrying", "dead_letters")] == [12, 3, 1, 1]
    assert [value("outcomes_total", outcome=o) for o in ("expired", "already-done", "not-eligible")] == [1, 1, 1]
    assert [value("outcomes_total", outcome=o) for o in ("retry", "dead-letter")] == [1, 1]
    assert value("leases_taken_back_total") == 0
    assert value("objective_seconds") == 30
    assert value("clock_skew_seconds") == 2.5
    assert value("paused_seconds") == 0
    assert 3500 < value("oldest_due_seconds") < 3700
    assert 0 < value("oldest_dead_letter_seconds") < 60
    relay = [value(f"relay_{name}", relay="audit") for name in ("waiting", "trouble", "dead_events", "delivered_total")]
    assert relay == [1, 1, 0, 0]
    assert 0 < value("relay_oldest_seconds", relay="audit") < 60
    now = db.execute("select extract(epoch from clock_timestamp())::float8").fetchone()[0]
    assert now - 60 < value("last_success_timestamp_seconds") <= now
    assert one(found, "pgreaper_policy_info", policy="holds", owner="tests") == 1
    assert {s: value("policy_state", state=s) for s in metrics.STATES} == {
        s: float(s == "active") for s in metrics.STATES
    }


def test_the_histogram_is_one(db, holds, in_process):
    """Buckets that only grow, up to all of them; the hour that the hold was late lies between its bounds."""
    everything(db, holds)
    found = samples(in_process("metrics").out)
    buckets = {
        dict(labels)["le"]: n for (name, labels), n in found.items() if name == "pgreaper_lateness_seconds_bucket"
    }
    bounds = sorted(buckets, key=float)
    assert [buckets[b] for b in bounds] == sorted(buckets.values())
    assert bounds[-1] == "+Inf"
    assert (buckets["2500"], buckets["5000"], buckets["+Inf"]) == (0, 1, 1)
    assert one(found, "pgreaper_lateness_seconds_count", policy="holds") == 1
    assert list(buckets)[:3] == ["0.001", "0.0025", "0.005"]


def test_nothing_identifies_a_hold(db, holds, in_process):
    """Labels are policies, relays, owners and fixed words: no key, no e-mail, no worker."""
    everything(db, holds)
    names = {label for _, labels in samples(in_process("metrics").out) for label, _ in labels}
    assert names == {"version", "policy", "owner", "state", "outcome", "le", "relay"}


def test_hostile_names(db, holds, in_process, needs):
    """A policy and an owner of any name stay labels; promtool reads the page."""
    name, owner = 'a "b" \\ {c="d"}\n# TYPE x counter\nżółć 座席', "o\\n\t'"
    holds.register(name, owner=owner)
    page = in_process("metrics").out
    assert one(page, "pgreaper_policy_info", policy=name, owner=owner) == 1
    assert one(page, "pgreaper_due", policy=name) == 0
    promtool = needs("promtool", package="prometheus")
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


@pytest.mark.parametrize(
    ("condition", "state"),
    [
        ("select pgreaper.reaper_pause('holds', 'x')", "paused"),
        ("drop table holds", "broken"),
        ("alter table holds rename column status to was", "broken"),
    ],
)
def test_states(db, holds, in_process, condition, state):
    """One of the states is 1.  What cannot be read is not told as nothing being due."""
    holds.due(3)
    holds.register()
    db.execute(condition)
    page = in_process("metrics").out
    assert {s for s in metrics.STATES if one(page, "pgreaper_policy_state", policy="holds", state=s)} == {state}
    assert (one(page, "pgreaper_due", policy="holds") is None) == (state == "broken")
    assert (one(page, "pgreaper_oldest_due_seconds", policy="holds") is None) == (state == "broken")
    assert (one(page, "pgreaper_paused_seconds", policy="holds") > 0) == (state == "paused")


def test_before_anything_happened(holds, in_process):
    """Counters begin at zero; what is not known has no sample."""
    holds.register()
    page = in_process("metrics").out
    assert one(page, "pgreaper_outcomes_total", policy="holds", outcome="expired") == 0
    assert one(page, "pgreaper_last_success_timestamp_seconds", policy="holds") is None
    assert one(page, "pgreaper_clock_skew_seconds", policy="holds") is None


def test_a_slow_policy_does_not_hide_the_others(db, holds, source, in_process, monkeypatch):
    """One target takes too long to look at: it is told as broken, and the others as they are."""
    holds.due(3)
    holds.register()
    db.execute("""
        create function slow(bigint) returns boolean language plpgsql as $$
          begin perform pg_sleep(5); return true; end $$;
        create table slow_holds (like holds including all);
        insert into slow_holds (status, expires_at)
          select 'held', now() - interval '1 minute' from generate_series(1, 3);
        create view slow_view as select * from slow_holds where slow(id);
    """)
    holds.register("slow", target="slow_view", key_columns=["id"], owner="slow-team")
    monkeypatch.setattr(metrics, "_ALL_WITHIN", 0.5)
    monkeypatch.setattr(metrics, "_EACH_WITHIN", 1.0)
    page = metrics.page(source().latest()).decode()
    assert one(page, "pgreaper_up") == 1
    assert one(page, "pgreaper_due", policy="holds") == 3
    assert one(page, "pgreaper_policy_state", policy="slow", state="broken") == 1
    assert one(page, "pgreaper_policy_info", policy="slow", owner="slow-team") == 1, "an alert about it needs its owner"
    assert one(page, "pgreaper_policy_state", policy="holds", state="active") == 1
    told = in_process("metrics")
    assert told.code == 0
    assert "not looked at in time: slow" in told.err


def test_a_database_that_is_away_is_told(in_process):
    """75, the error on stderr, and on stdout a page that says so: no password, no policies."""
    result = in_process("metrics", "--database-url", UNREACHABLE)
    assert result.code == 75
    assert result.err.startswith("error: the database cannot be reached")
    assert one(result.out, "pgreaper_up") == 0
    assert {name for name, _ in samples(result.out)} == {
        "pgreaper_build_info",
        "pgreaper_up",
        "pgreaper_read_seconds",
        "pgreaper_read_timestamp_seconds",
    }
    assert "s3cret" not in result.out + result.err


def test_a_standby_can_be_asked(pair):
    """A hot standby answers like its primary, also where transactions are serializable by default: it knows none."""
    primary, standby = pair
    with connect(primary) as db:
        holds = Holds(db)
        holds.due(2)
        holds.register()
        db.execute("alter database postgres set default_transaction_isolation = 'serializable'")
        with connect(standby, options="-c default_transaction_isolation=read\\ committed") as other:
            in_step(db, other)
    reading = metrics.Source(resolve(standby.dsn)).latest()
    assert reading.trouble is None
    assert one(metrics.page(reading).decode(), "pgreaper_due", policy="holds") == 2


def test_looking_writes_nothing(db, holds, source):
    """What the user's view does when it is read, it may not do for whoever only looks: the policy is broken then."""
    holds.due(2)
    db.execute("""
        create table spied (id bigint);
        create function spy(bigint) returns boolean language plpgsql as $$
          begin insert into spied values ($1); return true; end $$;
        create view spy_view as select * from holds where spy(id);
    """)
    holds.register("spy", target="spy_view", key_columns=["id"])
    db.execute("truncate spied")
    page = metrics.page(source().latest()).decode()
    assert one(page, "pgreaper_policy_state", policy="spy", state="broken") == 1
    assert db.execute("select count(*) from spied").fetchone() == (0,)


def test_a_reader_may_ask(db, holds, dsn, in_process):
    """`pgreaper grant … --as reader` is enough."""
    role = f"reader_{db.info.dbname}"
    holds.due(2)
    holds.register()
    db.execute(f"create role {role} login")
    try:
        db.execute("select pgreaper.reaper_grant(%s, 'reader')", (role,))
        url = re.sub(r"//[^@]*@", f"//{role}@", dsn)
        result = in_process("metrics", "--database-url", url)
        assert (result.code, one(result.out, "pgreaper_due", policy="holds")) == (0, 2), result.err
    finally:
        db.execute(f"drop owned by {role}")
        db.execute(f"drop role {role}")


def test_the_textfile_is_replaced_as_a_whole(holds, in_process, tmp_path):
    """Renamed into place, readable for the node exporter whatever the umask is, and nothing left beside it."""
    holds.register()
    file = tmp_path / "pgreaper.prom"
    file.write_text("old")
    before = file.stat().st_ino
    mask = os.umask(0o077)
    try:
        result = in_process("metrics", "--textfile", str(file))
    finally:
        os.umask(mask)
    assert (result.code, result.out, result.err) == (0, "", "")
    assert one(file.read_text(), "pgreaper_due", policy="holds") == 0
    assert file.stat().st_ino != before
    assert file.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [file]


def test_the_textfile_tells_of_an_outage(in_process, tmp_path):
    """A cron job that cannot read must not leave the figures of yesterday behind."""
    file = tmp_path / "pgreaper.prom"
    file.write_text('pgreaper_due{policy="holds"} 0\n')
    result = in_process("metrics", "--textfile", str(file), "--database-url", UNREACHABLE)
    assert (result.code, result.out) == (75, "")
    assert one(file.read_text(), "pgreaper_up") == 0
    assert one(file.read_text(), "pgreaper_due", policy="holds") is None


def test_a_textfile_that_cannot_be_written(holds, in_process, tmp_path):
    """1, the path and why, or 2 for what is no file; and nothing left behind."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name, why, code in (
        ("nowhere/x.prom", "no such file", 1),
        ("loop/x.prom", "too many levels of symbolic links", 1),
        ("folder", "is a directory", 2),
    ):
        file = tmp_path / name
        result = in_process("metrics", "--textfile", str(file))
        assert result.code == code
        assert why in result.err
    with pytest.raises(IsADirectoryError):
        metrics.write(tmp_path / "folder", b"written, and then not renamed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "loop"]


def test_as_json(db, holds, in_process):
    """One document: what the view has, numbers that JSON has, and null for the bound that is infinite."""
    everything(db, holds)
    result = in_process("metrics", "--json")
    (policy,) = result.json["policies"]
    assert (policy["policy"], policy["due"], policy["expired_total"]) == ("holds", 12, 1)
    assert policy["lateness_bounds"][-1] is None
    assert len(policy["lateness_bounds"]) == len(policy["lateness_counts"])
    assert result.json["unread"] == []
    assert in_process("metrics", "--json", "--textfile", "x").code == 2


def test_every_metric_is_documented(db, holds, in_process, serving):
    """docs/metrics.md lists each metric with its type and labels, and no other."""
    everything(db, holds)
    daemon = serving()
    page = daemon.until("pgreaper_up", 1)
    exported = {
        (name, frozenset(label for label, _ in labels))
        for name, labels in [*page, *samples(in_process("metrics").out)]
        if name.startswith("pgreaper_")
    }
    lines = re.findall(r"^\| `(pgreaper_\w+)(?:\{([\w, ]+)\})?` \|", DOCUMENT.read_text(), re.MULTILINE)
    documented = {(name, frozenset(filter(None, labels.split(", ")))) for name, labels in lines}
    assert documented == exported
    assert len(lines) == len(documented)
