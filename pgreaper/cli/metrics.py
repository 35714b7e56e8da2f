"""``pgreaper metrics``: what Prometheus wants to know, once."""

import sys
from pathlib import Path

import click

from pgreaper.cli.common import common_options, document, emit
from pgreaper.connection import resolve
from pgreaper.errors import ReaperError
from pgreaper.text import one_line


@click.command()
@click.option("--textfile", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write there, for the node exporter's textfile collector; name it *.prom.")  # fmt: skip
@common_options
def metrics(*, textfile: Path | None, database_url: str | None, as_json: bool) -> int:
    """
    Print the metrics of all policies in Prometheus' text format.

    They come from the database alone: no worker has to be alive. A daemon serves the same,
    and its own, with `pgreaper work --daemon --metrics-port PORT`. With --textfile a
    cron job keeps a file up to date, which is replaced as a whole.

    A database that cannot be read is told as well: the page then has pgreaper_up 0 and no
    policies, and the exit code is that of the error. With --json, what the view
    pgreaper.metrics has, and nothing in that case but the error.

    Exit codes: 0 done; 1 the file cannot be written, or pgreaper is not installed; 2 usage;
    75 the database cannot be reached, or does not answer.
    """
    from pgreaper.metrics import Source, page, write

    if textfile is not None and as_json:
        raise click.UsageError("--textfile and --json exclude each other.")
    reading = Source(resolve(database_url)).latest()
    if not as_json:
        text = page(reading)
        if textfile is None:
            sys.stdout.write(text.decode())
            sys.stdout.flush()
        else:
            try:
                write(textfile, text)
            except OSError as error:
                raise _unwritable(textfile, error) from None
    if reading.trouble is not None:
        raise reading.trouble
    if as_json:
        emit("metrics", policies=[document(p) for p in reading.policies], unread=list(reading.unread))
    elif reading.unread:
        names = ", ".join(one_line(name) for name in reading.unread)
        click.echo(f"pgreaper: not looked at in time: {names}; `pgreaper doctor` says why", err=True)
    return 0


def _unwritable(path: Path, error: OSError) -> ReaperError:
    return ReaperError(
        f"{one_line(str(path))} cannot be written: {(error.strerror or 'no space').lower()}",
        hint="Its folder must be there, and writable for this user.",
    )
