"""``auto`` cannot lose: texts that match, deceive and tease, on devices of known cost; and it is near the best where drafts are right."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.clock import VirtualClock
from octavo.core.request import Request, Sequence
from octavo.core.speculative_params import SpeculativeParams
from octavo.speculative.ngram import NgramProposer
from octavo.speculative.proposer import NO_TOKEN
from octavo.speculative.simulated import PREDICTABLE, SURPRISE, SimulatedProposer, SimulatedText
from octavo.speculative.speculator import Speculator
from octavo.speculative.suffix import SuffixProposer
from tests.speculative.replay import Device, Outcome, Replay, Text, flat_then_linear, linear, make_speculator, measured


def novel(rng: random.Random, num_tokens: int) -> list[int]:
    """Text that never matches."""
    return [rng.randrange(100, 1 << 20) for _ in range(num_tokens)]


def phrases(rng: random.Random, num_tokens: int, length: int) -> list[int]:
    """The same phrase over and over, each time followed by something new. Of 1 token: every match goes wrong at its first draft."""
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
    "deceptive": lambda rng: Text(novel(rng, 40), phrases(rng, 300, 1)),
    "half right": lambda rng: Text(novel(rng, 40), phrases(rng, 300, 2)),
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
    texts = [copied(rng, 400), *(Text(novel(rng, 40), phrases(rng, 400, 1)) for _ in range(3))]
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
    """A proposer that knows its drafts only when it makes them: right for the sequences in ``right``, wrong for all others.

    On ``clock`` a draft takes 0.1 ms, and before a sequence's first one ``token_s`` for each token so far.
    """

    name, looks_up = "dreamer", False

    def __init__(self, texts: dict[int, list[int]], right: set[int], token_s: float = 0.0) -> None:
        self.texts, self.right, self.known = texts, right, dict[int, int]()
        self.token_s, self.clock = token_s, VirtualClock()
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
            start = self.known[seq_id]
            self.clock.advance(1e-4 * num_drafts + (0.0 if self.num_asked[seq_id] else self.token_s * start))
            self.num_asked[seq_id] += 1
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


@pytest.mark.parametrize(("batch", "gain"), [(1, 1.3), (4, 1.0)])
def test_reading_a_text_is_paid_by_what_it_promises(batch: int, gain: float) -> None:
    """A draft model takes 60 ms, the time of 25 plain steps, to read a text. Good drafts earn that; of long texts alone."""
    rng = random.Random(9)
    texts = [Text(novel(rng, 200), novel(rng, n)) for n in [400] * 4 + [12] * 12]
    whole = {i: text.prompt + text.output for i, text in enumerate(texts)}
    dreamer = Dreamer(whole, set(whole), token_s=3e-4)
    speculator = make_speculator(proposer=dreamer, clock=dreamer.clock)
    outcome = Replay(speculator, Device(LAWS["flat"]), texts, batch).run()
    assert outcome.plain_s > gain * (outcome.seconds + speculator.stats.propose_s)
    num_read = [sum(dreamer.num_asked[i] > 0 for i in ids) for ids in (range(4), range(4, 16))]
    assert num_read[0] == 4 and num_read[1] <= 2


def test_a_draft_model_that_is_wrong_reads_few_texts() -> None:
    rng = random.Random(10)
    texts = [Text(novel(rng, 200), novel(rng, 150)) for _ in range(20)]
    dreamer = Dreamer({i: text.prompt + text.output for i, text in enumerate(texts)}, set(), token_s=3e-4)
    speculator = make_speculator(proposer=dreamer, clock=dreamer.clock)
    outcome = Replay(speculator, Device(LAWS["flat"]), texts).run()
    assert 1 <= sum(asked > 0 for asked in dreamer.num_asked.values()) <= 2
    assert outcome.plain_s > 0.97 * (outcome.seconds + speculator.stats.propose_s)


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
