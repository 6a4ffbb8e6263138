"""Length limits and stop rules."""

from __future__ import annotations

import pytest

from octavo.core.limits import LengthLimits, StopRule
from octavo.core.request import FinishReason, Sequence
from tests.core.harness import make_request
from tests.core.kv_memory import EOS


@pytest.mark.parametrize("context, blocks, total", [(64, 100, 64), (64, 16, 64), (64, 15, 61), (1, 1, 1)])
def test_total_tokens(context: int, blocks: int, total: int) -> None:
    assert LengthLimits(context, blocks, 4).max_total_tokens == total


def test_max_tokens_is_clamped_to_what_is_left() -> None:
    limits = LengthLimits(64, 8, 4)
    for asked, allowed, clamped in ((None, 23, None), (22, 22, None), (23, 23, None), (24, 23, 23), (0, 0, None)):
        request = make_request("a", [0] * 10, max_tokens=asked)
        assert (limits.max_output_tokens(request), limits.clamped_max_tokens(request)) == (allowed, clamped)


def rule(max_tokens: int = 10, **params: object) -> StopRule:
    return StopRule.of(make_request("a", [0], **params), max_tokens)


def append(stop_rule: StopRule, drawn: list[int], text_stop: tuple[int, str] | None = None) -> tuple:
    seq = Sequence(0, make_request("a", [0]), token_ids=[0], num_prompt_tokens=1)
    kept = list(drawn)
    end = stop_rule.append_tokens(seq, kept, text_stop)
    assert list(seq.output_token_ids) == kept == drawn[: len(kept)]
    return len(kept), end


def test_the_earliest_end_of_several_tokens_counts() -> None:
    length, stop = (FinishReason.LENGTH, None), (FinishReason.STOP, None)
    assert append(rule(), [0, 1, 2]) == (3, None)
    assert append(rule(), [0, EOS, 2]) == (2, stop)
    assert append(rule(max_tokens=2), [0, 1, EOS]) == (2, length)  # a stop past the cap does not win
    assert append(rule(max_tokens=2), [0, EOS, 1]) == (2, stop)  # at the cap it does
    assert append(rule(stop_token_ids=(1,)), [0, 1, EOS]) == (2, (FinishReason.STOP, 1))


def test_stop_strings_among_several_tokens() -> None:
    text = (FinishReason.STOP, "x")
    assert append(rule(), [0, 1, 2], (2, "x")) == (2, text)
    assert append(rule(), [0, EOS, 2], (3, "x")) == (2, (FinishReason.STOP, None))
    assert append(rule(), [0, EOS, 2], (2, "x")) == (2, text)
    assert append(rule(max_tokens=1), [0, 1, 2], (2, "x")) == (1, (FinishReason.LENGTH, None))
    assert append(rule(max_tokens=2), [0, 1, 2], (2, "x")) == (2, text)
    assert append(rule(), [0, 1, 2], (0, "x")) == (0, text)


def test_min_tokens_holds_stops_back_but_not_the_length() -> None:
    assert append(rule(min_tokens=2), [EOS, EOS, EOS]) == (3, (FinishReason.STOP, None))
    assert append(rule(min_tokens=5, max_tokens=3), [EOS, EOS, EOS]) == (3, (FinishReason.LENGTH, None))
