"""uvicorn's server as Octavo runs it: prints one line when ready, and drains on SIGTERM or SIGINT. ``launch`` makes its parts.

first signal:   no new requests (503), running and waiting ones go on for at most ``drain_s``, then end with an error event; exit 0
second signal:  the process ends at once
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from types import FrameType
from typing import Any

import uvicorn

from octavo.engine.serving import ServingEngine
from octavo.server.asgi import App
from octavo.server.connection import Connection, ConnectionLimits
from octavo.server.options import ServerOptions

MAX_CONNECTIONS = 8192  # where file descriptors allow
LISTEN_BACKLOG = 2048  # connections that the kernel keeps for us
ACCEPT_BATCH = 16  # connections accepted in one round of the event loop; it takes some four rounds to turn one away
OWN_FILES = 160  # descriptors for those, for the model and for libraries
CLOSE_S = 5  # for responses to be written after the engine has stopped


class Server(uvicorn.Server):
    """uvicorn's server with a drain before its shutdown, limits for slow clients, and exit code 0 for a signal that was obeyed.

    ``failure``: why the engine could not be made ready. The server has ended as at any other time then, for whoever ran it to raise it.
    """

    def __init__(self, config: uvicorn.Config, engine: ServingEngine, options: ServerOptions, ready_message: str) -> None:
        super().__init__(config)
        self.failure: Exception | None = None
        self._engine = engine
        self._drain_s = options.drain_s
        self._enforce_s = min(1.0, options.head_s / 4, options.stall_s / 4)
        self._enforced_s = 0.0
        self._ready_message = ready_message
        self._signal_received = False
        self._drain_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(LISTEN_BACKLOG)
        if not self.started:
            return
        try:
            is_ready = await self._engine_ready()
        except Exception as error:
            self.failure, self.should_exit = error, True
            return
        if is_ready and self._ready_message:
            print(self._ready_message, flush=True)

    async def _engine_ready(self) -> bool:
        """Wait until the engine can serve; False when a signal came first. Meanwhile /health says what is missing."""
        ready = asyncio.ensure_future(self._engine.ready())
        try:
            while not ready.done() and not self._signal_received:
                await asyncio.wait((ready,), timeout=0.1)
            if ready.done():
                ready.result()
            return ready.done()
        except BaseException:
            await self._engine.stop(0.0)
            raise
        finally:
            ready.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signal_received:
            os._exit(128 + sig)
        self._signal_received = True

    async def on_tick(self, counter: int) -> bool:
        if self._signal_received and self._drain_task is None:
            print(f"octavo: shutting down; running requests have {self._drain_s:g} s", file=sys.stderr, flush=True)
            self._drain_task = asyncio.create_task(self._drain())
        now_s = time.monotonic()
        if now_s - self._enforced_s >= self._enforce_s:
            self._enforced_s = now_s
            for connection in list(self.server_state.connections):
                assert isinstance(connection, Connection)
                connection.enforce()
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        try:
            await self._engine.stop(self._drain_s)
        finally:
            self.should_exit = True


def make_server(app: App, engine: ServingEngine, options: ServerOptions, ready_message: str = "") -> Server:
    """A server that is not running yet; it is to be run on a socket."""
    plain: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "proxy_headers": False, "lifespan": "on"}
    limits = ConnectionLimits(options.head_s, options.stall_s, max_connections())
    protocol = Connection.limited(limits)
    config = uvicorn.Config(app, http=protocol, ws="none", backlog=ACCEPT_BATCH, timeout_graceful_shutdown=CLOSE_S, **plain)
    return Server(config, engine, options, ready_message)


def max_connections() -> int:
    """Connections that the process has file descriptors for, having raised its limit to what it may have.

    Without any left, asyncio's accepting loop reports each connection it cannot take, thousands of times a second.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + OWN_FILES
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < wanted:
        soft = wanted if hard == unlimited else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft == unlimited else max(1, min(MAX_CONNECTIONS, soft - OWN_FILES))
