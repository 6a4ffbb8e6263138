"""The Python API on a scripted model: text, endings, stop strings, batches, streams, log-probabilities, failures."""

from __future__ import annotations

import math

import pytest

from octavo import LLM, GenerationError, ParameterError, SamplingParams
from octavo.core.block_tables import BlockTables
from octavo.core.request import FinishReason
from octavo.core.slots import SlotTable
from octavo.core.state import SchedulerState
from octavo.core.step import NO_TOKEN_ALLOWED, StepPlan
from octavo.engine.llm import make_config
from tests.engine.scripted import EOS_ID, LIKELY, Bigram, bigram_engine, byte_ids, byte_tokenizer, script

GREEDY = SamplingParams(temperature=0)


def make_llm(prompt: str, pieces: list[str | int], **options: object) -> LLM:
    tokenizer = byte_tokenizer([p for p in (prompt, *pieces) if isinstance(p, str) and len(p.encode()) > 1])
    engine = bigram_engine(tokenizer, **options)  # type: ignore[arg-type]
    script(engine, prompt, pieces)
    return LLM.from_engine(engine)


def backend_of(llm: LLM) -> Bigram:
    assert isinstance(llm.engine.backend, Bigram)
    return llm.engine.backend


def test_a_prompt_is_continued_to_its_end() -> None:
    llm = make_llm("x", ["a", "b", "c"])
    output = llm.generate("x", GREEDY)[0]
    assert (output.prompt, output.prompt_token_ids) == ("x", byte_ids(llm.engine, "x"))
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("abc", "stop", None)
    assert completion.token_ids == [*byte_ids(llm.engine, "abc"), EOS_ID]  # the end counts as a token and has no text


def test_prompts_of_all_kinds_run_as_one_batch() -> None:
    llm = make_llm("x", ["a", "b"])
    ids = byte_ids(llm.engine, "x")
    outputs = llm.generate(["x", ids, {"prompt": "qx"}, {"prompt_token_ids": ids}], GREEDY)
    assert [o.outputs[0].text for o in outputs] == ["ab"] * 4
    assert [o.prompt for o in outputs] == ["x", None, "qx", None]
    assert len(backend_of(llm).plans) == 3  # tokens a, b and the end: four prompts in the steps of one
    assert llm.generate(ids, GREEDY)[0].outputs[0].text == "ab"


def test_a_prompt_s_dict_has_known_keys_alone() -> None:
    llm = make_llm("x", ["a"])
    assert llm.generate({"prompt": "x", "cache_salt": "s"}, GREEDY)[0].outputs[0].text == "a"
    for prompt in ({"prompt": "x", "multi_modal_data": {}}, {"prompt_token_ids": [5], "multi_modal_data": {}}, {5: "x"}):
        with pytest.raises(ParameterError, match="multi_modal_data|'5'") as raised:
            llm.generate(prompt, GREEDY)  # type: ignore[arg-type]
        assert raised.value.param == "prompt"


def test_options_are_the_flags_with_underscores() -> None:
    config = make_config("m", kv_cache_memory=1 << 20, max_num_seqs=3, threads=1)
    assert (config.cache.kv_cache_memory, config.scheduler.max_num_seqs, config.backend.threads) == (1 << 20, 3, 1)
    with pytest.raises(TypeError, match="kv_cache_memory_bytes: it is no engine option; there are: .*kv_cache_memory,"):
        make_config("m", kv_cache_memory_bytes=1 << 20)
    with pytest.raises(TypeError, match="served_model_name: .*`octavo serve`") as raised:
        LLM("m", served_model_name="n")
    assert "served_model_name" not in str(raised.value).partition("there are")[2]


def test_each_prompt_may_have_its_own_parameters() -> None:
    llm = make_llm("x", ["a", "b"])
    short, long = llm.generate(["x", "x"], [SamplingParams(temperature=0, max_tokens=1), GREEDY])
    assert (short.outputs[0].text, short.outputs[0].finish_reason) == ("a", "length")
    assert long.outputs[0].text == "ab"
    with pytest.raises(ParameterError, match="sampling_params"):
        llm.generate(["x"], [GREEDY, GREEDY])


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "reason"),
    [
        (["ok", "\nUse", "ful", "\n."], "\nUser:", "ok\nUseful\n.", None),
        (["ok", "\nUse"], "\nUser:", "ok\nUse", None),
        ([" Mars", "?\n", "z"], "\n", " Mars?", "\n"),
        ([" Alice", "!"], "Alice:", " Alice!", None),
    ],
)
def test_stop_strings(pieces: list[str], stop: str, text: str, reason: str | None) -> None:
    llm = make_llm("x", list(pieces))
    params = SamplingParams(temperature=0, stop=(stop,))
    whole = llm.generate("x", params)[0].outputs[0]
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (text, "stop", reason)
    assert "".join(event.text for event in llm.stream("x", params)) == text
    if reason is not None:
        assert len(whole.token_ids) == 2  # nothing past the stop is counted


def test_an_emoji_comes_whole_and_at_once() -> None:
    llm = LLM.from_engine(bigram_engine())
    script(llm.engine, "x", list(byte_ids(llm.engine, "hi😀字!")))
    events = list(llm.stream("x", GREEDY))
    assert [e.text for e in events] == ["h", "i", "", "", "", "😀", "", "", "字", "!", ""]
    cut = SamplingParams(temperature=0, max_tokens=4)
    assert [e.text for e in llm.stream("x", cut)] == ["h", "i", "", "\ufffd"]
    assert llm.generate("x", cut)[0].outputs[0].text == "hi\ufffd"


def test_min_tokens_holds_for_ends_and_stop_strings() -> None:
    llm = make_llm("x", ["a", "b"])
    backend_of(llm).logits[EOS_ID, byte_ids(llm.engine, "b")] = LIKELY
    stopped = llm.generate("x", SamplingParams(temperature=0, stop=("a", "b"), min_tokens=1))[0].outputs[0]
    assert (stopped.text, stopped.stop_reason) == ("a", "b")
    later = llm.generate("x", SamplingParams(temperature=0, min_tokens=4, max_tokens=6))[0].outputs[0]
    assert EOS_ID not in later.token_ids[:4]


def test_log_probabilities_are_the_closed_form() -> None:
    llm = make_llm("x", ["a", "b"])
    params = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, max_tokens=1)
    output = llm.generate("qx", params)[0]
    log_z = math.log(math.exp(LIKELY) + llm.engine.backend.vocab_size - 1)
    (entry,) = output.outputs[0].logprobs or []
    assert entry.logprob == pytest.approx(LIKELY - log_z, abs=1e-6) and entry.rank == 1 and len(entry.top_ids) == 2
    assert output.outputs[0].cumulative_logprob == entry.logprob
    assert output.prompt_logprobs is not None
    first, second = output.prompt_logprobs
    assert first is None and second is not None
    assert second.logprob == pytest.approx(-math.log(llm.engine.backend.vocab_size), abs=1e-5)


def test_choices_have_their_own_text_and_seed() -> None:
    llm = LLM.from_engine(bigram_engine())
    params = SamplingParams(n=4, seed=7, max_tokens=12, ignore_eos=True)
    first, again = llm.generate("x", params)[0], llm.generate("x", params)[0]
    texts = [o.token_ids for o in first.outputs]
    assert len({tuple(t) for t in texts}) == 4
    assert texts == [o.token_ids for o in again.outputs]
    assert sum(s.num_tokens for p in backend_of(llm).plans[:1] for s in p.slices) == 1  # the prompt is computed once
    unseeded = [llm.generate("x", SamplingParams(max_tokens=12, ignore_eos=True))[0] for _ in range(2)]
    assert unseeded[0].outputs[0].token_ids != unseeded[1].outputs[0].token_ids
    replay = SamplingParams(max_tokens=12, ignore_eos=True, seed=unseeded[0].seed)
    assert llm.generate("x", replay)[0].outputs[0].token_ids == unseeded[0].outputs[0].token_ids


def test_allowed_tokens_and_bad_words() -> None:
    llm = make_llm("x", ["a", " b", "b"])
    (a, _, b) = (llm.tokenizer.encode(t, add_special_tokens=False)[0] for t in ("a", " b", "b"))
    forced = llm.generate("x", SamplingParams(temperature=0, allowed_token_ids=(b,), max_tokens=2))[0].outputs[0]
    assert forced.token_ids == [b, b]
    assert any(piece.mask is not None for plan in backend_of(llm).plans for piece in plan.slices)
    without = llm.generate("x", SamplingParams(temperature=0, bad_words=("a",), max_tokens=1))[0].outputs[0]
    assert without.token_ids != [a]
    spaced = llm.generate("a", SamplingParams(temperature=0, bad_words=("b",), max_tokens=1))[0].outputs[0]
    assert spaced.text not in ("b", " b")  # both forms are forbidden


def test_the_output_fills_what_the_context_leaves() -> None:
    llm = LLM.from_engine(bigram_engine(context=64))
    params = SamplingParams(ignore_eos=True, max_tokens=100)
    output = llm.generate([3] * 60, params)[0]
    assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].finish_reason == "length"
    assert output.warnings and "100" in output.warnings[0] and "4" in output.warnings[0]
    assert len(llm.generate([3] * 63, SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 1
    for num_tokens in (64, 65):
        with pytest.raises(ParameterError, match=f"{num_tokens} tokens.*64") as error:
            llm.generate([3] * num_tokens, params)
        assert error.value.code == "context_length_exceeded"


def test_nothing_runs_when_one_prompt_is_wrong() -> None:
    llm = LLM.from_engine(bigram_engine())
    for bad in ([], [10**6], [-1], [None]):
        with pytest.raises(ParameterError, match="prompt"):
            llm.generate([[3, 4], bad], SamplingParams(max_tokens=2))  # type: ignore[list-item]
    assert not backend_of(llm).plans
    assert not llm.engine.has_work


def test_a_stream_that_is_closed_ends_its_request() -> None:
    llm = LLM.from_engine(bigram_engine())
    stream = llm.stream("x", SamplingParams(ignore_eos=True, max_tokens=1000))
    next(stream)
    assert llm.engine.has_work
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work
    llm.engine.scheduler.check_invariants()
    assert llm.engine.scheduler.num_used_blocks == 0


def test_streams_can_be_read_in_turn() -> None:
    llm = make_llm("x", ["a", "b", "c"])
    pairs = list(zip(llm.stream("x", GREEDY), llm.stream("x", GREEDY), strict=True))
    assert ["".join(e.text for e in side) for side in zip(*pairs, strict=True)] == ["abc", "abc"]


def test_the_engine_outlives_a_step_that_fails() -> None:
    llm = make_llm("x", ["a", "b"])
    backend = backend_of(llm)

    def fail(plan: StepPlan) -> None:
        backend.before_step = None
        raise MemoryError("no more")

    backend.before_step = fail
    with pytest.raises(GenerationError, match="no more"):
        llm.generate(["x", "x"], GREEDY)
    assert llm.engine.num_failures_in_a_row == 1 and llm.engine.metrics.num_failed_steps == 1
    assert llm.generate("x", GREEDY)[0].outputs[0].text == "ab"
    assert llm.engine.num_failures_in_a_row == 0


@pytest.mark.parametrize("num_calls", [1, 2, 3])
@pytest.mark.parametrize("where", [(SchedulerState, "rank_anew"), (BlockTables, "grow"), (SlotTable, "take"), (SlotTable, "drain_closes")])
def test_the_engine_outlives_a_plan_that_fails(where: tuple[type, str], num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever planning stops: before anything is planned, or with the blocks, copies and slots of half a plan taken."""
    llm = make_llm("x", list("abcdefgh"))
    whole, num_left = getattr(*where), num_calls

    def failing(*args: object) -> object:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise AssertionError("half a plan")
        return whole(*args)

    monkeypatch.setattr(*where, failing)
    params = SamplingParams(temperature=0, max_tokens=8, n=2)
    with pytest.raises(GenerationError, match="half a plan"):
        llm.generate(["x", "y", "x"], params)
    scheduler = llm.engine.scheduler
    scheduler.check_invariants()
    assert (scheduler.num_used_blocks, scheduler.has_work, llm.engine.num_failures_in_a_row) == (0, False, 1)
    assert [choice.text for choice in llm.generate("x", params)[0].outputs] == ["abcdefgh"] * 2
    assert llm.engine.num_failures_in_a_row == 0


def test_a_row_without_an_answer_ends_its_own_request_alone() -> None:
    llm = make_llm("x", ["a", "b"])
    backend_of(llm).logits[byte_ids(llm.engine, "z")[0]] = float("nan")
    texts = []
    good = llm.stream("x", GREEDY)
    texts.append(next(good).text)
    with pytest.raises(GenerationError, match="nan"):
        llm.generate("z", GREEDY)
    texts += [event.text for event in good]
    assert "".join(texts) == "ab"


def test_a_prompt_that_fails_costs_the_others_nothing() -> None:
    llm = make_llm("x", ["a", "b"])
    backend_of(llm).logits[byte_ids(llm.engine, "z")[0]] = float("nan")
    with pytest.raises(GenerationError, match="nan") as raised:
        llm.generate(["x", "z", "x"], GREEDY)
    good, failed, also_good = raised.value.outputs
    assert failed.error == str(raised.value) and failed.outputs[0].finish_reason == "error" and raised.value.code is None
    assert [(o.error, o.outputs[0].text) for o in (good, also_good)] == [(None, "ab")] * 2


def test_a_request_that_forbids_itself_every_token_is_told_so() -> None:
    llm = make_llm("x", ["a", "b"])
    with pytest.raises(GenerationError, match="every token is forbidden") as raised:
        llm.generate("x", SamplingParams(allowed_token_ids=(EOS_ID,), min_tokens=1, max_tokens=2))
    assert raised.value.code == raised.value.outputs[0].error_code == NO_TOKEN_ALLOWED


def test_a_choice_without_an_answer_ends_all_choices_of_its_request() -> None:
    llm = LLM.from_engine(bigram_engine())
    logits = backend_of(llm).logits
    (a, b, c) = byte_ids(llm.engine, "abc")
    logits[a, [b, c]] = 20.0  # about half of the choices draw b, which allows nothing after it
    logits[b] = float("nan")
    logits[c, c] = LIKELY
    with pytest.raises(GenerationError, match="nan"):
        llm.generate("a", SamplingParams(n=8, seed=1, max_tokens=50))
    scheduler = llm.engine.scheduler
    scheduler.check_invariants()
    assert not llm.engine.has_work and scheduler.num_used_blocks == 0 and scheduler.stats.num_failed == 1
    assert llm.engine.metrics.num_finished[FinishReason.ERROR] == 1
    assert llm.generate("c", SamplingParams(n=8, temperature=0, max_tokens=3))[0].outputs[7].text == "ccc"


def test_max_tokens_0_gives_the_prompt_alone() -> None:
    llm = make_llm("x", ["a"])
    output = llm.generate("qx", SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert output.outputs[0].text == "" and output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 2


def test_closing_closes_the_backend() -> None:
    with make_llm("x", ["a"]) as llm:
        backend = backend_of(llm)
    assert backend.closed
