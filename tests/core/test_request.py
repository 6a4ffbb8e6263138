"""Sampling parameters: what callers may write, and that whatever else they write is an error that names the field."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.request import ParameterError, SamplingParams

HUGE = 10**400  # beyond every float
TOO_LONG = 10**5000  # beyond what Python writes out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("temperature", "top_p", "min_p") for value in (HUGE, -HUGE, TOO_LONG, "1", None)),
        *((name, TOO_LONG) for name in ("n", "seed", "min_tokens", "max_tokens", "logprobs", "presence_penalty")),
        *((name, float(bad)) for name in ("temperature", "top_p", "presence_penalty") for bad in ("nan", "inf")),
        *(("logit_bias", value) for value in ([1], "5", 5, {1: HUGE}, {1: "1"}, {"1": 1.0}, {TOO_LONG: 1.0})),
        *((name, value) for name in ("stop_token_ids", "allowed_token_ids") for value in (5, "5", b"5", {5: 5}, [5.0], [True], [TOO_LONG])),
        *(("bad_words_token_ids", value) for value in (5, [5], [[]], ["5"], [[5.0]], {5: (5,)})),
        *((name, value) for name in ("stop", "bad_words") for value in (5, 0, False, b"x", {"x": 1}, [5], [b"x"], [""], "")),
        *((name, value) for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens") for value in ("no", 0, 1, None)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_value_of_the_wrong_kind_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match="is not allowed") as raised:
        SamplingParams(**{name: value}).validate(vocab_size=100)
    assert raised.value.param == name and len(str(raised.value)) < 400


def test_lists_and_none_are_taken() -> None:
    stops, ids = ["a", "b"], [3, 4]
    lists: dict[str, Any] = {"stop": stops, "stop_token_ids": ids, "allowed_token_ids": ids, "bad_words_token_ids": [[3]]}
    params = SamplingParams(**lists, logit_bias={3: 1})
    stops.append("c")
    ids.append(5)
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("a", "b"), (3, 4), (3, 4))
    params.validate(vocab_size=100)
    nothing: dict[str, Any] = dict.fromkeys((*lists, "bad_words", "logit_bias"))
    assert SamplingParams(**nothing) == SamplingParams()
    assert SamplingParams(stop="a").stop == ("a",)


def test_whole_numbers_do_for_fractions() -> None:
    SamplingParams(temperature=1, top_p=1, min_p=0, presence_penalty=-2, logit_bias={1: -100}).validate(vocab_size=100)
