"""Sequences that are offered by one scheduler and reserved by another: the books of both balance after every move."""

from __future__ import annotations

import contextlib
import random

import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.request import BeamParams, ParameterError, Request, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.step import SliceResult, StepPlan, StepResult, TokenEvent


class Side:
    """A scheduler whose sequences say their position: the token at position p is p."""

    def __init__(self, num_blocks: int = 20, caching: bool = True, **config: int) -> None:
        fields = {"max_num_seqs": 3, "max_num_batched_tokens": 8, "admission_lookahead": 2, **config}
        settings = SchedulerConfig(**fields)  # type: ignore[arg-type]
        self.scheduler = Scheduler(settings, CacheConfig(block_size=4, enable_prefix_caching=caching), num_blocks, 60)
        self.plan: StepPlan | None = None

    def begin(self) -> StepPlan | None:
        self.plan = self.scheduler.plan()
        return self.plan

    def end(self) -> list[TokenEvent]:
        plan, self.plan = self.plan, None
        assert plan is not None
        slices = [SliceResult([piece.start + piece.num_tokens] * piece.num_samples) for piece in plan.slices]
        return self.scheduler.apply(StepResult(plan.step_index, slices))

    def step(self) -> list[TokenEvent]:
        return self.end() if self.begin() is not None else []


def request(name: str, num_prompt: int = 6, max_tokens: int = 8, **params: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
    return Request(name, list(range(num_prompt)), sampling, 5)


def test_a_sequence_goes_on_where_it_was_handed_over() -> None:
    sender, receiver, job = Side(), Side(), request("a")
    sender.scheduler.add(job)
    assert [event.token_ids for event in sender.step()] == [[6]]
    tokens = sender.scheduler.transfers.offer("a")
    assert tokens == [6] and not sender.scheduler.has_work and sender.scheduler.num_used_blocks == 2
    reservation = receiver.scheduler.transfers.reserve(job, 6)
    assert reservation is not None and len(reservation.blocks) == 2 and not reservation.saves and receiver.scheduler.num_running == 1
    receiver.scheduler.transfers.begin("a", tokens)
    sender.scheduler.transfers.release("a")
    plan = receiver.begin()
    assert plan is not None
    (piece,) = plan.slices
    assert (piece.start, piece.token_ids, list(piece.block_table[:2])) == (6, [6], reservation.blocks)
    (entry,) = plan.slot_opens
    assert (entry.prompt_token_ids, entry.output_token_ids, entry.seed) == (list(range(6)), [6], 5)
    drawn = [token for event in receiver.end() for token in event.token_ids]
    while receiver.scheduler.has_work:
        drawn += [token for event in receiver.step() for token in event.token_ids]
    assert drawn == list(range(7, 14))
    for side in (sender, receiver):
        assert side.scheduler.num_used_blocks == 0
        side.scheduler.check_invariants()
    assert sender.scheduler.num_cached_blocks == 1  # the full block of the prompt can be found again


def test_nobody_takes_it_and_the_sender_goes_on() -> None:
    side = Side()
    side.scheduler.add(request("a"))
    side.step()
    side.scheduler.transfers.offer("a")
    side.scheduler.check_invariants()
    side.scheduler.transfers.resume("a")
    side.scheduler.check_invariants()
    plan = side.begin()
    assert plan is not None and plan.slices[0].token_ids == [6] and len(plan.slot_opens) == 1


def test_it_waits_for_a_place_if_others_have_them_all() -> None:
    side = Side(max_num_seqs=1)
    side.scheduler.add(request("a"))
    side.step()
    side.scheduler.transfers.offer("a")
    side.scheduler.add(request("b", max_tokens=2))
    side.step()
    side.scheduler.transfers.resume("a")
    assert (side.scheduler.num_running, side.scheduler.num_waiting, side.scheduler.stats.num_preemptions) == (1, 1, 1)
    drawn = [token for _ in range(12) for event in side.step() if event.request_id == "a" for token in event.token_ids]
    assert drawn == list(range(7, 14))


def test_without_room_or_place_nothing_is_reserved() -> None:
    receiver = Side(num_blocks=5, max_num_seqs=2)
    reserve = receiver.scheduler.transfers.reserve
    assert reserve(request("a"), 6) is not None
    assert reserve(request("b", 12), 12) is None  # three blocks, and one to grow into
    assert reserve(request("c", 3), 3) is not None
    assert reserve(request("d", 3), 3) is None  # no place
    receiver.scheduler.check_invariants()
    receiver.scheduler.transfers.cancel("a")
    receiver.scheduler.transfers.cancel("c")
    receiver.scheduler.check_invariants()
    assert receiver.scheduler.num_free_blocks == 5 and receiver.scheduler.num_running == 0


def test_what_cannot_be_handed_over_is_refused() -> None:
    side, transfers = Side(), Side().scheduler.transfers
    side.scheduler.add(request("two", n=2))
    side.scheduler.add(request("long", 20))
    side.step()
    for name in ("two", "long", "unknown"):
        with pytest.raises(ValueError, match=f"request_id: '{name}' is not allowed"):
            side.scheduler.transfers.offer(name)
    for job, num_tokens, param in (
        (request("a", n=2), 6, "n"),
        (request("a", temperature=0.0, beam=BeamParams(2)), 6, "n"),
        (request("a", 80), 80, "prompt"),
        (request("a", max_tokens=1), 6, "output_token_ids"),
        (request("a"), 5, "output_token_ids"),
        (request("a"), 13, "output_token_ids"),
    ):
        with pytest.raises(ParameterError) as error:
            transfers.reserve(job, num_tokens)
        assert error.value.param == param
    transfers.reserve(request("a"), 6)
    with pytest.raises(ParameterError, match="not finished yet"):
        transfers.reserve(request("a"), 6)
    for move in (transfers.cancel, transfers.release, transfers.resume):
        with pytest.raises(KeyError):
            move("unknown")
    with pytest.raises(KeyError):
        transfers.begin("unknown", [6])
    with pytest.raises(ParameterError, match="KV of 0 of them is reserved for"):
        transfers.begin("a", [])
    with pytest.raises(ParameterError, match="less than max_tokens, which is 8 here"):
        transfers.begin("a", list(range(6, 14)))
    assert transfers.sequences, "a begin that was refused leaves the reservation"


@pytest.mark.parametrize("num_drawn", [1, 2, 6])
def test_what_was_drawn_with_the_last_token_from_drafts_is_computed_where_it_goes_on(num_drawn: int) -> None:
    """Room was reserved for the prompt alone; more than its last row may have been drawn at once."""
    side, tokens = Side(), list(range(6, 6 + num_drawn))
    side.scheduler.transfers.reserve(request("a"), 6)
    side.scheduler.transfers.begin("a", tokens)
    side.scheduler.check_invariants()
    plan = side.begin()
    assert plan is not None and (plan.slices[0].start, plan.slices[0].token_ids) == (6, tokens)
    drawn = [token for event in side.end() for token in event.token_ids]
    while side.scheduler.has_work:
        drawn += [token for event in side.step() for token in event.token_ids]
        side.scheduler.check_invariants()
    assert tokens + drawn == list(range(6, 14)) and side.scheduler.num_used_blocks == 0


def test_kv_that_a_plan_brings_back_from_host_memory_is_not_there_before_it_has_run() -> None:
    """What sends KV on reads blocks while steps run: those of a sequence that returns hold something else until its loads are done."""
    settings = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, admission_lookahead=1, preemption="swap")
    side = Side()
    side.scheduler = Scheduler(settings, CacheConfig(block_size=4, enable_prefix_caching=False, swap_space=1), 7, 60, num_host_blocks=8)
    scheduler, loaded = side.scheduler, 0
    scheduler.add(request("a", 8, 12))
    scheduler.add(Request("b", [50 + i for i in range(7)], SamplingParams(max_tokens=12, ignore_eos=True), 5))
    while scheduler.has_work:
        plan = side.begin()
        assert plan is not None
        for name in ("a", "b"):
            seq = scheduler.transfers.sender_sequence(name)
            pages = set() if seq is None else set(seq.block_table)
            if seq is not None and any(move.pool_block in pages for move in plan.block_loads):
                loaded += 1
                assert seq.num_computed > 0 and scheduler.transfers.num_there(seq) == 0
            elif seq is not None:
                assert scheduler.transfers.num_there(seq) == seq.num_computed
        side.end()
        for seq in scheduler.running_sequences:
            assert scheduler.transfers.num_there(seq) == seq.num_computed
    assert loaded > 0


def test_after_an_engine_error_nothing_is_held() -> None:
    side = Side()
    side.scheduler.add(request("a"))
    side.step()
    side.scheduler.transfers.offer("a")
    side.scheduler.transfers.reserve(request("b"), 6)
    side.scheduler.fail_all("broken")
    side.scheduler.check_invariants()
    assert side.scheduler.num_used_blocks == 0 and side.scheduler.num_running == 0


def _num_with_kv(job: Request, output_token_ids: list[int]) -> int:
    return len(job.prompt_token_ids) + len(output_token_ids) - 1


@pytest.mark.parametrize("seed", range(25))
def test_books_balance_whatever_happens(seed: int) -> None:
    """Two sides that hand over both ways, in the middle of steps too; every request ends with all its tokens."""
    rng = random.Random(seed)
    sides = [Side(rng.randint(8, 16), rng.random() < 0.7, admission_lookahead=rng.choice((1, 8))) for _ in range(2)]
    jobs, drawn = dict[str, Request](), dict[str, list[int]]()
    offered, reserved, ended = list[tuple[int, str, list[int]]](), list[tuple[int, str, list[int]]](), set[str]()
    for turn in range(400):
        place = rng.randrange(2)
        side, move = sides[place], rng.random()
        if move < 0.1 and turn < 300:
            name = f"r{turn}"
            jobs[name], drawn[name] = request(name, rng.randint(1, 12), rng.randint(1, 12)), []
            side.scheduler.add(jobs[name])
        elif move < 0.3:
            running = [seq.request.request_id for seq in side.scheduler.running_sequences]
            if running and turn < 300:
                name = rng.choice(running)
                with contextlib.suppress(ValueError):
                    offered.append((place, name, side.scheduler.transfers.offer(name)))
        elif move < 0.5 and offered:
            place, name, tokens = offered.pop(rng.randrange(len(offered)))
            job, transfers = jobs[name], sides[1 - place].scheduler.transfers
            if rng.random() < 0.7 and transfers.reserve(job, _num_with_kv(job, tokens)) is not None:
                reserved.append((place, name, tokens))
            else:
                sides[place].scheduler.transfers.resume(name)
        elif move < 0.6 and reserved:
            place, name, tokens = reserved.pop(rng.randrange(len(reserved)))
            if rng.random() < 0.7:
                sides[1 - place].scheduler.transfers.begin(name, tokens)
                sides[place].scheduler.transfers.release(name)
            else:
                sides[1 - place].scheduler.transfers.cancel(name)
                sides[place].scheduler.transfers.resume(name)
        elif side.plan is None:
            side.begin()
        else:
            for event in side.end():
                drawn[event.request_id] += event.token_ids
                if event.finish_reason is not None:
                    ended.add(event.request_id)
        for one in sides:
            one.scheduler.check_invariants()
    for place, name, _ in offered:
        sides[place].scheduler.transfers.resume(name)
    for place, name, tokens in reserved:
        sides[1 - place].scheduler.transfers.begin(name, tokens)
        sides[place].scheduler.transfers.release(name)
    for one in sides:
        while one.plan is not None or one.scheduler.has_work:
            if one.plan is None and one.begin() is None:
                break
            for event in one.end():
                drawn[event.request_id] += event.token_ids
                if event.finish_reason is not None:
                    ended.add(event.request_id)
        one.scheduler.check_invariants()
        assert one.scheduler.num_used_blocks == 0
    assert ended == set(jobs) and len(jobs) > 10
    for name, job in jobs.items():
        start = len(job.prompt_token_ids)
        assert drawn[name] == list(range(start, start + len(drawn[name]))) and len(drawn[name]) == job.params.max_tokens
