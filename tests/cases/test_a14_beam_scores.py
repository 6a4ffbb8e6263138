"""Hypotheses are ranked by sum of log-probabilities / own length ^ length_penalty, whatever the prompt and the batch (A14).

The end of text counts in the sum and not in the length (docs/server-api.md). Over HTTP, on the cpu backend, with known probabilities.
The rule step by step: tests/core/test_beam.py; chat, streams, and n above the width as a 400: tests/server/test_choices.py; the search
on a random model against one over plain rows: tests/cases/test_a14_beam_search.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.cases.bigram import byte_id, then, write_bigram
from tests.cases.served import served
from tests.models.tiny import IM_END_ID
from tests.server.harness import RunningServer

SHORT, LONG = "sab", "lcdefghij"
FIRST = {byte_id("s"): 10 + math.log(0.55), byte_id("l"): 10 + math.log(0.45)}
SCORES = {0: (math.log(0.55), math.log(0.45)), 1: (math.log(0.55) / 3, math.log(0.45) / 9), 2: (math.log(0.55) / 9, math.log(0.45) / 81)}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, openai.OpenAI]]:
    """Any other token than those of the two texts is followed by the first of either."""
    texts = then(*map(byte_id, SHORT), IM_END_ID) | then(*map(byte_id, LONG), IM_END_ID)
    path = write_bigram(tmp_path_factory.mktemp("models") / "beams.gguf", texts, FIRST, low=-40.0)
    with served(path, max_num_seqs=16) as both:
        yield both


def beams(client: openai.OpenAI, prompt: Any, penalty: float) -> list[Any]:
    search = {"use_beam_search": True, "length_penalty": penalty, "early_stopping": "never"}
    body = {"model": "m", "prompt": prompt, "n": 2, "max_tokens": 20, "logprobs": 0}
    return client.completions.create(**body, extra_body=search).choices


def check(choices: list[Any], penalty: int) -> None:
    short, long = SCORES[penalty]
    want = [(SHORT, short), (LONG, long)] if short > long else [(LONG, long), (SHORT, short)]
    assert [choice.text for choice in choices] == [text for text, _ in want]
    assert {choice.finish_reason for choice in choices} == {"stop"}
    scores = [sum(c.logprobs.token_logprobs) / (len(c.logprobs.token_logprobs) - 1) ** penalty for c in choices]
    assert scores == pytest.approx([score for _, score in want], abs=1e-3)


def test_the_numbers_of_the_case() -> None:
    assert [round(score, 3) for score in SCORES[0]] == [-0.598, -0.799] and [round(score, 3) for score in SCORES[1]] == [-0.199, -0.089]


@pytest.mark.parametrize("penalty", [0, 1, 2])
def test_prompts_of_1_and_200_tokens_alone_and_in_a_batch(api: tuple[RunningServer, openai.OpenAI], penalty: int) -> None:
    server, client = api
    prompts = ["x", "y" * 199 + "x"]
    for prompt in prompts:
        check(beams(client, prompt, penalty), penalty)
    together = beams(client, [*prompts, "z" * 57, *prompts], penalty)
    assert [choice.index for choice in together] == list(range(10))
    for pair in zip(together[::2], together[1::2], strict=True):
        check(list(pair), penalty)
    with ThreadPoolExecutor(8) as pool:  # beside drawn requests
        drawn = [
            pool.submit(client.completions.create, model="m", prompt="q" * (9 + i), max_tokens=60, seed=i, extra_body={"ignore_eos": True})
            for i in range(4)
        ]
        searches = [pool.submit(beams, client, prompt, penalty) for prompt in prompts * 2]
        for search in searches:
            check(search.result(), penalty)
        assert all(one.result().choices[0].finish_reason == "length" for one in drawn)
