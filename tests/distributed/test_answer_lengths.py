"""What routers learn of how long answers are: from those that came to their end, and from each choice of several."""

from __future__ import annotations

import asyncio

import pytest

from octavo.bench.stub_worker import StubWorker
from octavo.core.request import FinishReason, SamplingParams
from octavo.distributed.messages import Event, Events
from octavo.distributed.role_router import RoleRouter
from octavo.distributed.soonest import SoonestDone
from tests.distributed.test_stub_worker import front_end, stub, until
from tests.distributed.views import View, route


def give(worker: StubWorker, num_tokens: int, n: int) -> None:
    """So many tokens to each choice of its attempt; six are all."""
    assert worker._channel is not None
    key, reason = next(iter(worker._attempts)), FinishReason.LENGTH if num_tokens == 6 else None
    worker._channel.send(Events([Event(key, choice, "", [5] * num_tokens, reason) for choice in range(n)]))


@pytest.mark.parametrize(
    ("n", "way", "told"),
    [
        (1, "whole", 6),
        (3, "whole", 6),
        (1, "left before it began", None),
        (1, "left", None),
        (3, "left", None),
        (1, "failed", None),
        (1, "failed before it began", None),
    ],
)
def test_what_is_told_of_an_answer(n: int, way: str, told: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = dict[str, int | None]()
    monkeypatch.setattr(RoleRouter, "ended", lambda self, request_id, num_output: heard.setdefault(request_id, num_output))

    async def run() -> None:
        engine = await front_end()
        worker, task = stub(engine, "w")
        await until(lambda: len(engine.open_links()) == 1)
        params = engine.check_params(SamplingParams(max_tokens=6, seed=1, n=n))
        stream = engine.submit([engine.prepare_checked([4, 7], params, "r")])
        await until(lambda: worker.num_attempts == 1)
        if "before" not in way:
            give(worker, 6 if way == "whole" else 2, n)
            await until(lambda: engine.flights.num_output_tokens == n * (6 if way == "whole" else 2))
        if way.startswith("left"):
            engine.abort(stream)
        elif way.startswith("failed"):
            flight = engine.flights.find("r")
            assert flight is not None
            engine.flights.fail(flight, "it cannot be")
        await until(lambda: not len(engine.flights))
        await engine.stop()
        await task

    asyncio.run(run())
    assert heard == {"r": told}


def test_answers_that_nobody_waited_for_make_none_look_short() -> None:
    def choice_of(router: SoonestDone) -> float:
        return router._answer_s(route("new"), View(0, num_sequences=1, pending_tokens=1, pending_s=0.01))

    def asked(num_output: int | None) -> float:
        router = SoonestDone(16)
        for number in range(50):
            router.choose(route(str(number)), [View(0, num_sequences=1, pending_tokens=1, pending_s=0.01)])
            router.ended(str(number), num_output)
        return choice_of(router)

    assert asked(None) == asked(128) > asked(0), "128 is what is taken before any has ended"
