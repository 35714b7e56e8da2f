"""How a handler is found, how its exceptions are judged, and the key under which it is called; without a database."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.error import URLError

import pytest

from pgreaper.errors import InvalidInput
from pgreaper.handlers import Call, DeadLetter, Pool, Retry, Skip, idempotency_key, judge, load

if TYPE_CHECKING:
    from pathlib import Path

MODULE = """
import functools
def good(call): ...
def other(call, *, verbose=False): ...
async def coroutine(call): ...
class Service:
    def __call__(self, call): ...
    def method(self, call): ...
service = Service()
partial = functools.partial(lambda setting, call: None, 1)
number = 7
def nothing(): ...
def two(call, more): ...
def generator(call): yield
async def async_generator(call): yield
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of handlers in the current folder, which Python does not look into by itself."""
    package = tmp_path / "tickets"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "holds.py").write_text(MODULE)
    (package / "needs.py").write_text("import a_library_that_is_not_there")
    (package / "broken.py").write_text("raise ValueError('postgres://u:secret@h/d')")
    (package / "leaves.py").write_text("import sys; sys.exit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in [name for name in sys.modules if name.partition(".")[0] == "tickets"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize(
    "name", ["good", "other", "coroutine", "service", "service.method", "partial"], ids=lambda name: str(name)
)
def test_whatever_takes_a_call_is_a_handler(folder, name):
    """Functions, coroutine functions, methods, callable objects; found in the current folder."""
    assert callable(load(f"tickets.holds:{name}"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "does not name a handler"),
        ("tickets.holds", "does not name a handler"),
        ("tickets.holds:", "does not name a handler"),
        ("tickets/holds.py:good", "does not name a handler"),
        ("tickets.holds:good()", "does not name a handler"),
        ("theatre.holds:good", "there is no module theatre"),
        ("tickets.seats:good", "there is no module tickets.seats"),
        ("tickets.holds:goood", "module tickets.holds has no goood"),
        ("tickets.holds:service.nothing", "module tickets.holds has no service.nothing"),
        ("tickets.holds:number", "tickets.holds:number cannot be called"),
        ("tickets.holds:Service", "tickets.holds:Service is a class"),
        ("tickets.holds:nothing", "cannot be called with one argument"),
        ("tickets.holds:two", "cannot be called with one argument"),
        ("tickets.holds:generator", "is a generator"),
        ("tickets.holds:async_generator", "is a generator"),
        ("tickets.needs:good", "ModuleNotFoundError: there is no module a_library_that_is_not_there"),
        ("tickets.broken:good", "module tickets.broken cannot be imported, it raises ValueError"),
        ("tickets.leaves:good", "module tickets.leaves cannot be imported, it raises SystemExit"),
    ],
)
def test_what_is_no_handler_is_refused_before_anything_is_claimed(folder, name, message):
    """Exit code 2 and one sentence; a message of the module's own is not repeated."""
    with pytest.raises(InvalidInput) as refused:
        load(name)

    assert refused.value.exit_code == 2
    assert message in refused.value.message
    assert "secret" not in refused.value.message
    assert refused.value.hint


def test_a_slip_of_the_finger_is_answered_with_the_name(folder):
    with pytest.raises(InvalidInput) as refused:
        load("tickets.holds:goood")
    assert refused.value.hint == "Did you mean good?"


def caused_by(cause: BaseException) -> Exception:
    error = RuntimeError("a client library's own")
    error.__cause__ = cause
    return error


def circle() -> Exception:
    one, other = RuntimeError(), RuntimeError()
    one.__cause__, other.__cause__ = other, one
    return one


class Hostile(Exception):
    """An exception whose attribute raises."""

    @property
    def reason(self) -> object:
        raise RuntimeError


class Leaving(Exception):
    """One whose attribute would end the process."""

    @property
    def reason(self) -> object:
        raise SystemExit(0)


class Homemade(Retry):
    """A subclass that forgets ours."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (TimeoutError(), True),
        (ConnectionRefusedError(), True),
        (BrokenPipeError(), True),
        (URLError(ConnectionRefusedError()), True),
        (URLError(TimeoutError()), True),
        (URLError("unknown url type"), False),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (OSError(errno.ENOENT, "no such file"), False),
        (socket.gaierror(socket.EAI_AGAIN, "again"), True),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), False),
        (caused_by(ConnectionResetError()), True),
        (caused_by(KeyError()), False),
        (RuntimeError(TimeoutError()), True),
        (ExceptionGroup("", [TimeoutError(), ConnectionResetError()]), True),
        (ExceptionGroup("", [TimeoutError(), ValueError()]), False),
        (ValueError(), False),
        (circle(), False),
        (Hostile(), False),
        (asyncio.CancelledError(), False),
        (SystemExit(), False),
        (GeneratorExit(), False),
        (BaseExceptionGroup("", [SystemExit()]), False),
        (KeyboardInterrupt(), True),
        (Leaving(), False),
        (Homemade(), True),
        (MemoryError(), False),
    ],
    ids=repr,
)
def test_trouble_of_the_network_is_transient_and_nothing_else_is(error, transient):
    """Also where a client library has wrapped it."""
    verdict = judge(error)

    assert (verdict.transient, verdict.final, verdict.charged) == (transient, False, True)
    assert verdict.error_class == type(error).__name__


@pytest.mark.parametrize(
    ("after", "seconds"),
    [(None, None), (0, 0), (-5, 0), (1.5, 1.5), (timedelta(minutes=2), 120), (1e300, 315360000), (float("nan"), None)],
)  # fmt: skip
def test_a_delay_is_brought_into_bounds(after, seconds):
    """What Postgres could not store would be a failure that cannot be recorded."""
    expected = None if seconds is None else timedelta(seconds=seconds)
    assert judge(Retry(after)).retry_in == expected
    # Put off for no time at all, a drain would never end.
    assert judge(Skip(after)).retry_in == (None if expected is None else max(expected, timedelta(seconds=1)))


def test_a_subclass_is_recorded_by_its_name():
    """The way to say why, without storing a text that may tell of a person."""

    class CardExpired(DeadLetter):
        pass

    verdict = judge(CardExpired("Mrs Smith"))
    assert (verdict.error_class, verdict.final) == ("CardExpired", True)


MOMENT = datetime(2026, 1, 31, 12, 0, 0, 5, UTC)


@pytest.mark.parametrize(
    ("policy", "key", "deadline", "expected"),
    [
        ("seats", "42", MOMENT, "seats/42/2026-01-31T12:00:00.000005Z"),
        ("seats", '["a", "ü\n"]', MOMENT, "seats/%5B%22a%22%2C%20%22%C3%BC%0A%22%5D/2026-01-31T12:00:00.000005Z"),
        ("a/b", "c", MOMENT, "a%2Fb/c/2026-01-31T12:00:00.000005Z"),
        ("a", "b/c", MOMENT, "a/b%2Fc/2026-01-31T12:00:00.000005Z"),
        ("p", "", datetime.min.replace(tzinfo=UTC), "p//0001-01-01T00:00:00.000000Z"),
    ],
)
def test_the_idempotency_key_never_changes(policy, key, deadline, expected):
    """Written down here: a release that changed it would make services do everything twice."""
    assert idempotency_key(policy, key, deadline) == expected


def test_a_long_key_becomes_a_digest():
    """Services refuse keys beyond some length; two long ones stay two."""
    one, other = (idempotency_key("p", "k" * 1000 + end, MOMENT) for end in "ab")

    assert one != other
    assert len(one) <= 200
    assert one.startswith("p/sha256:")


def test_the_key_does_not_depend_on_the_zone_of_the_deadline():
    from datetime import timezone

    assert idempotency_key("p", "k", MOMENT) == idempotency_key(
        "p", "k", MOMENT.astimezone(timezone(timedelta(hours=5)))
    )


def test_a_pool_leaves_nothing_behind():
    """Its threads end when it is closed, those of the event loop too."""

    async def coroutine(call: Any) -> None: ...

    before = set(threading.enumerate())
    for handler in (lambda call: None, coroutine):
        pool = Pool(handler, 3)
        pool.start(Call("p", "k", MOMENT, 1, {}, "p/k"))
        while pool.running:
            pool.wait(1)
            pool.finished()
        pool.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()
