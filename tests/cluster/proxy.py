"""A TCP proxy that makes a network bad, and a sink that counts what comes: what tests put between two processes.

    with Proxy(("127.0.0.1", port_of_the_server)) as proxy:
        proxy.delay_s = 0.1     # every byte comes so much later, in both directions; order and rate stay
        proxy.stall()           # nothing passes, connections stay open
        proxy.resume()
        proxy.cut()             # connections are reset; new ones are taken
        proxy.refuse(True)      # new ones are closed at once

It runs in a thread of its own; its switches may be thrown from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

READ_BYTES = 1 << 16
HELD_CHUNKS = 256  # of a direction, before its reading waits: a slow link fills up as a real one does
_LINGER_RESET = struct.pack("ii", 1, 0)  # closing sends RST and drops what is queued


class _Loop:
    """An event loop in a thread, as long as the ``with`` block lasts."""

    def __enter__(self) -> Any:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._call(self._open())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _soon(self, action: Callable[[], None]) -> None:
        async def act() -> None:
            action()

        self._call(act())


class Proxy(_Loop):
    """Connections to ``host``:``port`` go on to ``target``. ``delay_s`` may be set at any time, for what is read from then on."""

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1", port: int = 0) -> None:
        self.target = target
        self.host, self.port = host, port
        self.delay_s = 0.0
        self.num_connections = 0  # since the start
        self._refuses = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def _open(self) -> None:
        self._flows = asyncio.Event()
        self._flows.set()
        self._listener = socket.create_server((self.host, self.port), backlog=64)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept())

    async def _close(self) -> None:
        tasks = [self._accepting, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    def stall(self) -> None:
        self._soon(self._flows.clear)

    def resume(self) -> None:
        self._soon(self._flows.set)

    def cut(self) -> None:
        """Reset every connection that is open."""

        def cancel() -> None:
            for task in self._tasks:
                task.cancel()

        self._soon(cancel)

    def refuse(self, refuses: bool) -> None:
        self._refuses = refuses

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            if self._refuses:
                _reset(client)
                continue
            self.num_connections += 1
            task = asyncio.create_task(self._serve(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_INET6 if ":" in self.target[0] else socket.AF_INET)
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await self._loop.sock_connect(server, self.target)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._carry(client, server))
                directions.create_task(self._carry(server, client))
            client.close()
            server.close()
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # one side is gone, or the connection is cut: the other side hears it
        finally:
            _reset(client)
            _reset(server)

    async def _carry(self, source: socket.socket, target: socket.socket) -> None:
        """One direction, to its end."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(HELD_CHUNKS)

        async def read() -> None:
            while True:
                data = await self._loop.sock_recv(source, READ_BYTES)
                await held.put((self._loop.time() + self.delay_s, data))
                if not data:
                    return

        async def write() -> None:
            while True:
                due_s, data = await held.get()
                await asyncio.sleep(due_s - self._loop.time())
                await self._flows.wait()
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                await self._loop.sock_sendall(target, data)

        async with asyncio.TaskGroup() as ends:
            ends.create_task(read())
            ends.create_task(write())


class Sink(_Loop):
    """Reads all that comes to ``host`` and counts it."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host, self.port = host, 0
        self.num_bytes = 0
        self.num_connections = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._read, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                self.num_bytes += len(data)
        self._writers.discard(writer)
        writer.close()

    def wait_for(self, num_bytes: int, timeout_s: float = 60.0) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.num_bytes < num_bytes and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.num_bytes >= num_bytes


def _reset(connection: socket.socket) -> None:
    """Close at once, so that the other end sees a reset; nothing to a closed one."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
    connection.close()
