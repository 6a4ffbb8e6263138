"""/v1/completions over a real socket: prompts, text, streams, log-probabilities, usage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.server.options import ServerOptions
from tests.engine.scripted import EOS_ID, LIKELY, bigram_engine, byte_ids, byte_tokenizer, script
from tests.server.harness import RunningServer, sse_events, strict_json

PIECES = ("ok", "\nUse", "ful", "\n.", " Mars", "?\n", " Alice")
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = bigram_engine(byte_tokenizer(PIECES))
    script(engine, "x", list(byte_ids(engine, "hi😀字!")))
    script(engine, "1", ["ok", "\nUse", "ful", "\n."])
    script(engine, "3", [" Mars", "?\n", "z"])
    script(engine, "4", [" Alice", "."])
    script(engine, "7", [])
    with RunningServer(engine) as running:
        yield running


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


def test_an_emoji_of_byte_tokens(server: RunningServer) -> None:
    whole = server.complete("x", model="m", max_tokens=10)
    assert whole["choices"][0]["text"] == "hi😀字!" and whole["choices"][0]["finish_reason"] == "length"
    chunks = server.stream(PATH, {"prompt": "x", "temperature": 0, "max_tokens": 10})
    deltas = [chunk["choices"][0]["text"] for chunk in chunks]
    assert deltas == ["h", "i", "", "", "", "😀", "", "", "字", "!"]  # one for every step


def test_a_cut_emoji_is_the_same_streamed_or_not(server: RunningServer) -> None:
    whole = server.complete("x", max_tokens=4)
    assert whole["choices"][0]["text"] == "hi\ufffd" and whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 4
    assert joined(server.stream(PATH, {"prompt": "x", "temperature": 0, "max_tokens": 4})) == "hi\ufffd"


@pytest.mark.parametrize(
    ("prompt", "stop", "text", "stop_reason"),
    [
        ("1", ["\nUser:"], "ok\nUseful\n.", None),
        ("3", ["\n"], " Mars?", "\n"),
        ("4", ["\n", "Alice:"], " Alice.", None),
        ("1", "ful", "ok\nUse", "ful"),
    ],
)
def test_stop_strings(server: RunningServer, prompt: str, stop: Any, text: str, stop_reason: str | None) -> None:
    whole = server.complete(prompt, stop=stop, max_tokens=20)["choices"][0]
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (text, "stop", stop_reason)
    chunks = server.stream(PATH, {"prompt": prompt, "temperature": 0, "stop": stop, "max_tokens": 20})
    assert joined(chunks) == text and "\ufffd" not in joined(chunks)
    assert chunks[-1]["choices"][0]["stop_reason"] == stop_reason


def test_prompts_of_every_form(server: RunningServer) -> None:
    ids = byte_ids(server.engine, "x")
    for prompt, count in ((["x", "1"], 2), (ids, 1), ([ids, ids, ids], 3), ("x", 1)):
        choices = server.complete(prompt, max_tokens=2, n=2)["choices"]
        assert [c["index"] for c in choices] == list(range(2 * count))
        assert choices[0]["text"] == choices[1]["text"] == "hi"
    assert [c["text"] for c in server.complete(["x", "1"], max_tokens=2)["choices"]] == ["hi", "ok\nUse"]
    chunks = server.stream(PATH, {"prompt": ["x", "1"], "temperature": 0, "max_tokens": 2, "n": 2})
    assert [joined(chunks, index) for index in range(4)] == ["hi", "hi", "ok\nUse", "ok\nUse"]
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"] is not None]
    assert sorted(ends) == [0, 1, 2, 3]


@pytest.mark.parametrize("prompt", [None, [], [[]], ["x", [5]], [1.5], [[1], "x"], {"a": 1}, [True], [10**6], [-1]])
def test_prompts_that_are_none(server: RunningServer, prompt: Any) -> None:
    status, error = server.error(PATH, {"prompt": prompt})
    assert status == 400 and error["param"] == "prompt"


def test_the_stream_protocol(server: RunningServer) -> None:
    body = {"prompt": "x", "temperature": 0, "max_tokens": 3}
    chunks = server.stream(PATH, {**body, "stream_options": {"include_usage": True}})
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "text_completion" and chunks[0]["model"] == "m"
    *content, last = chunks
    assert all(c["usage"] is None for c in content)
    assert [c["choices"][0]["finish_reason"] for c in content] == [None, None, "length"]
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"], last["usage"]["total_tokens"]) == (1, 3, 4)
    for options in ({"include_usage": False}, {}, None):
        assert all("usage" not in c and c["choices"] for c in server.stream(PATH, {**body, "stream_options": options}))
    status, error = server.error(PATH, {**body, "stream_options": {"include_usage": True}})
    assert status == 400 and error["param"] == "stream_options"


def test_a_stream_that_ends_at_once(server: RunningServer) -> None:
    (chunk,) = server.stream(PATH, {"prompt": "7", "temperature": 0})
    assert chunk["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None}


def test_max_tokens_defaults_to_16(server: RunningServer) -> None:
    assert server.complete("x", ignore_eos=True, temperature=1)["usage"]["completion_tokens"] == 16


def test_logprobs_with_echo_are_aligned(server: RunningServer) -> None:
    engine = server.engine
    size = engine.backend.vocab_size
    for max_tokens in (1, 0):
        choice = server.complete("12x", echo=True, logprobs=2, max_tokens=max_tokens)["choices"][0]
        logprobs = choice["logprobs"]
        assert choice["text"] == "12x" + "h" * max_tokens
        assert logprobs["tokens"] == list("12x") + ["h"] * max_tokens
        assert logprobs["text_offset"] == [0, 1, 2] + [3] * max_tokens
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        log_z = math.log(math.exp(LIKELY) + size - 1)
        assert logprobs["token_logprobs"][1] == pytest.approx(-log_z, abs=1e-5)  # "2" after "1": one of the unlikely
        assert logprobs["token_logprobs"][2] == pytest.approx(-math.log(size), abs=1e-5)  # after "2" all are alike
        assert len(logprobs["top_logprobs"]) == 3 + max_tokens
        assert "x" in logprobs["top_logprobs"][2] and "ok" in logprobs["top_logprobs"][1]
    streamed = server.stream(PATH, {"prompt": "12x", "temperature": 0, "echo": True, "logprobs": 2, "max_tokens": 3})
    whole = server.complete("12x", echo=True, logprobs=2, max_tokens=3)["choices"][0]
    for name, values in whole["logprobs"].items():
        assert [v for chunk in streamed for v in chunk["choices"][0]["logprobs"][name]] == values
    assert joined(streamed) == whole["text"]


def test_logprobs_0_names_the_chosen_token_alone(server: RunningServer) -> None:
    logprobs = server.complete("x", logprobs=0, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{t: lp} for t, lp in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)]


def test_offsets_point_into_text_of_several_bytes(server: RunningServer) -> None:
    choice = server.complete("x", logprobs=0, max_tokens=10)["choices"][0]
    assert choice["text"] == "hi😀字!"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 2, 2, 3, 3, 3, 4]


def test_token_ids_in_and_out(server: RunningServer) -> None:
    ids = byte_ids(server.engine, "x")
    answer = server.complete(ids, max_tokens=2, return_token_ids=True, logprobs=5, return_tokens_as_token_ids=True)["choices"][0]
    assert answer["token_ids"] == byte_ids(server.engine, "hi") and answer["prompt_token_ids"] == ids
    assert answer["logprobs"]["tokens"] == [f"token_id:{t}" for t in answer["token_ids"]]
    assert len(answer["logprobs"]["top_logprobs"][0]) == 5
    chunks = server.stream(PATH, {"prompt": ids, "max_tokens": 2, "temperature": 0, "return_token_ids": True})
    assert [c["choices"][0]["token_ids"] for c in chunks] == [[t] for t in answer["token_ids"]]
    assert [c["choices"][0]["prompt_token_ids"] for c in chunks] == [ids, None]


def test_prompt_logprobs_have_the_shape_of_vllm(server: RunningServer) -> None:
    ids = byte_ids(server.engine, "12x")
    answer = server.complete(ids, prompt_logprobs=0, max_tokens=1)["choices"][0]
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    for entry, token_id in zip(rest, ids[1:], strict=True):
        assert list(entry) == [str(token_id)]
        assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}
    top = server.complete(ids, prompt_logprobs=2, max_tokens=1)["choices"][0]["prompt_logprobs"][1]
    assert len(top) == 3 and [e["rank"] for e in top.values()][1:] == [1, 2]
    assert server.complete([5], prompt_logprobs=0, max_tokens=1)["choices"][0]["prompt_logprobs"] == [None]
    assert server.error(PATH, {"prompt": ids, "prompt_logprobs": 0, "stream": True})[1]["param"] == "prompt_logprobs"


def test_cached_prompt_tokens_are_reported(server: RunningServer) -> None:
    ids = [9] * 40
    cached = [server.complete(ids, max_tokens=2, cache_salt="cached")["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 32]
    usage = server.stream(PATH, {"prompt": ids, "max_tokens": 1, "stream_options": {"include_usage": True}, "cache_salt": "cached"})[-1][
        "usage"
    ]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 32}


def test_salts_separate_cache_entries(server: RunningServer) -> None:
    ids = [11] * 64
    for salt in (None, "x", "y"):
        cached = [server.complete(ids, max_tokens=1, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        assert cached == [0, 48]
    assert server.complete(ids, max_tokens=1, cache_salt="")["usage"]["prompt_tokens_details"]["cached_tokens"] == 48  # as no salt


def test_usage_says_why_a_prompt_was_found_no_further() -> None:
    """Only where the server was told to: it shows one client's tokens to another."""
    engine = bigram_engine(byte_tokenizer(PIECES))
    ids, other = (list(byte_ids(engine, "a" * 20 + letter * 20)) for letter in "bc")
    with RunningServer(engine, ServerOptions(explain_cache=True)) as explaining:
        body = {"prompt": [ids, [4] * 40], "max_tokens": 1, "cache_salt": "explained"}
        details = explaining.post(PATH, body)["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": 0, "cache_matches": [{"reason": "never_seen", "position": 0}] * 2}
        body = {"prompt": other, "max_tokens": 1, "cache_salt": "explained", "stream_options": {"include_usage": True}}
        (match,) = explaining.stream(PATH, body)[-1]["usage"]["prompt_tokens_details"]["cache_matches"]
        assert match == {
            "reason": "different_token", "position": 20, "token_id": other[20], "token": "c", "expected_id": ids[20], "expected": "b"
        }  # fmt: skip
        scored = explaining.complete(ids, prompt_logprobs=0, max_tokens=1)
        assert scored["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_matches": [None]}


def test_seeded_choices_repeat_beside_others(server: RunningServer) -> None:
    body = {"n": 4, "seed": 7, "temperature": 1, "max_tokens": 40, "ignore_eos": True}
    first = [c["text"] for c in server.complete("q", **body)["choices"]]
    assert len(set(first)) == 4
    others = [server.open_stream(PATH, {"prompt": "q", "max_tokens": 200, "ignore_eos": True}) for _ in range(4)]
    assert [c["text"] for c in server.complete("q", **body)["choices"]] == first
    streamed = server.stream(PATH, {"prompt": "q", **body})
    assert [joined(streamed, i) for i in range(4)] == first
    for connection in others:
        connection.close()
    unseeded = {k: v for k, v in body.items() if k != "seed"}
    assert server.complete("q", **unseeded)["choices"] != server.complete("q", **unseeded)["choices"]


def test_choices_of_different_lengths(server: RunningServer) -> None:
    logits = server.engine.backend.logits  # type: ignore[attr-defined]
    a, b = byte_ids(server.engine, "ab")
    logits[a] = logits[b] = -30.0
    logits[a, [b, EOS_ID]] = logits[b, [a, EOS_ID]] = [math.log(0.8), math.log(0.2)]
    body = {"n": 4, "seed": 3, "temperature": 1, "max_tokens": 100}
    whole = server.complete("a", **body)["choices"]
    assert len({len(c["text"]) for c in whole}) > 1 and all(c["finish_reason"] == "stop" for c in whole)
    streamed = server.stream(PATH, {"prompt": "a", **body})
    assert [joined(streamed, i) for i in range(4)] == [c["text"] for c in whole]


def test_penalties_at_temperature_0(server: RunningServer) -> None:
    logits = server.engine.backend.logits  # type: ignore[attr-defined]
    c, d = byte_ids(server.engine, "cd")
    logits[[c, d]] = -10.0
    logits[c, [c, d]] = [5.0, 4.0]
    logits[d, [c, d]] = [5.0, 0.0]
    others = [server.open_stream(PATH, {"prompt": "1", "temperature": 0, "max_tokens": 4000, "ignore_eos": True}) for _ in range(2)]
    for fields, text in (
        ({}, "cccc"),
        ({"frequency_penalty": 0.6}, "ccdc"),
        ({"frequency_penalty": 2}, "cdcd"),
        ({"presence_penalty": 2}, "cdcc"),
        ({"repetition_penalty": 1.5}, "dccc"),  # the prompt's token counts: 5 / 1.5 < 4
        ({"logit_bias": {str(d): 3}}, "dcdc"),
    ):
        assert server.complete("c", max_tokens=4, **fields)["choices"][0]["text"] == text, fields
    for connection in others:
        connection.close()


def test_held_text_is_never_cut_inside_a_character() -> None:
    engine = bigram_engine()
    script(engine, "x", list(byte_ids(engine, "用中文")))
    with RunningServer(engine) as server:
        assert server.complete("x", stop=["ZZZ"])["choices"][0]["text"] == "用中文"
        streams = [server.open_stream(PATH, {"prompt": "x", "temperature": 0, "stop": ["ZZZ"]}) for _ in range(8)]
        for connection in streams:
            chunks = [strict_json(event) for event in sse_events(connection) if event != "[DONE]"]
            assert [c["choices"][0]["text"] for c in chunks] == ["", "", "用", "", "", "中", "", "", "文", ""]


def test_detokenised_answers_can_be_tokenised_again(server: RunningServer) -> None:
    tokens = server.post("/tokenize", {"model": "m", "prompt": "hi 😀", "add_special_tokens": False})
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 4096
    assert server.post("/detokenize", {"tokens": tokens["tokens"]})["prompt"] == "hi 😀"
    named = server.post("/tokenize", {"prompt": "hi", "return_token_strs": True})
    assert named["token_strs"] == ["h", "i"]
    assert server.error("/detokenize", {"tokens": [10**6]})[1]["param"] == "tokens"
    assert server.error("/tokenize", {})[1]["param"] == "prompt"


def test_models_and_names(server: RunningServer) -> None:
    _, _, data = server.request("GET", "/v1/models")
    assert b'"id":"m"' in data and b'"max_model_len":4096' in data
    assert server.request("GET", "/v1/models/m")[0] == 200
    assert server.request("GET", "/v1/models/other")[0] == 404
    for path in (PATH, "/v1/chat/completions", "/tokenize"):
        status, error = server.error(path, {"model": "gpt-4", "prompt": "x", "messages": [{"role": "user", "content": "x"}]})
        assert status == 404 and error["code"] == "model_not_found" and "m" in error["message"]


def test_request_ids_are_echoed(server: RunningServer) -> None:
    _, headers, _ = server.request("POST", PATH, {"prompt": "x"}, {"X-Request-Id": "abc-1"})
    assert headers["x-request-id"] == "abc-1"
    assert len(server.request("GET", "/health")[1]["x-request-id"]) == 32


def test_unknown_routes_and_methods(server: RunningServer) -> None:
    for path in ("/", "/v2", "/v1/models/", "/V1/models"):
        status, _, data = server.request("GET", path)
        assert status == 404 and b'"error"' in data
    status, headers, data = server.request("GET", PATH)
    assert status == 405 and b'"method_not_allowed"' in data and headers["allow"] == "POST"
