"""What a naive tool gets wrong in these tables, beyond the counts."""

from __future__ import annotations

import json
import shlex
from urllib.parse import quote

import psycopg
import pytest

from pgreaper.cli import main


@pytest.fixture
def run(capfd):
    """A function that runs a command line in this process: exit code, the JSON document, what stderr said."""

    def run(url, *parts):
        code = main([*shlex.split(" ".join(parts)), "--json", "--database-url", url])
        captured = capfd.readouterr()
        return code, json.loads(captured.out), captured.err

    return run


def value(url, query, *parameters):
    with psycopg.connect(url, autocommit=True) as connection:
        [(found,)] = connection.execute(query, parameters or None).fetchall()
        return found


def register(run, url, arguments):
    code, answer, _ = run(url, "register", arguments)
    assert code == 0, answer


def execute(url, *statements):
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


WAITLIST = (
    "waitlist waitlist_entries --deadline offer_expires_at --status status --held OFFERED "
    "--expired OFFER_EXPIRED --zone UTC --stamp updated_at --owner tests"
)


def test_hi_events_leaves_no_live_token_and_the_trail_keeps_the_deadline(application, run):
    """`--set` empties token, offer time and the deadline itself with the transition."""
    url = application("hi_events_orders.sql", "Asia/Tokyo")
    deadlines = "select array_agg(d order by d) from ({}) as x (d)"
    due = value(
        url,
        deadlines.format(
            "select offer_expires_at at time zone 'UTC' from waitlist_entries where status = 'OFFERED'"
            " and offer_expires_at < now() at time zone 'UTC'"
        ),
    )
    cleared = [
        part for column in ("offer_token", "offered_at", "offer_expires_at") for part in ("--set", f"{column}=null")
    ]
    assert run(url, "register", WAITLIST, *cleared)[0] == 0
    assert run(url, "work")[1]["outcomes"]["expired"] == 350
    found = value(
        url,
        "select count(*) from waitlist_entries where status = 'OFFER_EXPIRED'"
        " and (offer_token, offered_at, offer_expires_at) is not null",
    )
    assert found == 0
    assert value(url, "select count(*) from waitlist_entries where offer_token is not null") == 100
    assert value(url, deadlines.format("select deadline from pgreaper.history where outcome = 'expired'")) == due
    assert run(url, "work")[1]["outcomes"]["expired"] == 0


def test_lago_uses_the_code_again_after_the_wallet_has_ended(application, run):
    """A partial unique index on the held state: expiring frees it, and an un-expired one is nobody's business here."""
    url = application("lago_wallets.sql")
    register(
        run,
        url,
        "wallets public.wallets --deadline expiration_at --status status --held 0 "
        "--expired 1 --zone UTC --stamp terminated_at --owner tests",
    )
    assert run(url, "work")[1]["outcomes"]["expired"] == 400
    assert value(url, "select count(*) from wallets where status = 1 and terminated_at is null") == 0
    found = value(
        url,
        "select sum((lock_version <> (substring(name from '[0-9]+'))::int % 7)::int) from"
        " wallets where name ~ '^Wallet'",
    )
    assert found == 0


def test_airflow_has_keys_that_break_csv_and_urls(application, run):
    """Four parts with quotes, commas, slashes and +00:00; map_index tells rows apart that are not due."""
    url = application("airflow_task_instance.sql", "America/Vancouver")
    register(
        run,
        url,
        "deferred task_instance --deadline trigger_timeout --status state --held deferred "
        "--expired failed --zone UTC --stamp end_date --set trigger_id=null --set "
        "next_method=__fail__ --owner tests",
    )
    code, worked, _ = run(url, "work --batch 17")
    assert (code, worked["outcomes"]["expired"]) == (0, 350)
    with psycopg.connect(url, autocommit=True) as connection:
        keys = [row[0] for row in connection.execute("select key from pgreaper.history where outcome = 'expired'")]
        for key in keys:
            row = connection.execute(
                "select state, trigger_id, next_method from task_instance"
                " where dag_id = %s and task_id = %s and run_id = %s and map_index = %s::int",
                json.loads(key),
            ).fetchone()
            assert row == ("failed", None, "__fail__")
    odd = max(keys, key=lambda key: sum(key.count(sign) for sign in "\\,'/+"))
    code, history, _ = run(url, "history deferred", shlex.quote(odd))
    assert code == 0
    assert "expired" in json.dumps(history)
    assert value(url, "select count(*) from task_instance where state is null") == 50


def test_odoo_writes_utc_though_its_days_are_those_of_brussels(application, run):
    """date in one zone, stamp in another; without --stamp-zone the stamp would be an hour or two ahead."""
    url = application("odoo_sale_order.sql", "Asia/Tokyo")
    command = (
        "register quotations sale_order --deadline validity_date --status state --held draft --held "
        "sent --expired cancel --zone Europe/Brussels --stamp write_date --owner tests"
    )
    ahead = (
        "select bool_and(write_date > now() at time zone 'UTC' + interval '50 minutes') from sale_order"
        " where id in (select key::int from pgreaper.history where outcome = 'expired')"
    )
    assert run(url, command, "--stamp-zone UTC")[0] == 0
    assert run(url, "work")[1]["outcomes"]["expired"] == 400
    assert value(url, ahead) is False

    other = application("odoo_sale_order.sql", "Asia/Tokyo")
    assert run(other, command)[0] == 0
    assert run(other, "work")[1]["outcomes"]["expired"] == 400
    assert value(other, ahead) is True


def test_alfio_under_forced_row_security_is_refused_and_not_silently_empty(application, run, server):
    """As the table's owner, who is under FORCE: one line that names table and role, exit code 2, nothing stored."""
    url = application("alfio_reservation.sql")
    execute(
        url,
        "create role pgreaper_alfio login",
        "grant usage, create on schema public to pgreaper_alfio",
        "alter table tickets_reservation owner to pgreaper_alfio",
        "grant usage on schema pgreaper to pgreaper_alfio",
        "grant execute on all functions in schema pgreaper to pgreaper_alfio",
        "grant all on all tables in schema pgreaper to pgreaper_alfio",
        "grant all on all sequences in schema pgreaper to pgreaper_alfio",
    )
    command = (
        "register stuck tickets_reservation --deadline validity --status status --held IN_PAYMENT "
        "--held EXTERNAL_PROCESSING_PAYMENT --expired STUCK --owner tests"
    )
    try:
        owner = f"{url}&options={quote('-c role=pgreaper_alfio')}"
        code, answer, stderr = run(owner, command)
        assert code == 2
        message = "row level security of public.tickets_reservation would hide holds from role pgreaper_alfio"
        assert answer["error"]["message"] == message
        assert stderr.splitlines()[0] == f"error: {message}"
        assert "BYPASSRLS" in stderr
        assert value(url, "select count(*) from pgreaper.policies") == 0

        # Registered by a superuser, run by the owner: refused too, and no hold is charged.
        assert run(url, command)[0] == 0
        code, answer, stderr = run(owner, "work")
        assert code == 1
        assert "row level security of public.tickets_reservation would hide holds" in json.dumps(answer)
        assert value(url, "select count(*) from pgreaper.failures") == 0
        assert run(url, "work")[1]["outcomes"]["expired"] == 150
    finally:
        execute(
            url,
            "reassign owned by pgreaper_alfio to current_user",
            "drop owned by pgreaper_alfio",
            "drop role pgreaper_alfio",
        )


def test_alfio_has_two_rules_on_one_table(application, run):
    """Two policies, each with its own held states and result, do not meet."""
    url = application("alfio_reservation.sql")
    for policy, held, expired in (
        ("stuck", ["IN_PAYMENT", "EXTERNAL_PROCESSING_PAYMENT"], "STUCK"),
        ("pending", ["PENDING"], "CANCELLED"),
    ):
        options = " ".join(f"--held {state}" for state in held) + f" --expired {expired} --owner tests"
        register(run, url, f"{policy} tickets_reservation --deadline validity --status status {options}")
    outcomes = {p["policy"]: p["outcomes"]["expired"] for p in run(url, "work")[1]["policies"]}
    assert outcomes == {"stuck": 150, "pending": 200}
    assert value(url, "select count(*) from pgreaper.history where outcome = 'expired' and length(key) <> 36") == 0


def test_supabase_has_an_index_that_serves(application, run):
    """An enum off the search_path and a partial index: registration finds it and asks for no other."""
    url = application("supabase_auth_oauth.sql")
    code, answer, _ = run(
        url,
        "register requests auth.oauth_authorizations --deadline expires_at --status status --held "
        "pending --expired expired --owner tests",
    )
    assert code == 0
    assert answer["index"] == {"serving": ["oauth_auth_pending_exp_idx"], "create": []}
    code, answer, stderr = run(
        url,
        "register other auth.oauth_authorizations --deadline expires_at --status status --held "
        "Pending --expired expired --owner tests",
    )
    assert code == 2
    assert "'pending', 'approved', 'denied', 'expired'" in stderr


def test_lemmy_frees_nobody_who_is_banned_for_ever(application, run):
    """NULL is for ever; a boolean state is given as true and false."""
    url = application("lemmy_person.sql")
    register(run, url, "bans person --deadline ban_expires --status banned --held true --expired false --owner tests")
    assert run(url, "preview", "bans")[1]["no_deadline"] == 150
    assert run(url, "work")[1]["outcomes"]["expired"] == 350
    assert value(url, "select count(*) from person where banned and ban_expires is null") == 150


def test_indico_counts_days_by_the_wall_clock_of_zurich(application, run):
    """Rows that end in the hour which occurs twice, or never, are due like the others."""
    url = application("indico_room_reservations.sql", "America/Vancouver")
    register(
        run,
        url,
        "bookings roombooking.reservations --deadline end_dt --status state --held 1 "
        "--expired 4 --zone Europe/Zurich --set rejection_reason=expired --owner tests",
    )
    assert run(url, "work")[1]["outcomes"]["expired"] == 350
    found = value(
        url,
        "select count(*) from roombooking.reservations where end_dt in ('2024-10-27 02:30', '2024-03-31 02:30')"
        " and state = 4 and rejection_reason = 'expired'",
    )
    assert found == 50
    code, answer, _ = run(
        url, "register bad roombooking.reservations --deadline end_dt --status state --held 1 --expired 4 --owner tests"
    )
    assert code == 2
    assert "says no time zone" in answer["error"]["message"]
