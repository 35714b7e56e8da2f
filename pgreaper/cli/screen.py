"""
What a run writes on stderr: a line per event, and on a terminal a last one that is written over.

Shared by the commands that stay or work for long: they take :func:`log_format_option`, and a
:class:`Screen` for their events.
"""

import errno
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import click

from pgreaper.connection import worker_name
from pgreaper.errors import ReaperError
from pgreaper.logs import ERROR, Event, as_text
from pgreaper.logs import as_json as line_of_json

_F = TypeVar("_F", bound=Callable[..., object])


def log_format_option(function: _F) -> _F:
    """Give a command ``--log-format``."""
    return click.option(
        "--log-format", type=click.Choice(["text", "json"]), envvar="PGREAPER_LOG_FORMAT", default="text",
        help="How events are written to stderr: for people, or a JSON object a line."
             "  [default: PGREAPER_LOG_FORMAT, or text]")(function)  # fmt: skip


class Screen:
    """The lines on stderr.  ``machine``: an event is a line of JSON.  Any thread may log."""

    def __init__(self, *, machine: bool) -> None:
        self.machine = machine
        self.shows_progress = not machine and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._worker = worker_name()
        self._lock = threading.Lock()
        self._drawn = False

    def refused(self, error: ReaperError) -> None:
        """A run that did not begin: for machines an event like the others, for people the usual error."""
        if self.machine:
            self.log(
                Event("worker.refused", error.message, ERROR, code=error.code, sqlstate=error.sqlstate, hint=error.hint)
            )
            error.told = True

    def log(self, event: Event) -> None:
        """Write an event."""
        lines = (
            [line_of_json(event, self._worker)] if self.machine else [f"pgreaper: {line}" for line in as_text(event)]
        )
        with self._lock:
            try:
                self._erase()
                for line in lines:
                    click.echo(line, err=True)
            except OSError as error:
                # That must not stop the work.  A full disk may have room again; a terminal or a pipe that is gone
                # stays so, and what is left in the buffer would spoil the exit code.
                if error.errno != errno.ENOSPC:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def draw(self, line: str) -> None:
        """Show this as the last line, in place of the one before."""
        columns = _columns()
        with self._lock:
            sys.stderr.write("\r" + line[: columns - 1] + "\x1b[K")
            sys.stderr.flush()
            self._drawn = True

    def clear(self) -> None:
        """Take the last line away."""
        with self._lock:
            self._erase()

    def _erase(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False


def failure(error: ReaperError | None) -> dict[str, object] | None:
    """An error as the document of a run has it."""
    if error is None:
        return None
    return {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "sqlstate": error.sqlstate,
        "constraint": error.constraint,
    }


def _columns() -> int:
    try:
        size: os.terminal_size = os.get_terminal_size(sys.stderr.fileno())
    except OSError:
        return 80
    return size.columns or 80
