"""Scheduling policy: how much of a prompt goes into a step, who gives way, what admission leaves free. Small functions of plain numbers.

Who comes first is told by the order of the queues, which ``policies.order`` makes. The scheduler owns the queues and the mechanism;
nothing here keeps state.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.core.request import Sequence


def chunk_size(gap: int, budget: int, num_decoding_behind: int, chunked: bool) -> int:
    """Tokens of a sequence to compute now, out of ``gap`` known but not computed ones; 0: not in this step.

    Each decoding sequence later in the order keeps one token of the budget, so a long prompt never stalls a running answer.
    Without chunking a prompt goes whole or not at all.
    """
    room = budget - num_decoding_behind
    if gap <= room:
        return gap
    return max(room, 0) if chunked else 0


def runs_alone(gap: int, max_budget: int, num_decoding: int) -> bool:
    """Without chunking: a prompt that does not fit beside the decoding sequences gets a step of its own, or it might wait for ever."""
    return gap > 1 and gap > max_budget - num_decoding


def takes_whole_batches(scheduling_policy: str) -> bool:
    """Request-level batching, as front ends of FasterTransformer had it: a batch is filled once and nobody joins until all of it has
    finished. Else iteration-level: whoever has room joins with the next step."""
    return scheduling_policy == "static"


def computes_prompts_alone(scheduling_policy: str) -> bool:
    """Prompts before answers, as vLLM scheduled before it had chunks (Kwon et al., SOSP 2023; named so by Agrawal et al., Sarathi-Serve,
    OSDI 2024, section 3): the time to the first token is short, and every prompt stalls all running answers."""
    return scheduling_policy == "prefill_first"


def choose_victim(candidates: Seq[Sequence]) -> Sequence:
    """Who gives its blocks back when they run out: the last in order, but not one that has drawn no token since it came back, if there
    is another. So each return is worth at least a token, and nobody is put out again and again for nothing.

    ``candidates``: running sequences in order, from the one that lacks a block on; those before it may be in the plan already.
    """
    for seq in reversed(candidates):
        if len(seq.token_ids) > seq.num_tokens_at_return:
            return seq
    return candidates[-1]


def victim_group(running: Seq[Sequence], victim: Sequence) -> list[Sequence]:
    """Who goes with the victim: all running choices of its request, in order. When nobody else runs, the pool cannot hold them together:
    then it goes alone."""
    group = [seq for seq in running if seq.request is victim.request]
    return group if len(group) < len(running) else [victim]


def expected_growth(num_tokens: int, num_left: int, num_choices: int, block_size: int, lookahead: int) -> int:
    """Blocks beyond those of its ``num_tokens`` known tokens that a sequence may want within ``lookahead`` steps.

    ``num_left``: output tokens that it may still make; the last one needs no KV. At least one block for each choice, which pays for the
    copy of a shared block that is about to be written.
    """
    end = num_tokens + min(lookahead, num_left) - 1
    return num_choices * max(1, -(-end // block_size) - -(-num_tokens // block_size))


def swaps_out(preemption: str, costs: tuple[float, float] | None) -> bool:
    """Whether preempted blocks go to host memory, which has room for them. ``costs``: seconds to recompute and to swap, when known."""
    if preemption == "auto" and costs is not None:
        recompute_s, swap_s = costs
        return swap_s < recompute_s
    return preemption != "recompute"
