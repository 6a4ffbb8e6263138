"""The Speculator: bounds of every draft, settings of every request, what is counted and forgotten."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from octavo.config import ConfigError, EngineConfig, SpeculativeConfig
from octavo.core.clock import VirtualClock
from octavo.core.request import ParameterError, Request, SamplingParams, Sequence, SequenceStatus
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.step import SequenceSlice, SliceResult, StepPlan, StepResult
from octavo.speculative.speculator import Speculator, create_speculator
from tests.speculative.replay import Device, Replay, Text, flat_then_linear, make_speculator

RING = [10, 11, 12, 13] * 8  # whatever is drafted from it goes on in the ring


def decoding(
    seq_id: int = 0, tokens: Seq[int] = RING, num_prompt: int | None = None, speculative: SpeculativeParams | None = None, **params: object
) -> Sequence:
    """A running sequence that lacks the KV of its last token."""
    num_prompt = len(tokens) - 1 if num_prompt is None else num_prompt
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    request = Request(f"r{seq_id}", list(tokens[:num_prompt]), sampling, 0, frozenset([2]), speculative=speculative)
    seq = Sequence(seq_id, request, token_ids=list(tokens), num_prompt_tokens=num_prompt, num_computed=len(tokens) - 1)
    seq.status = SequenceStatus.RUNNING
    return seq


def observe(speculator: Speculator, kept: dict[Sequence, int], drafts: dict[int, list[int]], seconds: float = 1e-3) -> None:
    """A step in which each sequence kept so many tokens; they are appended."""
    plan, results = StepPlan(0), []
    for seq, num_kept in kept.items():
        guess = drafts.get(seq.seq_id, [])
        piece = SequenceSlice(seq.seq_id, len(seq.token_ids) - 1, [seq.token_ids[-1], *guess], seq.block_table, 1 + len(guess), [0])
        piece.num_drafts = len(guess)
        plan.slices.append(piece)
        results.append(SliceResult([*guess[: num_kept - 1], 99]))
        seq.token_ids += results[-1].token_ids
        seq.num_computed = len(seq.token_ids) - 1
    speculator.observe(plan, StepResult(0, results, seconds))


# --- bounds ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "num_drafts"), [(1, 0), (2, 1), (4, 3), (100, 6)])
def test_one_draft_less_than_the_sequence_may_still_make(left: int, num_drafts: int) -> None:
    for params, total in (({"max_tokens": left + 1}, 1000), ({}, len(RING) + left)):
        drafts = make_speculator(6, max_total_tokens=total).drafts([decoding(**params)], 512)
        assert len(drafts.get(0, [])) == num_drafts


def test_nothing_comes_after_a_draft_that_ends_the_sequence() -> None:
    text = [5, 6, 7, 2, 8, 9, 5, 6, 7, 3, 8, 9, 5, 6]
    for params, expected in [
        ({"stop_token_ids": (3,)}, [7, 3]),
        ({"stop_token_ids": (7,)}, [7]),
        ({}, [7, 3, 8, 9, 5, 6]),
        ({"allowed_token_ids": (7, 3, 5)}, [7, 3]),
        ({"allowed_token_ids": (1, 2)}, None),
    ]:
        assert make_speculator(6).drafts([decoding(tokens=text, **params)], 512).get(0) == expected
    ended = [5, 6, 7, 2, 8, 9, 5, 6]
    assert make_speculator(6).drafts([decoding(tokens=ended)], 512) == {0: [7, 2]}
    assert make_speculator(6).drafts([decoding(tokens=ended, ignore_eos=True)], 512) == {0: [7, 2, 8, 9, 5, 6]}


def test_drafts_leave_every_sequence_its_row() -> None:
    running = [decoding(i) for i in range(4)]
    for max_rows, counts in [(4, []), (5, [1]), (11, [6, 1]), (100, [6, 6, 6, 6])]:
        drafts = make_speculator(6).drafts(running, max_rows)
        assert [len(tokens) for tokens in drafts.values()] == counts


def test_who_is_not_drafted_for() -> None:
    """A prompt still being computed, a prompt's end with several choices or with log-probabilities to come; a text that matches nothing."""
    prompt = decoding(1)
    prompt.num_computed -= 1
    choices = decoding(2, num_prompt=len(RING))
    choices.num_choices = 3
    logprobs = decoding(3, num_prompt=len(RING), prompt_logprobs=1)
    fresh = decoding(4, tokens=list(range(50, 90)))
    told = decoding(5, prompt_logprobs=1)
    speculator = make_speculator(3)
    assert set(speculator.drafts([prompt, choices, logprobs, fresh, told], 512)) == {5}


# --- settings -------------------------------------------------------------------------------------------------------------------------


def create(**config: object) -> Speculator:
    return create_speculator(SpeculativeConfig(**config), 1000, VirtualClock())  # type: ignore[arg-type]


def test_requests_decide_for_themselves() -> None:
    speculator = create(spec=2)
    off, five, zero = SpeculativeParams("off"), SpeculativeParams(5), SpeculativeParams(0)
    running = [decoding(0), decoding(1, speculative=off), decoding(2, speculative=five), decoding(3, speculative=zero)]
    assert {i: len(tokens) for i, tokens in speculator.drafts(running, 512).items()} == {0: 2, 2: 5}
    assert speculator.num_tracked == 2
    idle = create()
    assert idle.drafts(running[:2], 512) == {} and idle.num_tracked == 0
    assert list(idle.drafts(running, 512)) == [2]


def test_each_method_and_each_flag_counts() -> None:
    """"7 8" went on with 2 last, "9 7 8" with 1, "4 9 7 8" and so the longest match with 3."""
    text = [0, 4, 9, 7, 8, 3, 0, 9, 7, 8, 1, 0, 7, 8, 2, 4, 9, 7, 8]

    def first(speculator: Speculator, method: str = "auto") -> int | None:
        drafts = speculator.drafts([decoding(tokens=text, speculative=SpeculativeParams(3, method))], 512)
        return drafts[0][0] if drafts else None

    assert first(create()) == first(create(), "suffix") == 3
    assert first(create(), "ngram") == first(create(ngram_max=5), "ngram") == 3
    assert first(create(ngram_max=3), "ngram") == 1
    assert first(create(ngram_max=2), "ngram") == 2
    assert first(create(ngram_min=5, ngram_max=6), "ngram") is None
    assert first(create(suffix_min=4)) == 3 and first(create(suffix_min=5)) is None
    assert first(create(spec_method="ngram", ngram_max=2), "suffix") == 3
    text = [4, 9, 7, 8, 1, 8]  # one token matches
    assert first(create()) is None and first(create(suffix_min=1)) == 1
    assert create(spec_method="ngram", spec=1).drafts([decoding()], 512) != {}


def test_settings_outside_their_limits_are_refused() -> None:
    refused = [("spec", k) for k in ("some", 17, -1, True)]
    refused += [("max_drafts", 0), ("ngram_min", 0), ("ngram_max", 1), ("suffix_min", 0)]
    for field, value in refused:
        with pytest.raises(ConfigError, match=f"^{field}: .*{value!r}"):
            EngineConfig(speculative=SpeculativeConfig(**{field: value})).validate()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="spec_method: 'dream' .* auto, ngram, suffix"):
        create(spec_method="dream")
    for num_drafts in (17, "K", 2.0):
        with pytest.raises(ParameterError, match="speculative.num_drafts"):
            SpeculativeParams(num_drafts).validate(create().methods)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="speculative.method"):
        SpeculativeParams(2, "draft").validate(create().methods)
    for params in (SpeculativeParams(), SpeculativeParams(16, "ngram"), SpeculativeParams("off")):
        params.validate(create().methods)


# --- what is kept ---------------------------------------------------------------------------------------------------------------------


def test_prompts_are_indexed_while_they_are_computed() -> None:
    """At most 512 tokens in a step; a decoding sequence is drafted for once all of it is known."""
    speculator = make_speculator(3)
    tokens = list(range(1000, 2000)) + [5, 6, 7, 8, 5, 6]
    seq = decoding(tokens=tokens)
    assert speculator.drafts([seq], 512) == {}
    assert speculator.drafts([seq], 512) == {0: [7, 8, 5]}
    other = decoding(1, tokens=tokens)
    other.num_computed = 0
    speculator.drafts([other], 512)
    speculator.drafts([other], 512)
    other.num_computed = len(tokens) - 1
    assert speculator.drafts([other], 512) == {1: [7, 8, 5]}


def test_what_is_finished_is_forgotten_and_what_is_preempted_is_not() -> None:
    speculator = make_speculator(3)
    first, second = decoding(1), decoding(2)
    speculator.drafts([first, second], 512)
    second.status = SequenceStatus.WAITING  # preempted: no longer among the running
    speculator.drafts([first], 512)
    observe(speculator, {first: 1}, {})
    assert speculator.num_tracked == 2
    first.status = SequenceStatus.FINISHED
    observe(speculator, {}, {})
    assert speculator.num_tracked == 1
    second.status = SequenceStatus.RUNNING
    assert set(speculator.drafts([second], 512)) == {2}


def test_counters() -> None:
    speculator = make_speculator(3)
    seq, other = decoding(0), decoding(1)
    kept = {seq: 3, other: 1}
    drafts = speculator.drafts([seq, other], 512)
    observe(speculator, kept, drafts)
    stats = speculator.stats
    assert (stats.num_steps, stats.num_proposed, stats.num_accepted) == (1, 6, 2)
    assert stats.tested[:4] == [2, 1, 1, 0] and stats.accepted[:3] == [1, 1, 0]
    assert stats.alpha == pytest.approx(2 / 4)
    observe(speculator, {seq: 1, other: 1}, {})
    assert stats.num_steps == 1 and stats.num_proposed == 6
    assert make_speculator().stats.alpha is None


def test_seconds_saved_are_those_of_the_device() -> None:
    """On a device without noise the estimate is what the replay knows: to a few per cent of the gain."""
    texts = [Text(RING, RING * 20)]
    speculator = make_speculator(4)
    replay = Replay(speculator, Device(flat_then_linear(3), position_s=0.0), [Text(list(range(50, 90)), list(range(100, 140))), *texts])
    outcome = replay.run()
    assert speculator.stats.saved_s == pytest.approx(outcome.plain_s - outcome.seconds, rel=0.05)
    assert outcome.speedup > 2.0
