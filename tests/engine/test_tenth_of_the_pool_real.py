"""Real models in a pool of a tenth of the demand: every request finishes, with the text that it has in a large pool.

On a tiny model, with choices, penalties, drafts and other orders: tests/engine/test_swapping.py::test_a_tenth_of_the_demand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from tests.engine.real_prompts import real_prompts

COUNT, NUM_TOKENS, STREAMS, BLOCK = 60, 128, 16, 16
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, frequency_penalty=0.3, max_tokens=NUM_TOKENS, logprobs=0),
}
SWAP_BYTES = 1 << 30  # as much as the whole demand takes; memory is taken as it is written
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap", "swap_space": SWAP_BYTES},
    "auto": {"swap_space": SWAP_BYTES},
}
Large = Callable[[Path, str], list[RequestOutput]]


def generate(path: Path, name: str, num_kv_blocks: int, **options: Any) -> tuple[list[RequestOutput], LLM]:
    with LLM(str(path), max_model_len=1200, max_num_seqs=STREAMS, num_kv_blocks=num_kv_blocks, **options) as llm:
        params = [replace(PARAMS[name], seed=i) for i in range(COUNT)]
        return llm.generate(real_prompts(COUNT), params), llm


@pytest.fixture(scope="module")
def large() -> Large:
    """What a large pool gives. Kept: all ways are compared with the same."""

    @cache
    def of(path: Path, name: str) -> list[RequestOutput]:
        outputs, llm = generate(path, name, 1400)
        assert llm.engine.scheduler.stats.num_preemptions == 0
        return outputs

    return of


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("way", WAYS)
def test_60_prompts_at_16_streams(large: Large, path: Path, name: str, way: str) -> None:
    want = large(path, name)
    demand = sum(-(-(len(output.prompt_token_ids) + NUM_TOKENS) // BLOCK) for output in want)
    got, llm = generate(path, name, demand // 10, admission_lookahead=1, **WAYS[way])
    assert [i for i in range(COUNT) if got[i].outputs != want[i].outputs] == []
    assert {output.outputs[0].finish_reason for output in got} <= {"length", "stop"}
    stats = llm.engine.scheduler.stats
    assert stats.num_preemptions > 10 and stats.num_finished == COUNT
    if way != "auto":
        assert stats.num_swap_preemptions == (stats.num_preemptions if way == "swap" else 0)
    moved = f"{stats.num_swap_preemptions} by swap, {stats.num_blocks_saved} blocks out and {stats.num_blocks_loaded} in"
    print(f"{path.name} {name} {way}: {stats.num_preemptions} preemptions, {moved}, pool of {demand // 10} blocks")
