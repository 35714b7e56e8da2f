"""``pgreaper heartbeat``: a liveness probe that needs neither shell nor database."""

from pathlib import Path

import click

from pgreaper.cli.common import SECONDS, emit
from pgreaper.errors import InvalidInput
from pgreaper.heartbeat import NoFile, read
from pgreaper.text import duration, one_line


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--max-age", type=SECONDS, default=120, show_default=True, metavar="SECONDS",
              help="How old the last beat may be.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
@click.pass_context
def heartbeat(ctx: click.Context, *, file: Path, max_age: float, as_json: bool) -> None:
    """
    Whether the daemon that runs with --heartbeat FILE is alive; for liveness probes.

    A daemon that waits for its database is alive; one that hangs is not. Let --max-age be
    longer than your longest batch takes: while one statement runs there is no beat.

    Exit codes: 0 alive; 3 the last beat is too old, or there is none that can be read; 2 usage, also where FILE is
    a folder or a pipe.
    """
    unreadable = None
    try:
        beat = read(file)
    except NoFile:
        raise InvalidInput(
            f"{one_line(str(file))} is no file", hint="Name the one that `pgreaper work --daemon --heartbeat` writes."
        ) from None
    except OSError as error:
        beat, unreadable = None, (error.strerror or type(error).__name__).lower()
    alive = beat is not None and beat.age <= max_age
    code = 0 if alive else 3
    if as_json:
        emit(
            "heartbeat",
            alive=alive,
            worker=beat and beat.worker,
            age_seconds=beat and round(beat.age, 3),
            max_age_seconds=max_age,
            exit_code=code,
        )
    elif beat is None:
        why = f": {unreadable}" if unreadable else ""
        click.echo(f"error: there is no heartbeat in {one_line(str(file))}{why}", err=True)
        click.echo("hint: A daemon writes it: `pgreaper work --daemon --heartbeat FILE`.", err=True)
    elif alive:
        click.echo(f"{one_line(beat.worker)} was alive {duration(beat.age)} ago")
    else:
        click.echo(
            f"error: {one_line(beat.worker)} was last alive {duration(beat.age)} ago, more than {duration(max_age)}",
            err=True,
        )
    ctx.exit(code)
