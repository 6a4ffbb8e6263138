"""A front end in this process with scripted workers in processes of their own, and readers of its streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

from octavo.config import EngineConfig
from octavo.core.request import SamplingParams
from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.fleet import LivenessLimits
from octavo.distributed.handshake import new_secret
from octavo.distributed.local_cluster import worker_names
from octavo.distributed.process_worker import LocalProcesses
from octavo.engine.engine import Engine
from octavo.engine.outputs import OutputEvent, RequestOutput
from octavo.engine.params import PreparedRequest
from tests.distributed import scripted_worker
from tests.engine import step_gate
from tests.engine.scripted import bigram_config, bigram_model, byte_tokenizer
from tests.engine.step_gate import StepGate

WAIT_S = 120.0  # hangs are found, slow machines are forgiven
ROOT = Path(__file__).parents[2]
PATIENT = LivenessLimits(suspect_s=20.0, stall_s=60.0, gone_s=60.0)  # a busy machine is no reason to suspect anybody
COMMAND = (sys.executable, "-m", "tests.distributed.scripted_worker")


@contextlib.contextmanager
def children_find_the_sources(**variables: str) -> Iterator[None]:
    """``variables``: more of the environment of processes that are started inside the block."""
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **variables}):
        yield


class Cluster:
    """``engine`` is the front end's; ``processes`` has the workers' process ids; scripted workers make the steps that ``gate`` allows."""

    def __init__(self, engine: ClusterEngine, processes: LocalProcesses, gate: StepGate | None = None) -> None:
        self.engine, self.processes = engine, processes
        self._gate = gate
        self._number = 0

    @property
    def gate(self) -> StepGate:
        assert self._gate is not None, "these workers have none"
        return self._gate

    def prepare(self, prompt: Sequence[int], params: SamplingParams, **options: object) -> PreparedRequest:
        self._number += 1
        checked = self.engine.check_params(params)
        return self.engine.prepare_checked(list(prompt), checked, f"r{self._number}", **options)  # type: ignore[arg-type]

    async def run(
        self, prompt: Sequence[int], params: SamplingParams, on_event: Callable[[OutputEvent], None] | None = None
    ) -> RequestOutput:
        """One request, read to its end."""
        prepared = self.prepare(prompt, params)
        output = RequestOutput.start(prepared.request, None, [])
        stream = self.engine.submit([prepared])
        try:
            while not stream.finished:
                for event in await stream.read():
                    output.apply(event)
                    if on_event is not None:
                        on_event(event)
        finally:
            self.engine.abort(stream)
        return output

    def holder(self, request_id: str) -> str | None:
        """The worker that has a request's attempt."""
        flight = self.engine.flights.find(request_id)
        return None if flight is None or flight.link is None else flight.link.name

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.processes.pids[name], number)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def cluster(
    workers: dict[str, int] | int = 2,
    delay_s: float = 0.0,
    config: EngineConfig | None = None,
    options: ClusterOptions | None = None,
) -> AsyncIterator[Cluster]:
    """Workers that are ready. ``delay_s`` is slept in each of their steps."""
    secret, folder = new_secret(), tempfile.mkdtemp(prefix="octavo-test-")
    names = worker_names(workers if isinstance(workers, dict) else {"both": workers})
    gate = StepGate(Path(folder) / "steps")
    processes = LocalProcesses(names, secret, 1, COMMAND)
    model = bigram_model(byte_tokenizer(scripted_worker.PIECES))
    options = options or ClusterOptions(liveness=PATIENT, worker_wait_s=600.0)
    address = Address(path=f"{folder}/workers")
    clean_up = partial(shutil.rmtree, folder, ignore_errors=True)
    engine = ClusterEngine(model, config or bigram_config(), address, secret.encode(), options, processes, clean_up)
    with children_find_the_sources(OCTAVO_TEST_DELAY_S=str(delay_s), **{step_gate.VARIABLE: str(gate.path)}):
        engine.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await engine.ready()
            yield Cluster(engine, processes, gate)
            engine.flights.check_invariants()
        finally:
            gate.open()
            for pid in processes.pids.values():  # one that a test has stopped can end, too
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            await engine.stop()


def alone(config: EngineConfig | None = None) -> Engine:
    """The engine that each worker runs, in this process."""
    return scripted_worker.load(config or bigram_config())


def run_alone(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """The undisturbed answer to one request."""
    prepared = engine.prepare(list(prompt), params)
    output = RequestOutput.start(prepared.request, None, [])
    engine.add(prepared)
    while engine.has_work:
        for event in engine.step():
            output.apply(event)
    return replace(output, request_id="")
