"""``pgreaper register``: say which rows are holds."""

import re
import shlex
from typing import Any

import click
import psycopg
from psycopg.rows import tuple_row

from pgreaper.api import Reaper
from pgreaper.cli.common import BATCH, INTEGER, common_options, database, document, emit
from pgreaper.errors import InvalidInput, ReaperError, RegistrationRefused
from pgreaper.records import Change, Policy
from pgreaper.render import Column, show_facts, show_line, show_table
from pgreaper.statement import qualified
from pgreaper.targets import IndexAdvice, index_advice
from pgreaper.text import duration, quoted, visible

# Option, SQL parameter: they differ only where a shell wants it shorter.
_INTERVALS = ("grace", "lease", "backoff_base", "backoff_cap", "objective", "restore_within")


@click.command()
@click.argument("policy")
@click.argument("table")
@click.option(
    "--deadline", metavar="COLUMN", required=True, help="Column with the deadline; NULL and infinity mean never."
)
@click.option(
    "--status", metavar="COLUMN", help="Column with the state.  Without it, held means that the stamp is NULL."
)
@click.option("--held", metavar="VALUE", multiple=True, help="State that counts as held; may be given several times.")
@click.option("--expired", metavar="VALUE", help="State after the transition.")
@click.option("--owner", metavar="WHO", required=True, help="Who looks after what fails: a team, an address.")
@click.option("--key", metavar="COLUMN", multiple=True, help="Column of the key, in order.  [default: the primary key]")
@click.option("--stamp", metavar="COLUMN", help="Column that receives the time of the transition.")
@click.option("--set", "assignments", metavar="COLUMN=VALUE", multiple=True,
              help="Constant that a further column receives; the bare word null means NULL.")  # fmt: skip
@click.option("--zone", metavar="NAME", help="Time zone that a deadline without one is meant in, such as UTC.")
@click.option(
    "--stamp-zone", metavar="NAME", help="Time zone that a stamp without one is written in.  [default: --zone]"
)
@click.option("--payload", metavar="COLUMN", multiple=True, help="Column that a claim hands to its worker.")
@click.option("--grace", metavar="INTERVAL", default="0", show_default=True, help="Due this long after the deadline.")
@click.option("--lease", metavar="INTERVAL", default="1 minute", show_default=True, help="How long a claim is leased.")
@click.option("--batch", type=BATCH, metavar="N", default=500, show_default=True, help="Holds a claim takes.")
@click.option(
    "--max-attempts",
    type=INTEGER,
    metavar="N",
    default=5,
    show_default=True,
    help="Attempts before a transient failure is a dead letter.",
)
@click.option(
    "--permanent-attempts",
    type=INTEGER,
    metavar="N",
    default=1,
    show_default=True,
    help="Attempts before any other failure is one.",
)
@click.option(
    "--backoff-base",
    metavar="INTERVAL",
    default="1 second",
    show_default=True,
    help="The first retry waits twice this, each further one twice as long; plus up to half at random.",
)
@click.option(
    "--backoff-cap", metavar="INTERVAL", default="1 hour", show_default=True, help="Longest wait before a retry."
)
@click.option("--rate-limit", type=float, metavar="PER_SECOND", help="Most holds a second, all workers together.")
@click.option("--max-claims", type=INTEGER, metavar="N", help="Most claims at a time, all workers together.")
@click.option("--objective", metavar="INTERVAL", default="1 minute", show_default=True, help="The lateness promised.")
@click.option("--consumed", metavar="VALUE", help="State that reaper_consume() gives a hold which is still alive.")
@click.option("--consumed-stamp", metavar="COLUMN", help="Column that receives the time of consuming.")
@click.option("--restore-within", metavar="INTERVAL",
              help="How long after a hold became due it may be restored.  [default: not at all]")  # fmt: skip
@click.option("--restored", metavar="VALUE", help="Which of several --held states a restored hold gets.")
@click.option("--dry-run", is_flag=True, help="Check everything, store nothing.")
@common_options
def register(*, policy: str, table: str, database_url: str | None, as_json: bool, **options: Any) -> None:
    """
    Say which rows of TABLE are holds, and what expiring does to them.

    Declarative: the same call again changes nothing, another call changes the policy to what it says.
    TABLE is written as in SQL: shop.bookings, or '"PaymentRequests"'; it may be a simple view.

    \b
      pgreaper register bookings shop.bookings --deadline hold_until \\
        --status status --held held --expired expired --owner shop-team
    """  # noqa: D301  click reads the \\b
    _check_states(**options)
    dry_run = bool(options["dry_run"])
    with database(database_url, writes=True) as reaper:
        target = _resolve(reaper.connection, table)
        try:
            changes = reaper.register(policy, target, **_parameters(options))
        except RegistrationRefused as error:
            raise RegistrationRefused(
                error.message, hint=_as_options(error.hint), detail=error.detail, sqlstate=error.sqlstate,
                original=error.original,
            ) from None  # fmt: skip
        except InvalidInput as error:
            _blame_interval(reaper, options)
            raise InvalidInput(error.message, hint=_as_options(error.hint), sqlstate=error.sqlstate) from None
        stored, advice = _look(reaper, policy, target, options)
        lacking = [] if dry_run else _lacking(reaper)

    if as_json:
        emit(
            "register",
            policy=policy,
            target=target,
            dry_run=dry_run,
            changes=[document(change) for change in changes],
            index=None if advice is None else {"serving": advice.serving, "create": advice.create},
            lacking_rights=[{"role": role, "kind": kind} for role, kind in lacking],
        )
    else:
        _show(policy, target, changes, stored, advice, dry_run=dry_run)
        for role, kind in lacking:
            show_line(f"role {visible(role)} lacks rights: pgreaper grant {shlex.quote(role)} --as {kind}", "yellow")


def _check_states(
    *, status: str | None, stamp: str | None, held: tuple[str, ...], expired: str | None, **_others: object
) -> None:
    """What the database would refuse, in the words that were typed."""
    missing = [option for option, given in (("--held", held != ()), ("--expired", expired is not None)) if not given]
    if status is not None and missing:
        raise InvalidInput(
            f"--status {visible(status)} needs {' and '.join(missing)}",
            hint="--held VALUE is a state that counts as held, --expired VALUE the state afterwards.",
        )
    if status is None and stamp is None:
        raise InvalidInput(
            "neither --status nor --stamp says which rows are held",
            hint="--status COLUMN with --held and --expired; or only --stamp COLUMN, NULL while a row is held.",
        )


def _parameters(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "deadline_column": options["deadline"],
        "status_column": options["status"],
        "held": list(options["held"]) or None,
        "expired": options["expired"],
        "owner": options["owner"],
        "key_columns": list(options["key"]) or None,
        "stamp_column": options["stamp"],
        "consumed_stamp_column": options["consumed_stamp"],
        "set": dict(map(_assignment, options["assignments"])) or None,
        "payload_columns": list(options["payload"]) or None,
        **{
            name: options[name]
            for name in (
                "zone", "stamp_zone", "batch", "max_attempts", "permanent_attempts", "rate_limit", "max_claims",
                "dry_run", "consumed", "restored", *_INTERVALS,
            )
        },
    }  # fmt: skip


def _assignment(text: str) -> tuple[str, str | None]:
    """``COLUMN=VALUE``; the bare word null is NULL, and 'null' in quotes the word."""
    column, equals, value = text.partition("=")
    if not column or not equals:
        raise InvalidInput(
            f"--set {visible(text)} is not COLUMN=VALUE", hint="Example: --set token=null --set reason=expired"
        )
    if value.lower() == "null":
        return column, None
    return column, value[1:-1] if value.lower() == "'null'" else value


def _blame_interval(reaper: Reaper, options: dict[str, Any]) -> None:
    """Find the option whose value the database does not read as an interval; none: somebody else is to blame."""
    for name in _INTERVALS:
        if options[name] is None:
            continue
        try:
            with reaper.connection.transaction():
                reaper.connection.execute(qualified("select %s::text::interval"), [options[name]])
        except psycopg.DataError:
            raise InvalidInput(
                f"--{name.replace('_', '-')} {visible(options[name])} is not an interval",
                hint="Write it as Postgres does: '30 seconds', '5 min', '1 hour'.",
            ) from None
        except psycopg.Error:
            return


def _as_options(hint: str | None) -> str | None:
    """A hint that names SQL parameters, for a person who is typing options."""
    if hint is None:
        return None
    short = {
        "set": "set",
        "status_column": "status",
        "stamp_column": "stamp",
        "consumed_stamp_column": "consumed-stamp",
        "deadline_column": "deadline",
        "key_columns": "key",
    }
    hint = re.sub(r"\b(\w+) => '([^']*)'", lambda m: f"--{m[1].replace('_', '-')} {m[2]}", hint)
    hint = re.sub(r"\brestore_within\b", "--restore-within", hint)
    return re.sub(
        r"\b(status_column|consumed_stamp_column|stamp_column|deadline_column|key_columns)\b",
        lambda m: f"--{short[m[1]]}",
        hint,
    )


# -- the target


def _resolve(connection: "psycopg.Connection[Any]", table: str) -> str:
    """The table's full name as SQL writes it; an error that says what was probably meant."""
    with connection.cursor(row_factory=tuple_row) as cursor:
        try:
            if not table.strip():
                raise psycopg.DataError
            with connection.transaction():
                cursor.execute(
                    qualified(
                        "select n.nspname::text, c.relname::text from pg_catalog.pg_class as c join"
                        " pg_catalog.pg_namespace as n on n.oid = c.relnamespace where c.oid = to_regclass(%s::text)"
                    ),
                    [table],
                )
                found = cursor.fetchone()
        except (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError):
            raise InvalidInput(
                f"{visible(table)} is not the name of a table",
                hint="Write it as in SQL: table, schema.table, or quoted: '\"My Table\"'.",
            ) from None
        if found is not None:
            return ".".join(map(quoted, found))
        cursor.execute(
            qualified(
                "select n.nspname::text, c.relname::text, n.nspname = any (current_schemas(false))"
                "  from pg_catalog.pg_class as c join pg_catalog.pg_namespace as n on n.oid = c.relnamespace"
                " where c.relkind = any ('{r,p,v}') and n.nspname !~ '^pg_'"
                "   and n.nspname <> all ('{information_schema,pgreaper}')"
                " order by 3 desc, 1, 2 limit 20000"
            )
        )
        raise RegistrationRefused(
            f"there is no table {visible(table)}", hint=_meant(table, cursor.fetchall()), sqlstate="RP003"
        )


def _meant(table: str, candidates: list[tuple[str, str, bool]]) -> str:
    from difflib import get_close_matches

    wanted = table.replace('"', "").lower()
    last = wanted.rpartition(".")[2]
    # The same letters: only quotes, or the schema, are missing.
    for schema, name, visible_ in candidates:
        if wanted in (name.lower(), f"{schema}.{name}".lower()) or (last == name.lower() and "." not in wanted):
            full = quoted(name) if visible_ and "." not in table else f"{quoted(schema)}.{quoted(name)}"
            why = ", in quotes because it is not all lower case" if name != name.lower() and '"' not in table else ""
            return f"Did you mean {shlex.quote(full)}{why}?"
    near = get_close_matches(last, [name.lower() for _, name, _ in candidates], 1, cutoff=0.7)
    for schema, name, _ in candidates:
        if near and name.lower() == near[0]:
            return f"Did you mean {shlex.quote(f'{quoted(schema)}.{quoted(name)}')}?"
    return "Name it with its schema, and look whether this is the database you meant."


# -- what is shown


def _look(
    reaper: Reaper, policy: str, target: str, options: dict[str, Any]
) -> tuple[Policy | None, IndexAdvice | None]:
    """The policy as it is stored, or as a dry run would store it, and what the planner says of its index."""
    try:
        # A dry run stores it for a moment: only then can the same question be asked.
        with reaper.connection.transaction(force_rollback=options["dry_run"]):
            if options["dry_run"]:
                reaper.register(policy, target, **{**_parameters(options), "dry_run": False})
            found = next(p for p in reaper.policies() if p.policy == policy)
            return found, index_advice(reaper.connection, found)
    except (psycopg.Error, ReaperError):
        return None, None  # Advice is no reason to fail: the policy is registered.


def _lacking(reaper: Reaper) -> list[tuple[str, str]]:
    """Roles that work here and have yet to be given their rights on this target."""
    try:
        with reaper.connection.transaction():
            return reaper.ungranted()
    except ReaperError:
        return []  # Who may register need not see who may work.


def _show(
    policy: str, target: str, changes: list[Change], stored: Policy | None, advice: IndexAdvice | None, *, dry_run: bool
) -> None:
    name = visible(policy)
    if not changes:
        show_line(f"policy {name}: nothing to change")
    elif all(change.old_value is None for change in changes):
        head = f"policy {name} {'would be' if dry_run else 'is'} registered on {target}"
        facts = _facts(stored) if stored else [(c.setting, visible(c.new_value or "-", 100)) for c in changes]
        show_facts(head, facts)
    else:
        show_line(f"policy {name} {'would change' if dry_run else 'has changed'}:")
        show_table(
            [Column("setting"), Column("before"), Column("now")],
            [[c.setting, visible(c.old_value or "-", 60), visible(c.new_value or "-", 60)] for c in changes],
        )
    if advice is not None:
        _show_advice(advice)


def _facts(policy: Policy) -> list[tuple[str, str] | None]:
    """What a person checks after registering; the defaults of budgets are left out."""
    due = policy.deadline_column
    due += f", in {policy.zone}" if policy.zone else ""
    due += f", {duration(policy.grace)} of grace" if policy.grace else ""
    if policy.status_column is None:
        held, ends = f"{policy.stamp_column} is null", []
        if policy.consumed_stamp_column:
            held += f" and {policy.consumed_stamp_column} is null"
    else:
        states = policy.held or []
        held = f"{policy.status_column} {'=' if len(states) == 1 else 'in'} {', '.join(states)}"
        ends = [f"{policy.status_column} = {policy.expired}"]
    if policy.stamp_column:
        ends.append(f"{policy.stamp_column} = the time")
    ends += [f"{column} = {'null' if value is None else value}" for column, value in policy.set_values.items()]
    facts = [
        ("key", ", ".join(policy.key_columns)),
        ("deadline", due),
        ("held", held),
        ("expiring sets", ", ".join(ends)),
        ("consuming sets", ", ".join(_consuming(policy))),
        ("restoring", _restoring(policy)),
        ("payload", ", ".join(policy.payload_columns)),
        ("owner", policy.owner),
    ]
    return [(name, visible(value, 100)) for name, value in facts if value]


def _consuming(policy: Policy) -> list[str]:
    sets = [f"{policy.status_column} = {policy.consumed}"] if policy.consumed else []
    return sets + ([f"{policy.consumed_stamp_column} = the time"] if policy.consumed_stamp_column else [])


def _restoring(policy: Policy) -> str:
    if policy.restore_within is None:
        return ""
    return f"within {duration(policy.restore_within)}" + (f", as {policy.restored}" if policy.restored else "")


def _show_advice(advice: IndexAdvice) -> None:
    if advice.serving:
        show_line(f"index: {', '.join(visible(name) for name in advice.serving[:3])} serves")
    elif advice.create:
        show_line("index: none serves, so every look reads the whole table. Create one:", "yellow")
        for statement in advice.create:
            show_line(f"  {statement}")
    else:
        show_line("index: none serves; the table beneath the view needs one that begins with the deadline", "yellow")
