"""Faults that comparable engines really had, as far as the scheduler and the KV cache can have them."""

from __future__ import annotations

import random

import pytest

from octavo.core import policy
from octavo.core.request import FinishReason, ParameterError
from tests.core.harness import Harness, make_request


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(3), k=length)


def big(**sizes: object) -> Harness:
    """16-token blocks and room for everything, unless told otherwise."""
    return Harness(**{"num_blocks": 256, "block_size": 16, "max_model_len": 512, "max_num_seqs": 64, "budget": 512} | sizes)  # type: ignore[arg-type]


# --- A03: prompt plus max_tokens over the context -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [100, 4, 1, None])
@pytest.mark.parametrize("length", [60, 63, 64, 65])
def test_context_limit(length: int, max_tokens: int | None) -> None:
    harness = big(max_model_len=64)
    request = make_request("a", prompt_of(length), max_tokens=max_tokens, ignore_eos=True)
    if length >= 64:
        with pytest.raises(ParameterError) as refused:
            harness.add(request)
        assert refused.value.param == "prompt" and refused.value.code == "context_length_exceeded"
        assert f"{length} tokens" in str(refused.value) and "the context is 64 tokens" in str(refused.value)
        assert not harness.scheduler.has_work
        return
    harness.run_all([request])
    num_new = min(64 - length, max_tokens or 64)
    assert len(harness.texts["a", 0].token_ids) == num_new
    assert harness.texts["a", 0].finish_reason is FinishReason.LENGTH
    assert harness.scheduler.clamped_max_tokens(request) == (num_new if max_tokens is not None and max_tokens > num_new else None)
    assert all(piece.start + piece.num_tokens < 64 for plan in harness.plans for piece in plan.slices)


def test_scoring_needs_no_room_for_output() -> None:
    harness = big(max_model_len=64)
    harness.run_all([make_request("a", prompt_of(64), max_tokens=0, prompt_logprobs=1)])
    assert harness.texts["a", 0].finish_reason is FinishReason.LENGTH and len(harness.texts["a", 0].prompt_logprobs) == 63
    assert harness.backend.num_rows == 64
    with pytest.raises(ParameterError, match="65 tokens and the context is 64"):
        harness.add(make_request("b", prompt_of(65), max_tokens=0))


# --- A06: n > 1 with a seed ---------------------------------------------------------------------------------------------------------------


def strangers(num: int) -> list:
    return [make_request(f"s{i}", prompt_of(20 + i, seed=9), seed=i, max_tokens=30, ignore_eos=True) for i in range(num)]


def test_choices_differ_and_repeat_whatever_else_runs() -> None:
    request = make_request("a", prompt_of(33), seed=7, n=4, max_tokens=40, ignore_eos=True)
    alone, again, busy = big(), big(), big(budget=40)
    alone.run_all([request])
    again.run_all([request])
    busy.run_all([*strangers(4), request, *strangers(8)[4:]])
    texts = [alone.texts["a", i].token_ids for i in range(4)]
    assert len({tuple(text) for text in texts}) == 4
    assert texts == [again.texts["a", i].token_ids for i in range(4)] == [busy.texts["a", i].token_ids for i in range(4)]
    assert alone.backend.num_rows == 33 + 4 * 39  # the prompt once


def test_every_choice_ends_by_itself() -> None:
    harness = big()
    harness.run_all([make_request("a", prompt_of(10), seed=3, n=8, max_tokens=40)])
    lengths = [len(harness.texts["a", i].token_ids) for i in range(8)]
    reasons = {harness.texts["a", i].finish_reason for i in range(8)}
    assert len(set(lengths)) > 3 and reasons == {FinishReason.STOP, FinishReason.LENGTH}
    harness.check_idle()


def test_n_above_max_num_seqs_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"^n: 5 is not allowed; at most max_num_seqs \(4\)"):
        Harness(max_num_seqs=4).add(make_request("a", [0], n=5))


# --- A10, A27: the client goes away -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("moment, steps", [("queued", 0), ("long prefill", 1), ("last chunk", 2), ("decoding", 7)])
def test_abort_frees_everything(moment: str, steps: int, in_flight: bool) -> None:
    harness = big(budget=64, max_num_seqs=1 if moment == "queued" else 8)
    if moment == "queued":
        harness.add(make_request("first", prompt_of(70), max_tokens=60, ignore_eos=True))
        harness.step()
    for i in range(50):
        harness.add(make_request(f"a{i}", prompt_of(100), max_tokens=200, ignore_eos=True, n=1 + i % 3 if moment != "queued" else 1))
        for _ in range(steps):
            harness.step()
        if in_flight:
            harness.begin()
        events = harness.abort(f"a{i}")
        assert {event.finish_reason for event in events} == {FinishReason.ABORT}
        assert harness.scheduler.num_running + harness.scheduler.num_waiting == (moment == "queued")
        if in_flight and harness.pending is not None:
            assert all(event.request_id == "first" for event in harness.finish())
        assert harness.scheduler.abort(f"a{i}") == []
    assert harness.scheduler.stats.num_aborted == 50
    harness.run()
    harness.check_idle()
    harness.check_texts()
    assert harness.scheduler.stats.num_preemptions == 0


def test_aborted_prompt_stays_in_the_prefix_cache() -> None:
    harness = big()
    harness.add(make_request("a", prompt_of(100), max_tokens=200))
    harness.begin()
    harness.abort("a")
    harness.finish()
    assert harness.scheduler.num_used_blocks == 0
    harness.run_all([make_request("b", prompt_of(100), max_tokens=20)])
    assert harness.num_cached["b", 0] == 96


def test_gauges_fall_at_once_when_all_leave() -> None:
    harness = big()
    for i in range(100):
        harness.add(make_request(f"a{i}", prompt_of(20, seed=i), max_tokens=50, ignore_eos=True))
    for _ in range(3):
        harness.step()
    for i in range(100):
        harness.abort(f"a{i}")
    scheduler = harness.scheduler
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_used_blocks, scheduler.stats.num_aborted) == (0, 0, 0, 100)
    assert scheduler.num_cached_blocks > 0 and not scheduler.has_work


# --- A11: whole prompt cached, block multiples, part-filled blocks ------------------------------------------------------------------------

LENGTHS = [1, 15, 16, 17, 31, 32, 33, 48]


@pytest.mark.parametrize("together", [False, True])
def test_repeated_prompts_hit_full_blocks_only(together: bool) -> None:
    harness = big()
    requests = [make_request(f"{length}.{i}", prompt_of(length), max_tokens=12) for i in range(3) for length in LENGTHS]
    if together:
        harness.run_all(requests)
    else:
        for request in requests:
            harness.run_all([request])
    for length in LENGTHS:
        for i in range(3):
            hit = harness.num_cached[f"{length}.{i}", 0]
            assert hit == (0 if i == 0 else (length - 1) // 16 * 16) or (i == 0 and hit <= length - 1)


@pytest.mark.parametrize("max_tokens, hit", [(12, 16), (13, 32)])
def test_a_drawn_token_is_not_a_computed_one(max_tokens: int, hit: int) -> None:
    harness, prompt = big(), prompt_of(20)
    harness.run_all([make_request("p", prompt, max_tokens=max_tokens, ignore_eos=True)])
    output = harness.texts["p", 0].token_ids
    harness.run_all([make_request("other", [*prompt, *((t + 1) % 3 for t in output[:12])], max_tokens=12)])
    assert harness.num_cached["other", 0] == 16
    harness.run_all([make_request("same", prompt + output[:12] + [0], max_tokens=12)])
    assert harness.num_cached["same", 0] == hit


# --- A12: salt and adapter separate entries -----------------------------------------------------------------------------------------------


def test_salts_separate_entries() -> None:
    harness = big()
    for salt in (None, "x", "y"):
        for repeat in range(2):
            harness.run_all([make_request(f"{salt}{repeat}", prompt_of(64), salt=salt, max_tokens=12)])
            assert harness.num_cached[f"{salt}{repeat}", 0] == 48 * repeat
    harness.run_all([make_request("empty", prompt_of(64), salt="", max_tokens=12)])  # an empty salt is no salt
    assert harness.num_cached["empty", 0] == 48


# --- A13: a tight pool --------------------------------------------------------------------------------------------------------------------


def test_tight_pool_with_shared_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "expected_growth", lambda *_: 0)  # so that there is preemption
    rng = random.Random(13)
    prefixes = [prompt_of(length, seed=length) for length in (33, 48, 64, 65, 80)]
    harness = big(num_blocks=24, max_num_seqs=32, budget=256)
    requests = []
    for i in range(200):
        prefix = rng.choice(prefixes)
        prompt = prefix + rng.choices(range(3), k=max(0, rng.randint(60, 120) - len(prefix)))
        requests.append(make_request(f"r{i}", prompt, seed=i, max_tokens=16, ignore_eos=True))
    harness.run_all(requests)
    harness.check_idle()
    assert harness.scheduler.stats.num_preemptions > 0
    assert harness.scheduler.stats.prefix_hit_tokens > 1000


# --- A15: preemption ----------------------------------------------------------------------------------------------------------------------


def six_requests() -> list:
    params = {"min_tokens": 20, "max_tokens": 120, "logprobs": 2, "stop": ("000000",), "ignore_eos": True}
    return [make_request(f"r{k}", prompt_of(8 + k), seed=k, **params) for k in range(6)]


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_nothing(caching: bool) -> None:
    tight, roomy = big(num_blocks=17, caching=caching), big(caching=caching)
    requests = [*six_requests(), make_request("full", prompt_of(16), seed=9, n=2, max_tokens=120, ignore_eos=True, logprobs=0)]
    tight.run_all(requests)
    roomy.run_all(requests)
    assert tight.scheduler.stats.num_preemptions >= 2 and roomy.scheduler.stats.num_preemptions == 0
    assert tight.texts == roomy.texts
    opened = [slot for plan in tight.plans for slot in plan.slot_opens]
    assert any(slot.output_token_ids for slot in opened)
    assert all(len(slot.prompt_token_ids) <= 16 for slot in opened)  # outputs never become prompt
    assert {tight.num_cached[key] for key in tight.texts} == {0}  # what is found after a preemption is not a hit of the request
    tight.check_idle()


def test_a_plan_never_holds_a_preempted_sequence() -> None:
    harness = Harness(num_blocks=6, max_num_seqs=6, budget=12, caching=False)
    for i in range(5):
        harness.add(make_request(f"r{i}", prompt_of(3, seed=i), seed=i, max_tokens=15, ignore_eos=True))
    while harness.scheduler.has_work:
        plan = harness.begin()
        assert plan is not None
        assert all(seq.block_table and seq.num_scheduled for seq in harness.scheduler.in_flight_sequences)
        assert [piece.block_table for piece in plan.slices] == [seq.block_table for seq in harness.scheduler.in_flight_sequences]
        harness.finish()
    assert harness.scheduler.stats.num_preemptions > 3
    harness.check_texts()


# --- A28: a request that can never fit ----------------------------------------------------------------------------------------------------


def test_pool_smaller_than_the_context() -> None:
    harness = big(num_blocks=32, max_model_len=4096)
    for length in (513, 2000):
        with pytest.raises(ParameterError) as refused:
            harness.add(make_request(f"p{length}", prompt_of(length)))
        message = str(refused.value)
        assert f"{length} tokens" in message and "KV pool holds 512 tokens (32 blocks of 16)" in message and "4096" in message
        assert refused.value.code == "context_length_exceeded"
    small = [make_request(f"s{i}", prompt_of(10, seed=i), max_tokens=5) for i in range(10)]
    wide = {"ignore_eos": True}
    exact = [
        make_request("511", prompt_of(511)),
        make_request("512", prompt_of(512)),
        make_request("502", prompt_of(10), max_tokens=502, **wide),
    ]
    endless = make_request("4000", prompt_of(10), max_tokens=4000, **wide)
    harness.run_all([*exact, endless, *small])
    assert len(harness.texts["512", 0].token_ids) == 1 and len(harness.texts["502", 0].token_ids) == 502
    assert len(harness.texts["4000", 0].token_ids) == harness.scheduler.clamped_max_tokens(endless) == 503
    assert all(text.finish_reason is not None for text in harness.texts.values())
    harness.check_idle()


def test_small_requests_pass_while_a_large_one_runs() -> None:
    harness = big(num_blocks=32, max_model_len=4096)
    harness.add(make_request("large", prompt_of(10), max_tokens=400, ignore_eos=True))
    for i in range(10):
        harness.add(make_request(f"s{i}", prompt_of(10, seed=i), max_tokens=5))
    for _ in range(8):
        harness.step()
    assert all(harness.texts[f"s{i}", 0].finish_reason is not None for i in range(10))
    assert harness.texts["large", 0].finish_reason is None


# --- A36: children of one prompt write apart ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 20])
def test_choices_share_full_prompt_blocks_and_write_apart(length: int, caching: bool) -> None:
    harness = big(caching=caching)
    harness.add(make_request("a", prompt_of(length), seed=3, n=4, max_tokens=50, ignore_eos=True))
    harness.step()
    assert harness.scheduler.num_used_blocks == -(-length // 16)
    plan = harness.begin()
    assert plan is not None and len(plan.block_copies) == (3 if length % 16 else 0)  # the last owner writes in place
    assert harness.scheduler.num_used_blocks == length // 16 + 4
    harness.finish()
    for request in strangers(3):
        harness.add(request)
    harness.run()
    harness.check_texts()
    harness.check_idle()


def test_one_choice_ends_early_and_another_run_is_left() -> None:
    harness = big()
    harness.add(make_request("a", prompt_of(20), seed=3, n=4, max_tokens=50, stop=("0",)))
    harness.add(make_request("b", prompt_of(20), seed=5, n=4, max_tokens=50, ignore_eos=True))
    for _ in range(6):
        harness.step()
    harness.begin()
    assert len(harness.abort("b")) == 4
    harness.finish()
    harness.run()
    harness.check_texts()
    harness.check_idle()
