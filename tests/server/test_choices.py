"""best_of and beam search over a real socket: the documented rule, whole and streamed, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from octavo.models.chat_template import ChatTemplate
from tests.engine.scripted import EOS_ID, Bigram, bigram_engine, byte_ids, byte_tokenizer, script
from tests.models.tiny import CHAT_TEMPLATE
from tests.server.harness import RunningServer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """After "x" or a chat's prompt, s (0.55) begins a text of 3 tokens and l (0.45) one of 9; after "y" come p (0.6) and q (0.4)."""
    tokenizer = byte_tokenizer()
    engine = bigram_engine(tokenizer, chat_template=ChatTemplate(CHAT_TEMPLATE, tokenizer.bos_token, tokenizer.eos_token))
    backend = engine.backend
    assert isinstance(backend, Bigram)
    short, long = byte_ids(engine, "sab"), byte_ids(engine, "lcdefghij")
    script(engine, "a", ["b"])
    script(engine, "c", list("defghij"))
    backend.script([short[0], short[1]])
    backend.script([long[0], long[1]])
    x, y, p, q, newline = byte_ids(engine, "xypq\n")
    backend.logits[[x, y, p, q, newline]] = -200.0
    for token in (x, newline):
        backend.logits[token, [short[0], long[0]]] = np.log([0.55, 0.45])
    for token in (y, p, q):
        backend.logits[token, [p, q]] = np.log([0.6, 0.4])
    with RunningServer(engine) as running:
        yield running


def beams(server: RunningServer, prompt: str = "x", **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": prompt, "n": 2, "use_beam_search": True, "max_tokens": 20, "logprobs": 0} | fields
    choices: list[dict[str, Any]] = server.post(COMPLETIONS, body)["choices"]
    return choices


def score(choice: dict[str, Any], penalty: float) -> float:
    logprobs = choice["logprobs"]["token_logprobs"]
    return float(sum(logprobs) / (len(logprobs) - (choice["finish_reason"] == "stop")) ** penalty)


@pytest.mark.parametrize("prompt", ["x", "z" * 199 + "x"])
@pytest.mark.parametrize(("penalty", "texts"), [(0, ["sab", "lcdefghij"]), (1, ["lcdefghij", "sab"]), (2, ["lcdefghij", "sab"])])
def test_length_penalty_and_ordering(server: RunningServer, prompt: str, penalty: int, texts: list[str]) -> None:
    alone = beams(server, prompt, length_penalty=penalty, early_stopping="never")
    assert [choice["text"] for choice in alone] == texts and [choice["index"] for choice in alone] == [0, 1]
    assert [choice["finish_reason"] for choice in alone] == ["stop", "stop"]
    known = {"sab": math.log(0.55) / 3**penalty, "lcdefghij": math.log(0.45) / 9**penalty}
    assert [score(choice, penalty) for choice in alone] == pytest.approx([known[text] for text in texts], abs=1e-4)
    batch = beams(server, [prompt, "y", "x"], length_penalty=penalty, early_stopping="never", max_tokens=20)  # type: ignore[arg-type]
    assert [choice["text"] for choice in (*batch[:2], *batch[4:])] == texts * 2
    assert [choice["index"] for choice in batch] == list(range(6))


def test_best_of_is_the_width_and_n_what_is_shown(server: RunningServer) -> None:
    (best,) = beams(server, "y", n=1, best_of=4, max_tokens=3)
    four = beams(server, "y", n=4, max_tokens=3)
    assert best["text"] == "ppp" == four[0]["text"] and [c["text"] for c in four] == ["ppp", "ppq", "pqp", "qpp"]
    assert [c["finish_reason"] for c in four] == ["length"] * 4


def test_a_stream_has_each_hypothesis_whole_at_the_end(server: RunningServer) -> None:
    body = {"prompt": "x", "n": 2, "use_beam_search": True, "max_tokens": 20, "stream_options": {"include_usage": True}}
    *chunks, usage = server.stream(COMPLETIONS, body)
    shown = [(c["choices"][0]["index"], c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert shown == [(0, "lcdefghij", "stop"), (1, "sab", "stop")]
    assert usage["usage"]["completion_tokens"] == 10 + 4


def test_a_chat(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "z"}], "n": 2, "use_beam_search": True, "max_tokens": 20, "logprobs": True}
    choices = server.post(CHAT, body)["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["lcdefghij", "sab"]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [10, 4]
    chunks = server.stream(CHAT, body)
    deltas = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("content")) for c in chunks]
    assert deltas == [(0, ""), (0, "lcdefghij"), (1, ""), (1, "sab")]
    drawn = {"messages": body["messages"], "temperature": 1, "seed": 1, "max_tokens": 20}
    (best,) = server.post(CHAT, drawn | {"best_of": 8})["choices"]
    assert best["message"]["content"] == "lcdefghij"  # the same two texts, this one likelier per token


def test_usage_counts_the_hypotheses_shown(server: RunningServer) -> None:
    body = {"prompt": "x", "n": 1, "best_of": 2, "use_beam_search": True, "max_tokens": 20}
    assert server.post(COMPLETIONS, body)["usage"]["completion_tokens"] == 10


def test_tokens_and_stops(server: RunningServer) -> None:
    (_, c) = byte_ids_of(server, "bc")
    body = {"prompt": "x", "n": 2, "use_beam_search": True, "max_tokens": 20, "stop_token_ids": [c], "length_penalty": 0}
    choices = server.post(COMPLETIONS, body | {"return_token_ids": True})["choices"]
    assert [choice["text"] for choice in choices] == ["sab", "l"]
    assert [choice["stop_reason"] for choice in choices] == [None, c]
    assert [choice["token_ids"][-1] for choice in choices] == [EOS_ID, c]
    shown = server.post(COMPLETIONS, body | {"include_stop_str_in_output": True})["choices"]
    assert [choice["text"] for choice in shown] == ["sab", "lc"]


def byte_ids_of(server: RunningServer, text: str) -> list[int]:
    ids: list[int] = server.post("/tokenize", {"prompt": text})["tokens"]
    return ids


def test_best_of_shows_the_highest_logprob_per_token(server: RunningServer) -> None:
    body = {"prompt": "y", "temperature": 1, "seed": 3, "max_tokens": 4, "ignore_eos": True}
    every = server.post(COMPLETIONS, body | {"n": 6, "logprobs": 1})
    drawn = every["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]) for c in drawn]
    assert len(set(means)) > 2
    want = [drawn[i]["text"] for i in sorted(range(6), key=lambda i: -means[i])[:2]]
    best = server.post(COMPLETIONS, body | {"n": 2, "best_of": 6})
    assert [c["text"] for c in best["choices"]] == want and [c["index"] for c in best["choices"]] == [0, 1]
    assert [c["logprobs"] for c in best["choices"]] == [None, None]
    assert best["usage"]["completion_tokens"] == 24 == every["usage"]["completion_tokens"]
    with_logprobs = server.post(COMPLETIONS, body | {"n": 2, "best_of": 6, "logprobs": 1})
    assert with_logprobs["choices"][0]["logprobs"] == next(c["logprobs"] for c in drawn if c["text"] == want[0])
    two = server.post(COMPLETIONS, body | {"prompt": ["y", "y"], "best_of": 6})["choices"]
    assert [(c["index"], c["text"]) for c in two] == [(0, want[0]), (1, want[0])]


def test_best_of_equal_to_n_is_n(server: RunningServer) -> None:
    body = {"prompt": "y", "temperature": 1, "seed": 3, "max_tokens": 4, "n": 2}
    plain, same = (server.post(COMPLETIONS, body | extra)["choices"] for extra in ({}, {"best_of": 2}))
    assert plain == same
    assert server.stream(COMPLETIONS, body | {"best_of": 2})


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 3, "best_of": 2}, "n", "from 1 to best_of (2)"),
        ({"n": 3, "best_of": 2, "use_beam_search": True}, "n", "from 1 to best_of (2)"),
        ({"best_of": 2, "stream": True}, "best_of", "with stream it must be n (1)"),
        ({"n": 11, "use_beam_search": True}, "n", "from 1 to 10"),
        ({"n": 1, "best_of": 11, "use_beam_search": True}, "best_of", "from 1 to 10"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature", "draws nothing"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p", "beam search"),
        ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty", "beam search"),
        ({"use_beam_search": True, "stop": "x"}, "stop", "beam search"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias", "beam search"),
        ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs", "beam search"),
        ({"use_beam_search": True, "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty", "from -10 to 10"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping", '"never"'),
        ({"use_beam_search": True, "echo": True, "logprobs": 1}, "echo", "use_beam_search"),
        ({"use_beam_search": True, "n": 10, "stop_token_ids": list(range(20))}, "stop_token_ids", "may end a text"),
    ],
)
def test_refusals(server: RunningServer, fields: dict[str, Any], param: str, words: str) -> None:
    status, error = server.error(COMPLETIONS, {"prompt": "x", "max_tokens": 2} | fields)
    assert status == 400 and error["param"] == param and error["message"].startswith(f"{param}: ") and words in error["message"], error


def test_many_best_of_are_held_to_the_places(server: RunningServer) -> None:
    status, error = server.error(COMPLETIONS, {"prompt": "x", "best_of": 65})
    assert (status, error["param"]) == (400, "best_of")
