"""A logged worker whose steps take what a law says, by sleeping: ``python -m tests.bench.sleeping_worker``, flags as the real one's."""

from __future__ import annotations

import time
from pathlib import Path

from octavo.bench import logged_worker
from octavo.config import EngineConfig
from octavo.core.cost import StepShape
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from tests.engine.timed import Law

LAW = Law(step=8e-3, row=1e-3, pair=0.0, position=1e-6, logit_row=1e-3)


def load(config: EngineConfig, path: Path) -> Engine:
    engine = logged_worker.load(config, path)
    execute = engine.backend.execute

    def slowly(plan: StepPlan) -> StepResult:
        began_s = time.perf_counter()
        result = execute(plan)
        result.seconds = LAW.seconds(StepShape.of(plan))
        time.sleep(max(0.0, began_s + result.seconds - time.perf_counter()))
        return result

    engine.backend.execute = slowly  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    logged_worker.main(load)
