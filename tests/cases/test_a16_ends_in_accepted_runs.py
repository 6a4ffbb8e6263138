"""A stop or the end of text inside a run of accepted drafts: everything is as without drafts, and nothing is left behind (A16).

The draft model is the model itself, so that all 5 drafts come true: one step runs past the stop and past the cap. With looked-up drafts,
stops across tokens and included stops: tests/engine/test_speculation.py::test_an_end_inside_an_accepted_run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine
from tests.cases.bigram import byte_id, piece_id, then, write_bigram
from tests.cases.harness import Job, open_engine, plain_answer, prompt_of, run
from tests.cases.served import served
from tests.models.tiny import IM_END_ID
from tests.server.harness import RunningServer

PIECES = ("STOP",)
STOP = piece_id(PIECES, "STOP")
BEFORE = [byte_id(c) for c in "abc"]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, openai.OpenAI]]:
    """"!" is answered with a b c STOP d e f, "?" with x y z, the end of text, and d e f behind it for whoever goes on."""
    text = then(byte_id("!"), *BEFORE, STOP, *map(byte_id, "def"), IM_END_ID)
    ended = then(byte_id("?"), *map(byte_id, "xyz"), IM_END_ID, byte_id("d"))
    path = write_bigram(tmp_path_factory.mktemp("models") / "stops.gguf", text | ended, {byte_id("!"): 1.0}, PIECES)
    with served(path, draft_model=str(path)) as both:
        yield both


ENDS: dict[str, tuple[str, dict[str, Any], int | str | None]] = {
    "string": ("!", {"stop": ["STOP"]}, "STOP"),
    "token": ("!", {"stop_token_ids": [STOP]}, STOP),
    "end of text": ("?", {}, None),
}


def answer(client: openai.OpenAI, end: str, max_tokens: int, num_drafts: int | str, stream: bool) -> dict[str, Any]:
    prompt, fields, _ = ENDS[end]
    own = {"return_token_ids": True, "speculative": {"num_drafts": num_drafts, "method": "draft"}} | fields
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "extra_body": own}
    if not stream:
        whole = client.completions.create(**body)
        parts, usage = [whole.choices[0]], whole.usage
    else:
        chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        parts, usage = [chunk.choices[0] for chunk in chunks if chunk.choices], chunks[-1].usage
    assert usage is not None and [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    return {
        "ids": [token for part in parts for token in part.token_ids],
        "text": "".join(part.text for part in parts),
        "logprobs": [value for part in parts for value in part.logprobs.token_logprobs],
        "tokens": [token for part in parts for token in part.logprobs.tokens],
        "reason": (parts[-1].finish_reason, parts[-1].stop_reason),
        "counts": (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens),
    }


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("max_tokens", [3, 4, 5])
def test_all_that_a_client_sees(api: tuple[RunningServer, openai.OpenAI], end: str, max_tokens: int) -> None:
    """A stop at or before the cap wins, one past it does not."""
    server, client = api
    plain = answer(client, end, max_tokens, "off", stream=False)
    stats = server.engine.speculator.stats
    num_accepted = stats.num_accepted
    for stream in (False, True):
        assert answer(client, end, max_tokens, 5, stream) == plain
    assert stats.num_accepted > num_accepted
    assert answer(client, end, max_tokens, "off", stream=True) == plain
    prompt, _, reason = ENDS[end]
    num_tokens = min(max_tokens, 4)
    assert plain["text"] == {"!": "abc", "?": "xyz"}[prompt]
    assert plain["reason"] == (("length", None) if max_tokens == 3 else ("stop", reason))
    assert len(plain["ids"]) == len(plain["logprobs"]) == len(plain["tokens"]) == num_tokens
    assert plain["counts"] == (1, num_tokens, num_tokens + 1)


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=30, logprobs=2),
    "sampled": SamplingParams(temperature=0.9, seed=4, frequency_penalty=0.5, max_tokens=30, logprobs=2),
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("num_prompt", [14, 30])
def test_the_conversation_goes_on_as_if_later_tokens_had_never_been(rand: Path, plain: Engine, name: str, num_prompt: int) -> None:
    """Stopped at every place of a run, then continued on the same cache, once along the very drafts that were dropped and once elsewhere.

    A last token that was a draft has its KV, which that of a plain run lacks; so a block may be found that it fills. Nothing behind it is.
    """
    prompt, params = prompt_of(num_prompt, salt=2), replace(PARAMS[name], ignore_eos=True)
    whole = plain_answer(plain, Job(prompt, params))[0]
    ends = [i for i, token in enumerate(whole[:14]) if token not in whole[:i]]
    assert len(ends) > 4
    changes = [one for end in ends for one in ((end, {"stop_token_ids": (whole[end],)}), (end, {"max_tokens": end + 1}))]
    shown: list[list[object]] = []
    for options in ({}, {"draft_model": str(rand), "spec": 5, "spec_method": "draft"}):
        shown.append([])
        with open_engine(rand, threads=1, **options) as engine:
            for i, (end, change) in enumerate(changes):  # salts: each with a cache of its own
                first = Job(prompt, replace(params, **change), salt=f"{i}")
                run(engine, first)
                following = [Job([*prompt, *whole[:16], 9], params, f"{i}"), Job([*prompt, *whole[: end + 1], 9], params, f"{i}")]
                for job in following:
                    run(engine, job)
                computed = {num_prompt + end, num_prompt + end + bool(options)}
                assert following[0].num_cached in {num_tokens // 16 * 16 for num_tokens in computed}
                assert first.answer()[0] == whole[: end + 1]
                shown[-1].append([job.answer() for job in (first, *following)])
            assert not options or engine.speculator.stats.num_accepted > 0
    assert shown[0] == shown[1]
    alone = [plain_answer(plain, Job([*prompt, *whole[: end + 1], 9], params)) for end, _ in changes[::2]]
    assert [answers[2] for answers in shown[1][::2]] == alone
