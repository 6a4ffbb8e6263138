"""A request that goes on after tokens made by another engine: its text, tokens, log-probabilities and end are those of the undisturbed run,
to the last bit, wherever it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.causes import Cause
from octavo.engine.engine import Engine
from octavo.engine.outputs import OutputEvent
from octavo.engine.params import PreparedRequest
from tests.engine.scripted import bigram_engine, byte_tokenizer, script
from tests.models.tiny import write_tiny_gguf

PENALTIES = SamplingParams(
    temperature=0.9, top_p=0.95, frequency_penalty=0.8, presence_penalty=0.3, repetition_penalty=1.2, min_tokens=8, max_tokens=24,
    logprobs=3, seed=11, bad_words_token_ids=((70, 71), (80,)),
)  # fmt: skip
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, seed=1),
    "penalties": PENALTIES,
    "prompt scored": replace(PENALTIES, prompt_logprobs=2, ignore_eos=True),
    "some tokens": SamplingParams(temperature=0.7, allowed_token_ids=tuple(range(60, 90)), max_tokens=24, ignore_eos=True, seed=2),
    "biased": SamplingParams(temperature=1.3, top_k=40, min_p=0.01, logit_bias={66: 3.0, 70: -5.0}, max_tokens=24, ignore_eos=True, seed=3),
}
PROMPT = [66 + (i * i) % 9 for i in range(21)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf")


@pytest.fixture(scope="module", params=[{}, {"spec": 4, "spec_method": "ngram"}], ids=["plain", "drafts"])
def engine(request: pytest.FixtureRequest, path: Path) -> Iterator[Engine]:
    with LLM(str(path), num_kv_blocks=128, threads=1, **request.param) as llm:
        yield llm.engine


def run(engine: Engine, prepared: PreparedRequest, made: list[int], beside: int = 0) -> list[OutputEvent]:
    """Events of one request that goes on after ``made``; ``beside``: others that run meanwhile."""
    others = [engine.prepare([90, 91, 92 + i], SamplingParams(max_tokens=40, seed=i, ignore_eos=True)) for i in range(beside)]
    for other in others:
        engine.add(other)
    engine.add(prepared, made)
    events = list[OutputEvent]()
    while engine.has_work:
        events += [event for event in engine.step() if event.request_id == prepared.request.request_id]
        engine.scheduler.check_invariants()
    return events


def rest_of(events: list[OutputEvent], num_events: int) -> tuple[object, ...]:
    """Text, tokens, log-probabilities and end of the events behind the first ``num_events``."""
    rest = events[num_events:]
    logprobs = [one for event in rest for one in event.logprobs or ()]
    tokens = [token for event in rest for token in event.token_ids]
    return "".join(event.text for event in rest), tokens, logprobs, rest[-1].finish_reason, rest[-1].stop_reason


@pytest.mark.parametrize("name", PARAMS)
def test_the_rest_is_that_of_the_undisturbed_run(engine: Engine, name: str) -> None:
    whole = run(engine, engine.prepare(PROMPT, PARAMS[name]), [])
    assert len(whole) > 5
    for num_events in range(1, len(whole), 3):
        made = [token for event in whole[:num_events] for token in event.token_ids]
        events = run(engine, engine.prepare(PROMPT, PARAMS[name]), made, beside=num_events % 3)
        assert rest_of(events, 0) == rest_of(whole, num_events)
        assert all(event.prompt_logprobs is None and event.num_cached_tokens == 0 for event in events)


@pytest.mark.parametrize("options", [{}, {"include_stop_str_in_output": True}, {"min_tokens": 10}])
def test_stop_strings_and_characters_that_are_cut_in_the_middle(options: dict[str, object]) -> None:
    """The stop string " stop ab" and an emoji of four tokens, cut between any two of their tokens."""
    engine = bigram_engine(byte_tokenizer(["h", "i", " st", "op", " ab", "c", "x", "y"]))
    smile = [3 + byte for byte in "😀".encode()]
    script(engine, "!", ["h", "i", *smile, " st", "op", " ab", "c", "x", "y"])
    prompt = engine.model.tokenizer.encode("!", add_special_tokens=False)
    params = SamplingParams(temperature=0, stop=(" stop ab", "xy"), seed=0, **options)  # type: ignore[arg-type]
    whole = run(engine, engine.prepare(prompt, params), [])
    assert "😀" in "".join(event.text for event in whole) and whole[-1].stop_reason is not None
    for num_events in range(1, len(whole)):
        made = [token for event in whole[:num_events] for token in event.token_ids]
        events = run(engine, engine.prepare(prompt, params), made)
        assert rest_of(events, 0) == rest_of(whole, num_events)


def test_what_another_engine_had_computed_is_a_prompt_here(engine: Engine) -> None:
    """It was lost there, not put out here: more room in this engine's KV pool would have spared nobody anything."""
    whole = run(engine, engine.prepare(PROMPT, PARAMS["greedy"]), [])
    made = [token for event in whole[:2] for token in event.token_ids]
    prepared = engine.prepare(PROMPT, PARAMS["greedy"], cache_salt="alone")
    run(engine, prepared, made)
    record = engine.timeline.find(prepared.request.request_id)
    assert record is not None and record.num_recomputed == 0 and record.seconds[Cause.RECOMPUTED] == 0.0
    assert record.seconds[Cause.PREFILL] > 0.0 and record.num_prefilled == len(PROMPT)
