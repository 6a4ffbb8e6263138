"""The Speculator: bounds of every draft, settings of every request, what is learned and forgotten; and that ``auto`` cannot lose."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import ConfigError, EngineConfig, SpeculativeConfig
from octavo.core.clock import VirtualClock
from octavo.core.request import ParameterError, Request, SamplingParams, Sequence, SequenceStatus
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.step import SequenceSlice, SliceResult, StepPlan, StepResult
from octavo.speculative.ngram import NgramProposer
from octavo.speculative.proposer import NO_TOKEN
from octavo.speculative.simulated import PREDICTABLE, SURPRISE, SimulatedProposer, SimulatedText
from octavo.speculative.speculator import Speculator, create_speculator
from octavo.speculative.suffix import SuffixProposer
from tests.speculative.replay import Device, Outcome, Replay, Text, flat_then_linear, linear, make_speculator, measured

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


# --- cannot lose ----------------------------------------------------------------------------------------------------------------------


def novel(rng: random.Random, num_tokens: int) -> list[int]:
    """Text that never matches."""
    return [rng.randrange(100, 1 << 20) for _ in range(num_tokens)]


def phrases(rng: random.Random, num_tokens: int, length: int) -> list[int]:
    """The same phrase over and over, each time followed by something new. Of 2 tokens: every match of 2 goes wrong at its first draft."""
    out: list[int] = []
    while len(out) < num_tokens:
        out += [*range(length), rng.randrange(100, 1 << 20)]
    return out[:num_tokens]


def teasing(rng: random.Random, num_tokens: int) -> list[int]:
    """Copies that stop after a few tokens, at a place that nobody can know."""
    source = novel(rng, 200)
    out: list[int] = []
    while len(out) < num_tokens:
        start = rng.randrange(len(source) - 12)
        out += [*source[start : start + rng.randint(2, 5)], rng.randrange(100, 1 << 20)]
    return (source + out)[:num_tokens]


def copied(rng: random.Random, num_tokens: int, every: int = 40) -> Text:
    """An edit: the prompt again, with a new token now and then."""
    prompt = novel(rng, num_tokens)
    return Text(prompt, [rng.randrange(100, 1 << 20) if rng.randrange(every) == 0 else token for token in prompt])


LAWS = {"flat": flat_then_linear(8), "measured": measured, "linear": linear(), "steep": lambda rows: 1e-3 * rows**1.5}
KINDS = {
    "novel": lambda rng: Text(novel(rng, 40), novel(rng, 300)),
    "deceptive": lambda rng: Text(novel(rng, 40), phrases(rng, 300, 2)),
    "phrases": lambda rng: Text(novel(rng, 40), phrases(rng, 300, 24)),
    "teasing": lambda rng: Text(novel(rng, 40), teasing(rng, 300)),
    "copied": lambda rng: copied(rng, 300),
}


def replayed(
    law: str, kind: str, batch: int, num_drafts: int | str = "auto", noise: float = 0.05, texts: int = 6, **device: object
) -> Outcome:
    rng = random.Random(11)
    items = [KINDS[kind](rng) for _ in range(texts * (1 if batch == 1 else batch // 2))]
    return Replay(make_speculator(num_drafts), Device(LAWS[law], noise=noise, **device), items, batch).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("kind", KINDS)
def test_auto_never_loses(kind: str, law: str, batch: int) -> None:
    """Two per cent of a run of 1,800 steps or fewer, all learning included, whatever the text and whatever rows cost."""
    assert replayed(law, kind, batch).speedup > 0.98


@pytest.mark.parametrize(("law", "batch"), [("flat", 1), ("measured", 1), ("measured", 8)])
def test_auto_is_near_the_best_fixed_length(law: str, batch: int) -> None:
    """On copied text; the best of all fixed lengths is found by trying each, and is beaten where the text is not all copies."""
    fixed = {k: replayed(law, "copied", batch, k, noise=0.0).speedup for k in (2, 4, 8, 12, 16)}
    best = max(fixed.values())
    assert best > 1.5
    assert replayed(law, "copied", batch, noise=0.0, texts=12).speedup > 0.93 * best


def test_auto_beats_every_fixed_length_on_mixed_text() -> None:
    rng = random.Random(5)
    texts = [KINDS[kind](rng) for _ in range(4) for kind in ("copied", "deceptive", "teasing")]

    def speedup(num_drafts: int | str) -> float:
        return Replay(make_speculator(num_drafts), Device(measured, noise=0.03), texts).run().speedup

    assert speedup("auto") > 1.05 * max(speedup(k) for k in (1, 2, 4, 8))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=48, max_size=48),
    st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=3),
    st.sampled_from([1, 3]),
    st.integers(0, 99),
)
def test_auto_never_loses_on_any_curve(steps: list[float], kinds: list[str], batch: int, seed: int) -> None:
    """Any price list that rises somehow, any mixture of texts: what is lost is at most the purse's start and share."""
    prices = [1.0]
    for step in steps:
        prices.append(prices[-1] + step**3)
    rng = random.Random(seed)
    texts = [KINDS[kind](rng) for kind in kinds * 3]
    outcome = Replay(make_speculator(), Device(lambda rows: 1e-3 * prices[min(rows, 48)], position_s=0.0), texts, batch).run()
    assert outcome.seconds <= outcome.plain_s * 1.012 + 8e-3 * prices[batch]


def test_steps_that_are_held_up_do_not_stop_drafting() -> None:
    held_up = replayed("flat", "copied", 1, hiccup_every=50)
    assert held_up.speedup > 1.5  # half of a step's time on average goes to being held up
    assert sum(held_up.drafts[-100:]) > 500


def test_a_machine_that_changes_pace() -> None:
    """Three times slower from one step to the next, and back: drafting goes on, and plain text does not lose."""
    device = Device(LAWS["measured"], pace=lambda step: 3.0 if 300 < step < 600 else 1.0)
    outcome = Replay(make_speculator(), device, [copied(random.Random(1), 400) for _ in range(8)]).run()
    assert sum(outcome.drafts[-50:]) > 200
    for kind in ("novel", "deceptive"):
        rng = random.Random(3)
        device = Device(LAWS["measured"], pace=lambda step: 3.0 if step // 200 % 2 else 1.0)
        outcome = Replay(make_speculator(), device, [KINDS[kind](rng) for _ in range(6)]).run()
        assert sum(outcome.drafts) < 0.05 * outcome.num_steps


def test_sequences_are_judged_apart() -> None:
    """One text is a copy, the others deceive: the copy is drafted for at length, the others hardly ever."""
    rng = random.Random(2)
    texts = [copied(rng, 400), *(Text(novel(rng, 40), phrases(rng, 400, 2)) for _ in range(3))]
    counts = dict.fromkeys(range(4), 0)

    class Counting(Speculator):
        def drafts(self, running: Seq[Sequence], max_rows: int, num_queued_tokens: int = 0) -> dict[int, list[int]]:
            found = super().drafts(running, max_rows, num_queued_tokens)
            for seq_id, tokens in found.items():
                counts[seq_id] += len(tokens)
            return found

    speculator = Counting({"suffix": SuffixProposer()}, SpeculativeParams(), 10**6, VirtualClock())
    Replay(speculator, Device(LAWS["flat"]), texts, batch=4).run()
    assert counts[0] > 200 and max(counts[i] for i in (1, 2, 3)) < 40


def test_the_same_run_twice() -> None:
    assert replayed("measured", "copied", 8) == replayed("measured", "copied", 8)


# --- proposers that only drafts teach about -------------------------------------------------------------------------------------------


class Dreamer:
    """A proposer that knows its drafts only when it makes them: right for the sequences in ``right``, wrong for all others."""

    name, looks_up = "dreamer", False

    def __init__(self, texts: dict[int, list[int]], right: set[int]) -> None:
        self.texts, self.right, self.known = texts, right, dict[int, int]()
        self.num_asked = dict.fromkeys(texts, 0)

    def begin(self, seq_id: int, token_ids: Seq[int], request: Request, choice: int) -> None:
        self.known[seq_id] = len(token_ids)

    def extend(self, seq_id: int, token_ids: Seq[int]) -> None:
        self.known[seq_id] += len(token_ids)

    def peek(self, seq_id: int) -> tuple[int, int]:
        return 1, NO_TOKEN

    def propose(self, requests: Seq[tuple[int, int]]) -> list[list[int]]:
        out = []
        for seq_id, num_drafts in requests:
            self.num_asked[seq_id] += 1
            start = self.known[seq_id]
            tokens = self.texts[seq_id][start : start + num_drafts]
            out.append(tokens if seq_id in self.right else [7] * num_drafts)
        return out

    def end(self, seq_id: int) -> None:
        del self.known[seq_id]


def test_failing_drafts_are_tried_less_and_less_often() -> None:
    rng = random.Random(6)
    texts = [Text(novel(rng, 20), novel(rng, 2000)) for _ in range(2)]
    dreamer = Dreamer({i: text.prompt + text.output for i, text in enumerate(texts)}, right={1})
    outcome = Replay(make_speculator(proposer=dreamer), Device(LAWS["flat"]), texts, batch=2).run()
    assert dreamer.num_asked[0] < 40  # of some 2,000 steps
    assert dreamer.num_asked[1] < 2000 / 4  # nearly each step, of 5 tokens and more
    assert outcome.speedup > 1.2


def test_a_proposer_that_comes_to_be_right_is_found_out() -> None:
    rng = random.Random(7)
    text = Text(novel(rng, 20), novel(rng, 1500))
    whole = text.prompt + text.output
    dreamer = Dreamer({0: [7] * 320 + whole[320:]}, right={0})
    outcome = Replay(make_speculator(proposer=dreamer), Device(LAWS["flat"]), [text]).run()
    assert outcome.speedup > 1.5


# --- simulated text -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_simulated_text_is_accepted_as_often_as_asked(alpha: float) -> None:
    """Five standard errors; and tokens per step with 4 drafts are those of the formula (Leviathan et al., equation 1)."""
    text = SimulatedText(alpha, seed=3)
    output = [text.token(key=9, position=p) for p in range(6000)]
    assert set(output) <= {PREDICTABLE, SURPRISE}
    assert abs(output.count(PREDICTABLE) / 6000 - alpha) <= 5 * (alpha * (1 - alpha) / 6000) ** 0.5
    speculator = make_speculator(4, SimulatedProposer())
    outcome = Replay(speculator, Device(LAWS["flat"]), [Text([SURPRISE], output)]).run()
    expected = 5.0 if alpha == 1.0 else (1.0 - alpha**5) / (1.0 - alpha)
    assert outcome.num_tokens / outcome.num_steps == pytest.approx(expected, rel=0.06)
    assert speculator.stats.alpha == pytest.approx(alpha, abs=0.03)


def test_simulated_text_is_the_same_however_it_is_read() -> None:
    text = SimulatedText(0.5, seed=1)
    tokens = [text.token(4, p) for p in range(200)]
    assert [text.token(4, p) for p in reversed(range(200))][::-1] == tokens
    assert [text.token(5, p) for p in range(200)] != tokens != [SimulatedText(0.5, seed=2).token(4, p) for p in range(200)]
    with pytest.raises(ValueError, match="acceptance: 1.5"):
        SimulatedText(1.5)


def test_ngram_drafts_replay_as_well() -> None:
    rng = random.Random(8)
    assert Replay(make_speculator(proposer=NgramProposer()), Device(LAWS["flat"]), [copied(rng, 400) for _ in range(4)]).run().speedup > 2.0
