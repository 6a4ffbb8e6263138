"""Requests to an engine in this process when they are due, steps in between: an open loop without HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine

_LEAST_SLEEP_S = 1e-9  # more than rounding can swallow


@dataclass(frozen=True, slots=True)
class DueRequest:
    """``at_s``: from the beginning of the run."""

    name: str
    at_s: float
    prompt_token_ids: list[int]
    num_output: int
    cache_salt: str | None = None


def run_open_loop(engine: Engine, requests: Seq[DueRequest], sleep: Callable[[float], None] = time.sleep) -> float:
    """All ``requests``, which come by ``at_s``, to their end; seconds that it took. A request that came during a step arrived when it was
    due. ``sleep`` passes time on the engine's clock. Raises RuntimeError with the message of the first request that ends with an error."""
    begin_s, place = engine.clock.now(), 0
    while place < len(requests) or engine.has_work:
        now_s = engine.clock.now()
        while place < len(requests) and begin_s + requests[place].at_s <= now_s:
            one = requests[place]
            place += 1
            params = SamplingParams(temperature=0.0, max_tokens=one.num_output, ignore_eos=True)
            prepared = engine.prepare(one.prompt_token_ids, params, one.name, cache_salt=one.cache_salt)
            prepared.request.arrival_s = begin_s + one.at_s
            engine.add(prepared)
        if not engine.has_work:
            sleep(max(_LEAST_SLEEP_S, begin_s + requests[place].at_s - now_s))
            continue
        for event in engine.step():
            if event.error is not None:
                raise RuntimeError(event.error)
    return engine.clock.now() - begin_s
