"""A logged worker whose steps take what a law says, by sleeping: ``python -m tests.bench.sleeping_worker``, flags as the real one's.

So they do beside neighbours: workers that log to one folder share a host as those of a simulation do, and hold each other up by
``CROWDING``. What each is in is a byte of a file there.
"""

from __future__ import annotations

import time
from pathlib import Path

from octavo.bench import logged_worker
from octavo.config import EngineConfig
from octavo.core.cost import StepShape
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.outputs import OutputEvent
from octavo.simulator.shared_host import Crowding, StepKind
from tests.engine.timed import Law

LAW = Law(step=8e-3, row=1e-3, pair=0.0, position=1e-6, logit_row=1e-3)
CROWDING = Crowding(decode_decode=0.2, decode_prompt=0.8, prompt_decode=0.1, prompt_prompt=0.3)
_LOOK_S = 1e-3  # between looks at neighbours
_BYTES = {b"d": StepKind.DECODE, b"p": StepKind.PROMPT}


class Host:
    """What the workers of a folder are in, each told by itself: until it has nothing to do, since steps are logged without a gap."""

    def __init__(self, path: Path) -> None:
        self._own = path.with_suffix(".doing")
        self.tell(None)

    def tell(self, kind: StepKind | None) -> None:
        self._own.write_bytes(b"-" if kind is None else kind.value[:1].encode())

    def slowing(self, kind: StepKind) -> float:
        others = (_BYTES.get(path.read_bytes()) for path in self._own.parent.glob("*.doing") if path != self._own)
        return sum(CROWDING.of(kind, other) for other in others if other is not None)


def load(config: EngineConfig, path: Path) -> Engine:
    engine, host = logged_worker.load(config, path), Host(path)
    execute, make_step = engine.backend.execute, engine.step

    def slowly(plan: StepPlan) -> StepResult:
        began_s = last_s = time.perf_counter()
        shape = StepShape.of(plan)
        kind = StepKind.of(shape)
        host.tell(kind)
        result = execute(plan)
        left_s = LAW.seconds(shape)
        while left_s > 0.0:
            slow = 1.0 + host.slowing(kind)
            time.sleep(min(_LOOK_S, left_s * slow))
            now_s = time.perf_counter()
            left_s -= (now_s - last_s) / slow
            last_s = now_s
        result.seconds = time.perf_counter() - began_s
        return result

    def step() -> list[OutputEvent]:
        events = make_step()
        if not engine.has_work:
            host.tell(None)
        return events

    engine.backend.execute, engine.step = slowly, step  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    logged_worker.main(load)
