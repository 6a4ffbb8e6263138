"""What a body may say: numbers, types, nulls, limits, unknown fields. Raw bodies, since a client library would not send most of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.models.chat_template import ChatTemplate
from tests.engine.scripted import EOS_ID, bigram_engine, byte_ids, byte_tokenizer
from tests.models.tiny import CHAT_TEMPLATE
from tests.server.harness import RunningServer, sse_events, strict_json

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {COMPLETIONS: '"prompt":"x","max_tokens":2', CHAT: '"messages":[{"role":"user","content":"x"}],"max_tokens":2'}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = bigram_engine(byte_tokenizer(), context=64, chat_template=ChatTemplate(CHAT_TEMPLATE))
    with RunningServer(engine) as running:
        yield running


def is_served(server: RunningServer) -> None:
    assert server.complete("x", max_tokens=1)["choices"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("param", "value"),
    [
        *(("temperature", v) for v in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-0.5", '"hot"', "true", "[1]")),
        *(("top_p", v) for v in ("NaN", "-0.1", "1.5")),
        *(("presence_penalty", v) for v in ("NaN", "10")),
        *(("frequency_penalty", v) for v in ("-2.5",)),
        *(("repetition_penalty", v) for v in ("0", "-1", "NaN")),
        *(("top_k", v) for v in ("0.01", "-5", '"3"', "NaN")),
        *(("min_p", v) for v in ("2", "-1")),
        *(("n", v) for v in ('"two"', "0", "-1", "1.5", "1000")),
        *(("max_tokens", v) for v in ("-1", "1.5", '"3"', "100000000000000000000")),
        *(("min_tokens", v) for v in ("-1", "3")),
        *(("seed", v) for v in ('"x"', "1.5", "99999999999999999999999")),
        *(("stop", v) for v in ("[1]", '[""]', '""', "5", json.dumps(["s"] * 65), json.dumps("s" * 5000))),
        *(("stop_token_ids", v) for v in ("[100000]", '["a"]', "[-1]")),
        *(("allowed_token_ids", v) for v in ("[]", "[100000]")),
        *(("bad_words", v) for v in ('"a"', '[""]', '[" "]')),
        *(("logit_bias", v) for v in ('{"x":1}', '{"100000":1}', '{"5":1000}', '{"5":"a"}', "[]", '{"5":NaN}')),
        *(("stream_options", v) for v in ("[]", '{"include_usage":true}')),
        *(("response_format", v) for v in ('"json"', '{"type":"json_schema","json_schema":"{}"}', '{"type":"json_object"}')),
        *(("tools", v) for v in ("{}", '[{"type":"function","function":{"name":"f"}}]')),
        ("tool_choice", '"required"'),
        ("prompt_logprobs", "21"),
        *(("best_of", v) for v in ("0", "-1", '"3"', "65", "1.5")),
        *(("use_beam_search", v) for v in ('"yes"', "1")),
        *(("length_penalty", v) for v in ("0.5", '"x"', "NaN")),
        *(("early_stopping", v) for v in ("true", '"never"', "1")),
        ("suffix", '"x"'),
        ("guided_json", "{}"),
        ("priority", "1"),
        ("cache_salt", "5"),
        *(("request_id", v) for v in ("5", '""', '"a\\nb"', json.dumps("r" * 129))),
        *(("prompt_cache_key", v) for v in ("5", json.dumps("k" * 257))),
        ("stream", '"yes"'),
        ("model", "5"),
    ],
)
def test_a_bad_value_is_a_400_that_names_its_field(server: RunningServer, path: str, param: str, value: str) -> None:
    body = "{" + GOOD[path].replace('"max_tokens":2', f'"{param}":{value}' + ("" if param == "max_tokens" else ',"max_tokens":2')) + "}"
    for stream in ("", ',"stream":true'):
        if stream and param in ("stream", "stream_options"):
            continue
        status, error = server.error(path, body.encode()[:-1] + stream.encode() + b"}")
        assert status == 400 and error["param"] == param, error
        assert param in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b'{"model":"m",}', None),
        (b"[]", None),
        (b'"hi"', None),
        (b"nul", None),
        (b'{"messages":"hi","prompt":5}', "any"),
        (b'{"messages":[1],"prompt":5}', "any"),
        (b'{"messages":[],"prompt":[]}', "any"),
        (b"{}", "any"),
        (b'{"messages":[{"role":5}],"prompt":{}}', "any"),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", None),
        (b"[" * 5000, None),
        (b'{"prompt":"\xff\xfe","messages":[{"role":"user","content":"\xff"}]}', None),
        (b'{"prompt":"\\ud800","messages":[{"role":"user","content":"\\ud800"}]}', "prompt"),
        (b'{"logprobs":"x","prompt":"x","messages":[{"role":"user","content":"x"}]}', "logprobs"),
    ],
)
def test_a_broken_body_is_a_400(server: RunningServer, body: bytes, param: str | None) -> None:
    for path, own in ((COMPLETIONS, "prompt"), (CHAT, "messages")):
        status, error = server.error(path, body)
        assert status == 400
        assert error["param"] == (own if param == "any" else param)
    is_served(server)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (COMPLETIONS, b'"prompt":"\\ud800"', r"prompt: lone surrogate \ud800; text must be valid Unicode"),
        (COMPLETIONS, b'"prompt":"a","stop":["b","c\\udc01"]', r"stop: lone surrogate \udc01; text must be valid Unicode"),
        (COMPLETIONS, b'"prompt":"a","\\ud801":1', r"?: lone surrogate \ud801; text must be valid Unicode"),
        (CHAT, b'"messages":[{"role":"user","\\ud802":"x"}]', r"messages: lone surrogate \ud802; text must be valid Unicode"),
        (CHAT, b'"messages":[{"role":"user","content":7}]', "messages[0].content: a number is not content; it is a string or"),
        (CHAT, b'"messages":[{"role":"user","content":{}}]', "messages[0].content: an object is not content; it is a string or"),
        (COMPLETIONS, b'"prompt":"a","early_stopping":true', "early_stopping: true is only allowed when use_beam_search is true"),
        (COMPLETIONS, b'"prompt":"a","use_beam_search":true,"n":2,"early_stopping":"x"', "early_stopping: 'x' is not allowed; true, fal"),
        (COMPLETIONS, b'"prompt":"a","speculative":{"num_drafts":true}', "speculative.num_drafts: true is not allowed"),
        (COMPLETIONS, b'"prompt":"a","speculative":{"method":"draft"}', "a server has it where --draft-model is given"),
        (COMPLETIONS, b'"prompt":"a","speculative":{"method":"self"}', "a server has it where --self-draft-layers is given"),
    ],
)
def test_messages_are_in_the_words_of_the_client(server: RunningServer, path: str, fields: bytes, message: str) -> None:
    status, error = server.error(path, b"{" + fields + b"}")
    assert status == 400 and message in error["message"], error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_nulls_are_as_if_absent(server: RunningServer, path: str, stream: bool) -> None:
    nulls = '"stop":null,"seed":null,"max_tokens":null,"temperature":null,"logit_bias":{},"tools":null,"user":"","top_k":null,"n":null'
    body = "{" + GOOD[path].replace('"max_tokens":2', nulls) + f',"stream":{json.dumps(stream)}' + "}"
    status, headers, data = server.request("POST", path, body.encode())
    assert status == 200 and b'"error"' not in data and b'"warnings"' not in data


@pytest.mark.parametrize(
    "fields", [{"top_k": -1}, {"top_k": 0}, {"top_k": 9999999}, {"top_p": 1}, {"top_p": 0.5}, {"min_p": 0}, {"seed": -1}]
)
def test_values_at_the_edge_are_fine(server: RunningServer, fields: dict[str, Any]) -> None:
    assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2, **fields})["choices"]


def test_top_p_0_is_greedy(server: RunningServer) -> None:
    answers = [server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 5, "top_p": 0, "ignore_eos": True})["choices"] for _ in range(2)]
    assert answers[0] == answers[1]


def test_fields_that_nobody_defines_are_reported(server: RunningServer) -> None:
    body = {"prompt": "x", "max_tokens": 1, "tempreature": 3, "user": "me", "metadata": {"a": "b"}}
    (warning,) = server.post(COMPLETIONS, body)["warnings"]
    assert "tempreature" in warning
    chunks = server.stream(COMPLETIONS, body | {"max_tokens": 3, "ignore_eos": True})
    assert [c.get("warnings") for c in chunks] == [[warning], None, None]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stream_options_are_read_like_the_body(server: RunningServer, path: str) -> None:
    body = json.loads("{" + GOOD[path] + "}")
    for option in ("continuous_usage_stats", "include_obfuscation"):
        status, error = server.error(path, body | {"stream": True, "stream_options": {option: True}})
        assert (status, error["param"], error["code"]) == (400, "stream_options", "unsupported_parameter") and option in error["message"]
    options = {"include_usage": True, "continuous_usage_stats": False, "include_obfuscation": None, "user": 1}
    chunks = server.stream(path, body | {"stream_options": options, "ignore_eos": True})
    (warning,) = chunks[0]["warnings"]
    assert "stream_options.user" in warning and chunks[-1]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_names_its_answer(server: RunningServer, path: str) -> None:
    body = json.loads("{" + GOOD[path] + "}") | {"request_id": "my name-1", "n": 2}
    prefix = "cmpl" if path == COMPLETIONS else "chatcmpl"
    streams = [server.open_stream(path, body) for _ in range(3)]  # one name for several at once is the client's business
    for connection in streams:
        *events, done = sse_events(connection)
        assert done == "[DONE]" and {strict_json(event)["id"] for event in events} == {f"{prefix}-my name-1"}
        finished = [choice for event in events for choice in strict_json(event)["choices"] if choice["finish_reason"]]
        assert sorted(choice["index"] for choice in finished) == [0, 1]
    assert server.post(path, body)["id"] == f"{prefix}-my name-1"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_forbids_itself_every_token_is_a_400(server: RunningServer, stream: bool) -> None:
    body = {"prompt": "x", "allowed_token_ids": [EOS_ID], "min_tokens": 1, "max_tokens": 2, "stream": stream}
    status, error = server.error(COMPLETIONS, body)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "no_token_allowed")
    assert "every token is forbidden" in error["message"]
    is_served(server)


def test_a_stream_that_comes_to_forbid_itself_every_token_ends_with_that_code(server: RunningServer) -> None:
    (a,) = byte_ids(server.engine, "a")
    chunk, error = server.stream(COMPLETIONS, {"prompt": "x", "allowed_token_ids": [a], "bad_words": ["aa"], "max_tokens": 3})
    assert chunk["choices"][0]["text"] == "a" and error["error"]["code"] == "no_token_allowed"


def test_a_chat_s_top_logprobs_are_called_so_in_errors(server: RunningServer) -> None:
    status, error = server.error(CHAT, json.loads("{" + GOOD[CHAT] + "}") | {"logprobs": True, "top_logprobs": 25})
    assert (status, error["param"]) == (400, "top_logprobs") and error["message"].startswith("top_logprobs: 25 is not allowed")


def test_neutral_values_of_unserved_fields_are_fine(server: RunningServer) -> None:
    neutral = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "best_of": 1,
        "length_penalty": 1,
        "early_stopping": False,
        "suffix": None,
        "use_beam_search": False,
    }
    assert "warnings" not in server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, **neutral})


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("max_tokens", [100, 4, 1, "absent", None])
def test_the_context_limit(server: RunningServer, path: str, max_tokens: Any) -> None:
    overhead = server.post("/tokenize", {"messages": [{"role": "user", "content": ""}]})["count"] if path == CHAT else 0
    for num_prompt in (60, 63, 64, 65):
        text = "q" * (num_prompt - overhead)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        body |= {"ignore_eos": True} | ({} if max_tokens == "absent" else {"max_tokens": max_tokens})
        if num_prompt >= 64:
            status, error = server.error(path, body)
            assert status == 400 and error["code"] == "context_length_exceeded"
            assert str(num_prompt) in error["message"] and "64" in error["message"]
            assert error["param"] == ("messages" if path == CHAT else "prompt")
            continue
        answer = server.post(path, body)
        left = 64 - num_prompt
        asked = max_tokens if isinstance(max_tokens, int) else (16 if path == COMPLETIONS else left)
        assert answer["usage"]["prompt_tokens"] == num_prompt
        assert answer["usage"]["completion_tokens"] == min(asked, left)
        assert answer["choices"][0]["finish_reason"] == "length"
        clamped = isinstance(max_tokens, int) and max_tokens > left
        assert ("warnings" in answer) == clamped
        if clamped:
            assert f"{max_tokens} was reduced to {left}" in answer["warnings"][0]


def test_the_type_of_the_content_does_not_matter(server: RunningServer) -> None:
    for content_type in ("", "text/plain", "application/json; charset=utf-8"):
        status, _, _ = server.request("POST", COMPLETIONS, b'{"prompt":"x","max_tokens":1}', {"Content-Type": content_type})
        assert status == 200
