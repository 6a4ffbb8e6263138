"""Scheduling policy: who comes next, how much of a prompt goes into a step, who gives way. Small functions of plain numbers.

This is first come, first served with a token budget per step. The scheduler owns the queues and the mechanism; nothing here keeps state.
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


def choose_victim(running: Seq[Sequence]) -> Sequence:
    """Who gives its blocks back when they run out: the latest arrival.

    ``running`` is in arrival order and is planned from the front, so the victim is never one that the plan already holds.
    """
    return running[-1]


def admission_headroom(num_running: int) -> int:
    """Blocks that stay unused at an admission: one for each running sequence, so that the newcomer is not preempted by their next block."""
    return num_running
