"""2,000 seeded bodies for every route that reads one: each is served or refused with a JSON error that names the field, never a 5xx."""

from __future__ import annotations

import http.client
import random
from collections.abc import Iterator

import pytest

from octavo.config import CacheConfig, EngineConfig, ModelConfig
from octavo.engine.engine import Engine
from octavo.server.openai_types import METADATA, NEUTRAL, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.models.tiny import write_tiny_gguf
from tests.server.harness import TIMEOUT_S, RunningServer, strict_json, wait_until

NUM_BODIES = 2000
NUM_PARTS = 4  # so that a failure is found sooner
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# Route -> (fields it knows, a good body). All values are JSON text, since not all of them have a Python value.
ROUTES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    COMPLETIONS: (CompletionRequest.__struct_fields__, {"prompt": '"x"', "max_tokens": "3"}),
    CHAT: (ChatRequest.__struct_fields__, {"messages": '[{"role":"user","content":"x"}]', "max_tokens": "3"}),
    "/tokenize": (TokenizeRequest.__struct_fields__, {"prompt": '"x"'}),
    "/detokenize": (DetokenizeRequest.__struct_fields__, {"tokens": "[5,6]"}),
}
STRANGE_NAMES = ("", "\\u0000", "__class__", "__struct_fields__", "params", "0", "ключ", "\\ud83d\\ude00", "a" * 300)
SCALARS = (
    *("null", "true", "false", "0", "1", "-1", "2", "3", "5", "21", "64", "65", "-0", "1.0", "0.5", "1e0", "-1.5", "1e-5"),
    *("1e-30", "1e-40", "1e-45", "1e-46", "1e-300", "1e-400", "1e30", "1e39", "3.4028235e38", "99.9", "-1e-40", "-100", "100"),
    *("2147483648", "1099511627776", "9223372036854775807", "9223372036854775808", "18446744073709551616", "-9223372036854775809"),
    *("1" + "0" * 400, "1" + "0" * 5000, "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "01", "0x5", "1_000", "+1"),
    *('""', '"x"', '"0"', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\\uffff"', '"null"', '"m"', "'x'"),
    *('"' + "a" * 5000 + '"', '"\\n"', '" "', '"\u202e"', '"<|im_end|>"', '"%s{}{{ messages }}"', '"\x7f"', '"\\x"', '"\t"', '"'),
)
LARGE = (
    '"' + "a" * 1_000_000 + '"',
    '"' + "\\u0000" * 20_000 + '"',
    "[" + ",".join(['"x"'] * 1000) + "]",
    "[" + ",".join(["[5]"] * 1000) + "]",
    "[" + ",".join(["7"] * 100_000) + "]",
    '["' + "s" * 100_000 + '"]',
    "[" + ",".join(f'"{i}"' for i in range(5000)) + "]",
    "{" + ",".join(f'"{i}":1' for i in range(300_000)) + "}",
    "[" * 4000 + "]" * 4000,
    '{"a":' * 4000 + "1" + "}" * 4000,
    '[{"role":"user","content":"' + "c" * 500_000 + '"}]',
    "[" + ",".join(['{"role":"user","content":"x"}'] * 3000) + "]",
)
LISTS = (
    *("[]", "[[]]", "[[],[]]", "{}", "[{}]", '[""]', "[null]", "[true]", "[-1]", "[9223372036854775808]", "[1e999]", "[5.0]", '["x",5]'),
    *('["x",null]', "[[5],6]", "[[5],[]]", '{"5":1}', '{"x":1}', '{"-1":1}', '{"5":null}', '{"5":"1"}', '{"5":NaN}', '{"٥":1}', '{"":1}'),
    *('{"99999999999":1}', '{"include_usage":true}', '{"include_usage":5}', '{"type":"text"}', '{"type":"json_object"}'),
    *('[{"role":"user"}]', '[{"content":"x"}]', '[{"role":"user","content":5}]', '[{"role":"user","content":{"type":"text"}}]'),
    *('[{"role":"user","content":[{"type":"text","text":"x"}]}]', '[{"role":"user","content":[{"type":"image_url"}]}]'),
    *('[{"role":"assistant","content":null,"tool_calls":5}]', '[{"role":["user"],"content":"x"}]', '[{"role":"user","content":"\\ud800"}]'),
)


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def value(self) -> str:
        rng = self.rng
        kind = rng.random()
        if kind < 0.01:
            return rng.choice(LARGE)
        if kind < 0.15:
            return rng.choice(("0", "1", "2", "3", "true", "false", "null"))
        if kind < 0.5:
            return rng.choice(SCALARS)
        if kind < 0.75:
            return rng.choice(LISTS)
        if kind < 0.9:
            return "[" + ",".join(self.value() for _ in range(rng.randrange(4))) + "]"
        return "{" + ",".join(f'"{self.name(())}":{self.value()}' for _ in range(rng.randrange(4))) + "}"

    def name(self, known: tuple[str, ...]) -> str:
        kind = self.rng.random()
        if known and kind < 0.85:
            return self.rng.choice(known)
        return self.rng.choice(sorted(NEUTRAL) + sorted(METADATA)) if kind < 0.95 else self.rng.choice(STRANGE_NAMES)

    def body(self, route: str) -> bytes:
        rng = self.rng
        known, good = ROUTES[route]
        fields = [(name, value) for name, value in good.items() if rng.random() < 0.97]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            fields.insert(rng.randrange(len(fields) + 1), (self.name(known), self.value()))
        if rng.random() < 0.2:
            fields.append(("stream", "true"))
        data = ("{" + ",".join(f'"{name}":{value}' for name, value in fields) + "}").encode()
        return self.damaged(data) if rng.random() < 0.1 else data

    def damaged(self, data: bytes) -> bytes:
        rng = self.rng
        place = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            return data[:place]
        if kind == 1:
            return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
        if kind == 2:
            return data[:place] + rng.randbytes(4) + data[place:]
        return data + data[place:]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The cpu backend on a tiny model, so that what passes the checks meets the native sampler."""
    path = write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", layers=1, context=512)
    with RunningServer(Engine.load(EngineConfig(ModelConfig(str(path), "m"), CacheConfig(num_kv_blocks=128)))) as running:
        yield running


def check_answer(status: int, content_type: str, data: bytes) -> None:
    if status == 200:
        assert b'"error"' not in data
        if content_type.startswith("text/event-stream"):
            events = data.decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            for event in events[:-2]:
                strict_json(event.removeprefix("data: "))
        else:
            strict_json(data)
        return
    assert 400 <= status < 500 and content_type == "application/json"
    error = strict_json(data)["error"]
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 1000
    if error["param"] is None:
        assert error["code"] == "invalid_json"
    else:
        assert error["param"] and error["param"] in error["message"], error


class Asker:
    """One kept connection to the server."""

    def __init__(self, server: RunningServer) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, route: str, body: bytes) -> tuple[int, bytes]:
        """(status, body) of an answer that is as it must be."""
        self._connection.request("POST", route, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        data = response.read()
        try:
            check_answer(response.status, response.headers["content-type"], data)
        except Exception as error:
            raise AssertionError(f"{route} {body[:300]!r} got {response.status} {data[:300]!r}") from error
        return response.status, data


def assert_unharmed(server: RunningServer) -> None:
    assert server.complete("x", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
    wait_until(server.is_idle)
    server.engine.scheduler.check_invariants()
    assert server.metrics()["octavo_failed_steps_total"] == 0


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_with_every_odd_value(server: RunningServer, route: str) -> None:
    """One field is at fault, so it is the one to name."""
    known, good = ROUTES[route]
    with Asker(server) as asker:
        for name in known:
            for value in (*SCALARS, *LISTS):
                fields = good | {name: value}
                body = "{" + ",".join(f'"{key}":{text}' for key, text in fields.items()) + "}"
                status, data = asker.ask(route, body.encode())
                if status != 200:
                    error = strict_json(data)["error"]
                    blamed = {name, "min_tokens"} if name == "max_tokens" else {name}  # min_tokens is at most max_tokens
                    blamed |= {"prompt"} if name == "messages" and route == "/tokenize" else set()  # exactly one of them
                    assert error["code"] == "invalid_json" or error["param"] in blamed, (body, error)
    assert_unharmed(server)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_body_gets_a_server_error(server: RunningServer, part: int) -> None:
    statuses = []
    with Asker(server) as asker:
        for seed in range(part, NUM_BODIES, NUM_PARTS):
            fuzzer = Fuzzer(seed)
            route = fuzzer.rng.choice((COMPLETIONS, COMPLETIONS, CHAT, CHAT, "/tokenize", "/detokenize"))
            statuses.append(asker.ask(route, fuzzer.body(route))[0])
    assert_unharmed(server)
    assert statuses.count(200) > 40 and len(statuses) - statuses.count(200) > 200
