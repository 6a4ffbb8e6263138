"""What a front end holds back, sends and refuses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.distributed.dispatcher import Backpressure, Dispatcher, QueueFull
from octavo.distributed.role_router import RoleRouter
from octavo.distributed.roles import RolePools
from octavo.distributed.router import RoundRobin, ShortestQueue, SoonestDone
from octavo.distributed.told_load import Told, ToldLoad
from octavo.distributed.views import EngineView, RouteRequest
from tests.distributed.views import View, route


def test_an_idle_engine_takes_one_whatever_the_limits() -> None:
    limits = Backpressure(most_pending_s=0.0, most_sequences=1)
    assert limits.takes_more(View(0, pending_s=9.0)) and not limits.takes_more(View(0, num_sequences=1))
    assert not Backpressure(most_pending_s=1.0).takes_more(View(0, num_sequences=1, pending_s=1.1))
    assert Backpressure(most_pending_s=1.0).takes_more(View(0, num_sequences=99, pending_s=1.0))


def test_the_token_that_a_sequence_is_at_does_not_wait() -> None:
    """A model whose steps take longer than the limit still runs several requests at a time."""
    limits = Backpressure(most_pending_s=0.5)
    assert limits.takes_more(View(0, pending_tokens=3, num_sequences=3, pending_s=8.0))
    assert not limits.takes_more(View(0, pending_tokens=103, num_sequences=3, pending_s=8.0))
    assert limits.takes_more(View(0, pending_tokens=103, num_sequences=3, pending_s=0.5))
    assert limits.takes_more(View(0, pending_tokens=2, num_sequences=3, pending_s=8.0))  # one of them waits for its KV


def test_requests_wait_in_order_until_an_engine_takes_more() -> None:
    engines = [View(0, num_sequences=1, pending_s=2.0), View(1, num_sequences=1, pending_s=2.0)]
    desk = Dispatcher(ShortestQueue(), Backpressure(most_pending_s=1.0))
    for name in ("a", "b"):
        desk.submit(route(name), engines, 0.0)
    assert desk.next(engines, 0.0) is None and len(desk) == 2 and [r.request_id for r in desk.waiting_requests()] == ["a", "b"]
    engines[1].pending_s = 0.5
    request, place = desk.next(engines, 1.0) or pytest.fail("nobody goes")
    assert (request.request_id, place, desk.num_sent, len(desk)) == ("a", 1, 1, 1)
    engines[1].pending_s = 2.0
    assert desk.next(engines, 1.0) is None
    assert desk.withdraw("b") and not desk.withdraw("b") and not desk.withdraw("a")
    desk.ended("a", 3)
    desk.ended("a", 3)
    assert (len(desk), desk.num_sent) == (0, 0)
    desk.check_invariants()


def test_the_queue_is_bounded_and_says_so() -> None:
    engines = [View(0, num_sequences=1, pending_s=2.0)]
    desk = Dispatcher(RoundRobin(), Backpressure(1.0, most_waiting=2, most_waiting_tokens=150))
    desk.submit(route("a", 100), engines, 0.0)
    with pytest.raises(QueueFull, match="waiting prompt tokens: 160 is not allowed; at most 150 wait for a worker"):
        desk.submit(route("b", 60), engines, 0.0)
    desk.submit(route("c", 50), engines, 0.0)
    with pytest.raises(QueueFull, match="waiting requests: 3 is not allowed; at most 2") as refusal:
        desk.submit(route("d", 1), engines, 0.0)
    assert refusal.value.retry_after_s == 2.0 and desk.num_refused == 2 and len(desk) == 2
    with pytest.raises(ValueError, match="'a' is not allowed; it is not over yet"):
        desk.submit(route("a"), engines, 0.0)


def test_whoever_can_go_at_once_needs_no_room_in_the_queue() -> None:
    desk, engines = Dispatcher(RoundRobin(), Backpressure(most_waiting=0)), [View(0)]
    desk.submit(route("a"), engines, 0.0)
    assert desk.next(engines, 0.0) is not None
    engines[0].num_sequences, engines[0].pending_s = 1, 9.0
    with pytest.raises(QueueFull):
        desk.submit(route("b"), engines, 0.0)
    with pytest.raises(QueueFull) as refusal:
        desk.submit(route("b"), [], 0.0)
    assert refusal.value.retry_after_s is None


def test_what_was_on_a_lost_engine_may_be_sent_again() -> None:
    desk, engines = Dispatcher(RoundRobin()), [View(0), View(1)]
    for name in ("a", "b", "c"):
        desk.submit(route(name), engines, 0.0)
        desk.next(engines, 0.0)
    assert desk.gone(0) == ["a", "c"] and desk.num_sent == 1
    desk.submit(route("a"), engines[1:], 1.0)
    assert desk.next(engines[1:], 1.0) == (route("a"), 0)
    desk.check_invariants()


def test_a_request_that_was_lost_goes_before_those_of_its_key_that_came_later() -> None:
    desk, engines = Dispatcher(RoundRobin()), [View(0)]
    for i in range(3):
        desk.submit(route(str(i)), engines, float(i))
    assert desk.next(engines, 3.0) == (route("0"), 0)
    desk.resubmit(route("0"), 0.0)
    assert [desk.next(engines, 4.0) for _ in range(3)] == [(route(name), 0) for name in "012"]
    with pytest.raises(ValueError, match="waits already"):
        desk.submit(route("3"), engines, 5.0)
        desk.resubmit(route("3"), 5.0)


@pytest.mark.parametrize("alone", [True, False])
def test_nothing_is_promised_to_a_request_that_was_lost_until_it_is_sent_again(alone: bool) -> None:
    """Its decode worker is there and has kept room for it: the request may end before it goes anywhere again."""
    views = [View(0), View(1)]
    pools = RolePools(ShortestQueue())
    for index, role in enumerate(("prefill", "decode")):
        pools.add(index, role, 1000)
    desk = Dispatcher(RoleRouter(SoonestDone(), pools, lambda: views, lambda: 0.0))
    desk.submit(route("a"), views[:1], 0.0)
    assert desk.next(views[:1], 0.0) is not None and pools.worker(1).num_promised > 0
    if alone:
        assert desk.send_alone(route("a"), views[:1]) == 0 and desk.num_sent == 1
        desk.ended("a", 1)
    else:
        desk.resubmit(route("a"), 0.0)
        assert desk.withdraw("a")
        desk.ended("a", 0)
    assert pools.worker(1).num_promised == 0 and pools.placement("a") is None
    desk.check_invariants()
    pools.check_invariants()


class Books(ShortestQueue):
    """``there``: requests that it has chosen for, and of which it has not been told that they are lost or over."""

    def __init__(self) -> None:
        super().__init__()
        self.there = set[str]()

    def choose(self, request: RouteRequest, engines: Sequence[EngineView]) -> int:
        self.there.add(request.request_id)
        return super().choose(request, engines)

    def lost(self, request_id: str) -> None:
        self.there.discard(request_id)

    def ended(self, request_id: str, num_output: int | None) -> None:
        self.there.discard(request_id)


MOVES = st.sampled_from(["submit", "next", "end", "withdraw", "busy", "lose"])


@given(st.lists(st.tuples(MOVES, st.integers(0, 30)), max_size=60))
@example([("submit", 0), ("next", 0), ("lose", 0)])
def test_no_request_is_lost_or_sent_twice(moves: list[tuple[str, int]]) -> None:
    """And routers are told of all that becomes of those that they have chosen for: what they keep of each would pile up."""
    router = Books()
    desk = Dispatcher(router, Backpressure(1.0, most_waiting=8))
    engines = [View(0), View(1), View(2)]
    submitted, sent, over = set[str](), set[str](), set[str]()
    for number, (what, value) in enumerate(moves):
        if what == "submit":
            try:
                desk.submit(route(str(number), 1 + value, user=str(value % 3), priority=value % 2), engines, float(number))
                submitted.add(str(number))
            except QueueFull:
                assert len(desk) >= 8
        elif what == "next" and (found := desk.next(engines, float(number))) is not None:
            name = found[0].request_id
            assert name in submitted and name not in sent | over
            sent.add(name)
            engines[found[1]].num_sequences += 1
        elif what == "busy":
            engines[value % 3].pending_s = 2.0 if value % 2 else 0.0
        elif what == "lose":
            lost = set(desk.gone(value % 3))
            assert lost <= sent
            sent -= lost
            over |= lost
            engines[value % 3].num_sequences = 0
        elif what == "end" and sent:
            name = sorted(sent)[value % len(sent)]
            sent.discard(name)
            over.add(name)
            desk.ended(name, 1)
        elif what == "withdraw" and (waiting := submitted - sent - over):
            name = sorted(waiting)[value % len(waiting)]
            assert desk.withdraw(name)
            over.add(name)
        desk.check_invariants()
        assert len(desk) == len(submitted - sent - over) and desk.num_sent == len(sent)
        assert router.there == sent
    for engine in engines:
        engine.pending_s, engine.num_sequences = 0.0, 0
    while (found := desk.next(engines, 1e6)) is not None:
        sent.add(found[0].request_id)
    assert sent | over == submitted and not desk.waiting_requests()


def test_limits_are_checked() -> None:
    for name, value in (("most_pending_s", -1.0), ("most_sequences", 0), ("most_waiting", -1), ("most_waiting_tokens", 0)):
        with pytest.raises(ValueError, match=f"{name}: {value}"):
            Backpressure(**{name: value})  # type: ignore[arg-type]


# --- what an engine told, and what was sent since ---------------------------------------------------------------------------------------


def test_what_was_sent_and_not_told_of_is_added() -> None:
    load = ToldLoad(0, block_size=16, num_blocks=100, token_s=0.5)
    load.sent(20)
    load.sent(5)
    assert (load.pending_tokens, load.pending_s, load.num_sequences, load.num_available_blocks) == (25, 12.5, 2, 97)
    load.told(Told(num_received=1, pending_tokens=20, pending_s=2.0, num_sequences=1, num_available_blocks=98))
    assert (load.pending_tokens, load.pending_s, load.num_sequences, load.num_available_blocks) == (25, 2.5, 2, 97)
    load.told(Told(num_received=2, num_available_blocks=90))
    assert (load.pending_tokens, load.pending_s, load.num_sequences, load.num_available_blocks, load.num_unseen) == (0, 0.0, 0, 90, 0)
    for number in (1, 3):
        with pytest.raises(ValueError, match=f"num_received: {number} is not allowed; from 2 to 2"):
            load.told(Told(number))
    load.sent(7)
    load.reset()
    assert (load.pending_tokens, load.num_sequences, load.num_available_blocks) == (0, 0, 100)
    load.told(Told(0))


def test_what_a_step_of_few_tokens_takes_is_no_price_of_a_prompt() -> None:
    load = ToldLoad(0, token_s=0.5)
    load.told(Told(pending_tokens=1, pending_s=0.1, num_sequences=1))
    assert load.token_s == 0.1  # until it tells of a prompt
    load.told(Told(pending_tokens=101, pending_s=0.2, num_sequences=1))
    load.told(Told(pending_tokens=1, pending_s=0.1, num_sequences=1))
    load.sent(100)
    assert load.pending_s == pytest.approx(0.1 + 100 * 0.2 / 101)


def test_a_burst_between_two_reports_is_spread() -> None:
    loads = [ToldLoad(i, num_blocks=100) for i in range(4)]
    router, counts = ShortestQueue(by_seconds=True), [0] * 4
    for i in range(40):
        place = router.choose(route(str(i)), loads)
        loads[place].sent(100)
        counts[place] += 1
    assert counts == [10] * 4
