"""``pgreaper deploy``: print what cron, systemd or Kubernetes needs to run pgreaper."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgreaper import __version__
from pgreaper import deploy as texts
from pgreaper.cli.common import CALLS, SECONDS, emit
from pgreaper.errors import InvalidInput
from pgreaper.text import visible

_F = TypeVar("_F", bound=Callable[..., object])

_EVERY_MINUTE = "* * * * *"


@click.group(invoke_without_command=True)
@click.pass_context
def deploy(ctx: click.Context) -> None:
    """What cron, systemd or Kubernetes needs to run pgreaper."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@deploy.group("print", invoke_without_command=True)
@click.pass_context
def print_(ctx: click.Context) -> None:
    """
    Print a crontab, systemd's units, or Kubernetes' manifests.

    Nothing is installed and no database is asked. The texts have no password in them: each says where
    the URL of the database is expected.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


if TYPE_CHECKING:
    _ParamType = click.ParamType[str]
else:
    _ParamType = click.ParamType  # older versions of click cannot be subscripted


class _Text(_ParamType):
    """A text of a certain form; says the form in a sentence."""

    def __init__(self, name: str, pattern: str, what: str) -> None:
        self.name = name
        self._pattern = re.compile(pattern)
        self._what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not self._pattern.fullmatch(text):
            self.fail(f"{visible(text)} is not {self._what}", param, ctx)
        return text


_WORD = _Text("text", r"[^\ud800-\udfff\x00]+", "text in UTF-8")
_HANDLER = _Text("handler", r"[^\s:]+:[^\s:]+", "written as MODULE:FUNCTION")
_PATH = _Text("path", r"/[^\x00-\x1f\x7f\ud800-\udfff]+", "an absolute path")
_EXECUTABLE = _Text(
    "path",
    r"/[^\x00-\x1f\x7f\ud800-\udfff'\"\\]+",
    "an absolute path without quotes and backslashes, as systemd wants it",
)
_CALENDAR = _Text("schedule", r"[A-Za-z0-9*][A-Za-z0-9 *:,./~+_-]*", "a calendar expression of systemd")
_USER = _Text("name", r"[a-z]([a-z0-9-]{0,25}[a-z0-9])?", "a name of at most 27 lower-case letters, digits and hyphens")
_NAME = _Text("name", r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", "a name of at most 52 lower-case letters, digits and hyphens")
_NAMESPACE = _Text("name", r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "the name of a namespace")
_SECRET = _Text("name", r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "the name of a secret")
_KEY = _Text("key", r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}", "a key of a secret")
_IMAGE = _Text("image", r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "the name of an image")


def _job_options(function: _F) -> _F:
    """The options that all three share: what is to run."""
    for option in (
        click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text."),
        click.option("--concurrency", type=CALLS, metavar="N", help="Calls of the handler at once.  [default: 8]"),
        click.option("--handler", type=_HANDLER, metavar="MODULE:FUNCTION",
                     help="Call this function for each hold before it expires."),
        click.option("--max-seconds", type=SECONDS, metavar="SECONDS", default=50, show_default=True,
                     help="A run claims nothing more after that."),
        click.argument("policies", metavar="[POLICY]...", nargs=-1, type=_WORD),
    ):  # fmt: skip
        function = option(function)
    return function


_shutdown = click.option(
    "--shutdown-timeout", type=SECONDS, metavar="SECONDS", default=20, show_default=True,
    help="After SIGTERM, be gone within that; the scheduler waits a little longer.",
)  # fmt: skip
_PROGRAM_HELP = "Where pgreaper is on that machine.  [default: as it is on this one]"


def _job(options: dict[str, Any]) -> texts.Job:
    if options["concurrency"] is not None and options["handler"] is None:
        raise click.UsageError("--concurrency is for a --handler.")
    return texts.Job(
        policies=options["policies"],
        handler=options["handler"],
        concurrency=options["concurrency"],
        max_seconds=options["max_seconds"],
        shutdown_timeout=options.get("shutdown_timeout"),
    )


@print_.command()
@click.option("--schedule", metavar="'M H D M W'", default=_EVERY_MINUTE, show_default=True, help="When to start.")
@click.option("--program", type=_PATH, metavar="PATH", help=_PROGRAM_HELP)
@_job_options
def crontab(*, program: str | None, schedule: str, as_json: bool, **options: Any) -> None:
    """
    Lines for a crontab: one run per start, on all policies unless some are named.

    \b
      (crontab -l; pgreaper deploy print crontab) | crontab -
    """  # noqa: D301  click reads the \\b
    text = texts.crontab(_job(options), program=program or _own_path(), schedule=texts.check_schedule(schedule))
    _print("crontab", {"crontab": text}, as_json=as_json)


@print_.command()
@click.option("--kind", type=click.Choice(["daemon", "timer"]),
              help="The daemon's service, or a run with its timer.  [default: all three]")  # fmt: skip
@click.option("--schedule", type=_CALENDAR, metavar="CALENDAR", default="minutely", show_default=True,
              help="When the timer starts a run: see systemd.time(7).")  # fmt: skip
@click.option("--name", type=_USER, default="pgreaper", show_default=True,
              help="Of the units, of their user, and of /etc/NAME.env, which holds PGREAPER_DATABASE_URL.")  # fmt: skip
@click.option("--program", type=_EXECUTABLE, metavar="PATH", help=_PROGRAM_HELP)
@click.option("--to", "folder", type=click.Path(file_okay=False, exists=True, path_type=Path), metavar="DIRECTORY",
              help="Write the units there, each as a file.")  # fmt: skip
@_shutdown
@_job_options
def systemd(
    *,
    program: str | None,
    kind: str | None,
    schedule: str,
    name: str,
    folder: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """
    Units for systemd: a service that stays, and a service that a timer starts.

    One of the two is enough; both together share the work.

    \b
      pgreaper deploy print systemd --kind daemon --to /etc/systemd/system
    """  # noqa: D301  click reads the \\b
    name, schedule = texts.check_user(name), texts.check_calendar(schedule)
    job, program = _job(options), program or _own_path()
    units: dict[str, str] = {}
    if kind != "timer":
        units |= texts.systemd_daemon(job, program=program, name=name)
    if kind != "daemon":
        units |= texts.systemd_timer(job, program=program, name=name, schedule=schedule)
    if folder is not None:
        _write(folder, units)
    _print("systemd", units, as_json=as_json, folder=folder)


@print_.command()
@click.option("--kind", type=click.Choice(["cronjob", "deployment"]),
              help="One run per start, or the daemon.  [default: both]")  # fmt: skip
@click.option("--image", type=_IMAGE, default=f"pgreaper:{__version__}", show_default=True,
              help="Built from the Containerfile, or one of yours that adds a handler.")  # fmt: skip
@click.option("--schedule", metavar="'M H D M W'", default=_EVERY_MINUTE, show_default=True,
              help="When the CronJob starts.")  # fmt: skip
@click.option("--name", type=_NAME, default="pgreaper", show_default=True, help="Of the objects.")
@click.option("--namespace", type=_NAMESPACE, help="Where they are.  [default: where kubectl puts them]")
@click.option("--secret", type=_SECRET, default="pgreaper", show_default=True,
              help="The secret with the URL of the database.")  # fmt: skip
@click.option("--secret-key", type=_KEY, default="database-url", show_default=True, help="Its key in there.")
@_shutdown
@_job_options
def k8s(
    *,
    kind: str | None,
    image: str,
    schedule: str,
    name: str,
    namespace: str | None,
    secret: str,
    secret_key: str,
    as_json: bool,
    **options: Any,
) -> None:
    """
    Manifests for Kubernetes: a CronJob, and a Deployment of the daemon.

    One of the two is enough; both together share the work.

    \b
      pgreaper deploy print k8s --kind deployment | kubectl apply -f -
    """  # noqa: D301  click reads the \\b
    job, when = _job(options), texts.check_schedule(schedule, kubernetes=True)
    where = texts.Cluster(name=name, image=image, secret=secret, secret_key=secret_key, namespace=namespace)
    manifests = {}
    if kind != "deployment":
        manifests["cronjob.yaml"] = texts.cronjob(job, where, schedule=when)
    if kind != "cronjob":
        manifests["deployment.yaml"] = texts.deployment(job, where)
    _print("k8s", manifests, as_json=as_json)


def _own_path() -> str:
    """Where the program is that runs now: another user's PATH need not find it."""
    for candidate in (Path(sys.argv[0]), Path(sys.executable).with_name("pgreaper")):
        if candidate.name == "pgreaper" and candidate.is_file():
            return str(candidate.absolute())
    found = shutil.which("pgreaper")
    if found is None:
        raise InvalidInput(
            "the program pgreaper is not on the PATH", hint="Say where it is: --program /path/to/pgreaper"
        )
    return str(Path(found).absolute())


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write all of them, or none: a file that somebody has changed is not overwritten."""
    for name, text in files.items():
        path = folder / name
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise InvalidInput(
                f"{visible(str(path), 200)} is there already and says something else",
                hint="Remove it first, or choose another --name.",
            )
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _print(kind: str, files: dict[str, str], *, as_json: bool, folder: Path | None = None) -> None:
    if as_json:
        emit(
            f"deploy print {kind}",
            files=[{"name": name, "text": text} for name, text in files.items()],
            written_to=None if folder is None else str(folder),
        )
    elif folder is not None:
        for name in files:
            click.echo(visible(str(folder / name), 200))
    elif kind == "k8s":
        click.echo("---\n".join(files.values()), nl=False)
    else:
        heads = {name: f"# {name}\n" if len(files) > 1 else "" for name in files}
        click.echo("\n".join(heads[name] + text for name, text in files.items()), nl=False)
