"""What the documents say is there: tests, files, commands, functions, error codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pgreaper.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(p for p in ROOT.glob("**/*.md") if ".venv" not in p.parts and "node_modules" not in p.parts)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    """A relative link of a document names a file that exists."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    broken = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert broken == []


def test_each_guarantee_names_a_test_that_exists():
    """The README's table of guarantees points at tests by name."""
    named = re.findall(r"\[(test_\w+)\]\((tests/[^)]+)\)", (ROOT / "README.md").read_text())
    assert len(named) >= 15
    missing = [name for name, path in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_that_documents_name_exist(document):
    """No document speaks of a reaper_ function that the SQL does not have."""
    known = {path.stem for path in (ROOT / "sql/functions").glob("reaper_*.sql")}
    named = set(re.findall(r"\breaper_[a-z_]+(?=\()", document.read_text()))
    assert named - known == set()


def test_commands_that_the_readme_shows_exist():
    """Each `pgreaper …` in a code block of the README is a command."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    shown = set(re.findall(r"^pgreaper (\w+)", "\n".join(blocks), re.MULTILINE))
    assert shown
    assert shown - set(COMMANDS) == set()


def test_each_error_code_of_ours_is_explained():
    """Every SQLSTATE of class RP that the SQL raises stands in sql/README.md."""
    raised = {
        code
        for path in (ROOT / "sql").glob("**/*.sql")
        for code in re.findall(r"errcode = '(RP\d{3})'", path.read_text())
    }
    explained = set(re.findall(r"\bRP\d{3}\b", (ROOT / "sql/README.md").read_text()))
    assert raised
    assert raised - explained == set()
