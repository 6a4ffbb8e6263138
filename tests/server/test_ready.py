"""An engine that needs time until it can serve: the server answers meanwhile, says ready afterwards, and can be stopped or fail before."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable

import pytest

from octavo.engine.async_engine import AsyncEngine
from octavo.server.app import ServerOptions, create_app
from octavo.server.launch import run_server
from octavo.server.run import Server, make_server
from tests.engine.scripted import bigram_config, bigram_engine
from tests.server.harness import TIMEOUT_S, RunningServer, wait_until


class SlowToBeReady(AsyncEngine):
    """``let``: what its ``ready`` waits for, and may raise."""

    def __init__(self) -> None:
        super().__init__(bigram_engine())
        self.waits = threading.Event()
        self.let = threading.Event()
        self.error: Exception | None = None

    async def ready(self) -> None:
        self.waits.set()
        while not self.let.is_set():
            await asyncio.sleep(0.005)
        if self.error is not None:
            raise self.error


class Starting(RunningServer):
    """A server in a thread that need not come up. ``ended_with``: what its run raised."""

    def __init__(self) -> None:
        self.slow = self.async_engine = SlowToBeReady()
        self.engine = self.slow.engine
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        options = ServerOptions(drain_s=0.0)
        self.server: Server = make_server(create_app(self.slow, options), self.slow, options, "READY")
        self.ended_with: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.server.run(sockets=[self._listener])
        except BaseException as error:
            self.ended_with = error

    def __enter__(self) -> Starting:
        self.thread.start()
        assert self.slow.waits.wait(TIMEOUT_S)
        return self

    def join(self) -> None:
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()


def test_it_answers_while_it_waits_and_says_ready_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    with Starting() as server:
        assert server.request("GET", "/health/live")[0] == 200
        assert "READY" not in capsys.readouterr().out
        server.slow.let.set()
        said: list[str] = []
        wait_until(lambda: bool(said.append(capsys.readouterr().out) or "READY" in "".join(said)))
        assert server.complete("abc", max_tokens=2)["usage"]["completion_tokens"] == 2


def _stopped(server: Starting) -> None:
    server.server.handle_exit(signal.SIGTERM, None)


def _failed(server: Starting) -> None:
    server.slow.error = RuntimeError("no worker can be started")
    server.slow.let.set()


@pytest.mark.parametrize(("end", "message"), [(_stopped, None), (_failed, "no worker can be started")])
def test_it_ends_before_it_is_ready(
    end: Callable[[Starting], None], message: str | None, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    server = Starting().__enter__()
    end(server)
    server.join()
    assert server.ended_with is None, "it ends in order; whoever ran it raises what kept it"
    assert (None if server.server.failure is None else str(server.server.failure)) == message
    assert "Traceback" not in caplog.text and "Error" not in caplog.text, "nothing is torn down by a cancellation"
    assert "READY" not in capsys.readouterr().out
    assert server.engine.backend.closed  # type: ignore[attr-defined]


def test_what_kept_it_from_being_ready_is_raised_to_whoever_ran_it() -> None:
    slow = SlowToBeReady()
    slow.error = RuntimeError("no worker can be started")
    slow.let.set()
    with pytest.raises(RuntimeError, match=r"^no worker can be started$"):
        run_server(bigram_config(), port=0, load_engine=lambda config, beside: slow)
