"""A day that is played with pgreaper's own functions while its clock is moved, and a real browser."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.conftest import in_process, pgreaper, start, wait_until  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psycopg

STEP = timedelta(minutes=30)


class Day:
    """Holds of one table that come due all day; ``at`` is what the clock says, and it ends with the real one."""

    def __init__(self, db: psycopg.Connection[Any], set_clock: Callable[..., None]) -> None:
        self.db = db
        self.set_clock = set_clock
        self.at = datetime.now(UTC) - timedelta(hours=23, minutes=30)
        db.execute("set synchronous_commit = off")

    def table(self, name: str, **arguments: Any) -> None:
        """A table of holds, and its policy."""
        self.db.execute(
            f"create table {name} (id bigint generated always as identity primary key,"
            " status text not null default 'held', expires_at timestamptz not null, note text)"
        )
        self.db.execute(f"create index on {name} (expires_at) where status = 'held'")
        self.set_clock(self.at)
        self.db.execute(
            "select pgreaper.reaper_register(policy => %s, target => %s::regclass, deadline_column => 'expires_at',"
            " status_column => 'status', held => '{held}', expired => 'expired', owner => %s,"
            " objective => %s::interval)",
            (
                arguments.get("policy", name),
                name,
                arguments.get("owner", "tests"),
                arguments.get("objective", "1 minute"),
            ),
        )

    def come(self, name: str, holds: int, note: str | None = None) -> None:
        """So many holds, the last of which is due now."""
        self.db.execute(
            f"insert into {name} (expires_at, note) select %s::timestamptz - interval '12 s' * g / %s, %s"
            " from generate_series(0, %s - 1) as g",
            (self.at, holds, note, holds),
        )

    def expire(
        self, policy: str, *, after: timedelta = timedelta(), worker: str = "pgreaper/web-1/7", took: float = 0.05
    ):
        """Claim and expire what is due, in batches; the clock stands ``after`` behind the last deadlines."""
        while True:
            self.set_clock(self.at + after)
            rows = self.db.execute(
                "select token from pgreaper.reaper_claim(policy => %s, batch => 500, worker => %s, rescan => true)"
                " limit 1",
                (policy, worker),
            ).fetchall()
            if not rows:
                return
            self.set_clock(self.at + after + timedelta(seconds=took))
            self.db.execute("select count(*) from pgreaper.reaper_expire(%s)", rows[0])

    def now(self) -> None:
        """The day is over: the clock is the server's again."""
        self.set_clock(timedelta())


@pytest.fixture
def day(db: psycopg.Connection[Any], set_clock: Callable[..., None]) -> Day:
    return Day(db, set_clock)


def seats(day: Day) -> None:
    """A day with everything in it: an outage, failures, a dead worker, dead letters, a backlog."""
    db = day.db
    day.table("seats", owner="team-tickets", objective="1 minute")
    day.table("carts", owner="team-shop", objective="30 minutes")
    day.table("invites", owner="team-people", objective="1 day")
    db.execute("alter table seats add constraint paid_first check (not (note = 'paid' and status = 'expired'))")
    for step in range(47):
        wave = abs((step + 24) % 48 - 24) / 24
        day.come("seats", int(60 + 900 * wave))
        if step % 5 == 2:
            day.come("seats", 1, "paid")
        if step % 2 == 0:
            day.come("carts", int(10 + 60 * wave))
        outage = 30 <= step < 34
        if step == 20:
            # A worker dies with its lease.
            day.come("seats", 40)
            day.set_clock(day.at)
            db.execute(
                "select count(*)"
                " from pgreaper.reaper_claim(policy => 'seats', batch => 40, worker => 'pgreaper/db-2/9')"
            )
        if not outage:
            day.expire("seats", after=timedelta(seconds=0.3 + step % 7 * 0.1), took=0.02 + step % 5 * 0.07)
            day.expire("carts", after=timedelta(seconds=2), took=0.01 * (step % 7))
        day.at += STEP
    day.now()
    db.execute(
        "insert into seats (expires_at) select clock_timestamp() - interval '3 s' * g from generate_series(1, 90) as g"
    )


@pytest.fixture
def full_day(day: Day) -> Day:
    seats(day)
    return day


class Browser:
    """Debian's Chromium without a screen; it may reach nothing."""

    def __init__(self, program: Path, room: Path) -> None:
        self._program = program
        self._room = room

    def _run(self, page: Path, *options: str, width: int, dark: bool) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                str(self._program),
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
                *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
                *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--log-level=0"),
                *(["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]),
                f"--user-data-dir={self._room / 'profile'}",
                f"--window-size={width},{2000}",
                *options,
                page.as_uri(),
            ],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip

    def framed(self, page: Path, width: int) -> Path:
        """A page that shows the other one so wide: no window of the browser's is narrower than 500 pixels."""
        frame = page.with_name(f"{width}-{page.name}")
        frame.write_text(
            "<!doctype html><title></title><style>body{margin:0}</style>"
            f'<script>onmessage = e => {{ document.title = e.data }}</script><link rel="icon" href="data:,">'
            f'<iframe src="{page.name}" width="{width}" height="6000" style="border:0"></iframe>'
        )
        return frame

    def picture(self, page: Path, target: Path, *, width: int, dark: bool = False, height: int = 2000) -> None:
        self._run(page, f"--window-size={width},{height}", f"--screenshot={target}", width=width, dark=dark)

    def console(self, page: Path, *, width: int = 1200) -> tuple[str, str]:
        """The document after it was loaded, and what the browser's console has."""
        done = self._run(page, "--dump-dom", width=width, dark=False)
        return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.fixture
def browser(needs: Callable[..., Path], tmp_path: Path) -> Browser:
    return Browser(needs("chromium", package="chromium"), tmp_path)
