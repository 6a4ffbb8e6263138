"""What comes from other engines takes no room that somebody here waits for or is about to grow into."""

from __future__ import annotations

import pytest

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.policies.order import FairByKey
from octavo.core.request import Request, SamplingParams
from octavo.core.scheduler import Scheduler
from tests.core.test_transfers import Side, request

NUM_PROMPT = 6


class Receiver(Side):
    """Of sequences that share nothing."""

    def __init__(self, num_blocks: int, policy: str = "fcfs", lookahead: int = 2) -> None:
        settings = SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=64, admission_lookahead=lookahead, scheduling_policy=policy,  # type: ignore[arg-type]
        )  # fmt: skip
        cache = CacheConfig(block_size=4, enable_prefix_caching=False)
        self.scheduler, self.plan = Scheduler(settings, cache, num_blocks, 60), None


def job(name: str, max_tokens: int, priority: int = 0, num_prompt: int = NUM_PROMPT) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, list(range(num_prompt)), params, 5, priority=priority)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_steps_on_its_way", [0, 2, 7])
def test_who_was_preempted_comes_back_however_many_come_from_outside(policy: str, num_steps_on_its_way: int) -> None:
    """More want in than there is room for, at any time; each that came is at its end before many have come behind it."""
    side = Receiver(20, policy)
    scheduler, transfers = side.scheduler, side.scheduler.transfers
    coming, num_begun, ended = list[tuple[int, str]](), 0, list[int]()
    for step in range(800):
        while transfers.reserve(job(f"{num_begun + len(coming)}", 40 if (num_begun + len(coming)) % 3 == 0 else 12), NUM_PROMPT):
            coming.append((step, f"{num_begun + len(coming)}"))
        while coming and coming[0][0] + num_steps_on_its_way <= step:
            transfers.begin(coming.pop(0)[1], [NUM_PROMPT])
            num_begun += 1
        ended += [int(event.request_id) for event in side.step() if event.finish_reason is not None]
        scheduler.check_invariants()
        open_ones = set(range(num_begun)) - set(ended)
        assert num_begun - min(open_ones, default=num_begun) < 32, f"{min(open_ones)} never comes back"
    assert scheduler.stats.num_preemptions > 10 and len(ended) > 50


def test_those_that_are_to_come_will_have_room_to_grow() -> None:
    """Each has two blocks and will want a third: more than four of them would put each other out as soon as they begin."""
    side = Receiver(12, lookahead=4)
    reserved = [name for name in map(str, range(8)) if side.scheduler.transfers.reserve(job(name, 6), NUM_PROMPT) is not None]
    assert len(reserved) == 4
    for name in reserved:
        side.scheduler.transfers.begin(name, [NUM_PROMPT])
    while side.scheduler.has_work:
        side.step()
        side.scheduler.check_invariants()
    assert side.scheduler.stats.num_preemptions == 0 and side.scheduler.num_used_blocks == 0


def test_a_prompt_is_not_let_into_room_that_those_to_come_will_grow_into() -> None:
    side = Receiver(8, lookahead=4)
    for name in ("a", "b"):
        assert side.scheduler.transfers.reserve(job(name, 6), NUM_PROMPT) is not None
    side.scheduler.add(job("c", 6))
    assert side.step() == [] and side.scheduler.num_waiting == 1
    side.scheduler.transfers.cancel("a")
    assert [event.request_id for event in side.step()] == ["c"]


def waiting_behind(policy: str, priority: int) -> Receiver:
    """A request that runs and one of ``priority`` that waits, with room for a small one beside, and not for both."""
    side = Receiver(9, policy)
    side.scheduler.add(job("runs", 8, -9))
    side.step()
    side.scheduler.add(job("waits", 8, priority, num_prompt=24))
    side.step()
    assert (side.scheduler.num_running, side.scheduler.num_waiting) == (1, 1)
    return side


def test_the_head_of_the_queue_keeps_what_it_waits_for_from_those_behind_it() -> None:
    for policy, priority, has_room in (("fcfs", 1, False), ("priority", 0, False), ("priority", 1, True), ("priority", -1, False)):
        side = waiting_behind(policy, priority)
        assert (side.scheduler.transfers.reserve(job("comes", 8), NUM_PROMPT) is not None) == has_room, (policy, priority)
        side.scheduler.check_invariants()


def test_places_that_the_head_of_the_queue_waits_for_are_its_own() -> None:
    side = Side(num_blocks=40, max_num_seqs=3)
    side.scheduler.add(request("runs"))
    side.step()
    side.scheduler.add(request("waits", n=3))
    assert side.scheduler.transfers.reserve(request("comes"), 6) is None


def test_whose_key_is_not_at_work_is_ranked_as_if_it_came_now() -> None:
    order, old, new = FairByKey(), Request("a", [1], SamplingParams(), 0, user="old"), Request("b", [1], SamplingParams(), 0, user="new")
    order.added(old)
    order.started(old)
    rank = order.rank(new, [], 1)
    order.added(new)
    assert order.rank(new, [], 1) == rank == order.rank(old, [], 1)
