"""Every plan of a random load equals the one that the slow, obvious twin makes of the same load."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.core.request import Sequence
from tests.core.harness import Harness, make_request
from tests.core.twin import Twin
from tests.core.twin_blocks import TwinSequence


def names(sequences: list[Sequence] | list[TwinSequence]) -> list[tuple[str, int]]:
    return [(seq.request.request_id, seq.choice) for seq in sequences]


class Pair:
    """A scheduler and its twin under the same load."""

    def __init__(self, rng: random.Random, granularity: str) -> None:
        sizes: dict[str, Any] = {
            "num_blocks": rng.randint(4, 14),
            "block_size": rng.choice([1, 2, 4, 4]),
            "max_num_seqs": rng.randint(1, 6),
            "budget": rng.randint(6, 24),
            "chunked": rng.random() < 0.7,
            "caching": granularity == "token" or rng.random() < 0.8,
            "granularity": granularity,
            "lookahead": rng.choice([1, 1, 3, 64]),
            "num_host_blocks": rng.choice([0, 3, 8, 40]),
            "policy": rng.choice(["fcfs", "fcfs", "static"]),
        }
        self.rng = rng
        self.harness = Harness(max_model_len=40, **sizes)
        self.twin = Twin(**sizes, max_total=self.harness.scheduler.limits.max_total_tokens)
        self.prompts: list[list[int]] = [[]]

    def add(self, request_id: str) -> None:
        rng, scheduler = self.rng, self.harness.scheduler
        prompt = rng.choice(self.prompts) if rng.random() < 0.7 else []
        if rng.random() < 0.5 and self.harness.texts:  # part of what an earlier one made
            earlier, choice = rng.choice(sorted(self.harness.texts))
            tokens = self.harness.requests[earlier].prompt_token_ids + self.harness.texts[earlier, choice].token_ids
            prompt = tokens[: rng.randint(0, len(tokens))]
        prompt = prompt + [rng.randint(0, 2) for _ in range(rng.randint(0 if prompt else 1, 12))]
        prompt = prompt[: scheduler.limits.max_total_tokens - 1]
        self.prompts.append(prompt)
        request = make_request(
            request_id,
            prompt,
            seed=rng.randint(0, 1),
            salt=rng.choice([None, None, None, "x"]),
            n=min(rng.choice([1, 1, 2, 3]), scheduler._state.config.max_num_seqs),
            max_tokens=rng.choice([0, 1, 4, 12, None]),
            prompt_logprobs=rng.choice([None] * 5 + [1]),
            ignore_eos=rng.random() < 0.5,
        )
        self.harness.add(request)
        self.twin.add(request)

    def step(self) -> bool:
        plan, expected = self.harness.begin(), self.twin.plan()
        if plan is None or expected is None:
            assert plan is expected
            return False
        sequences = self.harness.scheduler.in_flight_sequences
        slices = [
            (seq.request.request_id, seq.choice, piece.start, piece.num_tokens, piece.num_samples)
            for piece, seq in zip(plan.slices, sequences, strict=True)
        ]
        assert slices == expected.slices
        assert len(plan.block_copies) == expected.num_copies
        assert (len(plan.block_saves), len(plan.block_loads)) == (expected.num_saves, len(expected.loaded))
        self.compare_queues()
        self.twin.apply(self.harness.finish())
        self.compare_queues()
        return True

    def compare_queues(self) -> None:
        state, twin = self.harness.scheduler._state, self.twin
        assert names(state.running) == names(twin.running)
        assert names(list(state.waiting)) == names(twin.waiting)
        assert [len(seq.block_table) for seq in state.running] == [len(seq.table) for seq in twin.running]
        hosts = {id(host) for seq in twin.waiting for host in seq.saved} | {id(host) for host in twin.reading}
        assert state.swaps.pool.num_used == len(hosts)
        pool = state.kv.pool
        assert pool.num_cached == len(twin.kv.unused)
        assert [len(seq.token_ids) - seq.num_computed - seq.num_scheduled for seq in state.running] == [
            seq.gap - seq.scheduled for seq in twin.running
        ]
        assert pool.num_used == len({id(block) for seq in twin.running for block in seq.table})


@pytest.mark.parametrize("granularity, seed", [(g, s) for g in ("block", "token") for s in range(70)])
def test_plans_equal_the_twins(granularity: str, seed: int) -> None:
    rng = random.Random(seed)
    pair, num_requests = Pair(rng, granularity), 0
    for _ in range(80):
        move = rng.random()
        if move < 0.3 and num_requests < 30:
            for _ in range(rng.choice([1, 1, 1, 4])):
                pair.add(f"r{num_requests}")
                num_requests += 1
        elif move < 0.34 and num_requests:
            request_id = f"r{rng.randrange(num_requests)}"
            pair.harness.abort(request_id)
            pair.twin.abort(request_id)
        else:
            pair.step()
    while pair.step():
        pass
    pair.harness.check_idle()
    pair.harness.check_texts()
