"""Requests that wait for the worker where their beginning is cached: as long as they are better off for it, and at nobody's cost."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.distributed.delays import RECHECK_S
from octavo.distributed.dispatcher import Backpressure, Dispatcher, Unroutable
from octavo.distributed.fair_queue import FairQueue
from octavo.distributed.role_router import RoleRouter
from octavo.distributed.roles import RolePools
from octavo.distributed.soonest import SoonestDone
from octavo.distributed.told_load import Told, ToldLoad
from octavo.distributed.views import Costs, EngineView, RouteRequest, Wait
from tests.distributed.views import View, keys, route

TEXTS = [letter * 130 for letter in "abc"]  # 2,080 tokens each in blocks of 16


class Milliseconds(Costs):
    """A token takes a millisecond, whichever it is."""

    def prompt_s(self, engine: EngineView, start: int, num_tokens: int) -> float:
        return num_tokens * 1e-3

    def token_s(self, engine: EngineView, num_sequences: int, num_context: int) -> float:
        return 1e-3


def router_of(*cached: str) -> SoonestDone:
    """``cached``: the text that each engine has."""
    router = SoonestDone(16, Milliseconds())
    for index, text in enumerate(cached):
        if text:
            router.told(index, keys(text), ())
    return router


def busy(index: int, seconds: float) -> View:
    return View(index, pending_tokens=int(1000 * seconds), num_sequences=1, pending_s=seconds)


def asked(name: str, text: str = TEXTS[0], **options: object):  # type: ignore[no-untyped-def]
    return route(name, 2090, prefix_keys=keys(text), **options)


def sent(dispatcher: Dispatcher, engines: list[View], now: float) -> list[tuple[str, int]]:
    found = []
    while (one := dispatcher.next(engines, now)) is not None:
        found.append((one[0].request_id, engines[one[1]].index))
    dispatcher.check_invariants()
    return found


def test_a_prompt_that_is_cached_where_work_waits_goes_there_when_it_takes_more() -> None:
    """2.1 s at the idle one, against 0.7 s of waiting and ten tokens."""
    dispatcher = Dispatcher(router_of(TEXTS[0]))
    engines = [busy(0, 0.7), View(1)]
    dispatcher.submit(asked("a"), engines, 0.0)
    assert sent(dispatcher, engines, 0.0) == []
    engines[0] = busy(0, 0.4)
    assert sent(dispatcher, engines, 0.3) == [("a", 0)]


def test_others_pass_and_nobody_pays_for_waiting() -> None:
    """One of the same user and one of another, both new; then the one that has waited goes first, though two came for the same worker."""
    dispatcher = Dispatcher(router_of(TEXTS[0]), queue=FairQueue(quantum=4096))
    engines = [busy(0, 0.7), View(1), View(2)]
    dispatcher.submit(asked("a", user="x"), engines, 0.0)
    dispatcher.submit(asked("b", TEXTS[1], user="x"), engines, 0.0)
    dispatcher.submit(asked("c", TEXTS[2], user="y"), engines, 0.0)
    assert {name for name, _ in sent(dispatcher, engines, 0.0)} == {"b", "c"}
    engines[1], engines[2] = busy(1, 2.0), busy(2, 2.0)
    dispatcher.submit(asked("d", user="x"), engines, 0.1)
    engines[0] = busy(0, 0.1)
    found = dispatcher.next(engines, 0.6)
    assert found is not None and (found[0].request_id, found[1]) == ("a", 0)


@pytest.mark.parametrize("left_s", [1.0, 3.0])
def test_it_goes_elsewhere_when_the_prediction_has_turned(left_s: float) -> None:
    """The worker is given more by others. Another one that works as well is spared what it need not compute: that counts twice."""
    dispatcher = Dispatcher(router_of(TEXTS[0]))
    engines = [busy(0, 0.7), busy(1, 0.1)]
    dispatcher.submit(asked("a"), engines, 0.0)
    assert sent(dispatcher, engines, 0.0) == []
    engines[0] = busy(0, left_s)
    assert sent(dispatcher, engines, RECHECK_S / 2) == [], "not asked again yet"
    engines[0] = busy(0, 0.1 + left_s + 2.09)
    assert sent(dispatcher, engines, 2 * RECHECK_S) == ([("a", 1)] if left_s > 2.0 else [])


def test_beside_an_idle_one_seconds_count_as_the_request_has_them() -> None:
    dispatcher = Dispatcher(router_of(TEXTS[0]))
    engines = [busy(0, 2.5), View(1)]
    dispatcher.submit(asked("a"), engines, 0.0)
    assert sent(dispatcher, engines, 0.0) == [("a", 1)], "2.1 s, where the work that is spared would make up for 4.2"
    other = Dispatcher(router_of(TEXTS[0]))
    other.submit(asked("b"), engines, 0.0)
    assert sent(other, [busy(0, 1.9), busy(1, 0.1), View(2)], 0.0) == [], "better off at the first than at either"
    assert sent(other, [busy(0, 2.2), busy(1, 0.1), View(2)], 1.0) == [("b", 2)]


def test_it_waits_no_longer_than_it_would_have_taken_elsewhere() -> None:
    """Whatever is predicted in the meantime: the worker stays where it is."""
    dispatcher = Dispatcher(router_of(TEXTS[0]))
    engines = [busy(0, 0.7), View(1)]
    dispatcher.submit(asked("a"), engines, 10.0)
    elsewhere_s = 2.09 + 0.128  # and its answer
    now = 10.0
    while now < 10.0 + elsewhere_s - 0.1:
        assert sent(dispatcher, engines, now) == []
        now += 0.1
    assert sent(dispatcher, engines, 10.0 + elsewhere_s + 1e-9) == [("a", 1)]
    assert len(dispatcher) == 0 and not dispatcher.set_aside()


def test_so_many_wait_and_no_more_and_none_takes_room_from_others() -> None:
    dispatcher = Dispatcher(router_of(TEXTS[0]), Backpressure(most_delayed=2, most_waiting=0))
    engines = [busy(0, 0.7), View(1)]
    for name in "abc":
        dispatcher.submit(asked(name), engines, 0.0)
        assert sent(dispatcher, engines, 0.0) == []
        if name == "a":
            assert dispatcher.withdraw("a")
    assert [one.request_id for one in dispatcher.set_aside()] == ["b", "c"]
    dispatcher.submit(asked("d"), engines, 0.0)
    assert sent(dispatcher, engines, 0.0) == [("d", 1)]
    nobody = Dispatcher(router_of(TEXTS[0]), Backpressure(most_delayed=0))
    nobody.submit(asked("a"), engines, 0.0)
    assert sent(nobody, engines, 0.0) == [("a", 1)]


def test_a_worker_that_could_not_hold_it_is_not_waited_for_and_one_that_is_gone_no_longer() -> None:
    dispatcher = Dispatcher(router_of(TEXTS[0]), holds=lambda request, view: view.index != 0)
    engines = [busy(0, 0.7), View(1)]
    dispatcher.submit(asked("a"), engines, 0.0)
    assert sent(dispatcher, engines, 0.0) == [("a", 1)]
    other = Dispatcher(router_of(TEXTS[0]))
    other.submit(asked("a"), engines, 0.0)
    assert sent(other, engines, 0.0) == []
    assert sent(other, [View(1)], 0.0) == [("a", 1)]


def test_what_strikes_the_router_strikes_one_request() -> None:
    class Faulty(SoonestDone):
        def waits_for(self, request, engines, open_places):  # type: ignore[no-untyped-def]
            if request.request_id == "bad":
                raise ZeroDivisionError("of ours")
            return super().waits_for(request, engines, open_places)

    dispatcher = Dispatcher(Faulty(16, Milliseconds()))
    engines = [busy(0, 0.7), View(1)]
    for name in ("bad", "good"):
        dispatcher.submit(asked(name), engines, 0.0)
    with pytest.raises(Unroutable) as struck:
        dispatcher.next(engines, 0.0)
    assert struck.value.request_id == "bad" and isinstance(struck.value.__cause__, ZeroDivisionError)
    assert sent(dispatcher, engines, 0.0) == [("good", 1)] and len(dispatcher) == 0


def test_with_roles_only_those_whose_role_it_is_are_waited_for() -> None:
    prompts = router_of(TEXTS[0])
    pools = RolePools(prompts)
    for index, role in enumerate(("prefill", "prefill", "decode")):
        pools.add(index, role, 1000)
    views = [busy(0, 0.7), View(1), View(2)]
    router = RoleRouter(prompts, pools, lambda: views, lambda: 0.0)
    found = router.waits_for(asked("a"), [views[1], views[0]], {0})
    assert found is not None and found.place == 1 and found.elsewhere_s == pytest.approx(2.218)
    pressed = [busy(0, 1.5), busy(1, 1.5), views[2]]
    assert router.waits_for(asked("a"), pressed, {2}) is None, "somebody is borrowed instead"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.floats(0.0, 1.0)), min_size=1, max_size=60), st.integers(0, 4))
def test_no_request_waits_too_long_and_none_is_blocked(moves: list[tuple[int, int, float]], most_delayed: int) -> None:
    """Engines compute what they are sent, second by second. After each look: whoever waits though some engine takes more is counted, is
    not better off at an idle one, and has waited no longer than its prompt and answer would have taken at once."""
    router = router_of(*TEXTS)
    dispatcher = Dispatcher(router, Backpressure(most_delayed=most_delayed))
    engines, work, now = [View(index) for index in range(3)], [0.0, 0.0, 0.0], 0.0
    since: dict[str, float] = {}
    for number, (text, user, pause_s) in enumerate(moves):
        request = asked(str(number), TEXTS[text], user=str(user))
        dispatcher.submit(request, engines, now)
        since[request.request_id] = now
        for _ in range(4):
            while (found := dispatcher.next(engines, now)) is not None:
                place = found[1]
                work[place] += (found[0].num_prompt - router.num_cached(found[0].request_id)) * 1e-3
                engines[place] = busy(place, work[place])
                del since[found[0].request_id]
            dispatcher.check_invariants()
            takes = [dispatcher.limits.takes_more(engine) for engine in engines]
            delayed = {one.request_id for one in dispatcher.set_aside()}
            assert len(delayed) <= most_delayed
            if any(takes):
                assert delayed == since.keys(), "the queue is blocked behind one that waits"
            now += pause_s / 4
            work = [max(0.0, seconds - pause_s / 4) for seconds in work]
            engines = [busy(i, seconds) if seconds else View(i) for i, seconds in enumerate(work)]
    for _ in range(400):
        now += 0.25
        work = [max(0.0, seconds - 0.25) for seconds in work]
        engines = [busy(i, seconds) if seconds else View(i) for i, seconds in enumerate(work)]
        while (found := dispatcher.next(engines, now)) is not None:
            work[found[1]] += 0.01
            engines[found[1]] = busy(found[1], work[found[1]])
            del since[found[0].request_id]
    assert not since and len(dispatcher) == 0


def test_what_is_cached_is_no_work_of_a_worker_that_has_not_told_of_it_yet() -> None:
    """Else each turn of a conversation that is sent makes its worker look busy with all that was said before."""
    view = ToldLoad(0, num_blocks=1000)
    view.sent(2090, 2080)
    assert (view.pending_tokens, view.num_sequences) == (10, 1)
    assert view.num_available_blocks == 1000 - 131, "what is cached is in use now"
    view.sent(100, 100)
    assert view.pending_tokens == 11, "the last token is computed in any case"
    view.told(replace(Told(), num_received=1, num_available_blocks=869))
    assert (view.pending_tokens, view.num_available_blocks) == (1, 869 - 7)
    router = router_of(TEXTS[0])
    assert router.choose(asked("a"), [View(0), View(1)]) == 0 and router.num_cached("a") == 2080
    router.ended("a", 5)
    assert router.num_cached("a") == 0


class Counting(SoonestDone):
    """How often it was asked whether somebody had better wait."""

    num_asked = 0

    def waits_for(self, request: RouteRequest, engines: Seq[EngineView], open_places: AbstractSet[int]) -> Wait | None:
        self.num_asked += 1
        return super().waits_for(request, engines, open_places)


def test_workers_that_nobody_waits_for_have_nobody_asked_about_however_often_they_fill() -> None:
    """Eight wait for the first of 16 workers, while the others take more and no more in turn, as they do all the time."""
    router = Counting(16, Milliseconds())
    router.told(0, keys(TEXTS[0]), ())
    dispatcher = Dispatcher(router)
    engines = [busy(0, 0.7), *(busy(index, 0.4) for index in range(1, 16))]
    for number in range(8):
        dispatcher.submit(asked(str(number)), engines, 0.0)
    assert sent(dispatcher, engines, 0.0) == sent(dispatcher, engines, 0.0) == [] and len(dispatcher) == 8
    num_asked = router.num_asked
    for number in range(100):
        engines[1 + number % 15] = busy(1 + number % 15, (0.6, 0.4)[number // 15 % 2])
        assert sent(dispatcher, engines, RECHECK_S * number / 101) == []
    assert router.num_asked == num_asked
    assert sent(dispatcher, engines, RECHECK_S) == [] and router.num_asked == num_asked + 8
    num_asked += 8
    engines[3] = View(3)
    assert sent(dispatcher, engines, 1.5 * RECHECK_S) == [] and router.num_asked == num_asked + 8, "one is idle now"
    engines[0] = busy(0, 0.4)
    assert ("0", 0) in sent(dispatcher, engines, 1.5 * RECHECK_S)


@pytest.mark.parametrize(("num_waiting", "num_predictions"), [(4, 4 * 20), (32, 8 * 20)])
def test_however_many_wait_predictions_are_few(num_waiting: int, num_predictions: int) -> None:
    """In a second, in which engines only work on."""
    router = Counting(16, Milliseconds())
    router.told(0, keys(TEXTS[0]), ())
    dispatcher, engines = Dispatcher(router), [busy(0, 0.7), busy(1, 0.4)]
    for number in range(num_waiting):
        dispatcher.submit(asked(str(number)), engines, 0.0)
    assert sent(dispatcher, engines, 0.0) == [] and len(dispatcher) == num_waiting
    num_asked = router.num_asked
    for millisecond in range(1, 1001):
        assert sent(dispatcher, engines, millisecond * 1e-3) == []
    assert 0 < router.num_asked - num_asked <= num_predictions + 2 * num_waiting
