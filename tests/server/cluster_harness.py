"""A real server whose steps are made by workers: front end and workers in this process, on threads with an event loop each."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

from octavo.core.step import StepPlan
from octavo.distributed import cluster_reports
from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.fleet import LivenessLimits
from octavo.distributed.handshake import new_secret
from octavo.distributed.worker import WorkerOptions, WorkerServer
from octavo.engine.engine import Engine
from octavo.server.app import ServerOptions, create_app
from octavo.server.run import Server, make_server
from tests.engine.scripted import Bigram, bigram_config, bigram_model, byte_tokenizer
from tests.server.harness import TIMEOUT_S, RunningServer, wait_until

PATIENT = LivenessLimits(suspect_s=20.0, stall_s=60.0, gone_s=60.0)  # a busy machine is no reason to suspect anybody


class WorkerThread:
    """A worker on the scripted model. ``delay_s`` is slept in each of its steps."""

    def __init__(self, address: Address, secret: bytes, name: str, role: str = "both", delay_s: float = 0.0) -> None:
        self.name, self.delay_s = name, delay_s
        self.backend: Bigram | None = None  # once it has joined
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: WorkerServer | None = None
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(address, secret, WorkerOptions(name, role)),), daemon=True)
        self._thread.start()

    async def _run(self, address: Address, secret: bytes, options: WorkerOptions) -> None:
        self._loop, self._server = asyncio.get_running_loop(), WorkerServer(address, secret, options, self._load)
        await self._server.run()

    def _load(self, config: Any, *_: object) -> Engine:
        tokenizer = byte_tokenizer()
        self.backend = Bigram(tokenizer.vocab_size, config.scheduler.max_num_seqs)
        self.backend.delay_s = self.delay_s
        return Engine(bigram_model(tokenizer), config, self.backend)

    def hold_at(self, position: int, goes_on: threading.Event) -> None:
        """Its engine waits before the step that computes the token at ``position`` of a sequence, until the event is set."""
        assert self.backend is not None

        def wait(plan: StepPlan) -> None:
            if any(piece.start + piece.num_tokens > position for piece in plan.slices):
                assert goes_on.wait(TIMEOUT_S)

        self.backend.before_step = wait

    def cut(self) -> None:
        """Its connection breaks; it connects again at once."""
        assert self._loop is not None and self._server is not None and self._server._channel is not None
        self._loop.call_soon_threadsafe(self._server._channel.abort, "the test has cut it")

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()


class RunningCluster(RunningServer):
    """``workers``: role by name. ``cluster``: the engine of the front end."""

    def __init__(self, workers: dict[str, str], options: ServerOptions | None = None, delay_s: float = 0.0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-test-")
        address, secret = Address(path=str(Path(self._folder.name) / "workers")), new_secret().encode()
        model, config = bigram_model(byte_tokenizer()), bigram_config(max_num_seqs=4)
        self.cluster = ClusterEngine(model, config, address, secret, ClusterOptions(liveness=PATIENT))
        options = options or ServerOptions()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.server: Server = make_server(create_app(self.cluster, options), self.cluster, options)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._listener]}, daemon=True)
        self._start_worker = lambda name, role: WorkerThread(address, secret, name, role, delay_s)
        self._wanted = workers
        self._patient = mock.patch.object(cluster_reports, "ANSWER_S", TIMEOUT_S)  # of accounts nothing is left out that only comes late
        self.workers: dict[str, WorkerThread] = {}

    def __enter__(self) -> RunningCluster:
        self._patient.start()
        self.thread.start()
        self.workers = {name: self._start_worker(name, role) for name, role in self._wanted.items()}
        wait_until(lambda: len(self.cluster.open_links()) == len(self.workers))
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for worker in self.workers.values():
            worker.join()
        self._patient.stop()
        self._folder.cleanup()
