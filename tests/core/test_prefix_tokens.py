"""Sharing by the token: part-filled blocks and beginnings of full ones, copied; and why a match ended."""

from __future__ import annotations

import random

import pytest

from octavo.core import policy
from octavo.core.kv_manager import KVManager
from octavo.core.match_report import MatchEnd, MatchReport
from octavo.core.request import Sequence
from octavo.core.step import BlockCopy, SliceResult, StepResult
from tests.core.harness import Harness, make_request
from tests.core.test_cases import LENGTHS, prompt_of

PROMPT = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]  # three full blocks of 4 and one token


def by_token(**sizes: object) -> Harness:
    """16-token blocks and room for everything, unless told otherwise."""
    roomy = {"num_blocks": 256, "block_size": 16, "max_model_len": 512, "max_num_seqs": 64, "budget": 512}
    return Harness(granularity="token", **roomy | sizes)  # type: ignore[arg-type]


def hit_of(harness: Harness, name: str, prompt: list[int], **params: object) -> int:
    harness.run_all([make_request(name, prompt, **{"max_tokens": 1, **params})])
    return harness.num_cached[name, 0]


# --- A11: whole prompt cached, block multiples, part-filled blocks ------------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
def test_repeated_prompts_hit_all_but_their_last_token(together: bool) -> None:
    harness = by_token()
    requests = [make_request(f"{length}.{i}", prompt_of(length), max_tokens=12) for i in range(3) for length in LENGTHS]
    if together:
        harness.run_all(requests)
    else:
        for request in requests:
            harness.run_all([request])
        assert [harness.num_cached[f"{length}.{i}", 0] for length in LENGTHS for i in (1, 2)] == [n - 1 for n in LENGTHS for _ in (1, 2)]
    harness.check_idle()


@pytest.mark.parametrize("max_tokens, hit", [(12, 31), (13, 32)])
def test_a_drawn_token_is_not_a_computed_one(max_tokens: int, hit: int) -> None:
    """20 prompt and 12 output tokens: the KV of the last one was never computed."""
    harness, prompt = by_token(), prompt_of(20)
    harness.run_all([make_request("p", prompt, max_tokens=max_tokens, ignore_eos=True)])
    output = harness.texts["p", 0].token_ids
    assert hit_of(harness, "other", [*prompt, *((t + 1) % 3 for t in output[:12])], max_tokens=12) == 20
    assert hit_of(harness, "same", prompt + output[:12] + [0], max_tokens=12) == hit
    assert harness.reports["other"].end is MatchEnd.DIFFERENT_TOKEN and harness.reports["other"].position == 20


def test_odd_lengths_of_a_common_beginning() -> None:
    rng = random.Random(1)
    for length in (1, 3, 15, 16, 17, 100):
        harness, common = by_token(), prompt_of(length)
        users = [[i, *rng.choices(range(3), k=30)] for i in range(3)]
        hits = [hit_of(harness, f"u{i}", common + user) for i, user in enumerate(users)]
        assert hits == [0, length, length]
        assert harness.scheduler.stats.prefix_tail_tokens == 2 * (length % 16)
        assert harness.scheduler.stats.num_tail_copies == (2 if length % 16 else 0)


def test_a_conversation_computes_only_what_is_new() -> None:
    harness, text = by_token(), prompt_of(21)
    for turn in range(5):
        hit = hit_of(harness, f"t{turn}", text, max_tokens=9, ignore_eos=True, min_tokens=9)
        assert hit == (0 if turn == 0 else len(text) - 8)  # the user's 7 tokens and the drawn one before were not computed
        text = text + harness.texts[f"t{turn}", 0].token_ids + prompt_of(7, seed=turn)
    assert harness.backend.num_rows == len(text) - 7 - 1  # each token once; the last one drawn did not run
    harness.check_idle()


# --- tails in the index -------------------------------------------------------------------------------------------------------------------


def test_a_longer_tail_takes_the_place_of_a_shorter_one() -> None:
    harness, text = by_token(), prompt_of(30)
    scheduler = harness.scheduler
    for length, num_cached in ((3, 1), (9, 1), (5, 1), (15, 1), (16, 1), (20, 2), (30, 2)):
        harness.run_all([make_request(f"l{length}", text[:length], max_tokens=1)])
        assert scheduler.num_cached_blocks == num_cached
        harness.check_idle()
    harness.run_all([make_request("other", [*text[:18], (text[18] + 1) % 3], max_tokens=1)])
    assert scheduler.num_cached_blocks == 3  # two ways to go on


def test_running_sequences_offer_no_tail() -> None:
    harness = by_token()
    harness.add(make_request("running", prompt_of(20), max_tokens=100, ignore_eos=True))
    for _ in range(3):
        harness.step()
    harness.add(make_request("beside", prompt_of(20), max_tokens=1))
    harness.run()
    assert harness.num_cached["beside", 0] == 16


@pytest.mark.parametrize("n", [1, 3])
def test_choices_leave_a_tail_each(n: int) -> None:
    harness, prompt = by_token(), prompt_of(20)
    harness.run_all([make_request("a", prompt, seed=3, n=n, max_tokens=5, ignore_eos=True)])
    for choice in range(n):
        output = harness.texts["a", choice].token_ids
        assert hit_of(harness, f"again{choice}", [*prompt, *output[:4], 0, 0]) == 24


# --- A12: salts separate entries ----------------------------------------------------------------------------------------------------------


def test_salts_separate_entries() -> None:
    harness = by_token()
    for salt in (None, "x", "y"):
        for length, hit in ((40, 0), (40, 39), (52, 40)):
            name = f"{salt}{length}{hit}"
            harness.run_all([make_request(name, prompt_of(60)[:length], salt=salt, max_tokens=1)])
            assert harness.num_cached[name, 0] == hit
    assert harness.reports["x400"].end is harness.reports["y400"].end is MatchEnd.OTHER_SALT
    harness.run_all([make_request("empty", prompt_of(60), salt="", max_tokens=1)])  # an empty salt is no salt
    assert harness.num_cached["empty", 0] == 52


# --- A13: a tight pool --------------------------------------------------------------------------------------------------------------------


def tight_load(granularity: str, chunked: bool) -> Harness:
    rng = random.Random(13)
    prefixes = [prompt_of(length, seed=length) for length in (33, 48, 64, 65, 80)]
    sizes = {"num_blocks": 24, "block_size": 16, "max_model_len": 512, "max_num_seqs": 32, "budget": 256}
    harness = Harness(granularity=granularity, chunked=chunked, **sizes)  # type: ignore[arg-type]
    requests = []
    for i in range(200):
        prefix = rng.choice(prefixes)
        prompt = prefix + rng.choices(range(3), k=max(0, rng.randint(60, 120) - len(prefix)))
        requests.append(make_request(f"r{i}", prompt, seed=i, max_tokens=16, ignore_eos=True))
    harness.run_all(requests)
    harness.check_idle()
    return harness


@pytest.mark.parametrize("chunked", [True, False])
def test_tight_pool_with_shared_prefixes(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "expected_growth", lambda *_: 0)  # so that there is preemption
    by_block, by_tokens = (tight_load(granularity, chunked).scheduler.stats for granularity in ("block", "token"))
    assert by_tokens.num_preemptions > 0 and by_tokens.num_tail_copies > 50
    assert by_tokens.prefix_hit_tokens - by_tokens.prefix_tail_tokens > 1000
    assert by_tokens.num_computed_tokens < by_block.num_computed_tokens


# --- copies -------------------------------------------------------------------------------------------------------------------------------


def sequence(seq_id: int, tokens: list[int]) -> Sequence:
    return Sequence(seq_id, make_request(f"r{seq_id}", tokens), token_ids=list(tokens), num_prompt_tokens=len(tokens))


def compute(kv: KVManager, seq: Sequence, num_tokens: int) -> None:
    """``num_tokens`` positions of ``seq``, planned and applied."""
    assert kv.grow(seq, num_tokens, [])
    kv.plan_ended()
    seq.num_computed += num_tokens
    kv.publish(seq)


def adopt(kv: KVManager, seq: Sequence) -> list[BlockCopy]:
    copies: list[BlockCopy] = []
    match = kv.find_prefix(seq)
    assert kv.can_admit(seq, match, 0)
    kv.adopt_prefix(seq, match)
    kv.adopt_tail(seq, match, copies)
    return copies


def left_behind(num_blocks: int, *texts: list[int]) -> KVManager:
    """A manager in which sequences of these tokens ran to their end, one after the other."""
    kv = KVManager(num_blocks, 4, token_granular=True)
    for i, tokens in enumerate(texts):
        seq = sequence(100 + i, tokens)
        adopt(kv, seq)
        compute(kv, seq, len(tokens) - seq.num_computed)
        kv.release(seq, forget=True)
        kv.check_invariants([])
    return kv


def test_the_source_stays_while_another_block_can_go() -> None:
    kv = left_behind(4, [9, 9, 9], [7, 7], PROMPT[:6])  # tails of 9s and 7s, then a full block and a tail of two tokens
    seq = sequence(0, [*PROMPT[:6], 5, 5])
    (copy,) = adopt(kv, seq)
    assert seq.num_computed == 6 and copy.dst_block == seq.block_table[1] != copy.src_block
    assert kv.index is not None and kv.index.offers(copy.src_block)
    nines = sequence(1, [9, 9, 9, 9])
    assert kv.find_prefix(nines).tail is None  # the longest unused had to go
    kv.check_invariants([seq])


def test_the_last_block_is_taken_over_in_place() -> None:
    kv = left_behind(2, PROMPT[:6])
    seq = sequence(0, [*PROMPT[:6], 5, 5])
    assert adopt(kv, seq) == [] and seq.num_computed == 6 and kv.pool.num_available == 0
    assert kv.index is not None and not kv.index.offers(seq.block_table[1])
    kv.check_invariants([seq])
    compute(kv, seq, 2)
    kv.check_invariants([seq])


def test_no_block_for_a_copy_is_no_gain() -> None:
    kv, source, holder = KVManager(3, 4, token_granular=True), sequence(0, PROMPT), sequence(1, [5] * 9)
    seq = sequence(2, [*PROMPT[:6], 5, 5])
    compute(kv, source, 8)
    compute(kv, holder, 4)
    match, copies = kv.find_prefix(seq), list[BlockCopy]()
    assert len(match.nodes) == 1 and match.tail is not None and not kv.can_admit(seq, match, 0)
    assert kv.adopt_prefix(seq, match) == 4 and kv.adopt_tail(seq, match, copies) == 0 and copies == []
    kv.check_invariants([source, holder, seq])


def test_a_sequence_with_part_of_the_block_gains_the_rest() -> None:
    kv = left_behind(8, PROMPT[:12])
    seq = sequence(0, [*PROMPT[:7], 5, 5])
    kv.index, index = None, kv.index  # as if the block had come into the cache later
    assert kv.grow(seq, 5, [])
    kv.index = index
    seq.num_computed = 5
    kv.publish(seq)
    (copy,) = adopt(kv, seq)
    assert seq.num_computed == 7 and copy.dst_block == seq.block_table[1] and len(seq.block_table) == 2
    kv.check_invariants([seq])


@pytest.mark.parametrize("applied", [False, True])
def test_a_copy_is_offered_only_when_it_has_been_made(applied: bool) -> None:
    """Its source is evicted and about to be written by the same plan, so nothing else holds these tokens."""
    kv, seq, other = left_behind(3, PROMPT[:8]), sequence(0, [*PROMPT[:6], 5, 5]), sequence(1, [9, 9, 9])
    (copy,) = adopt(kv, seq)
    assert kv.grow(other, 3, []) and list(other.block_table) == [copy.src_block]
    other.num_scheduled = 3
    if applied:
        kv.plan_ended()
    kv.release(seq, forget=True)
    assert kv.index is not None and kv.index.offers(copy.dst_block) == applied
    kv.check_invariants([other])


@pytest.mark.parametrize("num_slots", [0, 1, 9])
def test_a_step_that_failed_leaves_no_copy_behind(num_slots: int) -> None:
    """A pool so small that the source of the copy is needed by the same plan."""
    harness, prompt = by_token(num_blocks=4), prompt_of(40)
    other = [*prompt[:27], *((t + 1) % 3 for t in prompt[27:]), *prompt[:13]]
    harness.run_all([make_request("a", prompt, max_tokens=1)])
    harness.add(make_request("b", other, max_tokens=4))
    plan = harness.scheduler.plan()
    assert plan is not None and len(plan.block_copies) == 1
    assert plan.block_copies[0].src_block in plan.slices[0].block_table
    harness.backend.fail(plan, num_slots)
    harness._receive(harness.scheduler.fail_all("gone"))
    assert harness.scheduler.num_cached_blocks == 1
    harness.run_all([make_request("c", other, max_tokens=4)])
    assert harness.num_cached["c", 0] == 16


@pytest.mark.parametrize("aborted", [False, True])
def test_a_row_without_an_answer_leaves_no_tail(aborted: bool) -> None:
    harness, prompt = by_token(), prompt_of(12)
    harness.add(make_request("a", prompt, max_tokens=4))
    plan = harness.begin()
    assert plan is not None
    if aborted:
        harness.abort("a")
    harness.pending = StepResult(plan.step_index, [SliceResult(error="nan")])
    harness.finish()
    assert harness.scheduler.num_cached_blocks == 0
    assert hit_of(harness, "b", prompt) == 0


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_aborted_answer_leaves_its_tail(steps: int) -> None:
    """With the step in flight applied first; after 16, 32 and 40 tokens of the prompt."""
    harness, prompt = by_token(budget=16, max_num_seqs=8), prompt_of(40)
    harness.add(make_request("a", prompt, max_tokens=50, ignore_eos=True))
    for _ in range(steps - 1):
        harness.step()
    harness.begin()
    harness.abort("a")
    harness.finish()
    harness.check_idle()
    assert hit_of(harness, "b", prompt) == min(16 * steps, 39)


# --- why a match ended --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["block", "token"])
def test_the_first_event_says_why_the_match_ended(granularity: str) -> None:
    harness = Harness(granularity=granularity, max_model_len=40)
    for name, prompt in (
        ("first", PROMPT),
        ("same", PROMPT),
        ("other", [*PROMPT[:5], 1, 1, 1, 1, 1]),
        ("longer", [*PROMPT, 1, 1, 1, 1, 1]),
        ("short", [2, 2]),
    ):
        harness.run_all([make_request(name, prompt, max_tokens=1)])
    by_tokens = granularity == "token"
    assert harness.reports == {
        "first": MatchReport(MatchEnd.NOT_CACHED, 0),
        "same": MatchReport(MatchEnd.COMPLETE, 12),
        "other": MatchReport(MatchEnd.DIFFERENT_TOKEN, 5, token_id=1, expected_id=2),
        "longer": MatchReport(MatchEnd.NOT_CACHED, 13 if by_tokens else 12),
        "short": MatchReport(MatchEnd.DIFFERENT_TOKEN, 0, 2, 0) if by_tokens else MatchReport(MatchEnd.PART_BLOCK, 0),
    }
    assert harness.num_cached["other", 0] == (5 if by_tokens else 4)


def test_reports_of_evictions_waits_and_requests_that_are_not_looked_up() -> None:
    harness = Harness(num_blocks=4, max_model_len=17)
    harness.run_all([make_request("a", PROMPT, max_tokens=1)])
    harness.run_all([make_request("b", [2] * 13, max_tokens=1)])
    harness.run_all([make_request("again", PROMPT, max_tokens=1)])
    assert harness.reports["again"] == MatchReport(MatchEnd.EVICTED, 0)
    harness.run_all([make_request("scored", PROMPT, max_tokens=1, prompt_logprobs=1)])
    assert "scored" not in harness.reports
    together = Harness(num_blocks=16, max_model_len=40, budget=16)
    together.run_all([make_request(name, PROMPT, max_tokens=2, n=2) for name in ("x", "y")])
    assert together.reports == {"x": MatchReport(MatchEnd.NOT_CACHED, 0), "y": MatchReport(MatchEnd.COMPLETE, 12)}
    plain = Harness(caching=False)
    plain.run_all([make_request("a", PROMPT, max_tokens=1)])
    assert plain.reports == {}
