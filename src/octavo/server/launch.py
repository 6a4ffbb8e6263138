"""Serves a model, from a configuration to a socket: the order in which a start does things, and nothing else.

The port is bound first, so that one in use is known at once. Then the model is loaded, and what serves HTTP is imported beside that:
this module imports none of it before.
"""

from __future__ import annotations

import gc
import importlib
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.server.options import ServerOptions

if TYPE_CHECKING:
    from octavo.engine.replay_advice import Replayer
    from octavo.engine.serving import ServingEngine

    LoadEngine = Callable[[EngineConfig, Callable[[], object]], ServingEngine]

logger = logging.getLogger("octavo.server")


def load_in_process(config: EngineConfig, beside: Callable[[], object]) -> ServingEngine:
    """The engine that makes its steps in this process. ``beside`` is called while weights are packed on other threads."""
    loaded = Engine.load(config, beside)
    from octavo.engine.async_engine import AsyncEngine

    return AsyncEngine(loaded)


def run_server(
    config: EngineConfig,
    host: str = "127.0.0.1",
    port: int = 8000,
    options: ServerOptions | None = None,
    replayer: Replayer | None = None,
    load_engine: LoadEngine = load_in_process,
) -> None:
    """Serve until a signal. Port 0 takes a free one. Before that: ConfigError, ModelFileError, BackendError, OSError (port in use), and
    what the engine's ``ready`` raises.
    ``replayer``: see ``create_app``. ``load_engine``: makes the engine, and calls its second argument meanwhile."""
    options = options or ServerOptions()
    listener = _listen(host, port)
    gc.disable()  # next to nothing of what a start makes is garbage: walking it again and again would be time for nothing
    try:
        engine = load_engine(config, _import_server)
    except BaseException:
        gc.enable()
        listener.close()
        raise
    from octavo.server.app import create_app
    from octavo.server.run import make_server

    field = config.speculative.waits_to_be_asked
    if field is not None:
        logger.info("%s is set and spec is off: drafts are made for requests alone that ask for them (speculative)", field)
    app = create_app(engine, options, replayer)
    shown = f"[{host}]" if ":" in host else host
    ready = f"octavo: {engine.model_name} is ready at http://{shown}:{listener.getsockname()[1]} (Ctrl-C stops)"
    server = make_server(app, engine, options, ready)
    gc.collect()
    gc.freeze()  # what is loaded stays: full collections need not walk the vocabulary in the middle of a stream
    gc.enable()
    try:
        server.run(sockets=[listener])
        if server.failure is not None:
            raise server.failure
    finally:
        gc.unfreeze()  # else the interpreter ends without taking it apart, and the native module complains of leaks


def _import_server() -> None:
    """What serves is imported while weights are packed: the interpreter's work beside the native threads'."""
    importlib.import_module("octavo.server.app")
    importlib.import_module("octavo.server.run")


def _listen(host: str, port: int) -> socket.socket:
    """Bound before the model loads, so that a port in use is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _keep_alive(listener)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"port: cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def _keep_alive(listener: socket.socket) -> None:
    """Have the kernel ask after clients of its connections, so that one whose machine is gone ends its request within minutes."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
