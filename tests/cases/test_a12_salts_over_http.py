"""Salts, adapters and images never meet in the prefix cache: served apart, or refused (A12). Through the openai client.

In the engine, salts that look like other key material, and sharing by the token: tests/cases/test_a11_a12_a13_prefix_cache.py. Each source
of key material has a tag of its own: tests/core/test_prefix_index.py::test_each_source_of_key_material_is_tagged.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.engine.engine import Engine
from tests.cases.harness import GREEDY, Job, plain_answer, prompt_of
from tests.cases.served import served

PROMPT = prompt_of(64)
TEXT = {"type": "text", "text": "the same text"}


@pytest.fixture(scope="module")
def client(rand: Path) -> Iterator[openai.OpenAI]:
    with served(rand) as (_, client):
        yield client


def test_each_salt_begins_with_an_empty_cache(client: openai.OpenAI, plain: Engine) -> None:
    """An empty salt is none."""
    text = plain_answer(plain, Job(PROMPT, GREEDY))[1]
    for salt, first_hit in (("absent", 0), ("x", 0), ("y", 0), ("", 48), (None, 48)):
        for hit in (first_hit, 48):
            own = {"ignore_eos": True} | ({} if salt == "absent" else {"cache_salt": salt})
            answer = client.completions.create(model="m", prompt=PROMPT, max_tokens=12, temperature=0, extra_body=own)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            assert (answer.usage.prompt_tokens_details.cached_tokens, answer.choices[0].text) == (hit, text), salt


@pytest.mark.parametrize("salt", [3, ["x"], {"a": "b"}, True])
def test_a_salt_is_a_string(client: openai.OpenAI, salt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="m", prompt=PROMPT, max_tokens=1, extra_body={"cache_salt": salt})
    assert refused.value.param == "cache_salt"


ADAPTERS = {"lora_request": {"lora_name": "x"}, "lora": [{"id": 0, "scale": 1.0}], "lora_path": "x", "adapter_id": "x"}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_refused_however_they_are_asked_for(client: openai.OpenAI, name: str) -> None:
    """By the fields of other servers; a null or an empty list asks for none."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="m", prompt=PROMPT, max_tokens=1, extra_body={name: ADAPTERS[name]})
    assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
    answer = client.completions.create(model="m", prompt=PROMPT, max_tokens=1, extra_body={name: None})
    assert not (answer.model_extra or {}).get("warnings")


def test_an_adapter_as_a_model_s_name_is_no_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="x", prompt=PROMPT, max_tokens=1)
    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, {"type": "input_audio"}])
def test_images_are_refused(client: openai.OpenAI, part: dict[str, Any]) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": [TEXT, part]}], max_tokens=1, stream=stream)  # type: ignore[call-overload, misc, list-item]
        assert refused.value.param == "messages" and f"parts of type '{part['type']}' are not supported" in str(refused.value)
