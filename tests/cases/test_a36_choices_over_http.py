"""Choices of one prompt write apart, through the server: whole, streamed, beside others, with early ends and clients that leave (A36).

In the engine alone, the pool figure step by step and four moments of leaving: tests/cases/test_a06_a36_choices.py. Copies and tables:
tests/core/test_cases.py::test_choices_share_full_prompt_blocks_and_write_apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.core.request import SamplingParams, derive_seed
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from tests.cases.harness import Job, plain_answer, prompt_of
from tests.cases.served import served
from tests.models.tiny import IM_END_ID
from tests.server.harness import RunningServer, wait_until

LENGTHS = (1, 15, 16, 17, 20)
CASE = {"n": 4, "seed": 3, "temperature": 1, "max_tokens": 50}
ENDLESS = {"ignore_eos": True}
ENDING = {"logit_bias": {str(IM_END_ID): 5}}


def check_writes(engine: Engine) -> dict[str, int]:
    """From now on: a block is written by one slice of a step alone, which alone references it. Returns the most blocks ever in use."""
    execute, pool, seen = engine.backend.execute, engine.scheduler._state.kv.pool, {"peak": 0}

    def executing(plan: StepPlan) -> StepResult:
        written: list[int] = []
        for piece in plan.slices:
            first, last = piece.start // 16, (piece.start + piece.num_tokens - 1) // 16
            written += piece.block_table[first : last + 1]
        assert len(written) == len(set(written)) and {pool.ref_counts[block] for block in written} <= {1}
        seen["peak"] = max(seen["peak"], pool.num_used)
        return execute(plan)

    engine.backend.execute = executing  # type: ignore[method-assign]
    return seen


def ask(client: openai.OpenAI, prompt: list[int], stream: bool = False, **own: Any) -> list[tuple[list[int], str, str | None]]:
    """(token ids, text, finish reason) of each choice."""
    body = {"model": "m", "prompt": prompt, "extra_body": {"return_token_ids": True, **own}} | CASE
    if not stream:
        choices: list[Any] = client.completions.create(**body).choices  # type: ignore[call-overload]
        return [(choice.token_ids, choice.text, choice.finish_reason) for choice in choices]
    ids, texts, reasons = [list[int]() for _ in range(4)], [""] * 4, [""] * 4
    for chunk in client.completions.create(**body, stream=True):  # type: ignore[call-overload]
        (part,) = chunk.choices
        assert not reasons[part.index], "text after the end of a choice"
        ids[part.index] += part.token_ids
        texts[part.index] += part.text
        reasons[part.index] = part.finish_reason or ""
    return [(ids[i], texts[i], reasons[i]) for i in range(4)]


@contextmanager
def busy(client: openai.OpenAI) -> Iterator[None]:
    """Other requests, of other shapes and one of the same prompt, while this is open."""
    with ThreadPoolExecutor(4) as pool:
        prompts = [prompt_of(9 + 7 * i, salt=50 + i) for i in range(3)] + [prompt_of(20)]
        others = [
            pool.submit(client.completions.create, model="m", prompt=prompt, n=2, seed=i, max_tokens=90, extra_body=ENDLESS)
            for i, prompt in enumerate(prompts)
        ]
        yield
        for other in others:
            assert [choice.finish_reason for choice in other.result().choices] == ["length"] * 2


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("own", [ENDLESS, ENDING], ids=["to the length", "one ends early"])
def test_each_choice_is_a_request_of_its_own(rand: Path, plain: Engine, caching: bool, own: dict[str, Any]) -> None:
    with served(rand, enable_prefix_caching=caching) as (server, client):
        seen = check_writes(server.engine)
        for num_prompt in LENGTHS:
            seen["peak"], full, ends = 0, num_prompt // 16, -(-(num_prompt + 49) // 16)
            first = ask(client, prompt_of(num_prompt), **own)
            if own is ENDLESS:
                assert seen["peak"] == full + 4 * (ends - full)  # the full blocks of the prompt exist once
            else:
                assert len({len(ids) for ids, _, _ in first}) > 1 and "stop" in {reason for _, _, reason in first}
            with busy(client):
                assert ask(client, prompt_of(num_prompt), **own) == ask(client, prompt_of(num_prompt), stream=True, **own) == first
            bias = {IM_END_ID: 5.0} if own is ENDING else {}
            params = SamplingParams(temperature=1, max_tokens=50, logit_bias=bias, ignore_eos=own is ENDLESS)
            for choice, got in enumerate(first):
                assert got == plain_answer(plain, Job(prompt_of(num_prompt), params), seed=derive_seed(3, choice))[:3]


@pytest.mark.parametrize("caching", [True, False])
def test_a_client_leaves_in_the_middle(rand: Path, caching: bool) -> None:
    """Streaming, after some events; waiting, at once. The others' answers stay what they are, and every block comes back once."""
    with served(rand, enable_prefix_caching=caching) as (server, client):
        check_writes(server.engine)
        want = ask(client, prompt_of(20), **ENDLESS)
        for num_events in (1, 7, 40):
            body = {"model": "m", "prompt": prompt_of(20), "max_tokens": 230, "extra_body": ENDLESS} | {"n": 4, "seed": 8}
            with busy(client):
                stream = client.completions.create(**body, stream=True)  # type: ignore[call-overload]
                for _ in zip(range(num_events), stream, strict=False):
                    pass
                stream.close()
                waiting = {"model": "m", "prompt": prompt_of(20), "max_tokens": 230, "n": 4, **ENDLESS}
                server.send_raw("POST", "/v1/completions", json.dumps(waiting).encode()).close()
                assert ask(client, prompt_of(20), **ENDLESS) == want
            wait_until(server.is_idle)
            _check_idle(server)
        assert server.engine.scheduler.stats.num_aborted > 0


def _check_idle(server: RunningServer) -> None:
    scheduler, pool = server.engine.scheduler, server.engine.scheduler._state.kv.pool
    scheduler.check_invariants()
    assert not any(pool.ref_counts) and scheduler.num_free_blocks + scheduler.num_cached_blocks == scheduler.num_blocks
