"""
What ``pgreaper discover`` makes of the applications' tables, and that its commands register as they are.

The table says what an outsider can know: Lago's numbers and pretix's letters mean nothing to him, and Indico's
``end_dt`` may be the end of anything.
"""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest

from pgreaper.cli import main
from tests.realworld.conftest import DATA, Line, lines

# file: {table: (deadline, status, held, expired, overdue)}; without held states there is no command.
EXPECTED: dict[str, dict[str, tuple[str, str, list[str], str | None, int | None]]] = {
    "airflow_task_instance": {"task_instance": ("trigger_timeout", "state", ["deferred"], "failed", 350)},
    "alfio_reservation": {"tickets_reservation": ("validity", "status", ["PENDING"], "CANCELLED", 200)},
    "btcpay_payment_requests": {'"PaymentRequests"': ("Expiry", "Status", ["Pending"], "Expired", 350)},
    "hi_events_orders": {
        "orders": ("reserved_until", "status", ["RESERVED"], "ABANDONED", 350),
        "waitlist_entries": ("offer_expires_at", "status", ["OFFERED"], "OFFER_EXPIRED", 350),
    },
    "indico_room_reservations": {},
    "lago_wallets": {"wallets": ("expiration_at", "status", [], None, None)},
    "lemmy_person": {"person": ("ban_expires", "banned", ["true"], "false", 350)},
    "odoo_sale_order": {"sale_order": ("validity_date", "state", ["draft", "sent"], "cancel", 400)},
    "pretix_order": {"pretixbase_order": ("expires", "status", [], None, None)},
    "supabase_auth_oauth": {"oauth_authorizations": ("expires_at", "status", ["pending"], "expired", 400)},
}


def expected(file: str) -> dict[str, tuple[Any, ...]]:
    """What is found.  Odoo's days are those of Brussels: till a day ends in UTC too, `discover` counts one less."""
    table = dict(EXPECTED[file])
    if file == "odoo_sale_order" and datetime.now(ZoneInfo("Europe/Brussels")).date() != datetime.now(UTC).date():
        table["sale_order"] = (*table["sale_order"][:-1], 350)
    return table


def test_every_application_is_in_the_table():
    assert set(EXPECTED) == {path.stem for path in DATA.glob("*.sql")}


@pytest.mark.parametrize("file", EXPECTED)
def test_applications_are_found_and_their_commands_register(application, capfd, file):
    """Nothing is found that is not in the table; each command registers; then the table is told as registered."""
    url = application(f"{file}.sql")

    def run(*arguments):
        code = main([*arguments, "--json", "--database-url", url])
        return code, json.loads(capfd.readouterr().out)

    code, found = run("discover")
    assert code == 0
    assert found["skipped"] == []
    candidates = {c["table"].partition(".")[2]: c for c in found["candidates"]}
    assert {
        table: (c["deadline"], c["status"], c["held"], c["expired"], c["overdue"]) for table, c in candidates.items()
    } == expected(file)

    for c in candidates.values():
        assert (c["command"] is not None) == bool(c["held"])
        assert bool(c["obstacle"]) == (not c["held"])
        if c["command"]:
            program, *arguments = shlex.split(c["command"])
            assert program == "pgreaper"
            code, registered = run(*arguments)
            assert (code, bool(registered["changes"])) == (0, True)
            # The count is the number of rows that a run would meet, but for the days of a zone that is not UTC.
            with psycopg.connect(url) as connection:
                [(due,)] = connection.execute("select due from pgreaper.reaper_preview(%s)", [arguments[1]]).fetchall()
            assert due == c["overdue"]

    code, again = run("discover")
    after = {c["table"].partition(".")[2]: c for c in again["candidates"]}
    assert set(after) == set(candidates)
    for table, c in after.items():
        assert bool(c["policies"]) == bool(candidates[table]["command"])
        assert c["command"] is None


def test_what_is_proposed_is_what_a_person_registered():
    """Deadline and status are those of expected.tsv, and where a command is given its states are among them."""
    wanted: dict[tuple[str, str], list[Line]] = {
        (line.file.removesuffix(".sql"), line.table.rpartition(".")[2]): [] for line in lines()
    }
    for line in lines():
        wanted[line.file.removesuffix(".sql"), line.table.rpartition(".")[2]].append(line)
    for file, tables in EXPECTED.items():
        for table, (deadline, status, held, expired, _) in tables.items():
            known = wanted[file, table]
            assert any((line.deadline, line.status) == (deadline, status) for line in known)
            if held:
                assert any(set(held) <= set(line.held) and expired == line.expired for line in known)
