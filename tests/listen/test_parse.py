"""What a command is: a policy and its keys, in JSON; whatever else a queue may hold is no command and does no harm."""

from __future__ import annotations

import pytest

from pgreaper.listen import Malformed, Wish, parse


@pytest.mark.parametrize(
    ("body", "wish"),
    [
        (b'{"policy": "p", "key": "1"}', Wish("p", ("1",))),
        (b'{"policy": "p", "key": 42}', Wish("p", ("42",))),
        (b'{"policy": "p", "key": 12345678901234567890}', Wish("p", ("12345678901234567890",))),
        (b'{"policy": "p", "key": ""}', Wish("p", ("",))),
        (b'{"policy": "p", "key": ["a", 7, "\xc3\xa9"]}', Wish("p", ('["a", "7", "\xe9"]',))),
        (b'{"policy": "p", "keys": ["2", 1, "2"]}', Wish("p", ("2", "1"))),
        (b'{"policy": "p", "keys": []}', Wish("p", ())),
        (b' \n{"key": "1", "policy": "\xc3\xa9", "at": 1.5, "more": {"key": null}}\r\n', Wish("\xe9", ("1",))),
    ],
)
def test_a_command(body, wish):
    """A key is a string, a whole number or an array of these; more fields do no harm."""
    assert parse(body) == wish


@pytest.mark.parametrize(
    "body",
    [
        b"", b"x", b"\xff\xfe", b"\x00", b"null", b"[]", b'"p"', b"7",
        b'{"policy": "p"}', b'{"key": "1"}', b'{"policy": "p", "key": null}', b'{"policy": null, "key": "1"}',
        b'{"policy": 7, "key": "1"}', b'{"policy": "p", "key": 1.5}', b'{"policy": "p", "key": true}',
        b'{"policy": "p", "key": NaN}', b'{"policy": "p", "key": {"id": 1}}', b'{"policy": "p", "key": [["1"]]}',
        b'{"policy": "p", "key": [null]}', b'{"policy": "p", "key": "1", "keys": ["2"]}',
        b'{"policy": "p", "keys": "1"}', b'{"policy": "p", "keys": [null]}',
        # What Postgres has no text for.
        rb'{"policy": "p", "key": "a\u0000b"}', rb'{"policy": "p", "key": "\ud800"}',
        rb'{"policy": "\u0000", "key": "1"}',
        # What costs more than it is worth.
        b"[" * 200_000,
        b'{"policy": "p", "key": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_what_is_none(body):
    """One exception, whatever it is."""
    with pytest.raises(Malformed):
        parse(body)
