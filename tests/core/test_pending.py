"""What is still to be computed, as a scheduler tells it: prompts without what the prefix cache has of them, or is about to have."""

from __future__ import annotations

import random

import pytest

from octavo.core.planner import wants_prompt_logprobs
from octavo.core.request import Sequence
from tests.core.harness import Harness, make_request
from tests.core.test_cases import big, prompt_of


def pending(harness: Harness) -> int:
    return harness.scheduler.pending_shape().num_rows


def test_what_is_cached_of_a_prompt_that_waits_is_not_pending() -> None:
    harness = big(max_num_seqs=1)
    harness.run_all([make_request("a", prompt_of(100), max_tokens=1)])
    harness.add(make_request("runs", [9] * 8, max_tokens=3))
    harness.step()
    harness.add(make_request("waits", [*prompt_of(100), 1, 2, 3], max_tokens=1))
    assert harness.scheduler.num_waiting == 1
    assert pending(harness) == 1 + 103 - 96, "96 tokens of it lie in full blocks of the cache"
    harness.run()
    assert pending(harness) == 0


def test_what_another_is_computing_is_pending_once() -> None:
    harness = big(budget=20, max_num_seqs=2)
    for i in range(4):
        harness.add(make_request(f"r{i}", prompt_of(200), seed=i, max_tokens=3))
    harness.step()
    num_computed = harness.scheduler.running_sequences[0].num_computed
    assert pending(harness) == 200 - num_computed + 3 * (200 - 192), "the others wait for its blocks"
    harness.abort("r0")
    assert pending(harness) == 3 * (200 - num_computed // 8 * 8), "nobody computes it now"


def test_what_was_evicted_is_pending_again() -> None:
    harness = Harness(num_blocks=8, budget=32, max_num_seqs=1)
    harness.run_all([make_request("a", prompt_of(17), max_tokens=1)])
    harness.add(make_request("runs", [7, 8, 9] * 5, max_tokens=14, ignore_eos=True))
    harness.step()
    harness.add(make_request("waits", prompt_of(17), max_tokens=1))
    told = list[int]()
    while harness.scheduler.num_running:
        told.append(pending(harness) - 1)
        harness.step()
        if not harness.scheduler.num_waiting:
            break
    assert told == sorted(told) and (told[0], told[-1]) == (1, 13), "its end is evicted first, and in the end all but one block"


def _by_searching(harness: Harness, seq: Sequence) -> int:
    """From the beginning, by the look-up that admission makes."""
    state = harness.scheduler._state
    num_left = len(seq.token_ids) - seq.num_computed
    if num_left <= 1:
        return num_left
    num_left = min(num_left, len(seq.token_ids) - state.swaps.num_computed(seq))
    if wants_prompt_logprobs(seq) or seq.seq_id in state.kv.loading:
        return num_left
    match = state.kv.find_prefix(seq)
    depth = state.kv._chains[seq.seq_id].depth if seq.seq_id in state.kv._chains else 0
    return min(num_left, len(seq.token_ids) - (depth + len(match.nodes) + match.num_pending) * state.kv.block_size)


@pytest.mark.parametrize("pages", [None, (1, 5, 8)])
@pytest.mark.parametrize("num_host_blocks", [0, 12])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_what_a_search_from_the_beginning_finds(pages: tuple[int, int, int] | None, num_host_blocks: int, seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, length = (12, 12) if pages is None else (60, 40)
    harness = Harness(num_blocks, budget=11, max_num_seqs=3, max_model_len=400, pages=pages, num_host_blocks=num_host_blocks)
    beginnings, num_shared = [[rng.randrange(5) for _ in range(length)] for _ in range(3)], 0
    for number in range(60):
        prompt = rng.choice(beginnings)[: rng.randint(1, length)] + [rng.randrange(5) for _ in range(rng.randint(1, 9))]
        extra = {"prompt_logprobs": 1} if rng.random() < 0.1 else {}
        harness.add(make_request(f"r{number}", prompt, number, max_tokens=rng.randint(1, 9), **extra))
        if rng.random() < 0.1:
            harness.abort(f"r{rng.randrange(number + 1)}")
        for _ in range(rng.randrange(3)):
            harness.step()
        queues = (*harness.scheduler.running_sequences, *harness.scheduler.waiting_sequences)
        assert pending(harness) == sum(_by_searching(harness, seq) for seq in queues)
        num_shared += sum(_by_searching(harness, seq) < len(seq.token_ids) for seq in harness.scheduler.waiting_sequences)
    assert num_shared, "nothing that waited was cached"
    harness.run()
    harness.check_texts()
