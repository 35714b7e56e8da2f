"""
Tables and facts on the terminal.

On a terminal rich draws them, in colour unless NO_COLOR says otherwise; anywhere
else the same content is plain aligned text, one row a line, and rich is not even
imported.  Every cell is escaped before it is shown: see :mod:`pgreaper.text`.

A screen (:data:`Line`) is made of lines that are as wide as they are meant to be in any
script, so that both ways of showing it look alike.
"""

import os
import shutil
import sys
import unicodedata
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


# -- screens

Line = list[tuple[str, str]]
"""A line of a screen: pieces of text, each with its style."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What bars, sparklines and marks are made of; the first of ``levels`` stands for nothing at all."""

    levels: str
    bar: str
    ellipsis: str
    arrow: str
    plain: bool


BLOCKS = Glyphs("·▁▂▃▄▅▆▇█", "█", "…", "→", plain=False)
_ASCII = Glyphs("._:-=+*#@", "#", "..", "->", plain=True)


def glyphs() -> Glyphs:
    """Blocks where stdout can show them, else ASCII."""
    try:
        "".join([BLOCKS.levels, BLOCKS.arrow]).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _ASCII
    return BLOCKS if _has_unicode() else _ASCII


def _has_unicode() -> bool:
    """Whether the locale has more than ASCII: in the C locale Python writes UTF-8 all the same."""
    if not sys.flags.utf8_mode or os.environ.get("PYTHONUTF8") == "1":
        return True
    named = os.environ.get("LC_ALL") or os.environ.get("LC_CTYPE")
    # Python itself sets LC_CTYPE so when there is no other locale.
    if not named or (named == "C.UTF-8" and not os.environ.get("LC_ALL")):
        named = os.environ.get("LANG", "")
    return "utf" in named.lower()


def cells(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def clip(text: str, room: int, signs: Glyphs) -> str:
    """The text in at most ``room`` columns, on one line, with the characters that the terminal has."""
    # Nobody reads more of it than a line, and it may have a million characters.
    shown = one_line(text[: 4 * room + 8])
    if signs.plain:
        shown = shown.encode("ascii", "backslashreplace").decode("ascii")
    if cells(shown) <= room:
        return shown
    kept = ""
    left = room - cells(signs.ellipsis)
    for character in shown:
        left -= _cells(character)
        if left < 0:
            break
        kept += character
    return kept + signs.ellipsis


def padded(text: str, room: int, *, right: bool = False) -> str:
    """The text, filled up with spaces to ``room`` columns."""
    space = " " * max(room - cells(text), 0)
    return space + text if right else text + space


def sparkline(values: Sequence[int], signs: Glyphs) -> str:
    """A character a value, of the height that it has beside the greatest; what is not nothing is seen."""
    most = max(values, default=0)
    top = len(signs.levels) - 1
    return "".join(signs.levels[-(-value * top // most) if value > 0 else 0] for value in values)


def bar(value: int, most: int, room: int, signs: Glyphs) -> str:
    """A horizontal bar of at most ``room`` columns; what is not nothing is seen."""
    return signs.bar * (-(-value * room // most) if value > 0 and most > 0 else 0)


def wrapped(pieces: Line, room: int, signs: Glyphs, *, indent: str = "") -> list[Line]:
    """A paragraph: the pieces broken at words, never wider than ``room``; following lines begin with ``indent``."""
    lines: list[Line] = [[]]
    used = 0
    for text, style in pieces:
        for index, word in enumerate(text.split(" ")):
            space = " " if index and used else ""
            shown = clip(word, max(room - cells(indent), 8), signs)
            if used + cells(space) + cells(shown) > room and used > cells(indent):
                lines.append([(indent, "")])
                used, space = cells(indent), ""
            if lines[-1] and lines[-1][-1][1] == style:
                lines[-1][-1] = (lines[-1][-1][0] + space + shown, style)
            else:
                lines[-1].append((space + shown, style))
            used += cells(space) + cells(shown)
    return lines


def cropped(line: Line, room: int) -> Line:
    """The line without what does not fit into ``room`` columns."""
    kept: Line = []
    for text, style in line:
        if cells(text) > room:
            text = next(text[:end] for end in range(len(text), -1, -1) if cells(text[:end]) <= room)
        kept.append((text, style))
        room -= cells(text)
    return kept


def screen_width() -> int:
    """Columns for a screen: the terminal's; in a pipe what COLUMNS says, else 80."""
    if is_terminal():
        return max(width(), 20)
    room = os.environ.get("COLUMNS", "")
    return max(int(room), 20) if room.isascii() and room.isdecimal() and len(room) < 5 and int(room) else 80


def rich_lines(lines: Sequence[Line]) -> "Text":
    """The lines as rich prints them."""
    whole = _text("")
    for number, line in enumerate(lines):
        if number:
            whole.append("\n")
        for text, style in line:
            whole.append(text, style=style)
    whole.no_wrap = True
    whole.overflow = "ignore"
    return whole


def show_lines(lines: Sequence[Line]) -> None:
    """Print a screen."""
    if is_terminal():
        _console().print(rich_lines(lines), soft_wrap=True)
        return
    for line in lines:
        print("".join(text for text, _ in line).rstrip())  # noqa: T201


if TYPE_CHECKING:
    from rich.text import Text

    Renderable = RenderableType
