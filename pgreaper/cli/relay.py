"""``pgreaper relay``: expired holds as events in a queue, and ``pgreaper relays``: how far that has come."""

import os
import sys
from datetime import datetime, timedelta
from typing import Any

import click

from pgreaper.api import Reaper
from pgreaper.cli.common import BATCH, COUNT, SECONDS, common_options, database, document, emit
from pgreaper.cli.screen import Screen, failure, log_format_option
from pgreaper.connection import resolve
from pgreaper.errors import InvalidInput, ReaperError, UnknownPolicy
from pgreaper.records import DeadEvent, RelayStatus
from pgreaper.relay import Relay, RelayRun, Settings
from pgreaper.render import Column, show_line, show_table
from pgreaper.text import count, duration, instant, one_line, plural, visible
from pgreaper.text import key as shown_key

URL_VARIABLE = "PGREAPER_RELAY_URL"
_LISTED = 100


@click.command()
@click.argument("policy")
@click.option("--to", metavar="URL",
              help="The queue: amqp://, sqs://, kafka://, https:// or stdout:."
              f"  [default: {URL_VARIABLE}]")  # fmt: skip
@click.option("--name", metavar="NAME", help="The relay, if a policy has several.  [default: the policy's name]")
@click.option("--backfill", is_flag=True,
              help="Begin a new relay with the oldest of the trail, not with what expires from now on.")  # fmt: skip
@click.option("--payload", multiple=True, metavar="COLUMN",
              help="Send this column of the row too, as it is then; may be repeated.")  # fmt: skip
@click.option("--once", is_flag=True, help="Deliver what there is, then exit: for cron.")
@click.option("--batch", type=BATCH, default=500, show_default=True, metavar="N", help="Events a lease takes.")
@click.option("--poll", type=SECONDS, default=0.2, show_default=True, metavar="SECONDS",
              help="Longest sleep while there is nothing.")  # fmt: skip
@click.option("--lease", type=SECONDS, default=60, show_default=True, metavar="SECONDS",
              help="After a crash, the batch in hand is sent again that much later.")  # fmt: skip
@click.option("--max-seconds", type=SECONDS, metavar="SECONDS", help="Fetch nothing more after that.")
@click.option("--shutdown-timeout", type=SECONDS, default=20, show_default=True,
              metavar="SECONDS", help="After SIGTERM or Ctrl-C, be gone within that.")  # fmt: skip
@log_format_option
@click.option("--log-level", type=click.Choice(["info", "debug"]), envvar="PGREAPER_LOG_LEVEL", default="info",
              help="debug: each batch.  [default: PGREAPER_LOG_LEVEL, or info]")  # fmt: skip
@common_options
def relay(
    policy: str,
    *,
    to: str | None,
    name: str | None,
    backfill: bool,
    payload: tuple[str, ...],
    once: bool,
    batch: int,
    poll: float,
    lease: float,
    max_seconds: float | None,
    shutdown_timeout: float,
    log_format: str,
    log_level: str,
    database_url: str | None,
    as_json: bool,
) -> int:
    """
    Send each expired hold of a policy to a queue, at least once and in order.

    An event is JSON: policy, key, deadline, expired_at, state and idempotency_key, which stays the same when an
    event is sent again; a consumer that keeps it does everything once. The trail is the outbox, so expiring
    costs no more for it. The place is kept in the database, for each relay its own: a first run begins
    with what expires from now on. Any number of processes may share one relay, and a policy may have several relays.

    A queue that is down or takes nothing is waited for; nothing is lost. An event that it refuses for good is
    given up: `pgreaper relays dead` lists those, `pgreaper relays resend` tries them again.

    Exit codes: 0 done, or told to stop; 1 events were given up in this run, or something failed; 2 usage;
    75 the queue or the database is unreachable, try later; 141 nobody reads stdout.
    """
    screen = Screen(machine=log_format == "json")
    try:
        option = "--to"
        if to is None:
            option, to = URL_VARIABLE, os.environ.get(URL_VARIABLE) or None
        if to is None:
            raise InvalidInput(
                "no queue was named",
                hint=f"Give --to amqp://…, sqs://…, kafka://…, https://… or stdout:, or set {URL_VARIABLE}.",
            )
        from pgreaper import queues

        run = Relay(
            resolve(database_url),
            queues.sink(to, option=option),
            Settings(
                policy=policy,
                name=name,
                backfill=backfill,
                payload=payload,
                batch=batch,
                once=once,
                poll=poll,
                lease=lease,
                max_seconds=max_seconds,
                shutdown_timeout=shutdown_timeout,
                every_batch=log_level == "debug",
            ),
            log=screen.log,
            on_leave=lambda result: _show(result, as_json=as_json, told=screen.machine, silent=to == "stdout:"),
        )
        if as_json and run.result.to == "stdout:":
            raise click.UsageError("--json and --to stdout: would both write on stdout.")
        result = run.run()
    except ReaperError as error:
        screen.refused(error)
        raise
    finally:
        screen.clear()
    _show(result, as_json=as_json, told=screen.machine, silent=result.to == "stdout:")
    if run.left_behind:
        # A queue that hangs must not keep the process.
        sys.stderr.flush()
        os._exit(result.exit_code)
    return result.exit_code


def _show(run: RelayRun, *, as_json: bool, told: bool, silent: bool) -> None:
    """The result, on stdout unless the events are there; its error on stderr unless the log has ``told`` it."""
    if as_json:
        emit("relay", **_document(run))
    else:
        # Among lines of JSON on stderr there is no place for it; they have told it.
        if (text := _summary(run)) and not (silent and told):
            click.echo(text, err=silent)
        if run.trouble is not None and not told:
            click.echo(f"error: {one_line(run.trouble.message)}", err=True)
            if run.trouble.hint:
                click.echo(f"hint: {one_line(run.trouble.hint)}", err=True)
    sys.stdout.flush()


def _document(run: RelayRun) -> dict[str, Any]:
    return {
        "exit_code": run.exit_code,
        "ended": run.ended,
        "worker": run.worker,
        "relay": run.relay,
        "policy": run.policy,
        "to": run.to,
        "created": run.created,
        "seconds": round(run.seconds, 6),
        "reconnects": run.reconnects,
        "batches": run.batches,
        "delivered": run.delivered,
        "retried": run.retried,
        "dead": run.dead,
        "returned": run.returned,
        "unconfirmed": run.unconfirmed,
        "lost": run.lost,
        "leased": run.leased,
        "leased_until": run.leased_until,
        "refused": [{"error_class": kind, "events": events} for kind, events in run.reasons.most_common()],
        "troubles": run.troubles,
        "error": failure(run.trouble),
    }


def _summary(run: RelayRun) -> str:
    """One line, if anything happened or somebody looks."""
    parts = [
        f"{count(number)} {words}"
        for number, words in (
            (run.delivered, "delivered"),
            (run.retried, f"{_tries(run.retried)} refused for now"),
            (run.dead, "given up"),
            (run.returned, f"{_tries(run.returned)} to be repeated"),
            (run.lost, "left to another process"),
        )
        if number
    ]
    if parts:
        text = ", ".join(parts) + f" in {duration(run.seconds)}"
        if run.delivered >= 1000 and run.seconds > 0:
            text += f", {run.delivered / run.seconds:,.0f}/s"
    else:
        text = ""
    new = f"new, begins with {run.begins}" if run.begins else ""
    if said := "; ".join(part for part in (new, text, _elsewhere(run)) if part):
        return f"{visible(run.relay)}: {said}"
    if run.trouble is not None or not sys.stdout.isatty():
        return ""
    return f"{visible(run.relay)}: nothing to deliver"


def _tries(number: int) -> str:
    """An event has as many as it takes: in an outage they are far more than the events."""
    return "try" if number == 1 else "tries"


def _elsewhere(run: RelayRun) -> str:
    if not run.leased:
        return ""
    verb = "waits" if run.leased == 1 else "wait"
    return f"{count(run.leased)} {verb} for another process's lease, until {instant(run.leased_until)} at the latest"


# -- what the relays are doing


class NoDeadEvent(ReaperError):
    """The event that was named was not given up: nothing was done."""

    code = "no-dead-event"


@click.group(invoke_without_command=True)
@click.pass_context
def relays(ctx: click.Context) -> None:
    """
    Relays: how far each has come, what queues would not have.

    `pgreaper relay` makes and runs them.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@relays.command("list")
@click.argument("name", metavar="[RELAY]", required=False)
@common_options
def list_(*, name: str | None, database_url: str | None, as_json: bool) -> None:
    """
    List the relays: what waits, since when, and the trouble with their queues.

    The latency is from a hold's expiry to the queue's confirmation, since the relay was made.
    """
    with database(database_url) as reaper:
        found = reaper.relays(name)
        if name is not None and not found:
            raise _unknown(name, reaper)
        now = reaper.clock()
    if as_json:
        emit("relays list", relays=[document(relay) for relay in found])
        return
    if not found:
        show_line("there is no relay: `pgreaper relay POLICY --to URL` makes one")
        return
    columns = [
        Column("relay"),
        Column("policy", priority=2),
        Column("waiting", right=True),
        Column("oldest", right=True),
        Column("dead", right=True),
        Column("delivered", right=True),
        Column("p50", right=True, priority=1),
        Column("p99", right=True, priority=1),
        Column("last delivered", priority=3),
        Column("trouble"),
    ]
    rows = [
        [
            visible(r.relay),
            visible(r.policy, 30),
            count(r.waiting, capped=r.waiting_capped),
            duration(r.oldest_waiting),
            count(r.dead),
            count(r.delivered),
            duration(r.latency_p50),
            duration(r.latency_p99),
            instant(r.last_delivered_at),
            _trouble(r, now),
        ]
        for r in found
    ]
    dead = next((r for r in found if r.dead), None)
    notes = [f"given up: `pgreaper relays dead {_word(dead.relay)}` lists them"] if dead else []
    show_table(columns, rows, notes)


@relays.command()
@click.argument("name", metavar="[RELAY]", required=False)
@click.option("--limit", type=COUNT, default=_LISTED, show_default=True, help="Show at most so many.")
@common_options
def dead(*, name: str | None, limit: int, database_url: str | None, as_json: bool) -> None:
    """List events that were given up, the newest first; of all relays unless one is named."""
    with database(database_url) as reaper:
        if name is not None and not reaper.relays(name):
            raise _unknown(name, reaper)
        found = reaper.dead_events(name, limit=limit + 1)
    more, found = len(found) > limit, found[:limit]
    if as_json:
        emit("relays dead", more=more, dead_events=[document(event) for event in found])
        return
    if not found:
        show_line("no event was given up" + (f" by relay {visible(name)}" if name else ""))
        return
    columns = [
        Column("relay"),
        Column("event"),
        Column("key"),
        Column("owner", priority=1),
        Column("died"),
        Column("attempts", right=True, priority=2),
        Column("refused with"),
    ]
    rows = [
        [
            visible(d.relay, 30),
            d.event,
            shown_key(d.key, 30),
            visible(d.owner, 20),
            instant(d.died_at),
            str(d.attempts),
            visible(d.error_class, 40),
        ]
        for d in found
    ]
    notes = [f"only the newest {limit} are shown: --limit shows more"] if more else []
    show_table(columns, rows, [*notes, f"try one again: {found[0].replay_command}"])


@relays.command()
@click.argument("name", metavar="RELAY")
@click.option("--event", metavar="EVENT", help="Only this one, as `pgreaper relays dead` names it: 17.3.")
@click.option("--all", "everything", is_flag=True, help="All events that were given up.")
@click.option("--dry-run", is_flag=True, help="Say which ones, change nothing.")
@common_options
def resend(
    *, name: str, event: str | None, everything: bool, dry_run: bool, database_url: str | None, as_json: bool
) -> None:
    """
    Try events again that were given up.

    They go next, under the same idempotency key, and may come behind later events of the same hold.

    Exit codes: 0 done, also when none was given up; 1 the event that --event names was not given up;
    2 usage; 75 the database is unreachable or read-only.
    """
    if (event is not None) is everything:
        raise click.UsageError("name the events: --event or --all")
    with database(database_url, writes=not dry_run) as reaper:
        if not reaper.relays(name):
            raise _unknown(name, reaper)
        found = reaper.dead_events(name, event=event, limit=_LISTED) if event is not None or dry_run else []
        if event is not None and not found:
            raise NoDeadEvent(
                f"relay {visible(name)}: event {visible(event)} was not given up",
                hint=f"`pgreaper relays dead {_word(name)}` lists those that were.",
            )
        if dry_run:
            _dry(found, as_json=as_json)
            return
        resent = reaper.resend(name, event)
    if as_json:
        emit("relays resend", dry_run=False, relay=name, resent=resent)
        return
    show_line(f"{plural(resent, 'event')} to be sent again")


@relays.command()
@click.argument("name", metavar="RELAY")
@click.option("--yes", is_flag=True, help="What it has not delivered need not be delivered.")
@common_options
def remove(*, name: str, yes: bool, database_url: str | None, as_json: bool) -> None:
    """
    Remove a relay and its place.

    What it has not delivered, it never will; made anew, it begins with what expires then. The trail, the policy and its
    other relays stay.

    Exit codes: 0 removed; 1 events wait in it, and --yes was not given; 2 usage, no such relay;
    75 the database is unreachable or read-only.
    """
    with database(database_url, writes=True) as reaper:
        found = reaper.relays(name)
        if not found:
            raise _unknown(name, reaper)
        waiting, dead = found[0].waiting, found[0].dead
        if (waiting or dead) and not yes:
            raise ReaperError(
                f"relay {visible(name)} has {plural(waiting, 'event')} to deliver and {count(dead)} given up",
                hint="--yes removes it all the same.",
            )
        reaper.unrelay(name)
    if as_json:
        emit("relays remove", relay=name, waiting=waiting, dead=dead)
        return
    show_line(f"relay {visible(name)} is removed")


def _dry(found: list[DeadEvent], *, as_json: bool) -> None:
    if as_json:
        emit("relays resend", dry_run=True, dead_events=[document(event) for event in found])
        return
    for event in found:
        show_line(f"{event.event}  {shown_key(event.key)}  {visible(event.error_class)}, died {instant(event.died_at)}")
    show_line(f"{plural(len(found), 'event')} would be sent again")


def _trouble(relay: RelayStatus, now: datetime) -> str:
    if relay.trouble is None or relay.trouble_since is None:
        return ""
    return f"{visible(relay.trouble, 30)} for {duration(max(now - relay.trouble_since, timedelta()))}"


def _unknown(name: str, reaper: Reaper) -> UnknownPolicy:
    from difflib import get_close_matches

    names = [relay.relay for relay in reaper.relays()]
    near = get_close_matches(name, names, 1)
    hint = f"Did you mean {visible(near[0])}?" if near else "`pgreaper relays list` shows which there are."
    return UnknownPolicy(f"there is no relay {visible(name)}", hint=hint, sqlstate="RP002")


def _word(name: str) -> str:
    import shlex

    return visible(shlex.quote(name))
