"""
Tables and facts on the terminal.

On a terminal rich draws them, in colour unless NO_COLOR says otherwise; anywhere
else the same content is plain aligned text, one row a line, and rich is not even
imported.  Every cell is escaped before it is shown: see :mod:`pgreaper.text`.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pgreaper.text import one_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

STATE_STYLES = {"active": "green", "paused": "yellow", "suspended": "bold red", "broken": "bold red"}
OUTCOME_STYLES = {
    "expired": "green",
    "already-done": "cyan",
    "not-eligible": "cyan",
    "retry": "yellow",
    "taken-back": "yellow",
    "dead-letter": "bold red",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column; of those with the highest ``priority`` number the last is left out first when space is short."""

    title: str
    right: bool = False
    priority: int = 0
    styles: dict[str, str] | None = None


def is_terminal() -> bool:
    """Whether stdout is looked at by a person."""
    return sys.stdout.isatty()


def show_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], notes: Iterable[str] = ()) -> None:
    """Print a table, and below it one line per note."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    notes = [one_line(note) for note in notes]
    if is_terminal():
        console = _console()
        console.print(rich_table(columns, rows, console.width))
        for note in notes:
            console.print(_text(note, "yellow"))
        return
    # A pipe leads to grep or to a file: nothing is left out unless COLUMNS says how wide it may be, as `watch` does.
    room = os.environ.get("COLUMNS", "")
    if room.isdigit() and room != "0":
        kept = _fitting(columns, rows, int(room), gap=2)
        columns, rows = [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]
    widths = [max(map(len, column)) for column in zip([c.title for c in columns], *rows, strict=True)]
    for row in [[c.title for c in columns], *rows]:
        cells = (cell.rjust(w) if c.right else cell.ljust(w) for cell, w, c in zip(row, widths, columns, strict=True))
        print("  ".join(cells).rstrip())  # noqa: T201
    for note in notes:
        print(note)  # noqa: T201


def show_facts(title: str, facts: Sequence[tuple[str, str] | None], style: str | None = None) -> None:
    """Print a heading and named values, one a line; None makes a gap."""
    width = max((len(f[0]) for f in facts if f), default=0)
    shown = [(one_line(f[0]), one_line(f[1])) if f else None for f in facts]
    if is_terminal():
        console = _console()
        console.print(_text(one_line(title), f"bold {style or ''}".strip()))
        for fact in shown:
            if fact is None:
                console.print()
                continue
            line = _text(f"  {fact[0].ljust(width)}  ", "dim")
            line.append(fact[1], style=STATE_STYLES.get(fact[1].split(" ")[0], "") if fact[0] == "state" else "not dim")
            console.print(line, soft_wrap=True)
        return
    print(one_line(title))  # noqa: T201
    for fact in shown:
        print(f"  {fact[0].ljust(width)}  {fact[1]}" if fact else "")  # noqa: T201


def show_line(line: str, style: str = "") -> None:
    """Print one line, unwrapped: it may be meant for copying."""
    if is_terminal():
        _console().print(_text(one_line(line), style), soft_wrap=True)
    else:
        print(one_line(line))  # noqa: T201


def show_text(text: str, style: str = "", *, indent: int = 4) -> None:
    """Print a sentence, wrapped at words; what is meant for copying goes to :func:`show_line`."""
    from textwrap import wrap

    room = min(width(), 100) if is_terminal() else 80
    margin = " " * indent
    for line in wrap(one_line(text), room, initial_indent=margin, subsequent_indent=margin,
                     break_long_words=False, break_on_hyphens=False):  # fmt: skip
        show_line(line, style)


def rich_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> "Table":
    """The table as rich draws it, without the columns that do not fit into ``width``."""
    from rich import box
    from rich.table import Table

    kept = _fitting(columns, rows, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for index in kept:
        column = columns[index]
        table.add_column(
            column.title, justify="right" if column.right else "left", no_wrap=column.right, overflow="fold"
        )
    for row in rows:
        table.add_row(*(_text(row[i], (columns[i].styles or {}).get(row[i], "")) for i in kept))
    return table


def _fitting(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, gap: int = 3) -> list[int]:
    widths = [max([len(c.title), *(len(row[i]) for row in rows)]) for i, c in enumerate(columns)]
    kept = list(range(len(columns)))
    while sum(widths[i] + gap for i in kept) - gap > width and any(columns[i].priority for i in kept):
        kept.remove(max(kept, key=lambda i: (columns[i].priority, i)))
    return kept


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size().columns


def console() -> "Console":
    """The console that rich writes on."""
    return _console()


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def _text(value: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(value, style=style)


if TYPE_CHECKING:
    from rich.text import Text

    Renderable = RenderableType
