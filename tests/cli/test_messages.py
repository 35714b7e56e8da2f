"""How what a person reads is put: short, in the words that were typed, and as wide as there is room."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

REGISTER = ["register", "p", "holds", "--deadline", "expires_at", "--owner", "me"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--status", "status"], "--status status needs --held and --expired"),
        (["--status", "status", "--expired", "expired"], "--status status needs --held"),
        (["--status", "status", "--held", "held"], "--status status needs --expired"),
        ([], "neither --status nor --stamp says which rows are held"),
        (["--held", "held", "--expired", "expired"], "neither --status nor --stamp says which rows are held"),
    ],
)
def test_what_is_missing_is_named_as_an_option(in_process, holds, given, message):
    result = in_process(*REGISTER, *given)
    assert (result.code, result.out) == (2, "")
    error, hint = result.err.splitlines()
    assert error == f"error: {message}"
    assert "--held" in hint


def test_the_empty_state_may_be_the_expired_one(in_process, holds):
    assert in_process(*REGISTER, "--status", "status", "--held", "held", "--expired", "").code == 0


@contextmanager
def server(answer: bytes) -> Iterator[int]:
    """A port at which somebody answers the first packet with these bytes, and hangs up."""

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.recv(8)
                client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def reason(in_process, url: str) -> str:
    result = in_process("status", "--database-url", url)
    assert (result.code, result.out) == (75, "")
    error, hint = result.err.splitlines()
    assert hint == "hint: The address came from --database-url."
    return str(error.removeprefix("error: the database cannot be reached: "))


def test_a_failed_connection_is_one_sentence(in_process):
    assert reason(in_process, "postgresql://u@127.0.0.1:1/d") == (
        'connection to server at "127.0.0.1", port 1 failed: Connection refused'
    )


def test_several_hosts_are_a_part_each(in_process):
    """The address of each once, and not too many of them."""
    refused = 'connection to server at "127.0.0.1", port {} failed: Connection refused'
    assert reason(in_process, "postgresql://u@127.0.0.1:1,127.0.0.1:2/d") == "; ".join(map(refused.format, (1, 2)))
    five = ",".join(f"127.0.0.1:{port}" for port in range(1, 6))
    assert reason(in_process, f"postgresql://u@{five}/d") == "; ".join(map(refused.format, (1, 2, 3))) + "; and 2 more"


def test_advice_of_libpq_is_left_out(in_process):
    """What happened, and not what it "probably means"."""
    with server(b"") as port:
        text = reason(in_process, f"postgresql://u@127.0.0.1:{port}/d?sslmode=disable")
    assert text.endswith("server closed the connection unexpectedly")
    with server(b"S") as port:
        text = reason(in_process, f"postgresql://u@127.0.0.1:{port}/d?sslmode=verify-full&sslrootcert=/nowhere.pem")
    assert text.endswith('root certificate file "/nowhere.pem" does not exist')


def test_a_pipe_leaves_nothing_out(pgreaper, holds):
    """All columns, however wide, unless COLUMNS says that there is less room."""
    holds.register(owner="a team with a name that is as long as it may be")
    whole, narrow = pgreaper("policies").out.splitlines(), pgreaper("policies", COLUMNS="80").out.splitlines()
    assert whole[0].endswith("paused")
    assert len(whole[0]) > 80
    assert "owner" not in narrow[0]
    assert "paused" in narrow[0]
    assert max(map(len, narrow)) <= 80
    assert pgreaper("policies", COLUMNS="x").out.splitlines() == whole
