"""``pgreaper report``: what happened in a span of time, as one page."""

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import click

from pgreaper.cli.common import common_options, database, document, emit, unknown_policy
from pgreaper.errors import ReaperError
from pgreaper.text import visible


@click.command()
@click.argument("policies", metavar="[POLICY]...", nargs=-1)
@click.option("--html", metavar="FILE", help="Write a page that needs nothing else; - is stdout.")
@click.option("--since", default="24h", show_default=True, metavar="WHEN",
              help="Its begin: how long ago ('7 days'), or an instant (2026-01-31T12:00Z).")  # fmt: skip
@click.option("--until", metavar="WHEN", help="Its end, likewise.  [default: now]")
@common_options
def report(
    policies: tuple[str, ...],
    *,
    html: str | None,
    since: str,
    until: str | None,
    database_url: str | None,
    as_json: bool,
) -> None:
    """
    What became of the holds in a span of time, and whether the objectives were kept.

    Of all policies unless some are named. The page is one file without scripts:
    transitions and lateness over time, outcomes, backlog, failures, dead letters with
    their owners, slowest batches. What is read is bounded; a figure says where the
    bound was reached.
    """
    if html is None and not as_json:
        raise click.UsageError("say where to: --html FILE, or --json.")
    if html == "-" and as_json:
        raise click.UsageError("--html - and --json exclude each other on stdout.")
    from pgreaper.report import gather, span

    with database(database_url) as reaper:
        registered = list(reaper.registered())
        for policy in policies:
            if policy not in registered:
                raise unknown_policy(policy, registered)
        begin, end, now = span(reaper, since, until)
        found = gather(reaper, begin, end, now, policies or None)
    if html is not None:
        from pgreaper.page import page

        _write(html, page(found))
    if as_json:
        emit("report", **document(found))
    elif html != "-":
        click.echo(f"{found.headline}  {visible(str(html), 200)}")


def _write(target: str, text: str) -> None:
    """The whole file or nothing of it: written beside its place and renamed."""
    data = text.encode("utf-8", "replace")
    if target == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    path = Path(target)
    try:
        path = path.resolve()
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # A device or a pipe has no place beside it.
            return
        number, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            Path(new).chmod(0o666 & ~mask)
            Path(new).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(new).unlink()
            raise
    except OSError as error:
        raise ReaperError(
            f"{visible(target, 200)} cannot be written: {(error.strerror or 'it cannot').lower()}",
            hint="Its folder must be there, and writable for this user.",
        ) from None
