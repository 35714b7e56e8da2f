"""
A broker of AMQP that dies between two frames: what it has sent arrives whole, and the end right behind it.

That is what a client sees that is slower than the broker which is killed: it reads the last answers and the end of the
connection at once.  With a real broker it comes about on a busy machine only.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from pamqp import commands, frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from pamqp.base import Frame
    from pamqp.common import FieldTable

_CAPABILITIES: FieldTable = {"capabilities": {"publisher_confirms": True, "basic.nack": True}}
_ANSWERS: dict[str, Callable[[], Frame]] = {
    "Connection.StartOk": lambda: commands.Connection.Tune(2047, 131072, 60),
    "Connection.Open": commands.Connection.OpenOk,
    "Channel.Open": commands.Channel.OpenOk,
    "Confirm.Select": commands.Confirm.SelectOk,
}


class Leaver:
    """
    Alive inside a ``with`` block; leaves each connection after it has answered the frame ``last``.

    With ``confirms`` it waits for so many messages as ``messages`` says, confirms so many of them, one by one, and
    leaves then.  The frame ``silent`` it never answers.
    """

    def __init__(self, last: str = "", *, messages: int = 0, confirms: int = 0, silent: str = "") -> None:
        self._last = last
        self._silent = silent
        self._messages = messages
        self._confirms = confirms
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"amqp://127.0.0.1:{self._listener.getsockname()[1]}/?queue=q"
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._begin(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _begin(self, what: Callable[..., None], *arguments: socket.socket) -> None:
        self._threads.append(threading.Thread(target=what, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self._begin(self._serve, self._listener.accept()[0])

    def _serve(self, client: socket.socket) -> None:
        published = 0
        with suppress(OSError), client, client.makefile("rb") as requests:
            requests.read(8)
            client.sendall(frame.marshal(commands.Connection.Start(0, 9, _CAPABILITIES, "PLAIN", "en_US"), 0))
            while head := requests.read(7):
                rest = requests.read(int.from_bytes(head[3:7], "big") + 1)
                _, channel, request = frame.unmarshal(head + rest)
                if (answer := _ANSWERS.get(request.name)) and request.name != self._silent:
                    client.sendall(frame.marshal(answer(), channel))
                published += request.name == "Basic.Publish"
                if self._confirms and published == self._messages:
                    confirms = [commands.Basic.Ack(tag, False) for tag in range(1, self._confirms + 1)]
                    client.sendall(b"".join(frame.marshal(confirm, channel) for confirm in confirms))
                    published = -1
                if request.name == self._last or published < 0:
                    client.shutdown(socket.SHUT_RDWR)
                    return
