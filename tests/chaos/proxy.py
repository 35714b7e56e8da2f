"""
A TCP proxy before a server's socket that can be told to behave like a bad network.

Listens on a free loopback port and forwards to a Unix socket or to a port, in a thread with an event loop of its own.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Self

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset, as a network that gave up does


class _Pair:
    """One connection of a client and the one to the server that belongs to it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.open = asyncio.Event()
        self.open.set()
        self.mute = False
        self.keep_server = 0.0

    def cut(self) -> None:
        self.open.set()
        transport_socket = self.client.get_extra_info("socket")
        if transport_socket is not None and transport_socket.fileno() >= 0:
            with suppress(OSError):
                transport_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.client.transport.abort()
        if not self.keep_server:
            self.server.transport.abort()


class Proxy:
    """Alive inside a ``with`` block; ``port`` is where clients connect, on 127.0.0.1."""

    def __init__(self, target: Path | tuple[str, int]) -> None:
        self.port = 0
        self._target = target
        self._pairs: list[_Pair] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(10) or not self.port:
            raise RuntimeError("the proxy does not listen")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    # What it can be told.  Each returns whether there was a connection to do it to.

    def cut(self, dice: int) -> bool:
        """Reset a connection, on both sides at once."""
        return self._tell(dice, lambda pair: pair.cut())

    def stall(self, dice: int, seconds: float) -> bool:
        """Forward nothing for so long, in neither direction, then go on."""

        def stall(pair: _Pair) -> None:
            pair.open.clear()
            self._loop.call_later(seconds, pair.open.set)

        return self._tell(dice, stall)

    def half_close(self, dice: int, seconds: float) -> bool:
        """Cut off the client; the server hears of it only after so long."""

        def half_close(pair: _Pair) -> None:
            pair.keep_server = seconds
            pair.cut()

        return self._tell(dice, half_close)

    def swallow(self, dice: int, seconds: float) -> bool:
        """Pass requests on and swallow the replies for so long, then cut: what was done is done, nobody is told."""

        def swallow(pair: _Pair) -> None:
            pair.mute = True
            self._loop.call_later(seconds, pair.cut)

        return self._tell(dice, swallow)

    # How

    def _tell(self, dice: int, what: Callable[[_Pair], None]) -> bool:
        answer: Future[bool] = Future()

        def tell() -> None:
            pairs = list(self._pairs)
            if pairs:
                what(pairs[dice % len(pairs)])
            answer.set_result(bool(pairs))

        self._loop.call_soon_threadsafe(tell)
        return answer.result(10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()
        for pair in list(self._pairs):
            pair.keep_server = 0.0
            pair.cut()
            pair.server.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            if isinstance(self._target, Path):
                answers, server = await asyncio.open_unix_connection(self._target)
            else:
                answers, server = await asyncio.open_connection(*self._target)
        except OSError:
            client.transport.abort()  # the server is down
            return
        pair = _Pair(client, server)
        self._pairs.append(pair)
        pumps = {
            asyncio.create_task(self._pump(pair, reader, server, replies=False)),
            asyncio.create_task(self._pump(pair, answers, client, replies=True)),
        }
        # Cancelled is who is still here when the proxy closes, and nobody needs to hear of it.
        with suppress(asyncio.CancelledError):
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            self._pairs.remove(pair)
            if pair.keep_server:
                # Nobody is there any more, and the server's side of it still stands.
                await asyncio.sleep(pair.keep_server)
        for pump in pumps:
            pump.cancel()
        client.close()
        server.close()

    async def _pump(
        self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await pair.open.wait()
                if not (replies and pair.mute):
                    writer.write(data)
                    await writer.drain()
