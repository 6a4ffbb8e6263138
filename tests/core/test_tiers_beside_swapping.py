"""KV tiers and swapping on one pool of host memory: random loads of toy sizes, whose texts must equal their plain runs.

It found a plan that preempted a sequence, had nobody left to run since all others waited for the disk, and was dropped, and with it what it
was to save; and a part-filled block that came back shared by choices of which not all had a turn in that step.
"""

from __future__ import annotations

import random

import pytest

from tests.core.harness import Oracle, make_request
from tests.core.tier_harness import TierHarness, ToyDisk


def harness_of(rng: random.Random, seed: int) -> TierHarness:
    size = rng.choice([1, 1, 2, 3, 4])
    disk = rng.choice([None, ToyDisk(rng.choice([1, 3]), rng.choice([0.0, 0.2]), seed)])
    harness = TierHarness(
        num_tier_blocks=rng.choice([2, 8, 30]),
        disk=disk,
        min_tokens=rng.choice([1, 4]),
        num_blocks=rng.randint(24, 44) // size,
        block_size=size,
        max_num_seqs=rng.randint(5, 10),
        budget=rng.randint(3, 16),
        granularity=rng.choice(["block", "token"]),
        max_itl_ms=rng.choice([None, None, 5.0]),
        lookahead=rng.choice([1, 1, 3, 8]),
        num_host_blocks=rng.choice([4, 12, 40]),
        policy=rng.choice(["fcfs", "static", "priority", "fair", "srf"]),
        preemption=rng.choice(["auto", "swap"]),
        rounds=seed % 2 == 1,
    )
    if rng.random() < 0.4:
        harness.guess = Oracle(harness, rng.choice([2, 4]), rng.choice([0.3, 0.8, 1.0]), seed)
    return harness


def add_request(harness: TierHarness, rng: random.Random, number: int, prompts: list[list[int]]) -> None:
    prompt = list(rng.choice(prompts))[: rng.randint(0, 10)]
    prompt += [rng.randint(0, 2) for _ in range(rng.randint(0 if prompt else 1, 8))]
    prompts.append(prompt[:11])
    order = {"priority": rng.randint(-2, 2), "user": rng.choice([None, "a", "b"])}
    params = {"ignore_eos": rng.random() < 0.8, "n": rng.randint(1, 4), "max_tokens": rng.randint(4, 24)}
    harness.add(make_request(f"r{number}", prompts[-1], rng.randint(0, 3), **order, **params))  # type: ignore[arg-type]


@pytest.mark.parametrize("first", range(0, 120, 12))
def test_texts_equal_their_plain_runs(first: int) -> None:
    for seed in range(first, first + 12):
        rng = random.Random(seed)
        harness, prompts, number = harness_of(rng, seed), [[]], 0
        for _ in range(100):
            if rng.random() < 0.3 and number < 10:
                add_request(harness, rng, number, prompts)
                number += 1
            elif rng.random() < 0.03 and number:
                harness.abort(f"r{rng.randrange(number)}")
            elif harness.begin() is not None:
                harness.finish()
        harness.run(max_steps=3000)
        harness.check_texts()
        harness.check_idle()
