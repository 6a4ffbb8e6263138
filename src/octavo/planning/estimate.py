"""What an engine could do at best, from its cost model and the mean request alone: where a search begins, never what it reports.

In a steady state every sequence that decodes brings ``prompt / output`` rows of prompts into a step. So with B sequences a step has B
decoding rows and B * prompt / output rows of prompts, and B / (output * seconds of that step) requests end per second. Queues, bursts and
lengths other than the mean are left to the simulation.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from octavo.core.cost import CostModel, StepShape
from octavo.core.step import SequenceSlice, StepPlan
from octavo.planning.load import PlanLoad
from octavo.simulator.engine_spec import EngineSpec
from octavo.simulator.records import Slo

Piece = tuple[int, int, bool]  # first position, rows, whether its last row's logits are wanted


@dataclass(frozen=True, slots=True)
class Estimate:
    """Requests per second of an engine for both phases, for prompts alone and for decoding alone; sequences at a time for the first.

    ``least_itl_s``: of one sequence that decodes with nothing before it: no mean time between tokens is shorter.
    """

    rate: float
    prefill_rate: float
    decode_rate: float
    num_sequences: int
    least_itl_s: float


def estimate(spec: EngineSpec, load: PlanLoad, slo: Slo, conversations: int) -> Estimate:
    """``conversations``: of mean length, that the KV pool has room for."""
    prompt, output = max(1, round(load.mean_prompt)), max(1, round(load.mean_output))
    config = spec.scheduler
    most = max(1, min(config.max_num_seqs, conversations))
    budget = config.max_num_batched_tokens
    limit_s = min(limit for limit in (slo.itl_s, slo.gap_s, float("inf")) if limit is not None)
    rate = decode_rate = 0.0
    best, size = 1, 1
    while True:
        decodes = [(prompt + output // 2, 1, True)] * size
        num_rows = round(size * prompt / output)
        decode_s = _seconds(spec.cost, decodes)
        if decode_s <= limit_s or size == 1:
            decode_rate = max(decode_rate, size / (output * decode_s))
        if size == 1 or (size + num_rows <= budget):
            both_s = _seconds(spec.cost, [*decodes, (prompt // 2, num_rows, False)] if num_rows else decodes)
            found = size / (output * both_s)
            if found > rate and (both_s <= limit_s or size == 1):
                rate, best = found, size
        if size == most:
            break
        size = min(most, size + max(1, size // 4))
    chunk = min(prompt, budget)
    chunk_s = _seconds(spec.cost, [((prompt - chunk) // 2, chunk, True)])
    return Estimate(rate, chunk / (prompt * chunk_s), decode_rate, best, _seconds(spec.cost, [(0, 1, True)]))


def _seconds(cost: CostModel, pieces: list[Piece]) -> float:
    seconds_of = getattr(cost, "seconds_of", None)
    if seconds_of is not None:
        shape = StepShape()
        for start, num_rows, has_logits in pieces:
            shape.add(start, num_rows, int(has_logits))
        return float(seconds_of(shape))
    slices = [SequenceSlice(i, start, [0] * num_rows, array("i"), int(logits), [i]) for i, (start, num_rows, logits) in enumerate(pieces)]
    return cost.seconds(StepPlan(-1, slices))
