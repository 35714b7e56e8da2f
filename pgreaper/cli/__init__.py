"""
The command ``pgreaper``.

Owns the list of commands, what an error looks like, and the exit code.  A command's
module is imported when that command runs, and only then: ``pgreaper work`` in a cron
job starts as fast as psycopg and click do.
"""

from pgreaper.cli import first  # noqa: F401

# isort: split
import logging
import os
import sys
from importlib import import_module
from typing import NamedTuple, NoReturn

import click

from pgreaper import __version__
from pgreaper.errors import ReaperError
from pgreaper.text import harden, one_line


class _Entry(NamedTuple):
    section: str
    module: str
    help: str


# In the order in which a person meets them.
COMMANDS = {
    "demo": _Entry("Try it", "demo", "Watch 100,000 holds expire on a throw-away PostgreSQL."),
    "install": _Entry("Set up", "install", "Install or upgrade pgreaper in a database."),
    "uninstall": _Entry("Set up", "install", "Remove pgreaper from a database."),
    "discover": _Entry("Set up", "discover", "Find tables that look like holds, and what is overdue there."),
    "register": _Entry("Set up", "register", "Say which rows of a table are holds, and what expiring does."),
    "unregister": _Entry("Set up", "policies", "Withdraw a policy; its history stays."),
    "policies": _Entry("Set up", "policies", "List the policies."),
    "grant": _Entry("Set up", "grant", "Give a role what a worker, operator or reader needs, and no more."),
    "revoke": _Entry("Set up", "grant", "Take back what grant gave."),
    "preview": _Entry("Run", "preview", "Count what a run would meet now; change nothing."),
    "work": _Entry("Run", "work", "Expire what is due, then exit; or stay, with --daemon."),
    "relay": _Entry("Run", "relay", "Send each expired hold to a queue: RabbitMQ, SQS, Kafka, HTTP, stdout."),
    "listen": _Entry("Run", "listen", "Expire the holds that messages of a queue name."),
    "heartbeat": _Entry("Run", "heartbeat", "Whether a daemon is alive: for liveness probes."),
    "deploy": _Entry("Run", "deploy", "Print what cron, systemd or Kubernetes needs to run it."),
    "pause": _Entry("Run", "policies", "Claim nothing more for a policy."),
    "resume": _Entry("Run", "policies", "Let a paused policy go on."),
    "cron": _Entry("Run", "cron", "Let pg_cron run the sweep, inside the database."),
    "dead": _Entry("Mend", "dead", "Dead letters: list, show, replay, discard."),
    "relays": _Entry("Mend", "relay", "Relays: how far each is; list, dead, resend, remove."),
    "verify": _Entry("Mend", "verify", "Check from the books and the rows that nothing expired twice or early."),
    "prune": _Entry("Mend", "prune", "Remove what the books have kept long enough."),
    "status": _Entry("Look", "status", "How the policies are doing, and what to do next."),
    "check": _Entry("Look", "check", "Whether all is well, in one line: for probes and monitors."),
    "metrics": _Entry("Look", "metrics", "Print what Prometheus wants to know."),
    "report": _Entry("Look", "report", "What happened in a span of time, as one page of HTML."),
    "history": _Entry("Look", "history", "Everything that happened to one hold."),
    "doctor": _Entry("Look", "doctor", "Find what keeps holds from expiring, and what repairs it."),
}


class _Group(click.Group):
    """Finds commands by name without importing the others, and lists them by section."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = getattr(import_module(f"pgreaper.cli.{entry.module}"), cmd_name)
        assert isinstance(command, click.Command)  # noqa: S101
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, 1)
            hint = f"Did you mean `pgreaper {near[0]}`?" if near else "`pgreaper --help` lists the commands."
            raise _Usage(f"there is no command {one_line(args[0])!r}", hint)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _ReaderGone from None  # click would make a failure of it

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl(
                    [(name.ljust(width), e.help) for name, e in COMMANDS.items() if e.section == section]
                )


class _ReaderGone(Exception):
    """Nobody reads stdout any more."""


class _Usage(click.UsageError):
    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@click.command(
    cls=_Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="The database: --database-url, PGREAPER_DATABASE_URL, DATABASE_URL, or libpq's PGHOST and friends.",
)
@click.version_option(__version__, "-V", "--version", message="pgreaper %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Expire overdue holds in Postgres: your own rows, in place, each exactly once."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; nothing but one ``error:`` line tells of a failure."""
    try:
        code = _main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except (BrokenPipeError, _ReaderGone):
        # The reader has gone, as `| head` does; keep Python from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _main(arguments: list[str]) -> int:
    harden()
    # What psycopg thinks worth a warning (a rollback that came too late) is told by us, or not worth telling.
    logging.getLogger("psycopg").addHandler(logging.NullHandler())
    try:
        result = cli.main(args=arguments, prog_name="pgreaper", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except ReaperError as error:
        return _fail(arguments, error.message, error.hint, error.exit_code, error.code, error)
    except click.UsageError as error:
        where = f"`{error.ctx.command_path} --help` shows how." if error.ctx else None
        message = _lowered(error.format_message())
        return _fail(arguments, message, getattr(error, "hint", None) or where, 2, "usage", error)
    except click.ClickException as error:
        return _fail(arguments, _lowered(error.format_message()), None, error.exit_code, "error", error)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("", err=True)
        return 130
    except (BrokenPipeError, _ReaderGone):
        raise
    except Exception as error:  # noqa: BLE001  the last line of defence: no traceback reaches a user
        return _unexpected(arguments, error)


def _unexpected(arguments: list[str], error: Exception) -> int:
    import psycopg

    if isinstance(error, psycopg.Error):
        from pgreaper.errors import translate

        known = translate(error)
        return _fail(arguments, known.message, known.hint, known.exit_code, known.code, error)
    if isinstance(error, OSError) and error.strerror:
        return _fail(arguments, f"{error.strerror.lower()}: {error.filename}", None, 1, "error", error)
    return _fail(
        arguments,
        f"this should not have happened: {type(error).__name__}",
        "It is a bug in pgreaper; --debug shows where.",
        1,
        "bug",
        error,
    )


def _fail(arguments: list[str], message: str, hint: str | None, exit_code: int, code: str, error: BaseException) -> int:
    """Tell a failure: two lines on stderr, and the one document on stdout for whoever asked for JSON."""
    if "--debug" in arguments or os.environ.get("PGREAPER_DEBUG", "0") not in ("", "0"):
        _show_traceback(error)
    if not getattr(error, "told", False):
        sign = click.style("error:", fg="red", bold=True) if _colour(sys.stderr) else "error:"
        click.echo(f"{sign} {one_line(message)}", err=True)
        if hint:
            click.echo(f"hint: {one_line(hint)}", err=True)
    if "--json" in arguments:
        from pgreaper.cli.common import emit

        command = _named(arguments)
        failure = {"code": code, "message": message, "hint": hint, "sqlstate": getattr(error, "sqlstate", None)}
        emit(command, error=failure, exit_code=exit_code)
    return exit_code


def _named(arguments: list[str]) -> str | None:
    """The command's full name, as its document has it: ``dead list``."""
    command: click.Command = cli
    words: list[str] = []
    for word in arguments:
        if not isinstance(command, click.Group):
            break
        if not word.startswith("-"):
            below = command.get_command(click.Context(command), word)
            if below is None:
                break
            words.append(word)
            command = below
    return " ".join(words) or None


def _show_traceback(error: BaseException) -> None:
    """The traceback, and the server's own words: whoever asks for them may see values of rows."""
    import traceback

    traceback.print_exception(error)
    original = getattr(error, "original", None)
    if original is not None:
        click.echo("The server or libpq said:", err=True)
        traceback.print_exception(original)


def _colour(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)
    return isatty is not None and isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _lowered(message: str) -> str:
    """Click's sentence in our manner: a lower-case fact without a full stop."""
    message = message.rstrip(".")
    return message[:1].lower() + message[1:]


def run() -> NoReturn:
    """Run as a program."""
    sys.exit(main())
