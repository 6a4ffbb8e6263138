"""What looks on while an engine steps, and an engine whose work waits for what others hold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from octavo import SamplingParams
from octavo.core.request import Sequence
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.engine_thread import EngineThread
from octavo.engine.outputs import OutputEvent
from tests.engine.scripted import bigram_engine

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class Onlooker:
    """Hooks, a drafter and a device in one: writes down who comes when."""

    default = SimpleNamespace(enabled=True)

    def __init__(self, engine: Engine) -> None:
        self.seen: list[str] = []
        self.fail = False
        self._execute = engine.backend.execute
        engine.loop.step_hooks, engine.loop.speculator = self, self  # type: ignore[assignment]
        engine.backend.execute = self.execute  # type: ignore[method-assign]

    def drafts(self, running: list[Sequence], max_rows: int, num_queued_tokens: int = 0) -> dict[int, list[int]]:
        return {seq.seq_id: [70] for seq in running if len(seq.token_ids) - seq.num_computed == 1}

    def planned(self, plan: StepPlan) -> None:
        self.seen.append("planned")

    def fill(self, plan: StepPlan) -> None:
        self.seen.append("fill")

    def execute(self, plan: StepPlan) -> StepResult:
        self.seen.append("execute")
        if self.fail:
            raise RuntimeError("broken")
        return self._execute(plan)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        return None

    def failed(self, message: str) -> list[OutputEvent]:
        self.seen.append(message)
        return [OutputEvent("another", 0, "", [], error=message)]


def test_a_plan_is_told_before_anything_is_written_for_it() -> None:
    """Drafts of the model's own first layers write to the plan's blocks as well."""
    engine = bigram_engine()
    onlooker = Onlooker(engine)
    engine.add(engine.prepare([66, 67, 68], PARAMS))
    engine.step()
    engine.step()
    assert onlooker.seen == ["planned", "execute", "planned", "fill", "execute"]
    onlooker.fail = True
    events = engine.step()
    assert "broken" in onlooker.seen[-1] and [event.request_id for event in events[-1:]] == ["another"] and len(events) == 2


def test_an_engine_whose_work_waits_for_what_is_held_takes_no_processor() -> None:
    """It was given no plan; only what is posted can change that, and it is not taken for one that hangs."""
    engine = bigram_engine(num_kv_blocks=4)
    held, other = engine.prepare(list(range(20, 40)), PARAMS, "held"), engine.prepare(list(range(100, 140)), PARAMS, "other")
    engine.add(held)
    while not engine.step():
        pass
    engine.loop.offer("held")
    engine.add(other)
    num_steps, step, ended = 0, engine.step, list[OutputEvent]()

    def counted() -> list[OutputEvent]:
        nonlocal num_steps
        num_steps += 1
        return step()

    engine.step = counted  # type: ignore[method-assign]

    def let_go() -> list[OutputEvent]:
        engine.release("held")
        return []

    async def body() -> None:
        thread = EngineThread(engine, ended.extend)
        thread.start()
        while not engine.is_stuck or thread.silent_s > 0.0:
            await asyncio.sleep(0.01)
        before = num_steps
        await asyncio.sleep(0.2)
        assert num_steps == before and engine.has_work and thread.silent_s == 0.0
        thread.post(let_go)
        while not any(event.finish_reason is not None for event in ended):
            await asyncio.sleep(0.01)
        assert {event.request_id for event in ended} == {"other"} and not engine.is_stuck
        await thread.stop()

    asyncio.run(body())
