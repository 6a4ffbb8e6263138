"""Where a request would be done soonest, by hand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pytest

from octavo.distributed.published_keys import PublishedKeys
from octavo.distributed.soonest import SoonestDone
from octavo.distributed.views import EngineView
from tests.distributed.views import View, keys, route


class TokenCosts:
    """A hundredth of a second for a prompt token; a step is a hundredth and a thousandth for each sequence."""

    def prompt_s(self, engine: EngineView, start: int, num_tokens: int) -> float:
        return 0.01 * num_tokens

    def token_s(self, engine: EngineView, num_sequences: int, num_context: int) -> float:
        return 0.01 + 0.001 * num_sequences


def router(**options: object) -> SoonestDone:
    return SoonestDone(16, TokenCosts(), **{"work_weight": 1.0, **options})  # type: ignore[arg-type]


def test_what_is_cached_is_worth_what_computing_it_takes() -> None:
    one, engines = router(), [View(0), View(1)]
    one.told(1, keys("abcd"), ())
    engines[1].pending_s = 0.63  # 64 tokens are 0.64 s
    assert one.choose(route("a", 80, num_output=1, prefix_keys=keys("abcd")), engines) == 1
    engines[1].pending_s = 0.65
    assert one.choose(route("b", 80, num_output=1, prefix_keys=keys("abcd")), engines) == 0


def test_a_prompt_that_is_all_cached_still_computes_its_last_token() -> None:
    one, engines = router(), [View(0), View(1, pending_s=0.625)]
    one.told(1, keys("abcd"), ())
    assert one.choose(route("a", 64, num_output=1, prefix_keys=keys("abcd")), engines) == 1  # 0.635 s against 0.64 s
    engines[1].pending_s = 0.635
    one.keys.ended("a")
    assert one.choose(route("b", 64, num_output=1, prefix_keys=keys("abcd")), engines) == 0


def test_computing_weighs_more_than_waiting() -> None:
    one, engines = router(work_weight=2.0), [View(0), View(1, pending_s=1.2)]
    one.told(1, keys("abcd"), ())
    assert one.choose(route("a", 80, num_output=1, prefix_keys=keys("abcd")), engines) == 1  # 64 tokens saved are 1.28 s
    with pytest.raises(ValueError, match="work_weight: 0.5"):
        router(work_weight=0.5)


def test_what_was_just_sent_counts_as_cached_until_it_ends() -> None:
    one, engines = router(), [View(0), View(1)]
    first = one.choose(route("a", 80, prefix_keys=keys("abcd")), engines)
    assert first == 0
    engines[0].num_sequences = 1
    assert one.choose(route("b", 80, num_output=10, prefix_keys=keys("abcde")), engines) == 0
    one.ended("a", 10)
    one.ended("b", 10)
    assert one.keys.num_expected == 0
    assert one.choose(route("c", 80, num_output=10, prefix_keys=keys("abcd")), engines) == 1


def test_a_beginning_that_all_share_does_not_draw_all_to_one_engine() -> None:
    one, engines = router(), [View(i) for i in range(4)]
    one.told(0, keys("abcd"), ())
    for i in range(40):
        place = one.choose(route(str(i), 80, num_output=100, prefix_keys=keys("abcd")), engines)
        engines[place].num_sequences += 1
    counts = [engine.num_sequences for engine in engines]
    assert min(counts) >= 5 and max(counts) <= 17


def test_a_session_stays_for_a_little_and_moves_for_much() -> None:
    one, engines = router(), [View(0), View(1)]
    assert one.choose(route("a", 100, num_output=1, session="s"), engines) == 0
    engines[0].pending_s = 0.09  # of 1.01 s: within a tenth
    assert one.choose(route("b", 100, num_output=1, session="s"), engines) == 0
    engines[0].pending_s = 0.2
    assert one.choose(route("c", 100, num_output=1, session="s"), engines) == 1
    engines[0].pending_s = 0.0
    engines[1].pending_s = 0.05
    assert one.choose(route("d", 100, num_output=1, session="s"), engines) == 1  # it has moved
    one.gone(1)
    assert one.choose(route("e", 100, num_output=1, session="s"), engines) == 0


class NobodyWalks(OrderedDict[str, tuple[int, int]]):
    """Of the remembered sessions, tens of thousands."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all of them were looked at")

    items = values = __iter__  # type: ignore[assignment]


def test_an_engine_that_goes_costs_no_look_at_every_session() -> None:
    one, engines = router(), [View(0), View(1)]
    one._homes._homes = NobodyWalks()
    for name in ("s", "t"):
        assert one.choose(route(name, 100, num_output=1, session=name), engines) == 0
    one.ended("s", 1)
    one.ended("t", 1)
    one.gone(0)
    engines[0].pending_s = 0.05  # little enough to stay, if the one that is there were the one that was
    assert one.choose(route("u", 100, num_output=1, session="s"), engines) == 1
    assert len(one._homes) == 2


def test_an_engine_without_room_for_the_prompt_comes_last() -> None:
    one, engines = router(), [View(0, num_available_blocks=2), View(1, pending_s=5.0)]
    assert one.choose(route("a", 33, num_output=1), engines) == 1
    assert one.choose(route("b", 32, num_output=1), engines) == 0
    assert one.choose(route("c", 33, num_output=1, session="s"), engines[:1]) == 0  # there is no other
    assert one.choose(route("d", 33, num_output=1, session="s"), engines) == 1


def test_what_an_engine_forgot_it_has_not() -> None:
    one, engines = router(), [View(0, num_sequences=1), View(1)]
    one.told(0, keys("abcd"), ())
    one.told(0, (), keys("abcd")[1:])
    assert one.choose(route("b", 80, num_output=20, prefix_keys=keys("abcd")), engines) == 0  # a block is left: 0.16 s
    one.ended("b", 1)
    one.gone(0)
    assert one.choose(route("c", 80, num_output=20, prefix_keys=keys("abcd")), engines) == 1


def test_what_would_be_displaced_counts_as_often_as_it_is_asked_for_again() -> None:
    one, engines = router(), [View(0), View(1, pending_s=0.1)]
    for name in ("abcd", "efgh"):
        one.told(0, keys(name), ())
        one.choose(route(name, 80, num_output=0, prefix_keys=keys(name)), engines)  # 4 of 5 blocks are used again, after 1 to 2 requests
        one.ended(name, 0)
    assert one.choose(route("new", 80, num_output=0, prefix_keys=keys("ijkl")), engines) == 0  # it has forgotten nothing: there is room
    one.ended("new", 0)
    one.told(0, keys("ijkl"), (*keys("abcd")[::-1], *keys("efgh")[::-1]))
    assert one.choose(route("newer", 80, num_output=0, prefix_keys=keys("mnop")), engines) == 1
    one.ended("newer", 0)
    for i in range(40):  # what it keeps gets old
        one.choose(route(str(i), 80, num_output=0, prefix_keys=()), [engines[1]])
    engines[0].num_sequences = engines[1].num_sequences = 0
    assert one.choose(route("newest", 80, num_output=0, prefix_keys=keys("qrst")), engines) == 0


@pytest.mark.parametrize(("num_blocks", "place"), [(60, 1), (6000, 0)])
def test_what_begins_goes_elsewhere_before_a_cache_is_full(num_blocks: int, place: int) -> None:
    """Conversations behind a common block take turns at an engine that evicts nothing yet. A small one will, and then it is too late."""
    one, engines = router(), [View(i, num_blocks=num_blocks, num_available_blocks=num_blocks) for i in (0, 1)]
    for engine in engines:
        one.told(engine.index, (), ())
    for turn in (3, 5, 7):
        for name in "bcdefg":
            prompt = keys("a" + turn * name)
            one.choose(route(name, 16 * len(prompt) + 1, num_output=0, prefix_keys=prompt), engines[:1])
            one.ended(name, 0)
            one.told(0, prompt, ())
    assert one.keys.num_keys(0) == 1 + 6 * 7 < 60
    assert one.choose(route("new", 129, num_output=0, prefix_keys=keys("ahhhhhhh")), engines) == place
    assert one.choose(route("b", 145, num_output=0, prefix_keys=keys("abbbbbbb")), engines) == 0  # what has begun there stays


def test_equal_prompts_are_spread_over_full_caches_as_over_empty_ones() -> None:
    one, engines = router(), [View(i) for i in range(4)]
    for i in range(4):
        one.told(i, keys(f"{i}bcd"), ())
    for i in range(4):
        one.told(i, (), keys(f"{i}bcd")[::-1])
    for i in range(40):
        place = one.choose(route(str(i), 80, num_output=100, prefix_keys=keys("abcd")), engines)
        one.told(place, keys("abcd"), ())
        engines[place].num_sequences += 1
    counts = [engine.num_sequences for engine in engines]
    assert min(counts) >= 5 and max(counts) <= 17


def test_without_a_cost_model_it_learns_who_is_slow() -> None:
    one, engines = SoonestDone(16), [View(0, pending_tokens=100, pending_s=10.0), View(1, pending_tokens=100, pending_s=1.0)]
    assert one.choose(route("a", 100), engines) == 1
    engines[0].pending_s = engines[1].pending_s = 0.0
    engines[0].pending_tokens = engines[1].pending_tokens = 0
    assert one.choose(route("b", 100, num_output=1), engines) == 1  # it remembers


def test_bounds() -> None:
    one = SoonestDone(16, TokenCosts(), PublishedKeys(most_expected=1), num_remembered=1)
    for name in ("a", "b"):
        one.choose(route(name, 40, session=name, prefix_keys=keys(name * 2)), [View(0)])
    assert one.keys.num_expected == 1
    with pytest.raises(ValueError, match="stickiness: -1"):
        SoonestDone(stickiness=-1)
