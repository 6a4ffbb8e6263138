"""64 clients at once, each asking for something else, while others leave: every answer equals that of the same request alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from tests.models.tiny import write_tiny_gguf
from tests.server.harness import RunningServer, sse_events, strict_json, wait_until

NUM_CLIENTS = 64
NUM_LEAVING = 24
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "the quick brown fox jumps over the lazy dog and runs into the forest where nobody knows what is the capital of France "


def serving(path: Path, num_kv_blocks: int, **scheduler: Any) -> RunningServer:
    config = EngineConfig(ModelConfig(str(path), "m"), CacheConfig(num_kv_blocks=num_kv_blocks), SchedulerConfig(**scheduler))
    return RunningServer(Engine.load(config))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A pool that is too small for all, so that some are preempted."""
    path = write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", context=1024)
    with serving(path, num_kv_blocks=44, max_num_seqs=24, max_num_batched_tokens=96) as running:
        yield running


def make_request(seed: int, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """A call to either route, always the same for a seed."""
    rng = random.Random(seed)
    chat = rng.random() < 0.4
    body: dict[str, Any] = {"max_tokens": rng.randint(1, max_tokens), "seed": seed, "n": rng.choice((1, 1, 1, 2, 4))}
    body |= rng.choice(
        (
            {"temperature": 0},
            {"temperature": 1},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
            {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.2},
            {"temperature": 0, "frequency_penalty": 0.8, "presence_penalty": 0.3},
            {"temperature": 1, "logit_bias": {"40": 5, "41": -100}},
            {"temperature": 1, "allowed_token_ids": list(range(30, 200))},
            {"temperature": 1, "bad_words": ["the", "qu"]},
        )
    )
    endings = ({}, {"stop": ["e", "zz"]}, {"stop": " t", "include_stop_str_in_output": True}, {"ignore_eos": True}, {"min_tokens": 1})
    body |= rng.choice(endings)
    body |= {"stream": rng.random() < 0.4, "return_token_ids": True}
    text = (TEXT * 3)[rng.choice((0, 0, 7, 50)) :][: rng.choice((5, 60, 200))]
    if chat:
        body["messages"] = [{"role": "system", "content": TEXT}, {"role": "user", "content": text}]
        body |= rng.choice(({}, {"logprobs": True, "top_logprobs": 3}))
        return CHAT, body
    body["prompt"] = rng.choice((text, [text, TEXT], [5 + i % 300 for i in range(len(text))]))
    body |= rng.choice(({}, {"logprobs": 2}, {"logprobs": 3, "echo": True}, {"prompt_logprobs": 1, "stream": False}))
    return COMPLETIONS, body


def ask(server: RunningServer, seed: int, max_tokens: int) -> Any:
    """What the answer says, apart from what names the call and what was in the cache."""
    path, body = make_request(seed, max_tokens)
    if not body["stream"]:
        answer = server.post(path, body)
        return {k: v for k, v in answer.items() if k not in ("id", "created")} | {"usage": answer["usage"]["completion_tokens"]}
    *events, done = sse_events(server.open_stream(path, body))
    assert done == "[DONE]"
    choices: dict[int, list[Any]] = {}
    for event in map(strict_json, events):
        if "error" in event:
            return event
        (choice,) = event["choices"]
        choices.setdefault(choice["index"], []).append(choice)
    return choices


def ask_all(server: RunningServer, seeds: range, max_tokens: int) -> dict[int, Any]:
    answers: dict[int, Any] = {}

    def client(seed: int) -> None:
        try:
            answers[seed] = ask(server, seed, max_tokens)
        except Exception as error:
            answers[seed] = error

    threads = [threading.Thread(target=client, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for seed in range(NUM_LEAVING):
        path, body = make_request(1000 + seed, max_tokens)
        connection = server.open_stream(path, {**body, "max_tokens": 900, "ignore_eos": True, "prompt_logprobs": None})
        if seed % 2:
            connection.recv(100)
        connection.close()
    for thread in threads:
        thread.join()
    return answers


def check_all(server: RunningServer, num_clients: int, max_tokens: int) -> None:
    alone = {seed: ask(server, seed, max_tokens) for seed in range(num_clients)}
    greedy = {"prompt": "x", "max_tokens": 600, "ignore_eos": True, "n": 6}
    resident = server.open_stream(COMPLETIONS, greedy)  # wants more than a fair share of the pool
    together = ask_all(server, range(num_clients), max_tokens)
    resident.close()
    for seed in range(num_clients):
        assert together[seed] == alone[seed], make_request(seed, max_tokens)
    wait_until(server.is_idle)
    server.engine.scheduler.check_invariants()


def test_answers_at_once_equal_answers_alone(server: RunningServer) -> None:
    check_all(server, NUM_CLIENTS, max_tokens=60)
    assert server.engine.scheduler.stats.num_preemptions > 0
    assert server.metrics()['octavo_requests_finished_total{reason="abort"}'] >= NUM_LEAVING / 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_failed_steps_end_requests_cleanly_and_leave_no_trace(server: RunningServer, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Steps that fail before or after they have run: who is hit gets the error, who is not, and who comes later, the right answer."""
    alone = {seed: ask(server, seed, 40) for seed in range(32)}
    execute = server.engine.backend.execute
    num_steps = 0

    def failing(plan: StepPlan) -> StepResult:
        nonlocal num_steps
        num_steps += 1
        if num_steps % 40 == 0 and when == "before":
            raise RuntimeError("injected")
        result = execute(plan)
        if num_steps % 40 == 0:
            raise RuntimeError("injected")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(server.engine.backend, "execute", failing)
        together = ask_all(server, range(32), 40)
    num_hit = 0
    for seed, answer in together.items():
        if isinstance(answer, dict) and "error" not in answer:
            assert answer == alone[seed]
        else:
            num_hit += 1
            assert "injected" in str(answer)
    assert num_hit > 0
    wait_until(server.is_idle)
    server.engine.scheduler.check_invariants()
    assert ask_all(server, range(32), 40) == alone


@pytest.mark.soak
@pytest.mark.model
def test_answers_of_a_real_model_at_once_equal_answers_alone(smollm2_path: Path) -> None:
    with serving(smollm2_path, num_kv_blocks=150, max_num_seqs=24) as server:
        check_all(server, NUM_CLIENTS, max_tokens=40)
