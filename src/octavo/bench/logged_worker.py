"""A worker that writes down its steps: what each of them was, when it began, and what it took. For measurements of clusters.

``python -m octavo.bench.logged_worker --log FOLDER`` with the flags of `octavo worker` is such a worker; its steps are lines of JSON in a
file of its name in that folder, written whenever it has nothing to do. Whoever measures reads them with ``StepFile``. Its KV pool has been
written once. In all else it is the worker that serves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from array import array
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple, TextIO

from octavo.backends.kv_wire import moves_kv
from octavo.config import EngineConfig
from octavo.core.cost import StepShape
from octavo.core.step import StepPlan, StepResult
from octavo.distributed.channel import Address
from octavo.distributed.handshake import read_secret
from octavo.distributed.worker import WorkerOptions, WorkerServer
from octavo.distributed.worker_handover import handing_over
from octavo.engine.engine import Engine
from octavo.engine.outputs import OutputEvent
from octavo.engine.step_log import StepLog


class LoggedStep(NamedTuple):
    """``begin_s``: on ``time.perf_counter``, which all processes of a host share on Linux. The rest as in ``MeasuredStep``."""

    begin_s: float
    shape: StepShape
    kind: str
    device_s: float
    total_s: float
    follows_idleness: bool

    @property
    def end_s(self) -> float:
        """When the next could begin."""
        return self.begin_s + self.total_s

    def to_json(self) -> str:
        return json.dumps([self.begin_s, astuple(self.shape), *self[2:]])

    @classmethod
    def of_json(cls, line: str) -> LoggedStep:
        begin_s, shape, *rest = json.loads(line)
        return cls(begin_s, StepShape(*shape), *rest)


class WrittenLog(StepLog):
    """A step log that is written to ``file`` when the engine rests. ``origin_s``: the engine's time 0 on ``time.perf_counter``."""

    def __init__(self, file: TextIO, origin_s: float) -> None:
        super().__init__()
        self._file, self._origin_s = file, origin_s
        self._begins: list[float] = []  # of the steps that are not written

    def add(self, plan: StepPlan, result: StepResult, started_s: float, ended_s: float, goes_on: bool) -> None:
        self._begins.append(self._origin_s + started_s)
        super().add(plan, result, started_s, ended_s, goes_on)

    def rest(self) -> None:
        """There is no work: nor was there any since the last step ended, though that could not tell when its sequence was handed over."""
        if self._pending is not None:
            self.steps.append(self._pending)
            self._pending = None
        if not self._begins:
            return
        for begin_s, step in zip(self._begins, self.take(), strict=True):
            self._file.write(LoggedStep(begin_s, *step).to_json() + "\n")
        self._begins.clear()
        self._file.flush()


class LoggedEngine(Engine):
    """Its ``step_log``, a ``WrittenLog``, is told when there is no work."""

    def step(self) -> list[OutputEvent]:
        events = super().step()
        if isinstance(self.step_log, WrittenLog) and not self.has_work:
            self.step_log.rest()
        return events


class StepFile:
    """Reads the steps of a worker, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0

    def take(self) -> list[LoggedStep]:
        """Those that were written since the last call; none of a worker that has not begun."""
        if not self._path.exists():
            return []
        with open(self._path, encoding="ascii") as file:
            file.seek(self._place)
            lines = file.readlines()
            if lines and not lines[-1].endswith("\n"):  # it is being written
                lines.pop()
            self._place += sum(map(len, lines))
        return [LoggedStep.of_json(line) for line in lines]


def step_file(folder: Path, name: str) -> Path:
    """Where the worker of that name writes its steps."""
    return folder / f"{name}.steps"


def load(config: EngineConfig, path: Path) -> Engine:
    """An engine as ``Engine.load``, which writes its steps to ``path``."""
    engine = LoggedEngine.load(config)
    file = open(path, "a", encoding="ascii")  # noqa: SIM115  # for the life of the engine
    engine.step_log = WrittenLog(file, time.perf_counter() - engine.clock.now())
    touch_kv(engine)
    return engine


def touch_kv(engine: Engine) -> None:
    """Write all of the KV pool once: of a worker that has served for a while the system has given out all that memory, and what that takes
    is in no step, and in no hand-off."""
    backend = moves_kv(engine.backend)
    if backend is None:
        return
    layout = backend.kv_capacity(0).layout
    pages = array("i", [0]) * (layout.num_pages if layout else 1)
    for layer in range(backend.num_kv_layers):
        column = layout.layers[layer][0] if layout else 0
        nothing = bytearray(backend.wire_layer_bytes(layer))
        for page in range(engine.num_kv_blocks * len(pages)):
            pages[column] = page
            backend.import_kv(range(layer, layer + 1), pages, nothing)


async def _serve(server: WorkerServer) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.leave, f"it got signal {number}")
    await server.run()


def main(load: Callable[[EngineConfig, Path], Engine] = load) -> None:
    """``load``: makes the engine, and has it write its steps to the path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", required=True, type=Path)
    parser.add_argument("--connect", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--role", default="both")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--give-up-s", type=float)
    args = parser.parse_args()
    secret, options = read_secret(), WorkerOptions(args.name, args.role, args.threads, give_up_s=args.give_up_s)
    path = step_file(args.log, args.name)
    server = WorkerServer(Address.parse(args.connect), secret, options, lambda config: load(config, path), handing_over(secret))
    asyncio.run(_serve(server))


if __name__ == "__main__":
    main()
