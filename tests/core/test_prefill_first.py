"""Prompts before answers: steps hold prompts alone while there are some. (Under all kinds of load: test_scheduler_machine.)"""

from __future__ import annotations

import pytest

from octavo.config import ConfigError, EngineConfig, SchedulerConfig
from tests.core.harness import Harness, make_request


def rows(harness: Harness) -> list[int]:
    """Tokens of each slice of the next step, which is taken."""
    plan = harness.begin()
    assert plan is not None
    lengths = [len(piece.token_ids) for piece in plan.slices]
    harness.finish()
    return lengths


def harness_of(policy: str, chunked: bool = True, **sizes: int) -> Harness:
    return Harness(**{"num_blocks": 32, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4, "budget": 12, **sizes}, chunked=chunked,
                   caching=False, policy=policy)  # fmt: skip


@pytest.mark.parametrize(("policy", "chunked", "seen"), [
    ("prefill_first", True, [[6], [1], [12], [8, 4], [6], [1, 1, 1]]),
    ("prefill_first", False, [[6], [1], [20], [10], [1, 1, 1]]),
    ("fcfs", True, [[6], [1], [1, 11], [1, 9, 2], [1, 1, 8], [1, 1, 1]]),
])  # fmt: skip
def test_answers_stand_still_while_there_are_prompts(policy: str, chunked: bool, seen: list[list[int]]) -> None:
    harness = harness_of(policy, chunked)
    harness.add(make_request("a", [1] * 6, max_tokens=12, ignore_eos=True))
    steps = [rows(harness), rows(harness)]
    harness.add(make_request("b", [2] * 20, max_tokens=3, ignore_eos=True))
    harness.add(make_request("c", [3] * 10, max_tokens=3, ignore_eos=True))
    while steps[-1] != [1, 1, 1]:
        steps.append(rows(harness))
    assert steps == seen
    harness.run()
    harness.check_texts()
    harness.check_idle()


def test_a_prompt_without_room_waits_and_answers_go_on() -> None:
    harness = harness_of("prefill_first", num_blocks=4)
    harness.add(make_request("a", [1] * 6, max_tokens=6, ignore_eos=True))
    harness.add(make_request("b", [2] * 9, max_tokens=3, ignore_eos=True))
    assert [rows(harness) for _ in range(3)] == [[6], [1], [1]]
    harness.run()
    harness.check_texts()
    harness.check_idle()


def test_it_bounds_no_gaps() -> None:
    with pytest.raises(ConfigError, match=r"max_itl_ms: 20.0 is not allowed; .*prefill_first"):
        EngineConfig(scheduler=SchedulerConfig(scheduling_policy="prefill_first", max_itl_ms=20.0)).validate()
