"""Speculation through the whole engine: the same tokens, log-probabilities, text, usage and ends as without, whatever drafts there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from octavo import LLM, ParameterError, RequestOutput, SamplingParams
from octavo.config import ConfigError
from octavo.engine.llm import make_config
from tests.engine.scripted import EOS_ID, bigram_engine, byte_tokenizer, script
from tests.models.tiny import write_tiny_gguf

SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.95, frequency_penalty=0.6, repetition_penalty=1.1, max_tokens=40, ignore_eos=True, logprobs=2
)
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "sampled": SAMPLED,
    "choices": replace(SAMPLED, n=3, logprobs=None),
    "some tokens": SamplingParams(temperature=0.7, allowed_token_ids=tuple(range(60, 90)), max_tokens=40, ignore_eos=True),
    "prompt scored": SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=1, ignore_eos=True),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf")


def open_llm(path: Path, **options: object) -> LLM:
    return LLM(str(path), **{"num_kv_blocks": 128, "threads": 1, **options})


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[LLM]:
    with open_llm(path) as llm:
        yield llm


def repeating(num_tokens: int, salt: int = 0) -> list[int]:
    phrase = [70 + (i * i + salt) % 17 for i in range(9)]
    return (phrase * (num_tokens // 9 + 1))[:num_tokens]


PROMPTS = [[66, 66, 66], [80], repeating(31), [*repeating(40, 3), 5, 9, 200, 3], repeating(64, 5)]


def generate(llm: LLM, name: str) -> list[RequestOutput]:
    params = [replace(PARAMS[name], seed=i) for i in range(len(PROMPTS))]
    return llm.generate(PROMPTS, params)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> dict[str, list[RequestOutput]]:
    return {name: generate(plain, name) for name in PARAMS}


def same(a: RequestOutput, b: RequestOutput) -> bool:
    return a.outputs == b.outputs and a.prompt_logprobs == b.prompt_logprobs


METHODS = {
    "auto": {"spec": "auto"},
    "ngram": {"spec": 5, "spec_method": "ngram", "ngram_min": 1, "ngram_max": 3},
    "suffix": {"spec": 7, "spec_method": "suffix"},
    "self": {"spec": 3, "spec_method": "self", "self_draft_layers": 1},
    "a small pool": {"spec": 4, "spec_method": "ngram", "num_kv_blocks": 14, "max_num_seqs": 8},
    "small chunks": {"spec": 4, "spec_method": "suffix", "max_num_batched_tokens": 9, "max_num_seqs": 6},
    "a bound on gaps": {"spec": 4, "spec_method": "suffix", "max_itl_ms": 1e-6},
}


@pytest.mark.parametrize("method", METHODS)
def test_nothing_a_client_gets_changes(path: Path, expected: dict[str, list[RequestOutput]], method: str) -> None:
    with open_llm(path, **METHODS[method]) as llm:
        for name in PARAMS:
            for got, want in zip(generate(llm, name), expected[name], strict=True):
                assert same(got, want), name
        stats, speculated = llm.engine.scheduler.stats, llm.engine.speculator.stats
        assert stats.num_draft_tokens == speculated.num_proposed
        assert speculated.num_proposed > 0 or method == "auto"  # which goes by measured prices, and may find nothing worth it
        assert stats.num_accepted_tokens >= speculated.num_accepted
        assert llm.engine.loop.speculator is not None  # drafting did not fail
        assert llm.engine.speculator.num_tracked == 0 and llm.engine.scheduler.num_used_blocks == 0
        llm.engine.scheduler.check_invariants()


def test_the_model_as_its_own_draft(path: Path, expected: dict[str, list[RequestOutput]]) -> None:
    """Every draft is accepted, greedy and sampled: both draw with the same noise."""
    with open_llm(path, spec=5, spec_method="draft", draft_model=str(path)) as llm:
        for name in ("greedy", "sampled", "choices", "some tokens"):
            for got, want in zip(generate(llm, name), expected[name], strict=True):
                assert same(got, want), name
        stats = llm.engine.speculator.stats
        assert stats.num_accepted == stats.num_proposed > 100 and stats.alpha == 1.0
        assert stats.tested[:5] == stats.accepted[:5]


def test_requests_choose_for_themselves(path: Path, expected: dict[str, list[RequestOutput]]) -> None:
    prompts = [
        {"prompt_token_ids": PROMPTS[0], "speculative": {"num_drafts": 4, "method": "ngram"}},
        {"prompt_token_ids": PROMPTS[1]},
        {"prompt_token_ids": PROMPTS[2], "speculative": {"num_drafts": "auto"}},
        {"prompt_token_ids": PROMPTS[3], "speculative": {"num_drafts": "off"}},
        {"prompt_token_ids": PROMPTS[4], "speculative": {"num_drafts": 2}},
    ]
    with open_llm(path) as llm:
        got = llm.generate(prompts, [replace(PARAMS["sampled"], seed=i) for i in range(5)])
        assert all(same(a, b) for a, b in zip(got, expected["sampled"], strict=True))
        before = llm.engine.speculator.stats.num_proposed
        llm.generate(PROMPTS[0], PARAMS["greedy"])
        assert llm.engine.speculator.stats.num_proposed == before
    with open_llm(path, spec=4, spec_method="ngram", ngram_min=1) as llm:
        llm.generate({"prompt_token_ids": PROMPTS[0], "speculative": {"num_drafts": "off"}}, PARAMS["greedy"])
        assert llm.engine.speculator.stats.num_proposed == 0
        llm.generate(PROMPTS[0], PARAMS["greedy"])
        assert llm.engine.speculator.stats.num_proposed > 0


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"num_drafts": 17}, 'speculative.num_drafts: 17 is not allowed; "auto", "off", or an integer from 0 to 16'),
        ({"num_drafts": "many"}, "speculative.num_drafts: 'many'"),
        ({"num_drafts": True}, "speculative.num_drafts: true"),
        ({"method": "draft"}, "speculative.method: 'draft' is not allowed; one of auto, ngram, suffix"),
        ({"method": 3}, "speculative.method: 3"),
        ({"k": 3}, "it has the fields num_drafts and method"),
        ("auto", "speculative: 'auto' is not allowed"),
    ],
)
def test_what_a_request_may_not_ask_for(plain: LLM, speculative: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        plain.generate({"prompt_token_ids": [70], "speculative": speculative}, PARAMS["greedy"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec": 17}, "spec: 17 is not allowed; off, auto, or an integer from 0 to 16"),
        ({"spec": "on"}, "spec: 'on'"),
        ({"spec_method": "tree"}, "spec_method: 'tree' is not allowed; one of auto, ngram, suffix, draft, self"),
        ({"spec_method": "draft"}, "spec_method: 'draft' is not allowed; it needs draft_model"),
        ({"spec_method": "self"}, "spec_method: 'self' is not allowed; it needs self_draft_layers"),
        ({"self_draft_layers": 0}, "self_draft_layers: 0"),
        ({"ngram_min": 3, "ngram_max": 2}, r"ngram_max: 2 is not allowed; from ngram_min \(3\)"),
    ],
)
def test_what_cannot_be_configured(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config("m", **options)


def test_more_layers_than_there_are(path: Path) -> None:
    with pytest.raises(ConfigError, match="self_draft_layers: 9 is not allowed; from 1 to "):
        open_llm(path, spec_method="self", self_draft_layers=9)


def test_a_draft_model_of_other_tokens(path: Path, tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf", metadata_overrides={"tokenizer.ggml.eos_token_id": 1})
    with pytest.raises(ConfigError, match=r"draft_model: it ends with tokens .* they must be the same"):
        open_llm(path, spec="auto", draft_model=str(other))


# --- ends inside an accepted run (A16), on a model whose every token is scripted --------------------------------------------------------


def ended(spec: int, **params: object) -> tuple[list[int], str, object, object, list[float]]:
    """A request on a model that says a b c STOP d e f and then ends, with the text twice in the prompt, so that all of it is drafted."""
    tokenizer = byte_tokenizer(["STOP"])
    engine = bigram_engine(tokenizer)
    answer = script(engine, "!", ["a", "b", "c", "STOP", "d", "e", "f"])
    prompt = [*answer, EOS_ID, *tokenizer.encode("!"), *answer, EOS_ID, *tokenizer.encode("!")]
    with LLM.from_engine(engine) as llm:
        wanted = {"prompt_token_ids": prompt, "speculative": {"num_drafts": spec, "method": "ngram"}}
        out = llm.generate(wanted, SamplingParams(temperature=0, logprobs=0, **params))[0].outputs[0]  # type: ignore[arg-type]
        assert (engine.speculator.stats.num_accepted > 0) == (spec > 0)
        following = llm.generate([*prompt, *out.token_ids, *tokenizer.encode("!")], SamplingParams(temperature=0, max_tokens=3))
        assert following[0].outputs[0].token_ids == answer[:3]
        engine.scheduler.check_invariants()
    logprobs = [entry.logprob for entry in out.logprobs or []]
    return out.token_ids, out.text, out.finish_reason, out.stop_reason, logprobs


ENDS: dict[str, dict[str, object]] = {
    "string": {"stop": ("STOP",)},
    "string across tokens": {"stop": ("cST",)},
    "token": {"stop_token_ids": tuple(byte_tokenizer(["STOP"]).encode("STOP"))},
    "eos": {},
    "kept in the output": {"stop": ("STOP",), "include_stop_str_in_output": True},
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("max_tokens", [3, 4, 5, 30])
def test_an_end_inside_an_accepted_run(end: str, max_tokens: int) -> None:
    """A stop at or before the cap wins, one past it does not; token ids, text and log-probabilities end together."""
    want = ended(0, max_tokens=max_tokens, **ENDS[end])
    assert ended(5, max_tokens=max_tokens, **ENDS[end]) == want
    assert len(want[4]) == len(want[0]) <= max_tokens


def test_a_draft_model_that_fails_ends_drafting_and_nothing_else(path: Path, expected: dict[str, list[RequestOutput]]) -> None:
    with open_llm(path, spec=4, spec_method="draft", draft_model=str(path)) as llm:
        draft = llm.engine._drafting._backend
        assert draft is not None
        calls = iter(range(10**9))
        execute = draft.execute

        def failing(plan: object) -> object:
            if next(calls) == 7:
                raise RuntimeError("the draft's device is gone")
            return execute(plan)  # type: ignore[arg-type]

        draft.execute = failing  # type: ignore[method-assign, assignment]
        for got, want in zip(generate(llm, "sampled"), expected["sampled"], strict=True):
            assert same(got, want)
        assert llm.engine.loop.speculator is None and next(calls) == 8
