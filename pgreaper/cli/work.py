"""``pgreaper work``: the command of a cron job, a CronJob or a daemon."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from pgreaper.api import ALREADY_DONE, DEAD_LETTER, EXPIRED, LOCKED, NOT_ELIGIBLE, OUTCOMES, RETRY
from pgreaper.cli.common import BATCH, CALLS, COUNT, SECONDS, common_options, emit
from pgreaper.cli.screen import Screen, failure, log_format_option
from pgreaper.connection import resolve
from pgreaper.errors import ReaperError
from pgreaper.logs import Event
from pgreaper.text import count, duration, one_line, visible
from pgreaper.worker import HANDLER_TIMEOUT, PolicyRun, Run, Settings, Worker

# A drain that is over by then needs no progress.
_SHOW_AFTER = 1.0
_SHOW_EVERY = 0.2


def _port(_ctx: click.Context, _param: click.Parameter, value: int | None) -> int | None:
    if value is not None and not 0 <= value <= 65535:
        raise click.BadParameter(f"{value} is not a port: those are 1 to 65535, and 0 for any free one")
    return value


@click.command()
@click.argument("policies", metavar="[POLICY]...", nargs=-1)
@click.option("--once", is_flag=True, help="One batch per policy, then exit.")
@click.option("--daemon", is_flag=True, help="Stay, and expire each hold when its deadline comes.")
@click.option("--max-rows", type=COUNT, metavar="N", help="Expire at most N holds.")
@click.option("--max-seconds", type=SECONDS, metavar="SECONDS", help="Claim nothing more after that.")
@click.option("--batch", type=BATCH, metavar="N", help="Holds a claim takes.  [default: the policy's]")
@click.option("--handler", metavar="MODULE:FUNCTION", help="Call this function for each hold before it expires.")
@click.option("--concurrency", type=CALLS, metavar="N", help="Calls of the handler at once.  [default: 8]")
@click.option("--handler-timeout", type=SECONDS, metavar="SECONDS",
              help="Longest time for a call; then its hold is to be tried again.  [default: 300]")  # fmt: skip
@click.option("--fail-on-dead-letter", is_flag=True,
              help="Exit 1 while dead letters wait, not only when new ones come about.")  # fmt: skip
@click.option("--poll", type=SECONDS, default=5, show_default=True, metavar="SECONDS",
              help="Longest sleep of the daemon.")  # fmt: skip
@click.option("--heartbeat", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="A file that a living daemon keeps fresh; `pgreaper heartbeat FILE` judges it.")  # fmt: skip
@click.option("--metrics-port", type=int, callback=_port, metavar="PORT",
              help="Serve a daemon's metrics for Prometheus over HTTP there; 0: any free port.")  # fmt: skip
@click.option("--metrics-address", metavar="ADDRESS",
              help="On this address of the machine only.  [default: 0.0.0.0, all]")  # fmt: skip
@click.option("--shutdown-timeout", type=SECONDS, default=20, show_default=True,
              metavar="SECONDS", help="After SIGTERM or Ctrl-C, be gone within that.")  # fmt: skip
@log_format_option
@click.option("--log-level", type=click.Choice(["info", "debug"]), envvar="PGREAPER_LOG_LEVEL", default="info",
              help="debug: each batch, and each hold that failed.  [default: PGREAPER_LOG_LEVEL, or info]")  # fmt: skip
@common_options
def work(
    policies: tuple[str, ...],
    *,
    once: bool,
    daemon: bool,
    max_rows: int | None,
    max_seconds: float | None,
    batch: int | None,
    handler: str | None,
    concurrency: int | None,
    handler_timeout: float | None,
    fail_on_dead_letter: bool,
    poll: float,
    heartbeat: Path | None,
    metrics_port: int | None,
    metrics_address: str | None,
    shutdown_timeout: float,
    log_format: str,
    log_level: str,
    database_url: str | None,
    as_json: bool,
) -> int:
    """
    Expire what is due, then exit; or stay, with --daemon.

    Works on all policies unless some are named. Any number of workers may run at
    once. Ctrl-C, SIGTERM and SIGHUP finish the batch in hand; a second one cancels it.

    A handler is a function, or an async one, of one argument: the call, with policy,
    key, deadline, attempt, payload and idempotency_key. It is called at least once
    per hold. If it returns, the hold expires; it may raise Retry, Skip or
    DeadLetter of pgreaper.handlers. Any other error fails the hold, SystemExit too.
    When the time of --handler-timeout is over, an async call is cancelled; another
    one cannot be, and keeps its place among the --concurrency until it ends. While
    calls run, the worker's other policies wait: that is why there always is a limit.

    What it says on stderr are keys, counts and error classes: no value of a row, no
    text of an error, no password. Only --debug shows what the server said.

    Exit codes: 0 done, or nothing was due; 1 something failed: a batch, a hold that
    is to be tried again or became a dead letter in this run, a suspended policy;
    2 usage; 75 the database is unreachable, read-only or locked, try later.
    """
    if once and daemon:
        raise click.UsageError("--once and --daemon exclude each other.")
    if heartbeat is not None and not daemon:
        raise click.UsageError("--heartbeat is for a --daemon.")
    if metrics_port is not None and not daemon:
        raise click.UsageError("--metrics-port is for a --daemon; `pgreaper metrics` prints them once.")
    if metrics_address is not None and metrics_port is None:
        raise click.UsageError("--metrics-address is for a --metrics-port.")
    if concurrency is not None and handler is None:
        raise click.UsageError("--concurrency is for a --handler.")
    if handler_timeout is not None and handler is None:
        raise click.UsageError("--handler-timeout is for a --handler.")
    if fail_on_dead_letter and daemon and max_seconds is None and max_rows is None:
        raise click.UsageError("--fail-on-dead-letter needs a run that ends, and --daemon stays.")
    screen = _Screen(machine=log_format == "json")
    endpoint = None
    try:
        function = None
        if handler is not None:
            from pgreaper.handlers import load

            function = load(handler)
        address = resolve(database_url)
        worker = Worker(
            address,
            Settings(
                policies=policies,
                daemon=daemon,
                once=once,
                batch=batch,
                max_rows=max_rows,
                max_seconds=max_seconds,
                poll=poll,
                heartbeat=heartbeat,
                shutdown_timeout=shutdown_timeout,
                handler=function,
                concurrency=concurrency or 8,
                handler_timeout=handler_timeout or HANDLER_TIMEOUT,
                fail_on_dead_letter=fail_on_dead_letter,
                every_batch=log_level == "debug",
            ),
            log=screen.log,
            on_batch=screen.progress if screen.shows_progress and not daemon else None,
            on_leave=lambda run: _show(run, as_json=as_json, told=screen.machine),
        )
        if metrics_port is not None:
            from pgreaper.metrics import serve

            endpoint = serve(
                address,
                host=metrics_address or "0.0.0.0",  # noqa: S104  whoever scrapes is rarely on this machine
                port=metrics_port,
                vitals=lambda: worker.vitals,
                log=lambda text: screen.log(Event("metrics.reading", text)),
            )
            screen.log(Event("metrics.serving", f"metrics at {endpoint.url}"))
        run = worker.run()
    except ReaperError as error:
        screen.refused(error)
        raise
    except SystemExit:
        # Of code that a handler brought along: whoever restarts what failed must hear of it.
        raise ReaperError("something raised SystemExit where only this command ends itself") from None
    finally:
        screen.clear()
        if endpoint is not None:
            endpoint.close()
    _show(run, as_json=as_json, told=screen.machine)
    if worker.left_calls_behind:
        # A handler that hangs, perhaps in a thread of its own making, must not keep the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(run.exit_code)
    return run.exit_code


def _show(run: Run, *, as_json: bool, told: bool) -> None:
    """The result on stdout; its error goes to stderr unless the log has ``told`` it."""
    if as_json:
        emit("work", **_document(run))
    else:
        _tell(run)
        if run.trouble is not None and not told:
            click.echo(f"error: {one_line(run.trouble.message)}", err=True)
            if run.trouble.hint:
                click.echo(f"hint: {one_line(run.trouble.hint)}", err=True)
    sys.stdout.flush()


class _Screen(Screen):
    """With the progress of a long drain as its last line."""

    def __init__(self, *, machine: bool) -> None:
        super().__init__(machine=machine)
        self._started = time.monotonic()
        self._drawn_at = 0.0
        self._expected: int | None = None

    def progress(self, worker: Worker) -> None:
        """Redraw the progress line, a few times a second."""
        done = worker.result.expired
        if self._expected is None:
            # Asked once and early, while the table's statistics still hold; from then on it is subtraction.
            self._expected = done + worker.remaining()
        now = time.monotonic()
        if now - self._started < _SHOW_AFTER or now - self._drawn_at < _SHOW_EVERY:
            return
        self.draw(progress_line(done, self._expected - done, now - self._started))
        self._drawn_at = now


def progress_line(done: int, remaining: int, seconds: float) -> str:
    """``42,500 expired  18,200/s  57,500 left  about 3 s``."""
    rate = done / seconds if seconds > 0 else 0.0
    parts = [f"{count(done)} expired", f"{rate:,.0f}/s"]
    if remaining > 0:
        parts.append(f"about {count(_rounded(remaining))} left")
        if rate >= 1:
            parts.append(f"ready in {duration(float(max(1, round(remaining / rate))))}")
    return "  ".join(parts)


def _rounded(number: int) -> int:
    """Three digits are enough for an estimate."""
    scale: int = 10 ** max(len(str(number)) - 3, 0)
    return round(number / scale) * scale


def _document(run: Run) -> dict[str, Any]:
    return {
        "exit_code": run.exit_code,
        "ended": run.ended,
        "worker": run.worker,
        "seconds": round(run.seconds, 6),
        "reconnects": run.reconnects,
        "outcomes": {outcome: run.outcomes[outcome] for outcome in OUTCOMES},
        "policies": [
            {
                "policy": p.policy,
                "claims": p.claims,
                "claimed": p.claimed,
                "released": p.released,
                "lost": p.lost,
                "skipped": p.skipped,
                "dead": p.dead,
                "outcomes": {outcome: p.outcomes[outcome] for outcome in OUTCOMES},
                "suspended": p.suspended,
                "resting": p.resting,
                "failed": [
                    {"error_class": kind, "sqlstate": state, "constraint": constraint, "holds": holds}
                    for (kind, state, constraint), holds in p.reasons.items()
                ],
                "failures": p.failures,
                "error": failure(p.error),
            }
            for p in run.policies.values()
        ],
        "error": failure(run.trouble),
    }


def _tell(run: Run) -> None:
    """One line per policy for which anything happened; silence when nothing was due and nobody looks."""
    lines = {p.policy: text for p in run.policies.values() if (text := _summary(p))}
    total = f"{count(run.expired)} expired in {duration(run.seconds)}"
    if run.expired >= 1000 and run.seconds > 0:
        total += f", {run.expired / run.seconds:,.0f}/s"
    for policy, text in lines.items():
        only = len(lines) == 1 and text == f"{count(run.expired)} expired"
        click.echo(f"{visible(policy)}: {total + _why(run) if only else text}")
        if only:
            break
    else:
        if run.expired:
            click.echo(total + _why(run))
        elif not lines and sys.stdout.isatty() and run.ended in ("drained", "once"):
            resting = [p for p in run.policies.values() if p.resting]
            if any(p.failed for p in run.policies.values()):
                click.echo("nothing was done")
            elif resting:
                for p in resting:
                    click.echo(f"{visible(p.policy)}: {one_line(p.resting or '')}")
                if len(resting) < len(run.policies):
                    click.echo("of the other policies nothing is due")
            else:
                click.echo(
                    "nothing is due" if run.policies else "no policy is registered: `pgreaper register` adds one"
                )
        elif not lines and sys.stdout.isatty() and run.ended == "signal":
            click.echo("stopped; nothing was due")


def _summary(p: PolicyRun) -> str:
    parts = [f"{count(n)} {_WORDS[outcome]}" for outcome in OUTCOMES if (n := p.outcomes[outcome])]
    if p.released:
        parts.append(f"{count(p.released)} given back")
    if p.skipped:
        parts.append(f"{count(p.skipped)} put off")
    if p.lost:
        parts.append(f"{count(p.lost)} left to other workers")
    if p.suspended:
        parts.append("suspended")
    return ", ".join(parts)


_WORDS = {
    EXPIRED: "expired",
    ALREADY_DONE: "already done",
    NOT_ELIGIBLE: "not eligible",
    LOCKED: "locked",
    RETRY: "to be tried again",
    DEAD_LETTER: "dead letters",
}


def _why(run: Run) -> str:
    return {
        "signal": " (stopped by a signal)",
        "max-rows": " (--max-rows)",
        "max-seconds": " (--max-seconds)",
        "unavailable": " (the database went away)",
        "failed": " (not all: see the error)",
    }.get(run.ended, "")
