"""Runs the server in this process: loads the engine, listens, prints one line when ready, and drains on SIGTERM or SIGINT.

first signal:   no new requests (503), running and waiting ones go on for at most ``drain_s``, then end with an error event; exit 0
second signal:  the process ends at once
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections.abc import MutableMapping
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.engine import Engine
from octavo.server.app import ServerOptions, create_app
from octavo.server.asgi import TRANSPORT_KEY, App

CLOSE_S = 5  # for responses to be written after the engine has stopped


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with the transport in the scope so that a stuck connection can be dropped."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: MutableMapping[str, Any] = self.scope  # type: ignore[assignment]
        scope[TRANSPORT_KEY] = self.transport


class Server(uvicorn.Server):
    """uvicorn's server with a drain before its shutdown, and exit code 0 for a signal that was obeyed."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, drain_s: float, ready_message: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_s = drain_s
        self._ready_message = ready_message
        self._signal_received = False
        self._drain_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._ready_message:
            print(self._ready_message, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._signal_received:
            os._exit(128 + sig)
        self._signal_received = True

    async def on_tick(self, counter: int) -> bool:
        if self._signal_received and self._drain_task is None:
            print(f"octavo: shutting down; running requests have {self._drain_s:g} s", file=sys.stderr, flush=True)
            self._drain_task = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        try:
            await self._engine.stop(self._drain_s)
        finally:
            self.should_exit = True


def make_server(app: App, engine: AsyncEngine, host: str, port: int, drain_s: float, ready_message: str = "") -> Server:
    """A server that is not running yet."""
    options: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "proxy_headers": False, "lifespan": "on"}
    config = uvicorn.Config(app, host=host, port=port, http=Protocol, ws="none", timeout_graceful_shutdown=CLOSE_S, **options)
    return Server(config, engine, drain_s, ready_message)


def run_server(config: EngineConfig, host: str = "127.0.0.1", port: int = 8000, options: ServerOptions | None = None) -> None:
    """Serve until a signal. Port 0 takes a free one. Before that: ConfigError, ModelFileError, BackendError, OSError (port in use)."""
    options = options or ServerOptions()
    listener = _listen(host, port)
    try:
        engine = AsyncEngine(Engine.load(config))
    except BaseException:
        listener.close()
        raise
    app = create_app(engine, options)
    name = config.model.served_model_name or engine.engine.model.name
    shown = f"[{host}]" if ":" in host else host
    ready = f"octavo: {name} is ready at http://{shown}:{listener.getsockname()[1]} (Ctrl-C stops)"
    server = make_server(app, engine, host, port, options.drain_s, ready)
    gc.collect()
    gc.freeze()  # what is loaded stays: full collections need not walk the vocabulary in the middle of a stream
    server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """Bound before the model loads, so that a port in use is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"port: cannot listen on {host}:{port}: {error.strerror}") from None
    return listener
