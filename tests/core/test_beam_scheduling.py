"""Beams as sequences: the hypotheses of a request are the plain ones whatever else runs, however small the pool, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.policies.order import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from octavo.core.request import BeamParams, FinishReason, ParameterError, Request, SequenceStatus
from octavo.core.scheduler import Scheduler
from tests.core.harness import Harness, bound_for, make_request
from tests.core.kv_memory import EOS


def beam_request(
    name: str, prompt: list[int], width: int, n: int | None = None, penalty: float = 1.0, early: Any = False, **params: Any
) -> Request:
    return make_request(name, prompt, n=width if n is None else n, beam=BeamParams(width, penalty, early), **params)


@st.composite
def requests(draw: st.DrawFn, index: int) -> Request:
    prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=11))
    order = {"priority": draw(st.integers(-1, 1)), "user": draw(st.sampled_from([None, "a"]))}
    if draw(st.integers(0, 2)) == 0:
        seed, n, max_tokens = draw(st.integers(0, 3)), draw(st.integers(1, 2)), draw(st.integers(4, 20))
        return make_request(f"plain-{index}", prompt, seed, n=n, max_tokens=max_tokens, ignore_eos=True, **order)
    width = draw(st.integers(1, 4))
    return beam_request(
        f"beam-{index}",
        prompt,
        width,
        draw(st.integers(1, width)),
        draw(st.sampled_from([0.0, 1.0, -0.5, 2.0])),
        draw(st.sampled_from([True, False, "never"])),
        max_tokens=draw(st.integers(1, 14)),
        min_tokens=draw(st.integers(0, 1)),
        ignore_eos=draw(st.integers(0, 3)) > 0,
        stop_token_ids=draw(st.sampled_from([(), (1,)])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        **order,
    )


def valid(request: Request) -> bool:
    return request.params.min_tokens <= (request.params.max_tokens or 0)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.data())
def test_hypotheses_do_not_depend_on_anything_else(data: st.DataObject) -> None:
    """Batch mates, a pool that forces preemption, host memory, order, block size, budget, chunks, prefix cache, paced steps, aborts."""
    block_size, chunked = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.booleans())
    caching = data.draw(st.booleans())
    policy = data.draw(st.sampled_from(["fcfs", "fcfs", "static", "priority", "fair", "srf", "prefill_first"]))
    harness = Harness(
        num_blocks=data.draw(st.integers(-(-13 // block_size), 40 // block_size)),
        block_size=block_size,
        max_num_seqs=data.draw(st.integers(4, 10)),
        budget=data.draw(st.integers(10, 14)),
        chunked=chunked,
        caching=caching,
        granularity=data.draw(st.sampled_from(["block", "token"])) if caching else "block",
        max_itl_ms=bound_for(data.draw(st.sampled_from([None, 5.0])), chunked, policy),
        lookahead=data.draw(st.sampled_from([1, 1, 4, 64])),
        num_host_blocks=data.draw(st.sampled_from([0, 4, 40])),
        policy=policy,
    )
    todo = [r for r in (data.draw(requests(i)) for i in range(data.draw(st.integers(1, 5)))) if valid(r)]
    leaving = {data.draw(st.integers(1, 12)): request.request_id for request in todo[:1] if data.draw(st.booleans())}
    for _ in range(400):
        if todo and data.draw(st.integers(0, 3)) > 0:
            harness.add(todo.pop())
        if harness.begin() is None:
            if not todo:
                break
            continue
        leaver = leaving.get(harness.scheduler.stats.num_steps)
        if leaver in harness.requests:
            harness.abort(leaver)
        harness.finish()
    harness.check_texts()
    harness.check_idle()


def run_tight(num_blocks: int, caching: bool, num_host_blocks: int = 0) -> tuple[int, int, int]:
    """Earlier requests take the blocks of the beams half way through, the first to end lets them come back, and a step has no room for the
    rests of all beams, while the others grow and want the blocks again. Beams are never saved in host memory. Returns how often
    the beams were preempted, after how many steps one waited for the others, and how often that one was preempted then."""
    harness = Harness(num_blocks, 1, max_num_seqs=7, budget=7, caching=caching, num_host_blocks=num_host_blocks)
    harness.add(make_request("early", [0, 1, 2] * 2, max_tokens=50, ignore_eos=True))
    harness.add(make_request("second", [1, 1, 2] * 2, max_tokens=50, ignore_eos=True))
    harness.add(make_request("third", [2, 1, 2] * 2, max_tokens=20, ignore_eos=True))
    harness.add(beam_request("beams", [2, 1] * 3, 4, max_tokens=20, ignore_eos=True, logprobs=1))
    num_preempted = num_waits = num_preempted_waiting = 0
    requests, waited, was_collapsed = harness.scheduler._state.requests, False, False
    while harness.begin() is not None:
        beams = requests["beams"].beams if "beams" in requests else None
        collapsed = beams is not None and beams.collapsed
        num_preempted += collapsed and not was_collapsed
        num_preempted_waiting += collapsed and waited
        harness.finish()
        assert "beams" not in requests or not any(map(harness.scheduler._state.swaps.holds, requests["beams"].sequences))
        waited, was_collapsed = "beams" in requests and beams is not None and bool(beams.rows), collapsed
        num_waits += waited
    harness.check_texts()
    harness.check_idle()
    return num_preempted, num_waits, num_preempted_waiting


@pytest.mark.parametrize("num_host_blocks", [0, 100])
@pytest.mark.parametrize("caching", [True, False])
def test_beams_are_preempted_together_and_go_on_from_their_tokens(caching: bool, num_host_blocks: int) -> None:
    counts = [run_tight(num_blocks, caching, num_host_blocks) for num_blocks in range(80, 108, 4)]
    num_preempted, num_waits, num_preempted_waiting = map(sum, zip(*counts, strict=True))
    assert num_preempted >= 6 and num_waits >= 6
    assert num_preempted_waiting > 0 or caching  # shared blocks make the rests too short for it


def test_others_are_swapped_out_beside_beams() -> None:
    """Beams and choices preempt each other's requests: those that come later go to host memory, the beams never do."""
    harness = Harness(num_blocks=30, block_size=2, max_num_seqs=8, budget=12, caching=False, num_host_blocks=40, preemption="swap")
    harness.add(beam_request("first", [2, 1] * 3, 3, max_tokens=16, ignore_eos=True))
    harness.add(make_request("choices", [0, 1, 2], n=2, max_tokens=24, ignore_eos=True))
    harness.add(beam_request("last", [1, 1, 2], 3, max_tokens=16, ignore_eos=True))
    was_collapsed = False
    while harness.step() is not None:
        state = harness.scheduler._state
        saved = [seq.request.request_id for seq in state.waiting if state.swaps.holds(seq)]
        assert set(saved) <= {"choices"}
        was_collapsed |= any(owner.beams is not None and owner.beams.collapsed for owner in state.requests.values())
    stats = harness.scheduler.stats
    assert was_collapsed and stats.num_swap_preemptions >= 2 and stats.num_swap_preemptions < stats.num_preemptions
    harness.check_texts()
    harness.check_idle()


def steps_that_a_trunk_waits(lookahead: int, num_blocks: int) -> int:
    """Steps in which the trunk alone would fit, but not all that the beams behind it lack, and what they and the others grow by."""
    harness = Harness(num_blocks, 1, max_num_seqs=7, budget=8, caching=False, lookahead=lookahead)
    harness.add(make_request("early", [0, 1, 2] * 2, max_tokens=50, ignore_eos=True))
    harness.add(make_request("second", [0, 1, 2] * 2, max_tokens=26, ignore_eos=True))
    harness.add(beam_request("beams", [2, 1] * 3, 4, max_tokens=20, ignore_eos=True))
    state, num_waited = harness.scheduler._state, 0
    while harness.begin() is not None:
        owner = state.requests.get("beams")
        if owner is not None and owner.beams is not None and owner.beams.collapsed:
            (trunk,) = owner.sequences
            if trunk.status is SequenceStatus.WAITING:
                num_waited += state.kv.num_missing(trunk) <= state.kv.pool.num_available
            else:
                assert owner.beams.num_missing(state.kv, trunk) <= state.kv.pool.num_available
                assert trunk.num_tokens_at_return == owner.num_known(trunk) > len(trunk.token_ids)
        harness.finish()
    assert harness.scheduler.stats.num_preemptions == 4, "each beam once"
    harness.check_texts()
    return num_waited


@pytest.mark.parametrize("num_blocks", [68, 76])
def test_a_trunk_comes_back_once_when_all_beams_behind_it_have_room(num_blocks: int) -> None:
    assert 0 < steps_that_a_trunk_waits(1, num_blocks) < steps_that_a_trunk_waits(6, num_blocks)


def test_fair_order_charges_each_beam_for_its_tokens() -> None:
    """As for as many choices, once for each position; what is computed again is free."""
    harness = Harness(num_blocks=40, block_size=1, max_num_seqs=6, budget=8, caching=False, policy="fair")
    harness.add(make_request("early", [0, 1, 2], max_tokens=26, ignore_eos=True, user="a"))
    harness.add(beam_request("beams", [2, 1, 0], 3, max_tokens=10, ignore_eos=True, user="b"))
    order, served = harness.scheduler._state.order, dict[str, float]()
    while harness.step() is not None:
        for key in "ab":
            served[key] = order.served(key) or served.get(key, 0.0)  # type: ignore[attr-defined]
    assert served["b"] == PROMPT_TOKEN_COST * 3 + OUTPUT_TOKEN_COST * (1 + 3 * 8)  # the last round ends the request
    harness.check_texts()


def test_a_pool_that_holds_the_worst_case_and_no_more() -> None:
    """The prompt's full blocks once and the rest for each beam; max_tokens is what that leaves."""
    harness = Harness(num_blocks=1 + 3 * 2, block_size=4, max_num_seqs=3, caching=False)
    request = beam_request("r", [0, 1, 2, 0, 1], 3, ignore_eos=True)
    assert harness.scheduler.limits.max_output_tokens(request) == (1 + 2) * 4 + 1 - 5
    harness.run_all([request])
    assert harness.scheduler.stats.num_preemptions == 0
    harness.check_idle()


def test_beams_share_their_common_history() -> None:
    harness = Harness(num_blocks=40, block_size=2, max_num_seqs=4, caching=False)
    harness.add(beam_request("r", [0, 1, 2, 0, 1, 2, 0], 4, max_tokens=12, ignore_eos=True))
    while harness.begin() is not None:
        plan = harness.plans[-1]
        tables = [tuple(piece.block_table[: -(-(piece.start + piece.num_tokens) // 2)]) for piece in plan.slices]
        for table in tables:
            assert table[:3] == tables[0][:3]
        assert harness.scheduler.num_used_blocks == len({block for table in tables for block in table})
        harness.finish()
    harness.check_texts()


def test_losing_beams_give_their_blocks_back_at_once() -> None:
    """One finished hypothesis ends the search of width 1: nothing is held after its step."""
    harness = Harness(num_blocks=20, block_size=2)
    harness.run_all([beam_request("r", [1, 2], 1, early=True, max_tokens=20)])
    harness.check_idle()


@pytest.mark.parametrize("stay", range(1, 8))
def test_abort_in_mid_run(stay: int) -> None:
    harness = Harness(num_blocks=24, block_size=2, max_num_seqs=4)
    harness.add(beam_request("r", [0, 1, 2], 4, 2, max_tokens=10, ignore_eos=True))
    for _ in range(stay):
        harness.step()
    harness.begin()
    events = harness.abort("r")
    assert [(e.choice, e.finish_reason, e.token_ids) for e in events] == [(0, FinishReason.ABORT, []), (1, FinishReason.ABORT, [])]
    harness.finish()
    harness.check_idle()


def test_each_choice_is_one_event_with_its_whole_hypothesis() -> None:
    harness = Harness(num_blocks=40, block_size=4)
    harness.add(beam_request("r", [0, 1, 2], 3, 2, max_tokens=6))
    events = []
    while harness.begin() is not None:
        assert harness.pending is not None
        result, harness.pending = harness.pending, None
        events.append(harness.scheduler.apply(result))
    assert [len(e) for e in events] == [0] * (len(events) - 1) + [2]
    assert [e.choice for e in events[-1]] == [0, 1] and all(e.finish_reason is not None and e.token_ids for e in events[-1])
    assert harness.scheduler.stats.num_finished == 2
    assert harness.scheduler.stats.num_output_tokens == sum(len(e.token_ids) for e in events[-1])


def test_nothing_to_take_is_an_error_of_the_request() -> None:
    harness = Harness()
    request = beam_request("r", [0, 1], 2, max_tokens=4, min_tokens=2, stop_token_ids=(0, 1, 2, EOS))
    harness.add(request)
    other = make_request("other", [1], max_tokens=2)
    harness.add(other)
    harness.run()
    assert harness.texts["r", 0].finish_reason is harness.texts["r", 1].finish_reason is FinishReason.ERROR
    harness.check_texts()
    harness.check_idle()


def test_more_beams_than_places_are_refused() -> None:
    with pytest.raises(ParameterError, match="beam_width: 5 .* at most max_num_seqs"):
        Harness(max_num_seqs=4).scheduler.add(beam_request("r", [0], 5, 1, max_tokens=3))


@pytest.mark.parametrize("reservation", ["max", "pow2", "oracle"])
def test_reserved_memory_takes_no_beams(reservation: str) -> None:
    cache = CacheConfig(block_size=4, enable_prefix_caching=False, kv_reservation=reservation)
    scheduler = Scheduler(SchedulerConfig(8, 16), cache, num_blocks=64, max_model_len=32)
    with pytest.raises(ParameterError, match="beam_width: 2 .* beam search needs kv_reservation paged"):
        scheduler.add(beam_request("r", [0], 2, max_tokens=3))
