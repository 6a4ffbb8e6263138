from __future__ import annotations

from dataclasses import dataclass

import pytest

from octavo.distributed.router import ROUTERS, PrefixAffinity, RoundRobin, RouteRequest, ShortestQueue, create_router


@dataclass
class View:
    index: int
    pending_tokens: int = 0
    num_sequences: int = 0
    num_available_blocks: int = 0
    num_blocks: int = 0
    pending_s: float = 0.0


def request(session: str | None = None, keys: tuple[bytes, ...] = ()) -> RouteRequest:
    return RouteRequest("r", 100, None, session, keys)


def test_round_robin_takes_turns() -> None:
    router, engines = RoundRobin(), [View(0), View(1), View(2)]
    assert [router.choose(request(), engines) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert router.choose(request(), engines[:1]) == 0


def test_the_shortest_queue_counts_tokens_then_sequences_then_place() -> None:
    engines = [View(0, 5, 1), View(1, 4, 9), View(2, 4, 2), View(3, 4, 2)]
    assert ShortestQueue().choose(request(), engines) == 2


def test_by_seconds_a_fast_engine_takes_more() -> None:
    engines = [View(0, pending_tokens=100, pending_s=2.0), View(1, pending_tokens=150, pending_s=1.0)]
    assert ShortestQueue(by_seconds=True).choose(request(), engines) == 1
    assert ShortestQueue().choose(request(), engines) == 0


def test_a_session_stays_unless_its_engine_is_far_behind() -> None:
    router, engines = PrefixAffinity(16, max_extra_tokens=50), [View(0), View(1)]
    assert router.choose(request("a"), engines) == 0
    engines[0].pending_tokens = 50
    assert router.choose(request("a"), engines) == 0
    assert router.choose(request("b"), engines) == 1
    engines[0].pending_tokens = 51
    assert router.choose(request("a"), engines) == 1
    engines[0].pending_tokens = 0
    engines[1].pending_tokens = 50
    assert router.choose(request("a"), engines) == 1  # it has moved


def test_the_longest_beginning_counts_and_is_worth_its_length() -> None:
    router, engines = PrefixAffinity(16, max_extra_tokens=0), [View(0), View(1)]
    assert router.choose(request(keys=(b"1", b"2")), engines) == 0
    engines[0].pending_tokens = 20
    assert router.choose(request(keys=(b"1", b"2", b"4")), engines) == 0  # 32 tokens are known there
    engines[0].pending_tokens = 33
    assert router.choose(request(keys=(b"1", b"2")), engines) == 1


def test_engines_may_come_in_another_order_or_be_gone() -> None:
    router, engines = PrefixAffinity(16), [View(0), View(1), View(2)]
    engines[0].pending_tokens = engines[1].pending_tokens = 1
    assert router.choose(request("a"), engines) == 2
    assert router.choose(request("a"), [engines[2], engines[0]]) == 0
    assert router.choose(request("a"), engines[:2]) == 0


def test_what_is_remembered_is_bounded() -> None:
    router, engines = PrefixAffinity(16, num_remembered=2), [View(0), View(1)]
    assert router.choose(request("a"), engines) == 0
    engines[0].pending_tokens = 1
    for session in ("b", "c"):
        assert router.choose(request(session), engines) == 1
    assert router.choose(request("a"), engines) == 1  # forgotten


def test_routers_by_name() -> None:
    for name in ROUTERS:
        assert create_router(name).choose(request(), [View(0)]) == 0
    with pytest.raises(ValueError, match="router: 'x' is not allowed; one of shortest-queue"):
        create_router("x")


def test_what_a_worker_had_its_successor_has_not() -> None:
    """It gets the number of the one that is gone, and none of its cache: what is known of the beginning elsewhere counts, else nothing."""
    router, keys = PrefixAffinity(16), (b"a", b"b", b"c")
    assert router.choose(request("s", keys), [View(0), View(1, 9)]) == 0
    assert router.choose(request("s", keys), [View(0, 100), View(1)]) == 0
    router.gone(0)
    assert router.choose(request("s", keys), [View(0, 100), View(1)]) == 1
    assert router.choose(request("s", (*keys, b"d")), [View(0), View(1, 50)]) == 1
    assert router.choose(request("t", (b"x",)), [View(0), View(1, 50)]) == 0
    router.gone(1)
    assert router.choose(request("s"), [View(0), View(1, 50)]) == 0
