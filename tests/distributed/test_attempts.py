"""Attempts: however often a request's worker is lost, its client gets every token, character and log-probability once and in order."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.request import BeamParams, FinishReason, Request, SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.distributed.attempts import Attempts, Divergence, Loss, Pacer, RetryLimits
from octavo.engine.outputs import CacheMatch, OutputEvent

ENDLESS = RetryLimits(in_place=10**6, in_all=10**6)


def request(n: int = 1, beam: BeamParams | None = None) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(n=n, max_tokens=50, logprobs=1, beam=beam), seed=0)


@dataclass
class Answer:
    """What any worker makes of the request: tokens of each choice, and the text that is shown with each (none while a character waits)."""

    tokens: list[list[int]]
    texts: list[list[str]]
    flush: list[str]  # shown with the last event

    @classmethod
    def random(cls, rng: random.Random, n: int) -> Answer:
        tokens = [[rng.randrange(100) for _ in range(rng.randint(1, 12))] for _ in range(n)]
        texts = [[rng.choice(["", "a", "bc", "déf"]) for _ in choice] for choice in tokens]
        return cls(tokens, texts, [rng.choice(["", "!"]) for _ in range(n)])

    def events(self, rng: random.Random, made: int = 0, whole: bool = False) -> list[OutputEvent]:
        """As one worker gives them, after ``made`` tokens: in steps of any size, choices in turn. ``whole``: a beam search's."""
        at, out = [made] * len(self.tokens), list[OutputEvent]()
        while any(at[c] < len(self.tokens[c]) for c in range(len(self.tokens))):
            for c, tokens in enumerate(self.tokens):
                if at[c] == len(tokens):
                    continue
                end = len(tokens) if whole else min(len(tokens), at[c] + rng.randint(1, 4))
                last = end == len(tokens)
                text = "".join(self.texts[c][at[c] : end]) + (self.flush[c] if last else "")
                event = OutputEvent("r", c, text, tokens[at[c] : end], [logprob_of(t) for t in tokens[at[c] : end]])
                event.finish_reason = FinishReason.LENGTH if last else None
                if not out and not made:
                    event.prompt_logprobs, event.cache_match = [logprob_of(2), logprob_of(3)], CacheMatch("never_seen", 0)
                event.num_cached_tokens = 0 if made else 7
                out.append(event)
                at[c] = end
        return out


def logprob_of(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -token / 7, 1, [token], [-token / 7])


@dataclass
class Client:
    """What it has got, by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    num_prompt_logprobs: int = 0
    num_matches: int = 0
    cached: set[int] = field(default_factory=set)

    def get(self, event: OutputEvent) -> None:
        assert event.choice not in self.ends, "an event after the last one"
        assert len(event.logprobs or []) == len(event.token_ids)
        self.tokens.setdefault(event.choice, []).extend(event.token_ids)
        self.texts[event.choice] = self.texts.get(event.choice, "") + event.text
        self.logprobs += [(event.choice, one) for one in event.logprobs or []]
        self.num_prompt_logprobs += len(event.prompt_logprobs or [])
        self.num_matches += event.cache_match is not None
        self.cached.add(event.num_cached_tokens)
        if event.finish_reason is not None:
            self.ends[event.choice] = event.finish_reason

    def check(self, answer: Answer) -> None:
        assert [self.tokens[c] for c in range(len(answer.tokens))] == answer.tokens
        assert [self.texts[c] for c in range(len(answer.tokens))] == [
            "".join(texts) + flush for texts, flush in zip(answer.texts, answer.flush, strict=True)
        ]
        for c, tokens in enumerate(answer.tokens):
            assert [one for choice, one in self.logprobs if choice == c] == [logprob_of(t) for t in tokens]
        assert len(self.ends) == len(answer.tokens)
        assert (self.num_prompt_logprobs, self.num_matches, self.cached) == (2, 1, {7})


@given(st.integers(0, 10**9), st.integers(1, 3), st.booleans())
def test_a_client_gets_each_token_once_whatever_is_lost(seed: int, n: int, has_beams: bool) -> None:
    rng = random.Random(seed)
    answer, client = Answer.random(rng, n), Client()
    attempts = Attempts(request(n, BeamParams(3) if has_beams else None), ENDLESS)
    for key in range(1, 1000):
        made = attempts.begin(key)
        assert (attempts.key, attempts.num_attempts) == (key, key)
        assert made == (answer.tokens[0][: len(made)] if n == 1 and not has_beams else [])
        events = answer.events(rng, len(made), whole=has_beams)
        num_heard = rng.randint(0, len(events)) if key < 20 else len(events)
        for event in events[:num_heard]:
            new = attempts.take(event)
            if new is not None:
                client.get(new)
        ended = {event.choice for event in events[:num_heard] if event.finish_reason is not None}
        assert attempts.is_made_on == (len(ended) < n), "whether its worker has something to leave off"
        if attempts.is_over:
            break
        assert attempts.lost(rng.choice(list(Loss))) is None
        assert attempts.key == 0
    client.check(answer)


def test_one_choice_goes_on_and_several_begin_again() -> None:
    one, two = Attempts(request()), Attempts(request(2))
    for attempts in (one, two):
        assert attempts.begin(1) == []
        attempts.take(OutputEvent("r", 0, "ab", [5, 6], [logprob_of(5), logprob_of(6)]))
        attempts.lost(Loss.DIED)
    assert one.begin(2) == [5, 6]
    assert two.begin(2) == []
    event = one.take(OutputEvent("r", 0, "c", [7], [logprob_of(7)]))
    assert event is not None and (event.text, event.token_ids) == ("c", [7])
    assert two.take(OutputEvent("r", 0, "a", [5], [logprob_of(5)])) is None
    event = two.take(OutputEvent("r", 0, "bc", [6, 7], [logprob_of(6), logprob_of(7)]))
    assert event is not None and (event.text, event.token_ids, event.logprobs) == ("c", [7], [logprob_of(7)])


def test_the_room_of_an_attempt_has_what_it_makes_again_in_it() -> None:
    one, two = Attempts(request()), Attempts(request(2))
    for attempts in (one, two):
        attempts.begin(1)
        attempts.take(OutputEvent("r", 0, "ab", [5, 6], [logprob_of(5), logprob_of(6)]))
        assert attempts.room(0) == 48
        attempts.lost(Loss.DIED)
        attempts.begin(2)
    assert (one.room(0), two.room(0), two.room(1)) == (48, 50, 50)
    two.take(OutputEvent("r", 0, "abc", [5, 6, 7], [logprob_of(5), logprob_of(6), logprob_of(7)]))
    assert two.room(0) == 47
    assert Attempts(Request("r", [1], SamplingParams(max_tokens=None), seed=0)).room(0) is None


def test_workers_that_disagree_are_found_out() -> None:
    attempts = Attempts(request(2))
    attempts.begin(1)
    attempts.take(OutputEvent("r", 1, "ab", [5, 6]))
    attempts.lost(Loss.DIED)
    attempts.begin(2)
    attempts.take(OutputEvent("r", 1, "a", [5]))
    with pytest.raises(Divergence, match="output token 1 of choice 1"):
        attempts.take(OutputEvent("r", 1, "x", [9]))


def test_an_answer_that_ends_before_what_was_sent_of_it_is_another_answer() -> None:
    attempts = Attempts(request(2))
    attempts.begin(1)
    attempts.take(OutputEvent("r", 0, "abc", [5, 6, 7]))
    attempts.lost(Loss.DIED)
    attempts.begin(2)
    with pytest.raises(Divergence, match="ended choice 0 1 tokens before"):
        attempts.take(OutputEvent("r", 0, "ab", [5, 6], finish_reason=FinishReason.STOP))


def test_a_request_that_gets_no_further_is_given_up() -> None:
    attempts = Attempts(request(), RetryLimits(in_place=3, in_all=8))
    for key in (1, 2):
        attempts.begin(key)
        assert attempts.lost(Loss.DIED) is None
        assert attempts.confirm() is None
    attempts.begin(3)
    assert attempts.lost(Loss.HUNG) is None and attempts.is_held
    why = attempts.confirm()
    assert why is not None and "3 workers in a row hung" in why


@pytest.mark.parametrize("order", list(itertools.permutations([True, True, True, False])))
def test_a_request_ends_of_workers_that_are_gone_and_not_of_those_that_come_back(order: tuple[bool, ...]) -> None:
    """Of four losses in a row one was a worker that had only been stopped; in whatever order that is known."""
    attempts, num_gone = Attempts(request(), RetryLimits(in_place=3)), 0
    for key, is_gone in enumerate(order, 1):
        attempts.begin(key)
        assert attempts.lost(Loss.DIED if is_gone else Loss.HUNG) is None
        assert attempts.is_held == (num_gone == 2)
        if is_gone:
            num_gone += 1
            assert (attempts.confirm() is not None) == (num_gone == 3)
        else:
            attempts.forgive()
        if num_gone == 3:
            break
        assert not attempts.is_held


@pytest.mark.parametrize("loss", [loss for loss in Loss if not loss.is_open and loss is not Loss.LEFT])
def test_what_a_worker_brought_about_while_it_spoke_counts_at_once(loss: Loss) -> None:
    attempts = Attempts(request(), RetryLimits(in_place=3))
    for key in (1, 2):
        attempts.begin(key)
        assert attempts.lost(loss) is None and not attempts.is_held
    attempts.begin(3)
    why = attempts.lost(loss)
    assert why is not None and f"3 workers in a row {loss.value} while they ran this request" in why


def test_it_is_held_while_the_losses_are_open() -> None:
    attempts = Attempts(request(), RetryLimits(in_place=3))
    for key in (1, 2, 3):
        assert not attempts.is_held
        attempts.begin(key)
        assert attempts.lost(Loss.HUNG) is None
    assert attempts.is_held and attempts.confirm() is None and attempts.confirm() is None and attempts.is_held
    attempts.forgive()
    assert not attempts.is_held
    attempts.begin(4)
    assert attempts.lost(Loss.FAILED) is not None  # that one is certain


def test_progress_between_losses_counts_for_a_request_but_not_without_end() -> None:
    attempts = Attempts(request(), RetryLimits(in_place=3, in_all=5))
    for key in range(1, 5):
        attempts.begin(key)
        attempts.take(OutputEvent("r", 0, "a", [key]))
        assert attempts.lost(Loss.DIED) is None
        assert attempts.confirm() is None
    attempts.begin(5)
    attempts.take(OutputEvent("r", 0, "a", [5]))
    why = attempts.lost(Loss.FAILED)
    assert why is not None and "5 workers died, hung or failed" in why


def test_making_again_what_was_sent_is_no_progress() -> None:
    attempts = Attempts(request(2), RetryLimits(in_place=3))
    attempts.begin(1)
    attempts.take(OutputEvent("r", 0, "ab", [5, 6]))
    assert attempts.lost(Loss.DIED) is None and not attempts.is_suspect
    attempts.begin(2)
    attempts.take(OutputEvent("r", 0, "a", [5]))
    assert attempts.lost(Loss.DIED) is None and attempts.is_suspect
    attempts.begin(3)
    attempts.take(OutputEvent("r", 0, "ab", [5, 6]))
    assert attempts.is_suspect
    assert attempts.lost(Loss.DIED) is None and attempts.is_held


def test_losses_that_are_forgiven_do_not_count() -> None:
    attempts = Attempts(request())
    for key in range(1, 30):
        attempts.begin(key)
        assert attempts.lost(Loss.HUNG) is None
        attempts.forgive()
        assert attempts.num_losses == 0 and not attempts.is_suspect


def test_a_suspect_that_gets_further_is_none_any_more() -> None:
    attempts = Attempts(request())
    for key in (1, 2):
        attempts.begin(key)
        assert attempts.lost(Loss.DIED) is None
    attempts.begin(3)
    assert attempts.is_suspect
    attempts.take(OutputEvent("r", 0, "a", [5]))
    assert not attempts.is_suspect
    assert attempts.lost(Loss.DIED) is None and not attempts.is_suspect


def test_workers_that_were_told_to_go_do_not_count() -> None:
    attempts = Attempts(request(), RetryLimits(in_all=1))
    for key in range(1, 30):
        attempts.begin(key)
        assert attempts.lost(Loss.LEFT) is None
    attempts.begin(30)
    assert attempts.lost(Loss.FAILED) is not None


def test_failing_ends_the_choices_that_go_on() -> None:
    attempts = Attempts(request(2))
    attempts.begin(1)
    attempts.take(OutputEvent("r", 1, "a", [5], finish_reason=FinishReason.STOP))
    events = attempts.failed("no worker", "code")
    assert [(e.choice, e.finish_reason, e.error, e.error_code) for e in events] == [(0, FinishReason.ERROR, "no worker", "code")]
    assert attempts.is_over and attempts.failed("again") == []


@pytest.mark.parametrize("limits", [{"in_place": 2}, {"in_all": 0}])
def test_limits_are_checked(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least [13]"):
        replace(RetryLimits(), **limits)


def test_a_pacer_lets_a_burst_through_and_then_so_many_a_second() -> None:
    pacer, taken, now = Pacer(per_s=10.0, burst=3), list[float](), 100.0
    while now < 102.0:
        while pacer.take(now):
            taken.append(now)
        now += pacer.wait_s() + 1e-9
    assert taken[:3] == [100.0] * 3
    assert [round(b - a, 3) for a, b in zip(taken[2:], taken[3:], strict=False)] == [0.1] * (len(taken) - 3)
    assert 20 <= len(taken) <= 23


@given(st.lists(st.floats(0, 5), max_size=40))
def test_a_pacer_never_exceeds_its_rate(gaps: list[float]) -> None:
    pacer, now, taken = Pacer(per_s=4.0, burst=2), 0.0, list[float]()
    for gap in gaps:
        now += gap
        if pacer.take(now):
            taken.append(now)
    for i, begin in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= 2 + 4.0 * (taken[j] - begin) + 1e-6


@pytest.mark.parametrize(("per_s", "burst"), [(0.0, 1), (float("nan"), 1), (1.0, 0)])
def test_a_pacers_rates_are_checked(per_s: float, burst: int) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        Pacer(per_s, burst)
