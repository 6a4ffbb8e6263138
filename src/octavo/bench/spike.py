"""The spike: running streams, and one long prompt that comes among them. What does it cost them, and how long does it wait?

Streams decode; when each has its first tokens, the long prompt arrives. Of interest are its time to the first token, and the streams' gaps
from its arrival until then. A stream that ended before saw nothing of it: the case then says nothing, and the figures say so.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from octavo.bench.latency import distribution_ms, ttft_s
from octavo.bench.load import LoadRun
from octavo.bench.stream_record import StreamRecord
from octavo.workload.arrivals import ClosedLoop
from octavo.workload.lengths import Fixed
from octavo.workload.requests import Independent, TokenRange, Workload

_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Spike:
    """Lengths in tokens. ``num_before``: tokens that each stream has when the long prompt comes."""

    num_streams: int = 8
    stream_prompt: int = 64
    stream_output: int = 800
    num_before: int = 16
    long_prompt: int = 3000
    long_output: int = 8
    tokens: TokenRange = TokenRange()
    seed: int = 0

    def workload(self) -> Workload:
        """The requests of the streams."""
        lengths = Independent(Fixed(self.stream_prompt), Fixed(self.stream_output))
        return Workload(ClosedLoop(self.num_streams), lengths, self.num_streams, None, self.tokens, self.seed)

    def long_request(self) -> Workload:
        """The one request that comes among them."""
        lengths = Independent(Fixed(self.long_prompt), Fixed(self.long_output))
        return Workload(ClosedLoop(1), lengths, 1, None, self.tokens, f"{self.seed}-long")


async def run_spike(run: LoadRun, spike: Spike) -> dict[str, Any]:
    """Send streams and prompt; ``run`` then has the streams' records, and what comes back is what the spike did to them."""
    streams = [run.prepare(request) for request in spike.workload().requests()]
    (late,) = (run.prepare(request) for request in spike.long_request().requests())
    tasks = [asyncio.ensure_future(run.send(record, body)) for record, body in streams]
    try:
        while min(len(record.event_times) for record, _ in streams) < spike.num_before and not any(task.done() for task in tasks):
            await asyncio.sleep(_POLL_S)
        await run.send(*late)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    run.records.remove(late[0])
    return spike_figures([record for record, _ in streams], late[0])


def spike_figures(streams: list[StreamRecord], late: StreamRecord) -> dict[str, Any]:
    """``overlap``: every stream went on after the long prompt's first token."""
    if late.error_kind is not None:
        return {"error": late.error_kind, "first_error": late.error_message, "overlap": False}
    began_s, ended_s = late.due_s, late.event_times[0]
    pairs = [pair for r in streams for pair in zip(r.event_times, r.event_times[1:], strict=False)]
    gaps = [later - earlier for earlier, later in pairs if later > began_s and earlier < ended_s]
    return {
        "prompt_ttft_ms": round(1000 * ttft_s(late), 3),
        "gap_ms": distribution_ms(gaps),
        "overlap": all(len(r.event_times) > 0 and r.event_times[-1] > ended_s for r in streams),
    }
