"""/v1/chat/completions over a real socket, with the real openai client, and templates of different habits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from octavo.models.chat_template import ChatTemplate
from tests.engine.scripted import BOS_ID, bigram_engine, byte_ids, byte_tokenizer, script
from tests.models.tiny import CHAT_TEMPLATE
from tests.server.harness import TIMEOUT_S, RunningServer, strict_json

PATH = "/v1/chat/completions"
GEMMA_LIKE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "x"}


def start(template: str | None, **tokenizer_options: Any) -> RunningServer:
    tokenizer = byte_tokenizer(**tokenizer_options)
    chat_template = None if template is None else ChatTemplate(template, tokenizer.bos_token, tokenizer.eos_token)
    engine = bigram_engine(tokenizer, context=256, chat_template=chat_template)
    script(engine, "\n", list(byte_ids(engine, "hi😀字!")))
    return RunningServer(engine)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start(CHAT_TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def strict_server() -> Iterator[RunningServer]:
    with start(GEMMA_LIKE) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as one:
        yield one


def chat(server: RunningServer, messages: Any, **fields: Any) -> dict[str, Any]:
    return server.post(PATH, {"messages": messages, "temperature": 0, **fields})


def test_the_openai_client_gets_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], temperature=0)
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hi😀字!" and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 11
    assert answer.usage.prompt_tokens_details is not None


def test_the_openai_client_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "hi😀字!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 11
    text = "".join(c.choices[0].text for c in client.completions.create(model="m", prompt="\n", temperature=0, stream=True, max_tokens=4))
    assert text == "hi\ufffd"


def test_the_openai_client_sees_errors_and_models(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="m", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").owned_by == "octavo"


def test_the_openai_client_reads_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}], temperature=0, logprobs=True, top_logprobs=3, n=2, seed=1
    )
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
            assert entry.top_logprobs[0].logprob == entry.logprob
        joined = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content[:-1])  # the last token is the end
        assert joined.decode() == "hi😀字!"


def test_stream_chunks_have_the_protocol_form(server: RunningServer) -> None:
    chunks = server.stream(PATH, {"messages": [USER], "temperature": 0})
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    first, *rest = [c["choices"][0] for c in chunks]
    assert first == {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert [c["delta"]["content"] for c in rest] == ["h", "i", "", "", "", "😀", "", "", "字", "!", ""]
    assert all("finish_reason" in c for c in rest) and all("usage" not in c for c in chunks)


def test_choices_of_a_stream_each_have_a_role_and_an_end(server: RunningServer) -> None:
    chunks = server.stream(PATH, {"messages": [USER], "temperature": 0, "n": 3})
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and mine[-1]["finish_reason"] == "stop"
        assert "".join(c["delta"]["content"] for c in mine) == "hi😀字!"


def test_logprobs_are_the_same_streamed_or_not(server: RunningServer) -> None:
    for fields in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 3}):
        whole = chat(server, [USER], **fields)["choices"][0]["logprobs"]["content"]
        assert all(len(e["top_logprobs"]) == fields.get("top_logprobs", 0) for e in whole)
        chunks = server.stream(PATH, {"messages": [USER], "temperature": 0, **fields})
        parts = [c["choices"][0]["logprobs"] for c in chunks]
        assert parts[0] is None  # the role's chunk
        assert [entry for part in parts[1:] for entry in part["content"]] == whole
    assert chat(server, [USER])["choices"][0]["logprobs"] is None
    assert server.error(PATH, {"messages": [USER], "top_logprobs": 3})[1]["param"] == "top_logprobs"


def test_token_ids_and_prompt_logprobs(server: RunningServer) -> None:
    answer = chat(server, [USER], return_token_ids=True, prompt_logprobs=1, max_completion_tokens=2)
    ids = answer["prompt_token_ids"]
    assert server.post("/tokenize", {"messages": [USER]})["tokens"] == ids
    assert answer["choices"][0]["token_ids"] == byte_ids(server.engine, "hi")
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == len(ids)
    chunks = server.stream(PATH, {"messages": [USER], "temperature": 0, "return_token_ids": True, "max_tokens": 2})
    assert chunks[0]["prompt_token_ids"] == ids
    assert [i for c in chunks[1:] for i in c["choices"][0]["token_ids"]] == byte_ids(server.engine, "hi")


def test_max_tokens_by_either_name(server: RunningServer) -> None:
    for fields in ({"max_tokens": 2}, {"max_completion_tokens": 2}, {"max_tokens": 2, "max_completion_tokens": 2}):
        assert chat(server, [USER], **fields)["usage"]["completion_tokens"] == 2
    status, error = server.error(PATH, {"messages": [USER], "max_tokens": 2, "max_completion_tokens": 3})
    assert status == 400 and error["param"] == "max_completion_tokens"
    filled = chat(server, [USER], ignore_eos=True)["usage"]
    assert filled["total_tokens"] == 256


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        ([{"role": "system", "content": "be kind"}, USER], True),
        ([{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, USER], True),
        ([USER, USER], False),
        ([USER, {"role": "assistant", "content": "y"}, {"role": "tool", "content": "z", "tool_call_id": "1"}], False),
        ([USER, {"role": "assistant", "content": "y"}], True),
        ([{"role": "wizard", "content": "x"}], False),
        ([{"role": "user", "content": None}], False),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], False),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}], True),
    ],
)
def test_what_a_strict_template_takes(strict_server: RunningServer, messages: list[Any], rendered: bool, stream: bool) -> None:
    body = {"messages": messages, "temperature": 0, "max_tokens": 2, "stream": stream}
    if rendered:
        assert strict_server.request("POST", PATH, body)[0] == 200
    else:
        status, error = strict_server.error(PATH, body)
        assert status == 400 and error["param"] == "messages"
        assert "{%" not in error["message"] and "Traceback" not in error["message"]


def test_a_refusal_is_the_template_s_own_sentence(strict_server: RunningServer) -> None:
    _, error = strict_server.error(PATH, {"messages": [USER, USER]})
    assert "Conversation roles must alternate" in error["message"]


def test_the_final_message_can_be_continued(server: RunningServer) -> None:
    messages = [USER, {"role": "assistant", "content": "so\n"}]
    answer = chat(server, messages, continue_final_message=True, return_token_ids=True)
    assert answer["choices"][0]["message"]["content"] == "hi😀字!"
    assert server.post("/detokenize", {"tokens": answer["prompt_token_ids"]})["prompt"].endswith("assistant\nso\n")
    status, error = server.error(PATH, {"messages": messages, "continue_final_message": True, "add_generation_prompt": True})
    assert status == 400 and error["param"] == "continue_final_message"


def test_bos_is_written_once() -> None:
    with start("{{ bos_token }}" + CHAT_TEMPLATE, **{"tokenizer.ggml.add_bos_token": True}) as server:
        ids = chat(server, [USER], return_token_ids=True)["prompt_token_ids"]
        assert ids.count(BOS_ID) == 1 and ids[0] == BOS_ID
        text = server.post("/detokenize", {"tokens": ids})["prompt"]
        for path_ids in (
            server.complete(text, return_token_ids=True, max_tokens=1)["choices"][0]["prompt_token_ids"],
            server.post("/tokenize", {"prompt": text})["tokens"],
        ):
            assert path_ids == ids  # a prompt that begins with BOS keeps that one
        plain = server.post("/tokenize", {"prompt": "x"})["tokens"]
        assert plain == [BOS_ID, *byte_ids(server.engine, "x")]
        assert server.complete("x", return_token_ids=True, max_tokens=1)["choices"][0]["prompt_token_ids"] == plain
    with start(CHAT_TEMPLATE, **{"tokenizer.ggml.add_bos_token": True}) as server:
        assert BOS_ID not in chat(server, [USER], return_token_ids=True)["prompt_token_ids"]


def test_a_model_without_a_template() -> None:
    with start(None) as server:
        status, error = server.error(PATH, {"messages": [USER]})
        assert status == 400 and error["code"] == "no_chat_template"


def test_tool_calls_in_history_are_rendered_as_objects() -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}\n"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"city": "Đà Nẵng <3"})}}
    with start(template) as server:
        answer = chat(server, [USER, {"role": "assistant", "content": None, "tool_calls": [call]}], return_token_ids=True)
        text = server.post("/detokenize", {"tokens": answer["prompt_token_ids"]})["prompt"]
        assert strict_json(text) == {"city": "Đà Nẵng <3"}


def test_template_arguments(server: RunningServer) -> None:
    assert server.post(PATH, {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 1})
    for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
        status, error = server.error(PATH, {"messages": [USER], "chat_template_kwargs": {name: 1}})
        assert status == 400 and error["param"] == "chat_template_kwargs"
