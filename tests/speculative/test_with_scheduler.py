"""Speculator and scheduler together, on toy sizes with preemptions: every text is the plain one, every block and token accounted for."""

from __future__ import annotations

import random

import pytest

from octavo.core.clock import VirtualClock
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.step import StepPlan, TokenEvent
from octavo.speculative.ngram import NgramProposer
from octavo.speculative.proposer import Proposer
from octavo.speculative.speculator import Speculator
from octavo.speculative.suffix import SuffixProposer
from tests.core.harness import Harness, make_request

METHODS: dict[str, type[NgramProposer] | type[SuffixProposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}


class SpeculatingHarness(Harness):
    """As Harness, with drafts from a Speculator, in the order in which an engine loop calls it."""

    def __init__(self, num_drafts: int | str, method: str = "suffix", **sizes: object) -> None:
        super().__init__(**sizes)  # type: ignore[arg-type]
        self.budget = int(sizes.get("budget", 8))  # type: ignore[call-overload]
        proposers: dict[str, Proposer] = {"ngram": NgramProposer(1, 3), "suffix": SuffixProposer(1)}
        total = self.scheduler.limits.max_total_tokens
        self.speculator = Speculator(proposers, SpeculativeParams(num_drafts, method), total, VirtualClock())
        self.num_offered = 0

    def begin(self) -> StepPlan | None:
        drafts = self.speculator.drafts(self.scheduler.running_sequences, self.budget)
        self.num_offered += sum(map(len, drafts.values()))
        plan = self.scheduler.plan(drafts=drafts)
        self.check()
        if plan is not None:
            self.plans.append(plan)
            self.pending = self.backend.execute(plan)
        return plan

    def finish(self) -> list[TokenEvent]:
        result = self.pending
        events = super().finish()
        assert result is not None
        self.speculator.observe(self.plans[-1], result)
        return events


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_drafts", ["auto", 1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_texts_are_those_of_plain_runs(num_drafts: int | str, method: str, seed: int) -> None:
    rng = random.Random(seed)
    harness = SpeculatingHarness(num_drafts, method, num_blocks=rng.choice([10, 16, 40]), budget=rng.choice([5, 8, 24]), max_num_seqs=4)
    for i in range(8):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 14))]
        params: dict[str, object] = {"max_tokens": rng.randint(1, 24), "n": rng.choice([1, 1, 2])}
        params |= rng.choice([{}, {"ignore_eos": True}, {"stop": ("01",)}, {"stop_token_ids": (2,), "min_tokens": 1}, {"logprobs": 1}])
        harness.add(make_request(f"r{i}", prompt, seed=i, **params))
        for _ in range(rng.randrange(4)):
            harness.step()
        if rng.random() < 0.15:
            harness.abort(f"r{i}")
    harness.run()
    harness.check_texts()
    harness.check_idle()
    stats, scheduler = harness.speculator.stats, harness.scheduler.stats
    assert stats.num_proposed == scheduler.num_draft_tokens <= harness.num_offered
    assert stats.num_accepted == sum(stats.accepted) >= scheduler.num_accepted_tokens
    assert harness.speculator.num_tracked == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_pool_that_preempts(method: str) -> None:
    harness = SpeculatingHarness(3, method, num_blocks=9, budget=16, max_num_seqs=4)
    harness.run_all([make_request(f"r{i}", [0, 1, i % 3], seed=i, max_tokens=20, ignore_eos=True) for i in range(5)])
    assert harness.scheduler.stats.num_preemptions > 0 and harness.speculator.stats.num_accepted > 0
    assert harness.speculator.num_tracked == 0


def test_a_repeating_prompt_near_the_context_limit() -> None:
    """Prompts that invite long drafts: `1 1 1`, one shorter than any n-gram, one that leaves two positions of context."""
    for prompt in ([1, 1, 1], [1], [1, 2] * 31):
        for method in METHODS:
            harness = SpeculatingHarness(5, method, num_blocks=20, budget=64, max_model_len=64)
            harness.run_all([make_request("r", prompt, ignore_eos=True, max_tokens=64 - len(prompt))])
            assert all(piece.start + piece.num_tokens <= 63 for plan in harness.plans for piece in plan.slices)


def test_settings_of_a_request_reach_its_plans() -> None:
    harness = SpeculatingHarness("off", num_blocks=40, budget=64)
    for name, asked in (("plain", None), ("three", SpeculativeParams(3, "ngram")), ("off", SpeculativeParams("off"))):
        request = make_request(name, [0, 1, 2] * 4, seed=1, ignore_eos=True, max_tokens=24)
        request.speculative = asked
        harness.add(request)
    harness.run()
    harness.check_texts()
    most = {seq_id: max(p.num_drafts for plan in harness.plans for p in plan.slices if p.seq_id == seq_id) for seq_id in range(3)}
    assert most == {0: 0, 1: 3, 2: 0}
