"""
What every revision installs, as ``migrations/SHA256SUMS`` records it.

``python tests/migrations/history.py`` compares, ``--write`` brings the record and the
list of files of the revision that is not released yet up to date with
``sql/install.sql``.  A released revision is never written again: its lines stay
as they are, and a difference is an error.

The record is one that ``sha256sum --check`` reads, from the top of the repository.
"""

import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pgreaper.schema import Source

ROOT = Path(__file__).parents[2]
REFRESH = "python tests/migrations/history.py --write"
HEADING = re.compile(r"^# revision (\S+) \((.+)\)$")
RETIRED = re.compile(r"^migrations/retired/\w+/")
UNRELEASED = "unreleased"


@dataclass(frozen=True)
class Entry:
    """One revision of the record: the release it came with, and its lines."""

    revision: str
    release: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((f"# revision {self.revision} ({self.release})", *self.lines, ""))

    @property
    def content(self) -> tuple[tuple[str, str], ...]:
        """Hash and name below sql/, wherever the text lives by now."""
        return tuple((line[:64], RETIRED.sub("sql/", line[66:])) for line in self.lines)


def recorded(source: Source) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for block in (source.migrations / "SHA256SUMS").read_text(encoding="utf-8").split("\n\n"):
        heading, *lines = block.strip().splitlines()
        found = HEADING.match(heading)
        if not found:
            raise ValueError(f"SHA256SUMS has a block without a heading: {heading}")
        entries[found[1]] = Entry(found[1], found[2], tuple(lines))
    return entries


def actual(source: Source) -> Iterator[Entry]:
    """What the files say, oldest revision first, as unreleased."""
    top = source.migrations.parent
    for script in reversed(list(source.scripts.walk_revisions())):
        paths = [Path(script.path), *(source.path(script.revision, name) for name in script.module.FILES)]
        yield Entry(
            script.revision,
            UNRELEASED,
            tuple(
                f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(top).as_posix()}" for path in paths
            ),
        )


def problems(source: Source) -> Iterator[str]:
    """Every way in which the record and the files differ, a sentence each."""
    record = recorded(source)
    found = {entry.revision: entry for entry in actual(source)}
    for revision, entry in record.items():
        if revision not in found:
            yield f"revision {revision} ({entry.release}) is gone; ids are never deleted or reused"
            continue
        if entry.content != found[revision].content:
            changed = {name for _, name in set(entry.content) ^ set(found[revision].content)}
            names = ", ".join(sorted(changed)) or "the order of its files"
            if entry.release == UNRELEASED:
                yield f"revision {revision} is not as recorded ({names}); refresh with: {REFRESH}"
            else:
                yield (
                    f"released revision {revision} ({entry.release}) would install something else: {names}; "
                    f"put the released text into migrations/retired/{revision}/ and the new one into a new revision"
                )
        elif entry.lines != found[revision].lines:
            yield f"the texts of revision {revision} have moved; refresh with: {REFRESH}"
    for revision in found.keys() - record.keys():
        yield f"revision {revision} is not recorded; refresh with: {REFRESH}"


def write(source: Source) -> None:
    record = recorded(source) if (source.migrations / "SHA256SUMS").exists() else {}
    first = next(script for script in source.scripts.walk_revisions() if script.down_revision is None)
    if first.revision not in record or record[first.revision].release == UNRELEASED:
        # The only revision there is installs everything, in the order of the manifest.
        path = Path(first.path)
        names = "".join(f'    "{name}",\n' for name in source.manifest())
        listing = f"FILES: tuple[str, ...] = (\n{names})\n"
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"^FILES: tuple\[str, \.\.\.\] = \(.*?\)\n", listing, text, flags=re.MULTILINE | re.DOTALL)
        path.write_text(text, encoding="utf-8")
    entries = []
    for entry in actual(source):
        known = record.get(entry.revision)
        if known and known.release != UNRELEASED:
            if known.content != entry.content:
                sys.exit(next(problem for problem in problems(source) if entry.revision in problem))
            entry = Entry(entry.revision, known.release, entry.lines)
        entries.append(entry)
    (source.migrations / "SHA256SUMS").write_text("\n".join(map(str, entries)), encoding="utf-8")


if __name__ == "__main__":
    here = Source(ROOT / "migrations")
    if sys.argv[1:] == ["--write"]:
        write(here)
    elif sys.argv[1:]:
        sys.exit(__doc__)
    found = list(problems(here))
    sys.exit("\n".join(found) if found else 0)
