"""Drafts: verified behind the last known token, never at anybody's cost, and invisible in what a client gets."""

from __future__ import annotations

import random

import pytest

from octavo.core.request import FinishReason, Sequence
from octavo.core.result_checks import StepProtocolError
from octavo.core.step import SliceResult, StepResult
from tests.core.harness import Harness, Oracle, make_request
from tests.core.kv_memory import plain_run


def right(harness: Harness, most: int = 4) -> Oracle:
    oracle = Oracle(harness, most, 1.0)
    oracle._random.randint = lambda low, high: high  # type: ignore[method-assign]
    return oracle


def decode(num_drafts: int, **options: object) -> Harness:
    harness = Harness(num_blocks=16, budget=16)
    harness.guess = right(harness, num_drafts)
    harness.run_all([make_request("a", [0, 1, 2], max_tokens=21, ignore_eos=True, **options)])
    harness.check_idle()
    return harness


@pytest.mark.parametrize("num_drafts", [0, 1, 4, 6])
def test_right_drafts_save_steps(num_drafts: int) -> None:
    harness = decode(num_drafts, logprobs=1)
    assert len(harness.plans) == 1 + -(-20 // (1 + num_drafts))  # the prompt's step draws the first token
    stats = harness.scheduler.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 21 - len(harness.plans)
    assert stats.num_output_tokens == 21


def test_wrong_drafts_cost_rows_alone() -> None:
    harness = Harness(num_blocks=16, budget=16)
    harness.guess = Oracle(harness, 4, 0.0)
    harness.run_all([make_request("a", [0, 1, 2], max_tokens=21, ignore_eos=True)])
    stats = harness.scheduler.stats
    assert len(harness.plans) == 21 and stats.num_draft_tokens > 0 == stats.num_accepted_tokens
    harness.check_idle()


def test_a_sequence_gets_no_more_drafts_than_it_may_still_make() -> None:
    harness = decode(6)
    pieces = [plan.slices[0] for plan in harness.plans[1:]]
    assert all(piece.num_samples == 1 + piece.num_drafts for piece in pieces)
    assert max(piece.start + piece.num_tokens for piece in pieces) <= 3 + 21 - 1  # the last token is never run


@pytest.mark.parametrize(
    "params", [{"stop": ("02",)}, {"stop": ("1",)}, {"stop_token_ids": (1,)}, {"stop_token_ids": (2,), "min_tokens": 5}, {}], ids=str
)
@pytest.mark.parametrize("max_tokens", [3, 4, 5, 30])
@pytest.mark.parametrize("seed", range(4))
def test_an_end_inside_an_accepted_run(params: dict[str, object], max_tokens: int, seed: int) -> None:
    """Tokens, log-probabilities and reason are those of the plain run; so is what the request's next turn computes on."""
    harness = Harness(num_blocks=32, budget=16)
    harness.guess = right(harness, 5)
    if params.get("min_tokens", 0) > max_tokens:  # type: ignore[operator]
        return
    harness.run_all([make_request("a", [0, 1, 2, seed % 3], seed, max_tokens=max_tokens, logprobs=1, **params)])
    text = harness.texts["a", 0]
    assert len(text.token_ids) < max_tokens or text.finish_reason is not None
    harness.run_all([make_request("b", [0, 1, 2, seed % 3, *text.token_ids, 1], seed, max_tokens=9, ignore_eos=True)])
    harness.check_idle()


def test_drafts_preempt_nobody_and_keep_everybody_s_token() -> None:
    """A pool that holds the sequences without a block to spare, and a budget of little more than a token each."""
    rng = random.Random(1)
    for num_blocks, budget in ((9, 5), (12, 16), (10, 7)):
        harness = Harness(num_blocks=num_blocks, budget=budget, max_num_seqs=4)
        plain = Harness(num_blocks=num_blocks, budget=budget, max_num_seqs=4)
        harness.guess = Oracle(harness, 4, 0.5, rng.randint(0, 99))
        for run in (harness, plain):
            requests = [make_request(f"r{i}", [i % 3, 1, 2], i, max_tokens=9, ignore_eos=True) for i in range(4)]
            run.run_all(requests)
        assert harness.scheduler.stats.num_preemptions <= plain.scheduler.stats.num_preemptions
        for plan in harness.plans:
            assert plan.num_tokens <= budget


def test_a_step_that_fails_or_is_aborted_gives_all_blocks_back() -> None:
    for end in ("abort", "fail"):
        harness = Harness(num_blocks=16, budget=16)
        harness.guess = right(harness)
        harness.add(make_request("a", [0, 1, 2], max_tokens=21, ignore_eos=True))
        harness.step()
        harness.begin()
        if end == "abort":
            harness.abort("a")
            harness.finish()
        else:
            harness.scheduler.fail_all("gone")
            harness.pending = None
        harness.check_idle()


@pytest.mark.parametrize("tokens", [[], [0], None], ids=["none", "another", "too many"])
def test_a_result_behind_other_drafts_is_refused(tokens: list[int] | None) -> None:
    harness = Harness(num_blocks=16, budget=16)
    harness.add(make_request("a", [0, 1, 2], max_tokens=21, ignore_eos=True))
    harness.step()
    (seq,) = harness.scheduler.decoding_sequences
    plan = harness.scheduler.plan(drafts={seq.seq_id: [1, 2]})
    assert plan is not None and plan.slices[0].num_drafts == 2
    drawn = [1, 2, 0, 1] if tokens is None else tokens if not tokens else [0, 2]
    with pytest.raises(StepProtocolError):
        harness.scheduler.apply(StepResult(plan.step_index, [SliceResult(drawn)]))
    harness.scheduler.apply(StepResult(plan.step_index, [SliceResult([1, 0])]))
    assert seq.output_token_ids[-2:] == [1, 0] and seq.num_computed == len(seq.token_ids) - 1
    harness.scheduler.check_invariants()


def test_who_may_have_drafts() -> None:
    """Sequences that lack the last token's KV alone; not one that will still split into choices."""
    harness = Harness(num_blocks=32, budget=32, max_num_seqs=6)
    harness.add(make_request("long", range(3), max_tokens=9, ignore_eos=True))
    harness.step()
    harness.add(make_request("two", [1, 1, 1], max_tokens=9, ignore_eos=True, n=2))

    def names() -> list[tuple[str, int]]:
        return [(seq.request.request_id, seq.choice) for seq in harness.scheduler.decoding_sequences]

    assert names() == [("long", 0)]
    harness.step()
    assert names() == [("long", 0), ("two", 0), ("two", 1)]
    seqs: list[Sequence] = harness.scheduler.decoding_sequences
    assert [harness.scheduler._state.num_tokens_left(seq) for seq in seqs] == [7, 8, 8]
    harness.run()
    want = plain_run(harness.requests["two"], 1, 64)
    assert harness.texts["two", 1] == want and want.finish_reason is FinishReason.LENGTH
