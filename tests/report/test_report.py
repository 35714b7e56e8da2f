"""``pgreaper report``: right figures, a verdict in words, bounded reading, one page that needs nothing."""

from __future__ import annotations

import re
import stat
import subprocess
import time
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest

from pgreaper import report as figures
from pgreaper.api import Reaper
from pgreaper.errors import InvalidInput
from pgreaper.page import page
from tests.cli.conftest import PGREAPER, environment

HOSTILE = [
    "</title></style></svg><script>alert(1)</script>",
    '"><img src=https://example.com/x onerror=alert(1)>',
    "a' onmouseover='alert(1)' x=\"",
    "]]>--><!--&lt;&amp;&#x3c;script>",
    "line\nbreak\u2028\u202e\x1b[31m",
    "k" * 50_000,
]


def read(db, *policies, since="24h", until=None):
    reaper = Reaper(db)
    begin, end, now = figures.span(reaper, since, until)
    return figures.gather(reaper, begin, end, now, policies or None)


class Tags(HTMLParser):
    """The elements of a page and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_a_day_in_figures(db, full_day, in_process, monkeypatch):
    """The report's figures are those of the books and of the table, over a day in which much went wrong."""
    found = {p.policy: p for p in read(db).policies}
    seats = found["seats"]
    expired = db.execute("select count(*) from seats where status = 'expired'").fetchone()[0]
    late = db.execute(
        "select count(*) from pgreaper.history where policy = 'seats' and outcome = 'expired'"
        " and at - deadline > interval '1 minute'"
    ).fetchone()[0]
    latest = db.execute(
        "select max(at - deadline) from pgreaper.history where policy = 'seats' and outcome = 'expired'"
    )
    assert (seats.outcomes["expired"], seats.over, seats.lateness_max) == (expired, late, latest.fetchone()[0])
    assert 0 < late < expired
    assert sum(b.expired for b in seats.buckets) == expired
    paid = db.execute("select count(*) from seats where note = 'paid'").fetchone()[0]
    assert (seats.outcomes["dead-letter"], len(seats.dead_letters), seats.status.dead) == (paid, paid, paid)
    assert [(f.error_class, f.constraint_name, f.dead_letters) for f in seats.failures] == [
        ("ConstraintViolation", "paid_first", paid)
    ]
    assert (seats.taken_back, [b.worker for b in seats.lost]) == (1, ["pgreaper/db-2/9"])
    assert [b.took for b in seats.slowest] == sorted((b.took for b in seats.slowest), reverse=True)
    assert len(seats.slowest) == 10
    assert (seats.kept, found["carts"].kept, found["invites"].kept) == (False, False, None)
    assert seats.bounds == []
    assert all(letter.owner == "team-tickets" for letter in seats.dead_letters)

    # Each bound, reached, is told in a sentence, on the page too.
    for name in ("_COUNTED", "_JUDGED", "_SAMPLED", "_EVENTS", "_CLAIMS", "_LETTERS"):
        monkeypatch.setattr(figures, name, 1)
    (bounded,) = read(db, "seats").policies
    said = [bound.partition(":")[0] for bound in bounded.bounds]
    assert said == [
        "expired",
        "late and latest",
        "p50 and p99",
        "conflicts and failures",
        "slowest batches",
        "dead letters",
    ]
    assert "none that was looked at expired later" in bounded.verdict
    monkeypatch.setattr(figures, "_JUDGED", 3)
    some = read(db, "seats").policies[0]
    assert 0 < some.over < late
    assert some.verdict.startswith(f"at least {some.over:,} of ")
    assert all(bound in page(read(db, "seats")) for bound in some.bounds)
    monkeypatch.undo()

    # As JSON the same, with lengths of time in seconds.
    done = in_process("report", "--json")
    (told,) = [p for p in done.json["policies"] if p["policy"] == "seats"]
    assert (done.code, told["outcomes"], told["over"]) == (0, seats.outcomes, late)
    assert told["lateness_max_seconds"] == seats.lateness_max.total_seconds()
    assert told["dead_letters"][0]["replay_command"] == seats.dead_letters[0].replay_command
    assert done.json["headline"] == "2 of 3 policies did not keep their objective: seats, carts."


def test_the_verdict_in_words(db, day, monkeypatch):
    """Kept, not kept, waiting now, nothing due: each is said."""
    day.table("t", objective="1 minute")
    assert read(db).headline == "Nothing was due in this time."
    day.at = datetime.now(UTC) - timedelta(hours=3)
    day.come("t", 20)
    day.expire("t", after=timedelta(seconds=1))
    day.now()
    found = read(db)
    assert (found.headline, found.kept, found.policies[0].kept) == ("The objective was kept.", True, True)
    assert found.policies[0].verdict.startswith("all of 20 holds expired within the promised 1 min")
    with monkeypatch.context() as patch:
        patch.setattr(figures, "_JUDGED", 1)
        assert read(db).headline == "The objective was kept, as far as was looked."
    db.execute("insert into t (expires_at) values (clock_timestamp() - interval '1 hour')")
    found = read(db)
    assert (found.headline, found.kept) == ("The objective was not kept.", False)
    assert "now 1 are due, the oldest for 60 min" in found.policies[0].verdict.replace("1 h", "60 min")
    # What waits now says nothing about an hour that is over.
    assert read(db, until="1h").policies[0].kept is True
    day.at = datetime.now(UTC) - timedelta(seconds=1)
    day.expire("t")
    day.now()
    found = read(db)
    assert "1 of 21 holds expired later than the promised 1 min" in found.policies[0].verdict
    db.execute("select pgreaper.reaper_pause('t', 'tests')")
    assert "now it is paused" in read(db).policies[0].verdict


def test_the_span(db, day):
    """Only what lies in it, whatever the words for it."""
    day.table("t")
    day.at = datetime.now(UTC) - timedelta(hours=5)
    day.come("t", 7)
    day.expire("t")
    day.now()
    assert read(db, since="6 hours").policies[0].outcomes["expired"] == 7
    assert read(db, since="4h").policies[0].outcomes["expired"] == 0
    assert read(db, since="10h", until="5h30min").policies[0].outcomes["expired"] == 0
    begin = (datetime.now(UTC) - timedelta(hours=6)).isoformat()
    assert read(db, since=begin).policies[0].outcomes["expired"] == 7
    assert len(read(db, since="20 years").policies[0].buckets) <= figures.MOST_BUCKETS + 1
    assert read(db, since="20 s").step == timedelta(seconds=1)
    for since, until in (("yesterday-ish", None), ("1h", "2h"), ("-1h", None), ("2026-99-99", None), ("", None)):
        with pytest.raises(InvalidInput):
            read(db, since=since, until=until)


def test_what_lies_outside_the_span_is_not_read(db, full_day):
    """Large trails are read through their indexes: a hundred times as much that is older costs nothing."""
    older = "at - g * interval '10 days'"
    db.execute(
        "alter table pgreaper.transitions disable trigger counted;"
        " insert into pgreaper.transitions (policy_id, at, holds, keys, deadlines, first_deadline,"
        f" last_deadline, lateness) select policy_id, {older}, holds, '{{}}', '{{}}', first_deadline,"
        f" last_deadline, lateness"
        "   from pgreaper.transitions, generate_series(1, 100) as g;"
        " insert into pgreaper.events (policy_id, key, kind, at)"
        f" select policy_id, key, kind, {older} from pgreaper.events, generate_series(1, 300) as g;"
        " insert into pgreaper.claims (policy_id, first_deadline, last_deadline, holds, attempt, claimed_at,"
        f" claim_until, finished_at, ending) select policy_id, first_deadline, last_deadline, holds, attempt, {older},"
        f" {older}, {older}, 'expired' from pgreaper.claims as c (token, policy_id),"
        " lateral (select c.claimed_at as at) as w, generate_series(1, 100) as g where finished_at is not null;"
        " analyze pgreaper.transitions, pgreaper.events, pgreaper.claims"
    )
    whole = dict(
        db.execute("select relname, reltuples from pg_class where relnamespace = 'pgreaper'::regnamespace").fetchall()
    )
    before = rows_read(db)
    read(db)
    after = rows_read(db, than=before)
    for table in ("transitions", "events", "claims"):
        assert whole[table] > 2000
        assert 0 < after[table] - before[table] < whole[table] / 5, table


def rows_read(db, than=None):
    """Rows of each table that were read in any way; with ``than``, as soon as the server has counted more than that."""
    end = time.monotonic() + 20
    while True:
        if db.info.server_version >= 150000:
            db.execute("select pg_stat_force_next_flush()")
        found = dict(
            db.execute(
                "select t.relname, t.seq_tup_read + sum(i.idx_tup_read)::bigint"
                "  from pg_stat_user_tables as t join pg_stat_user_indexes as i using (relid)"
                " where t.schemaname = 'pgreaper' group by t.relid, t.relname, t.seq_tup_read"
            ).fetchall()
        )
        if than is None or found["transitions"] > than["transitions"]:
            return found
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_page_needs_nothing_runs_nothing_and_is_accessible(db, full_day):
    """No script, no handler of events, no address but those within the page; a policy that forbids the rest."""
    text = page(read(db))
    tags = Tags(text).found
    assert not {tag for tag, _ in tags} & {"script", "img", "iframe", "object", "embed", "form", "base", "use", "image"}
    assert [a["href"] for tag, a in tags if tag == "link"] == ["data:,"]
    addresses = [value for _, a in tags for name, value in a.items() if name in ("href", "src", "xlink:href", "action")]
    assert all(address == "data:," or address.startswith("#p") for address in addresses if address)
    assert not [name for _, a in tags for name in a if name.startswith("on")]
    assert "url(" not in text
    assert "@import" not in text
    (csp,) = [a["content"] for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert csp is not None
    assert csp.startswith("default-src 'none'; style-src 'unsafe-inline'")

    # Accessible: each picture has a title that its element names, each figure is in a table too.
    pictures = [a for tag, a in tags if tag == "svg"]
    titles = {a["id"] for tag, a in tags if tag == "title" and "id" in a}
    assert len(pictures) == 4
    assert {a["aria-labelledby"] for a in pictures} <= titles
    assert all(a["role"] == "img" for a in pictures)
    assert sum(tag == "details" for tag, _ in tags) == 2
    assert [tag for tag, _ in tags if tag == "h1"] == ["h1"]
    ids = [a["id"] for _, a in tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert next(a for tag, a in tags if tag == "html")["lang"] == "en"


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_hostile_names_and_keys_are_only_text(db, set_clock, text):
    """A policy, an owner, a key, a state, a constraint and a worker that try to be markup."""
    db.execute("create table holds (id text primary key, status text not null default 'held', expires_at timestamptz)")
    db.execute(
        "create function no() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$;"
        " create trigger no before update on holds for each row execute function no()"
    )
    db.execute(
        "select pgreaper.reaper_register(policy => %s, target => 'holds', deadline_column => 'expires_at',"
        " status_column => 'status', held => '{held}', expired => 'expired', owner => %s)",
        (text[:200], text[:200]),
    )
    db.execute("insert into holds values (%s, 'held', clock_timestamp() - interval '1 hour')", (text,))
    db.execute("insert into holds values ('2', 'held', clock_timestamp() - interval '1 hour')")
    for _ in range(2):
        token = db.execute(
            "select token from pgreaper.reaper_claim(policy => %s, batch => 5, worker => %s)",
            (text[:200], text[:3000]),
        ).fetchone()
        if token:
            db.execute("select count(*) from pgreaper.reaper_expire(%s)", token)
    db.execute("drop trigger no on holds")
    db.execute("insert into holds values ('3', 'held', clock_timestamp() - interval '1 hour')")
    plain = page(read(db))
    found = Tags(plain).found
    allowed = {
        *("html", "head", "meta", "link", "title", "style", "body", "main", "header", "p", "h1", "span", "time", "dl"),
        *("div", "dt", "dd", "section", "h2", "h3", "table", "thead", "tr", "th", "tbody", "td", "i", "ul", "li", "b"),
        *("code", "footer", "figure", "figcaption", "svg", "line", "g", "rect", "details", "summary", "a"),
    }
    assert {tag for tag, _ in found} <= allowed
    assert not [name for _, a in found for name in a if name.startswith("on")]
    assert "\x1b" not in plain
    assert "\u202e" not in plain
    assert len(plain) < 30_000
    assert db.execute("select count(*) from pgreaper.dead_letters").fetchone()[0] > 0


def test_the_file_is_written_whole_or_not_at_all(db, holds, dsn, in_process, tmp_path):
    """By renaming, with the rights that the umask gives; what was there stays when it fails; - is stdout."""
    holds.register()
    there = tmp_path / "report.html"
    there.write_text("old")
    inode = there.stat().st_ino
    done = in_process("report", "--html", str(there))
    assert (done.code, done.err) == (0, "")
    assert done.out == f"Nothing was due in this time.  {there}\n"
    assert there.read_text().endswith("</html>\n")
    assert there.stat().st_ino != inode
    assert stat.S_IMODE(there.stat().st_mode) & 0o044
    assert [f.name for f in tmp_path.iterdir()] == ["report.html"]
    failed = in_process("report", "--html", str(tmp_path / "none" / "report.html"))
    assert (failed.code, failed.out) == (1, "")
    assert "cannot be written: no such file or directory" in failed.err
    assert in_process("report", "--html", "/dev/null").code == 0
    # A disk that is full half-way: here, a limit on the size of a file.
    before = there.read_bytes()
    command = 'ulimit -f 4; exec "$@"'
    full = subprocess.run(
        ["sh", "-c", command, "sh", *PGREAPER, "report", "--html", str(there)],
        env=environment(dsn), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (full.returncode, "cannot be written: file too large" in full.stderr) == (1, True), full.stderr
    assert (there.read_bytes(), [f.name for f in tmp_path.iterdir()]) == (before, ["report.html"])


def test_usage(holds, pgreaper):
    """What it needs, and names that are not there."""
    holds.register()
    assert "say where to" in pgreaper("report").err
    assert pgreaper("report").code == 2
    assert "Did you mean holds?" in pgreaper("report", "hold", "--json").err
    out = pgreaper("report", "holds", "--html", "-")
    assert (out.code, out.err, out.out[:15]) == (0, "", "<!doctype html>")


def test_a_reader_may_read_it(db, holds, dsn, pgreaper):
    """The rights of a reader are enough."""
    holds.register()
    db.execute("drop role if exists report_reader")
    db.execute("create role report_reader login")
    try:
        db.execute("select pgreaper.reaper_grant('report_reader', 'reader')")
        url = re.sub(r"//[^@/]*@", "//report_reader@", dsn)
        done = pgreaper("report", "--html", "-", url=url)
        assert (done.code, done.err) == (0, "")
    finally:
        db.execute("select pgreaper.reaper_revoke('report_reader')")
        db.execute("drop owned by report_reader")
        db.execute("drop role report_reader")


def test_in_a_browser(db, full_day, browser, tmp_path):
    """Light and dark, wide and narrow: no error, no request, nothing wider than the screen, and something is drawn."""
    target = tmp_path / "report.html"
    # The page says how wide it is: only this copy for the test may run a script.
    text = page(read(db))
    target.write_text(text)
    _, console = browser.console(target)
    assert console == ""
    probe = """<script>
      const bars = [...document.querySelectorAll("rect.bar")].filter(r => r.getBoundingClientRect().height > 1).length
      const requests = performance.getEntriesByType("resource").length
      const whole = document.documentElement.scrollWidth
      parent.postMessage([innerWidth, whole, requests, bars].join(), "*")
    </script></body>"""
    measured = tmp_path / "measured.html"
    measured.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", text).replace("</body>", probe))
    for width in (400, 1200):
        dom, console = browser.console(browser.framed(measured, width))
        said = re.search(r"<title>([\d,]+)</title>", dom)
        assert said, dom[:500]
        shown, whole, requests, bars = map(int, said[1].split(","))
        assert (shown, console, requests) == (width, "", 0)
        assert whole <= width
        assert bars > 40
    sizes = set()
    for width, dark in ((400, True), (1200, True), (1200, False)):
        picture = tmp_path / f"{width}-{dark}.png"
        browser.picture(browser.framed(target, width), picture, width=width, dark=dark)
        assert picture.read_bytes()[:4] == b"\x89PNG"
        sizes.add(picture.read_bytes())
    assert len(sizes) == 3


def test_a_script_in_the_page_would_not_run(db, holds, browser, tmp_path):
    """The page's own policy: even markup that got through would do nothing."""
    holds.register()
    target = tmp_path / "report.html"
    target.write_text(page(read(db)).replace("</body>", "<script>document.title='ran'</script></body>"))
    dom, console = browser.console(target)
    assert "<title>ran</title>" not in dom
    assert "Content Security Policy" in console
