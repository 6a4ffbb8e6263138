"""Requests to an engine in this process, steps in between, without HTTP: an open loop by arrivals, or clients that wait for their answers.

Times are on the engine's clock, and its own timeline keeps them: that is what advice and explanations are tested on, so idle time passes as
it does for a server, and a request arrived when it was due even if a step ran then. ``in_process`` is the other way about: it measures for
itself, so that engines without a timeline's view can be compared, and moves on over idle time, which the engine's clock cannot do.
``engine_load`` goes through the event loop and the loop thread, whose cost is part of what it measures. One loop for all three would be
these differences as options, with little left in between.
"""

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


def run_requests(
    engine: Engine, requests: Seq[DueRequest], num_clients: int | None = None, sleep: Callable[[float], None] = time.sleep
) -> float:
    """All ``requests`` to their end; seconds that it took.

    Without ``num_clients`` they come by ``at_s`` (ascending), and one that came during a step arrived when it was due. With it, as many
    clients take them in their order, each the next one as soon as it has its answer; ``at_s`` counts for nothing. ``sleep`` passes time
    on the engine's clock. Raises RuntimeError with the message of the first request that ends with an error.
    """
    begin_s, place, num_open = engine.clock.now(), 0, 0
    while place < len(requests) or engine.has_work:
        now_s = engine.clock.now()
        while place < len(requests) and _is_due(requests[place], now_s - begin_s, num_open, num_clients):
            one = requests[place]
            place, num_open = place + 1, num_open + 1
            params = SamplingParams(temperature=0.0, max_tokens=one.num_output, ignore_eos=True)
            prepared = engine.prepare(one.prompt_token_ids, params, one.name, cache_salt=one.cache_salt)
            prepared.request.arrival_s = now_s if num_clients else begin_s + one.at_s
            engine.add(prepared)
        if not engine.has_work:
            sleep(max(_LEAST_SLEEP_S, begin_s + requests[place].at_s - now_s))
            continue
        for event in engine.step():
            if event.error is not None:
                raise RuntimeError(event.error)
            num_open -= event.finish_reason is not None
    return engine.clock.now() - begin_s


def _is_due(request: DueRequest, since_s: float, num_open: int, num_clients: int | None) -> bool:
    return request.at_s <= since_s if num_clients is None else num_open < num_clients
