"""``pgreaper listen``: commands from a queue."""

import sys
from typing import Any

import click

from pgreaper.api import ANSWERS, DEAD_LETTER, EXPIRED, NOT_DUE, RETRY, WRONG_KEY
from pgreaper.cli.common import BATCH, SECONDS, common_options, emit
from pgreaper.cli.screen import Screen, failure, log_format_option
from pgreaper.connection import resolve
from pgreaper.errors import ReaperError
from pgreaper.listen import VISIBILITY, Listener, PolicyRun, Run, Settings
from pgreaper.queues import source
from pgreaper.text import count, duration, one_line, plural, visible

VARIABLE = "PGREAPER_LISTEN_URL"


@click.command()
@click.option("--from", "url", metavar="URL", envvar=VARIABLE,
              help="The queue: amqp://, sqs://, an AWS queue URL, kafka://, or stdin: for a command a line."
              f"  [default: {VARIABLE}]")  # fmt: skip
@click.option("--policy", "policies", metavar="POLICY", multiple=True,
              help="Accept commands for this policy, and for no others; may be given more than once.")  # fmt: skip
@click.option("--once", is_flag=True, help="Do what is in the queue, then exit.")
@click.option("--batch", type=BATCH, default=500, show_default=True, metavar="N",
              help="Take at most so many messages at once.")  # fmt: skip
@click.option("--max-seconds", type=SECONDS, metavar="SECONDS", help="Take nothing more after that.")
@click.option("--shutdown-timeout", type=SECONDS, default=20, show_default=True,
              metavar="SECONDS", help="After SIGTERM or Ctrl-C, be gone within that.")  # fmt: skip
@log_format_option
@common_options
def listen(
    *,
    url: str | None,
    policies: tuple[str, ...],
    once: bool,
    batch: int,
    max_seconds: float | None,
    shutdown_timeout: float,
    log_format: str,
    database_url: str | None,
    as_json: bool,
) -> int:
    """
    Expire the holds that messages of a queue name.

    A message is JSON, {"policy": "holds", "key": "42"}, or "keys" with an array of
    them. It is acknowledged after the commit. The guard is that of every other way:
    a command that comes early goes back to the queue until the hold is due; one for
    a hold that was consumed, extended or expired before changes nothing. So messages
    may be delayed, repeated and reordered. What is no command, or names no policy
    or no possible key, is left to the queue's dead-letter path.

    No handler is called. Any number of listeners may read one queue, beside
    workers and sweeps. Ctrl-C, SIGTERM and SIGHUP finish the batch in hand; a second
    one cancels it.

    The password of a URL is shown to everybody on the machine; PGREAPER_LISTEN_URL
    keeps it out of the list of processes.

    Exit codes: 0 done; 1 something failed: a hold is to be tried again or is a dead
    letter, a message was rejected; 2 usage; 75 the queue or the database is not there,
    or commands from stdin: have to wait and are lost with the run, try later.
    """
    if not url:
        raise click.UsageError(f"which queue? Give --from URL, or set {VARIABLE}.")
    screen = Screen(machine=log_format == "json")
    try:
        listener = Listener(
            resolve(database_url),
            source(url, visibility=VISIBILITY),
            Settings(
                policies=policies,
                once=once,
                batch=batch,
                max_seconds=max_seconds,
                shutdown_timeout=shutdown_timeout,
            ),
            log=screen.log,
            on_leave=lambda run: _show(run, as_json=as_json, told=screen.machine),
        )
        run = listener.run()
    except ReaperError as error:
        screen.refused(error)
        raise
    _show(run, as_json=as_json, told=screen.machine)
    return run.exit_code


def _show(run: Run, *, as_json: bool, told: bool) -> None:
    """The result on stdout; its error goes to stderr unless the log has ``told`` it."""
    if as_json:
        emit("listen", **_document(run))
    else:
        _tell(run)
        if run.trouble is not None and not told:
            click.echo(f"error: {one_line(run.trouble.message)}", err=True)
            if run.trouble.hint:
                click.echo(f"hint: {one_line(run.trouble.hint)}", err=True)
    sys.stdout.flush()


def _document(run: Run) -> dict[str, Any]:
    return {
        "exit_code": run.exit_code,
        "ended": run.ended,
        "listener": run.listener,
        "source": run.source,
        "seconds": round(run.seconds, 6),
        "reconnects": run.reconnects,
        "received": run.received,
        "done": run.done,
        "put_off": run.put_off,
        "lost": run.lost,
        "rejected": dict(run.rejected),
        "outcomes": {outcome: run.outcomes[outcome] for outcome in ANSWERS},
        "policies": [
            {
                "policy": p.policy,
                "outcomes": {outcome: p.outcomes[outcome] for outcome in ANSWERS},
                "failures": p.failures,
                "error": failure(p.error),
            }
            for p in run.policies.values()
        ],
        "error": failure(run.trouble),
    }


def _tell(run: Run) -> None:
    """A line for each policy that commands came for, and one about the messages; silence when none came."""
    for policy in run.policies.values():
        if text := _summary(policy):
            click.echo(f"{visible(policy.policy)}: {text}")
    if run.received:
        parts = [f"{plural(run.received, 'message')} in {duration(run.seconds)}: {count(run.done)} done"]
        if run.put_off:
            parts.append(f"{count(run.put_off)} put off")
        if run.lost:
            parts.append(f"{count(run.lost)} lost")
        if run.rejected:
            why = ", ".join(f"{count(n)} {reason}" for reason, n in run.rejected.items())
            parts.append(f"{count(run.rejected.total())} rejected ({why})")
        click.echo(", ".join(parts))
    elif sys.stdout.isatty() and run.trouble is None:
        click.echo("no message came")


def _summary(p: PolicyRun) -> str:
    return ", ".join(f"{count(n)} {_WORDS.get(outcome, outcome)}" for outcome in ANSWERS if (n := p.outcomes[outcome]))


_WORDS = {
    EXPIRED: "expired",
    "already-done": "already done",
    "not-eligible": "not eligible",
    RETRY: "to be tried again",
    DEAD_LETTER: "dead letters",
    NOT_DUE: "not due yet",
    WRONG_KEY: "with a wrong key",
}
