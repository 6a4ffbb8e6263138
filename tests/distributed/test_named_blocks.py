"""The blocks of a prompt are named where it is checked, aside, and not on the event loop, which a long prompt would hold up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from octavo.core.prefix_index import Namespace, prompt_keys
from octavo.core.request import SamplingParams
from octavo.distributed import flight
from tests.distributed.test_stub_worker import front_end, stub, until

PROMPT = [3 + i % 50 for i in range(200)]


@pytest.mark.parametrize("is_other", [False, True])
def test_blocks_are_named_aside(is_other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``is_other``: workers of another build have come in the place of all meanwhile, and name them otherwise."""
    named_in = list[int]()

    def named(*args):  # type: ignore[no-untyped-def]
        named_in.append(threading.get_ident())
        return prompt_keys(*args)

    monkeypatch.setattr(flight, "prompt_keys", named)

    async def run() -> None:
        engine = await front_end()
        worker, task = stub(engine, "w")
        await until(lambda: len(engine.open_links()) == 1)
        params = engine.check_params(SamplingParams(max_tokens=3, seed=1))
        prepared = await asyncio.to_thread(engine.prepare_checked, PROMPT, params, "r")
        if is_other:
            engine.control.fingerprint = "bigram/other"
        engine.submit([prepared])
        found, fingerprint = engine.flights.find("r"), engine.control.fingerprint
        assert found is not None and fingerprint is not None
        block_size = engine.config.cache.block_size
        assert list(found.route.prefix_keys) == prompt_keys(fingerprint, Namespace(), PROMPT, block_size)
        here = threading.get_ident()
        assert [thread == here for thread in named_in] == ([False, True] if is_other else [False])
        await engine.stop()
        await task

    asyncio.run(run())
