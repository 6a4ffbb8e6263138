"""``LLM.beam_search`` on a scripted model: hypotheses, their order, texts and sums; batches; what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from octavo import LLM, BeamSearchParams, ParameterError, SamplingParams
from tests.engine.scripted import EOS_ID, Bigram, bigram_engine, byte_ids, byte_tokenizer, script


@pytest.fixture
def llm() -> LLM:
    """After "x" comes "sab" (0.55) or "lcdefghij" (0.45), then the end."""
    engine = bigram_engine(byte_tokenizer(), max_num_seqs=8)
    backend = engine.backend
    assert isinstance(backend, Bigram)
    script(engine, "s", ["a", "b"])
    script(engine, "l", list("cdefghij"))
    x, *firsts = byte_ids(engine, "xsl")
    backend.logits[x] = -200.0
    backend.logits[x, firsts] = np.log([0.55, 0.45])
    return LLM.from_engine(engine)


@pytest.mark.parametrize(("penalty", "texts"), [(0.0, ["sab", "lcdefghij"]), (1.0, ["lcdefghij", "sab"]), (2.0, ["lcdefghij", "sab"])])
@pytest.mark.parametrize("num_before", [0, 199])
def test_scores_order_the_hypotheses_whatever_the_prompt_s_length(llm: LLM, penalty: float, texts: list[str], num_before: int) -> None:
    params = BeamSearchParams(2, 30, length_penalty=penalty, early_stopping="never")
    prompt = "z" * num_before + "x"
    (alone,) = llm.beam_search(prompt, params)
    assert [o.text for o in alone.outputs] == texts
    assert [(o.index, o.finish_reason, o.token_ids[-1]) for o in alone.outputs] == [(0, "stop", EOS_ID), (1, "stop", EOS_ID)]
    sums = {"sab": math.log(0.55), "lcdefghij": math.log(0.45)}
    assert [o.cumulative_logprob for o in alone.outputs] == pytest.approx([sums[text] for text in texts], abs=1e-5)
    assert alone.outputs[0].logprobs is None
    batch = llm.beam_search([prompt, "q", prompt, "x"], params)
    assert [[o.text for o in output.outputs] for output in (batch[0], batch[2], batch[3])] == [texts] * 3


def test_it_runs_beside_sampling_and_changes_nothing(llm: LLM) -> None:
    beams, drawn = BeamSearchParams(2, 30).sampling_params(), SamplingParams(n=2, seed=4, max_tokens=5)
    mixed = llm.generate(["x", "q", "x"], [beams, drawn, drawn])
    apart = [llm.generate("x", beams)[0], llm.generate("q", drawn)[0], llm.generate("x", drawn)[0]]
    assert [[o.token_ids for o in output.outputs] for output in mixed] == [[o.token_ids for o in output.outputs] for output in apart]


def test_n_of_the_width_and_logprobs(llm: LLM) -> None:
    (output,) = llm.beam_search("x", BeamSearchParams(3, 30, n=1, logprobs=1, length_penalty=0))
    (best,) = output.outputs
    assert best.text == "sab" and best.logprobs is not None and [entry.token_id for entry in best.logprobs] == best.token_ids
    assert sum(entry.logprob for entry in best.logprobs) == best.cumulative_logprob
    assert all(entry.rank == 1 and len(entry.top_ids) == 1 for entry in best.logprobs)


def test_a_stream_gives_each_hypothesis_at_the_end(llm: LLM) -> None:
    events = list(llm.stream("x", BeamSearchParams(2, 30).sampling_params()))
    assert [(e.choice, e.text) for e in events] == [(0, "lcdefghij"), (1, "sab")] and all(e.finish_reason is not None for e in events)


def test_ends(llm: LLM) -> None:
    (c,) = byte_ids(llm.engine, "c")
    (output,) = llm.beam_search("x", BeamSearchParams(2, 30, stop_token_ids=[c], length_penalty=0))
    assert [(o.text, o.stop_reason) for o in output.outputs] == [("sab", None), ("l", c)]
    (output,) = llm.beam_search("x", BeamSearchParams(2, 2))
    assert [(o.text, o.finish_reason) for o in output.outputs] == [("sa", "length"), ("lc", "length")]
    (output,) = llm.beam_search("x", BeamSearchParams(2, 6, ignore_eos=True))
    assert all(len(o.token_ids) == 6 and o.finish_reason == "length" for o in output.outputs)
    (output,) = llm.beam_search("x", BeamSearchParams(2, 9, min_tokens=7))
    assert all(len(o.token_ids) > 7 for o in output.outputs)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (BeamSearchParams(2, 5, n=3), "n"),
        (BeamSearchParams(0, 5), "beam_width"),
        (BeamSearchParams(9, 5), "beam_width"),  # more than max_num_seqs
        (BeamSearchParams(11, 5), "beam_width"),
        (BeamSearchParams("2", 5), "beam_width"),  # type: ignore[arg-type]
        (BeamSearchParams(2, 0), "max_tokens"),
        (BeamSearchParams(2, 5, temperature=0.3), "temperature"),
        (BeamSearchParams(2, 5, early_stopping="soon"), "early_stopping"),
        (BeamSearchParams(2, 5, length_penalty=math.inf), "length_penalty"),
        (BeamSearchParams(8, 5, stop_token_ids=range(3, 20)), "stop_token_ids"),
    ],
)
def test_refusals(llm: LLM, params: BeamSearchParams, param: str) -> None:
    with pytest.raises(ParameterError) as raised:
        llm.beam_search("x", params)
    assert raised.value.param == param


def test_a_failed_step_ends_a_search_once_for_each_choice(llm: LLM) -> None:
    backend: Any = llm.engine.backend

    def fail(plan: object) -> None:
        if len(backend.plans) == 3:
            raise RuntimeError("no")

    backend.before_step = fail
    prepared = llm.engine.prepare(byte_ids(llm.engine, "x"), BeamSearchParams(4, 30, n=2).sampling_params())
    llm.engine.add(prepared)
    events = [event for _ in range(3) for event in llm.engine.step()]
    assert [(event.choice, event.error is not None) for event in events] == [(0, True), (1, True)]
    assert llm.engine.scheduler.num_used_blocks == 0 and not llm.engine.has_work
    backend.before_step = None
    assert llm.beam_search("x", BeamSearchParams(2, 30))[0].outputs[0].text == "lcdefghij"
