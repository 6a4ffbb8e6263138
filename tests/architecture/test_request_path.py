"""docs/request-path.md is true: every name in it exists, and one traced request enters its functions in the page's order."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

from octavo.backends.cpu.backend import CpuBackend
from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.server.calls import Answer
from tests.models.tiny import write_tiny_gguf
from tests.server.harness import TIMEOUT_S, RunningServer, sse_events, strict_json

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "octavo"
PAGE = (ROOT / "docs" / "request-path.md").read_text()
STEPS = PAGE.partition("\n## The steps\n")[2].partition("\n## ")[0]


def references(text: str) -> list[tuple[str, str | None]]:
    """(file, name or None) of everything in backticks that is a path."""
    found = re.findall(r"`([\w./]+\.(?:py|cc|h|inl|md))(?:::([^`]+))?`", text)
    return [(path, name or None) for path, name in found]


def file_of(path: str) -> Path:
    return ROOT / path if path.split("/")[0] in ("native", "tests", "docs") else SRC / path


def definitions(path: Path) -> set[str]:
    """Qualified names of all functions, methods and classes of a Python file."""

    def walk(nodes: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name
                if isinstance(node, ast.ClassDef):
                    yield from walk(node.body, f"{prefix}{node.name}.")

    return set(walk(ast.parse(path.read_text()).body, ""))


def test_the_page_is_read() -> None:
    assert len(references(STEPS)) > 50 and len(references(PAGE)) > len(references(STEPS))


@pytest.mark.parametrize("reference", sorted(set(references(PAGE)), key=str), ids=lambda r: "::".join(filter(None, r)))
def test_every_name_exists(reference: tuple[str, str | None]) -> None:
    path, name = reference
    file = file_of(path)
    assert file.is_file()
    if name is not None and file.suffix == ".py":
        assert name in definitions(file)
    elif name is not None:
        assert name in file.read_text()


class Trace:
    """The names of the page in the order in which one request first enters them, from all threads."""

    def __init__(self, names: set[str]) -> None:
        self.order: list[str] = []
        self._names = names
        self._by_code: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, _arg: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._by_code:
            file = Path(code.co_filename)
            name = f"{file.relative_to(SRC).as_posix()}::{code.co_qualname}" if file.is_relative_to(SRC) else None
            self._by_code[code] = name if name in self._names else None
            if self._by_code[code] is not None:
                self.order.append(self._by_code[code])


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    cache = CacheConfig(num_kv_blocks=64)
    return Engine.load(EngineConfig(ModelConfig(str(path), "m"), cache, backend=BackendConfig(threads=1)))


def hold_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop thread makes step 2 only when step 1's event has been sent: the two threads' order is then the same in every run."""
    first_sent = threading.Event()
    execute, send = CpuBackend.execute, Answer._send_chunks

    def held(self: CpuBackend, plan: StepPlan) -> StepResult:
        if plan.step_index == 1:
            assert first_sent.wait(TIMEOUT_S)
        return execute(self, plan)

    async def sent(self: Answer, data: bytes, headers: object, more: bool = True) -> None:
        await send(self, data, headers, more)  # type: ignore[arg-type]
        first_sent.set()

    monkeypatch.setattr(CpuBackend, "execute", held)
    monkeypatch.setattr(Answer, "_send_chunks", sent)


def test_a_request_enters_the_functions_in_the_page_s_order(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(dict.fromkeys(f"{path}::{name}" for path, name in references(STEPS) if name and path.endswith(".py")))
    hold_second_step(monkeypatch)
    trace = Trace(set(expected))
    messages = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stop": ["never said"]}
    old = threading.getprofile()
    threading.setprofile(trace)  # for threads that start from now on: the event loop's and the engine's
    try:
        with RunningServer(engine) as server:
            connection = server.open_stream("/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
            *chunks, usage, done = sse_events(connection)
    finally:
        threading.setprofile(old)
        assert sys.getprofile() is None
    assert done == "[DONE]" and strict_json(usage)["usage"]["completion_tokens"] == 4
    assert strict_json(chunks[-1])["choices"][0]["finish_reason"] == "length"
    assert trace.order == expected
