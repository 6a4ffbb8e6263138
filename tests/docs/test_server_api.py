"""docs/server-api.md and the server say the same: fields, defaults, limits, routes, error codes, metrics."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields as dataclass_fields
from typing import Any

import msgspec
import pytest

from octavo.core import step
from octavo.core.request import ParameterError, SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.engine import Engine
from octavo.engine.metric_families import metric_families
from octavo.engine.params import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_STOP_CHARS, MAX_STOPS
from octavo.server import connection, openai_types
from octavo.server.app import OPEN_PATHS, ServerOptions, create_app
from octavo.server.chat import ROLES
from octavo.server.openai_types import (
    METADATA,
    NEUTRAL,
    NEUTRAL_STREAM_OPTIONS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    StreamOptions,
    TokenizeRequest,
)
from octavo.server.prometheus import exposition
from tests.docs.pages import ROOT, code, page, rows_by_name, section, tables
from tests.engine.scripted import bigram_engine

PAGE = page("docs/server-api.md")
SHARED = rows_by_name(section(PAGE, "Chat and completions"))


def names_of(kind: type[msgspec.Struct], beyond: type[msgspec.Struct] | None = None) -> set[str]:
    """Fields of a body; ``warnings`` is never read from one."""
    return set(kind.__struct_fields__) - {"warnings"} - set(beyond.__struct_fields__ if beyond else ())


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Chat and completions", names_of(SamplingFields) | names_of(StreamOptions)),
        ("Completions only", names_of(CompletionRequest, SamplingFields)),
        ("Chat only", names_of(ChatRequest, SamplingFields)),
        ("POST /tokenize", names_of(TokenizeRequest)),
        ("POST /detokenize", names_of(DetokenizeRequest)),
    ],
)
def test_the_tables_have_every_field_and_no_other(title: str, names: set[str]) -> None:
    assert set(rows_by_name(section(PAGE, title))) == names


def test_defaults_are_the_sampler_s() -> None:
    """Fields that are off by default show a dash; the others the value itself."""
    defaults = {f.name: getattr(SamplingParams(), f.name) for f in dataclass_fields(SamplingParams)}
    for name in names_of(SamplingFields) & defaults.keys():
        value = defaults[name]
        empty = value is None or value == () or value == {}
        assert SHARED[name][1] == ("—" if empty else json.dumps(value)), name


OUTSIDE: dict[str, Any] = {
    "n": 0,
    "max_tokens": -1,
    "min_tokens": -1,
    "temperature": 101.0,
    "top_p": 1.1,
    "top_k": -2,
    "min_p": -0.1,
    "presence_penalty": 3.0,
    "frequency_penalty": 3.0,
    "repetition_penalty": 0.0,
    "logit_bias": {1: 101.0},
    "allowed_token_ids": (),
    "bad_words": ("",),
    "seed": 2**64,
    "stop": ("",),
    "prompt_logprobs": 21,
    "logprobs": 21,
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_limits_are_written_as_the_error_says_them(name: str) -> None:
    with pytest.raises(ParameterError) as raised:
        SamplingParams(**{name: OUTSIDE[name]}).validate(vocab_size=100)
    assert raised.value.param == name
    rows = SHARED | rows_by_name(section(PAGE, "Completions only"))
    assert raised.value.limit.lower() in rows[name][2].lower()


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    options, text = ServerOptions(), " ".join(PAGE.split())
    async_defaults = AsyncEngine.__init__.__defaults__
    assert async_defaults == (8 << 20, 60.0) and "up to 8 MiB of output per call" in text and "no step has finished for 60 s" in text
    assert options.max_body_bytes == 32 << 20 and "(32 MiB)" in text
    assert options.stall_s == 120.0 and "for 120 s is cut off" in text and "A body may take 120 s" in text
    assert options.head_s == 30.0 and "must arrive within 30 s" in text
    assert connection.MAX_HEAD_BYTES == 64 << 10 and "and be at most 64 KiB" in text
    assert connection.MIN_BODY_BYTES_PER_S == 1024 and "a second more for every 1024 bytes" in text
    assert f"at most {MAX_STOPS} stop strings, at most {MAX_STOP_CHARS} characters each" in text
    assert f"at most {MAX_BAD_WORDS}, at most {MAX_BAD_WORD_CHARS} characters each" in text
    assert f"at most {openai_types.MAX_PROMPTS} prompts" in text
    assert f"1 to {openai_types.MAX_REQUEST_ID_CHARS} printable characters. The answer's `id`" in text
    assert f"completions make {openai_types.DEFAULT_COMPLETION_TOKENS} tokens" in text
    assert "Roles: " + ", ".join(f"`{role}`" for role in ROLES) + "." in text


def test_unserved_fields_and_their_neutral_values() -> None:
    shown = rows_by_name(section(PAGE, "Not served"))
    documented = {name: [json.loads(value) for value in re.findall(r"`([^`]*)`", row[1])] for name, row in shown.items()}
    neutral = NEUTRAL | {f"stream_options.{name}": values for name, values in NEUTRAL_STREAM_OPTIONS.items()}
    assert documented == {name: [value for value in values if value is not None] for name, values in neutral.items()}
    accepted = section(PAGE, "Not served").partition("Accepted and without effect")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", accepted)) == METADATA


@pytest.fixture
def engine() -> Engine:
    return bigram_engine()


def test_routes(engine: Engine) -> None:
    app: Any = create_app(AsyncEngine(engine))
    routes = {f"{method} {route.path}" for route in app.routes for method in route.methods - {"HEAD"}}
    shown = rows_by_name(section(PAGE, "Endpoints"))
    assert set(shown) == routes
    assert {name.split()[1] for name, row in shown.items() if "Needs no key" in row[1]} == OPEN_PATHS


def error_codes() -> set[str]:
    """Every code that the sources give to an error: a ``code=`` argument or default, or the last positional one."""
    found = set()
    for file in [*(ROOT / "src/octavo/server").glob("*.py"), *(ROOT / "src/octavo/core").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                values = [k.value for k in node.keywords if k.arg == "code"]
                position = {"invalid": 2, "APIError": 3}.get(getattr(node.func, "id", ""))
                values += node.args[position : position + 1] if position is not None else []
            elif isinstance(node, ast.FunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args]
                pairs = zip(reversed(arguments), reversed(node.args.defaults), strict=False)
                values = [default for argument, default in pairs if argument.arg == "code"]
            else:
                continue
            found |= {getattr(step, v.id) for v in values if isinstance(v, ast.Name) and v.id.isupper()}
            found |= {v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)}
    return found


def test_error_codes() -> None:
    assert set(rows_by_name(section(PAGE, "Errors"))) == error_codes()


def test_metrics(engine: Engine) -> None:
    body, _ = exposition(metric_families(engine))
    lines = body.decode().splitlines()
    helps = {line.split(" ", 3)[2]: line.split(" ", 3)[3] for line in lines if line.startswith("# HELP ")}
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE ")}
    (table,) = tables(section(PAGE, "Metrics"))
    assert {code(name): (kind, meaning) for name, kind, meaning in table} == {name: (kinds[name], helps[name]) for name in helps}
    labels = set(re.findall(r'\{(?!le=)(\w+)="', body.decode()))
    assert labels == set(re.findall(r"a label `(\w+)`", PAGE))


def test_chat_errors_name_the_fields_of_a_chat() -> None:
    request = ChatRequest(max_completion_tokens=5)
    renamed = {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": "max_completion_tokens", "n": "n"}
    assert {name: request.name_of(name) for name in renamed} == renamed
    assert ChatRequest(max_tokens=5).name_of("max_tokens") == "max_tokens"
