"""Who may be given prompts, who computes one and who goes on with it, by roles."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.distributed.role_router import RoleRouter
from octavo.distributed.roles import RolePools
from octavo.distributed.router import RouteRequest, ShortestQueue


@dataclass
class View:
    index: int
    pending_s: float = 0.0
    num_available_blocks: int = 100
    num_sequences: int = 0

    @property
    def pending_tokens(self) -> int:
        return int(1000 * self.pending_s)


def router_of(roles: dict[int, str], views: list[View], may_borrow: bool = True) -> RoleRouter:
    pools = RolePools(ShortestQueue(), may_borrow=may_borrow)
    for index, role in roles.items():
        pools.add(index, role, 100)
    return RoleRouter(ShortestQueue(), pools, lambda: views, lambda: 1000.0)


PAIR = {0: "prefill", 1: "decode"}


def test_a_prompt_goes_to_prefill_and_its_answer_to_decode() -> None:
    views = [View(0), View(1)]
    router = router_of(PAIR, views)
    places = router.entries(views)
    assert places == [0]
    assert router.choose(RouteRequest("a", 100), [views[0]]) == 0 and router.receiver_of("a") == 1
    router.ended("a", 5)
    assert router.receiver_of("a") is None


def test_an_attempt_that_was_lost_is_placed_anew() -> None:
    views = [View(0), View(1), View(2)]
    router = router_of({**PAIR, 2: "decode"}, views)
    router.choose(RouteRequest("a", 100), [views[0]])
    first = router.receiver_of("a")
    assert first is not None
    router.pools.remove(first)
    del views[first]
    router.choose(RouteRequest("a", 100), [views[0]])
    assert router.receiver_of("a") == 3 - first
    router.pools.check_invariants()


def test_decode_workers_are_given_prompts_when_all_others_are_busy() -> None:
    views = [View(0, pending_s=5.0), View(1)]
    router = router_of(PAIR, views)
    assert router.entries(views) == [0, 1]
    assert router.choose(RouteRequest("a", 100), views) == 1 and router.receiver_of("a") is None
    assert router.pools.mixed() == [1]
    kept = router_of(PAIR, views, may_borrow=False)
    assert kept.entries(views) == [0]
    assert kept.choose(RouteRequest("a", 100), [views[0]]) == 0 and kept.receiver_of("a") == 1


def test_without_prefill_workers_the_others_answer_whole_requests() -> None:
    views = [View(1)]
    for may_borrow in (True, False):
        router = router_of({1: "decode"}, views, may_borrow)
        assert router.entries(views) == [0]
        assert router.choose(RouteRequest("a", 100), views) == 0 and router.receiver_of("a") is None


def test_workers_that_do_both_hand_nothing_over() -> None:
    views = [View(0, pending_s=0.2), View(1)]
    router = router_of({0: "both", 1: "both"}, views)
    assert router.entries(views) == [0, 1]
    assert router.choose(RouteRequest("a", 100), views) == 1 and router.receiver_of("a") is None
