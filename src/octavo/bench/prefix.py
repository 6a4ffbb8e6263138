"""Prefix sharing by the block and by the token, side by side on the same requests.

Two engines that differ in ``prefix_granularity`` alone answer each request one after the other, the first of them in turn; their answers
must be equal, token for token. Two loads, of random tokens:

- ``chat``: users who begin with the same system prompt, each turn going on from the whole conversation so far, turn by turn;
- ``system``: single questions behind one system prompt.

Reported per load and engine: prompt tokens found in the cache, how many of them by copying blocks, and the time to the first token of
requests alone. The first request of a load finds nothing in either engine; its time is left out.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from octavo.bench.record import measured_with
from octavo.bench.steps import steps_to_end
from octavo.bench.tables import table
from octavo.config import PREFIX_GRANULARITIES
from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine

if TYPE_CHECKING:
    from octavo.config import EngineConfig

Load = Generator[list[int], list[int], None]
"""Yields prompts, and is sent the answer to each."""


@dataclass(frozen=True, slots=True)
class PrefixCase:
    """All but ``users``, ``turns`` and ``requests`` in tokens."""

    users: int = 4
    turns: int = 5
    requests: int = 24
    num_system: int = 101
    num_question: int = 37
    num_output: int = 24


@dataclass(slots=True)
class Side:
    """One engine's figures of one load."""

    num_cached: int = 0
    num_copied: int = 0  # of these, in blocks that matched in part
    num_copies: int = 0
    ttft_s: list[float] = field(default_factory=list)


def chat_load(case: PrefixCase, rng: random.Random, vocab_size: int) -> Load:
    system = _tokens(rng, case.num_system, vocab_size)
    talks = [list(system) for _ in range(case.users)]
    for _ in range(case.turns):
        for talk in talks:
            talk += _tokens(rng, case.num_question, vocab_size)
            talk += yield list(talk)


def system_load(case: PrefixCase, rng: random.Random, vocab_size: int) -> Load:
    system = _tokens(rng, case.num_system, vocab_size)
    for _ in range(case.requests):
        yield system + _tokens(rng, case.num_question, vocab_size)


LOADS: dict[str, Callable[[PrefixCase, random.Random, int], Load]] = {"chat": chat_load, "system": system_load}


def run_prefix(config: EngineConfig, case: PrefixCase, echo: Callable[[str], None], as_json: bool) -> None:
    """`octavo bench prefix`: the last line given to ``echo`` is the JSON record. ValueError when a conversation does not fit."""
    engines: list[Engine] = []
    try:
        for granularity in PREFIX_GRANULARITIES:
            engines.append(Engine.load(replace(config, cache=replace(config.cache, prefix_granularity=granularity))))
        _check_fits(engines[0], case)
        for engine in engines:
            _answer(engine, _tokens(random.Random(0), 64, engine.backend.vocab_size), 2, "warm-up")
        loads = {name: _measure(engines, case, name) for name in LOADS}
        record = _record(engines[0], case, loads)
    finally:
        for engine in engines:
            engine.close()
    if not as_json:
        echo(_report(record))
    echo(json.dumps(record))


def _check_fits(engine: Engine, case: PrefixCase) -> None:
    longest = case.num_system + case.turns * (case.num_question + case.num_output)
    if longest > engine.scheduler.limits.max_total_tokens:
        room = f"a sequence has room for {engine.scheduler.limits.max_total_tokens}"
        raise ValueError(f"--turns: {case.turns} turns make conversations of {longest} tokens, and {room}")


def _measure(engines: list[Engine], case: PrefixCase, name: str) -> tuple[int, list[Side]]:
    """The prompt tokens of a load, and each engine's figures of it."""
    load, sides = LOADS[name](case, random.Random(1), engines[0].backend.vocab_size), [Side() for _ in engines]
    before = [(engine.scheduler.stats.prefix_tail_tokens, engine.scheduler.stats.num_tail_copies) for engine in engines]
    num_prompt, count = 0, 0
    prompt: list[int] | None = next(load)
    while prompt is not None:
        answers: list[list[int]] = [[] for _ in engines]
        for i in range(len(engines)) if count % 2 else reversed(range(len(engines))):
            answers[i], ttft_s, num_cached = _answer(engines[i], prompt, case.num_output, name)
            sides[i].num_cached += num_cached
            if count:
                sides[i].ttft_s.append(ttft_s)
        if any(answer != answers[0] for answer in answers):
            raise RuntimeError(f"request {count} of {name}: sharing by the block and by the token gave different answers")
        num_prompt, count = num_prompt + len(prompt), count + 1
        prompt = _following(load, answers[0])
    for side, engine, (num_copied, num_copies) in zip(sides, engines, before, strict=True):
        side.num_copied = engine.scheduler.stats.prefix_tail_tokens - num_copied
        side.num_copies = engine.scheduler.stats.num_tail_copies - num_copies
    return num_prompt, sides


def _answer(engine: Engine, prompt: list[int], num_output: int, salt: str) -> tuple[list[int], float, int]:
    """The answer to a request alone, the seconds until its first token, and the prompt tokens that were cached."""
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    started = time.perf_counter()
    engine.add(engine.prepare(prompt, params, cache_salt=salt))
    token_ids, ttft_s, num_cached = list[int](), 0.0, 0
    for events in steps_to_end(engine):
        for event in events:
            ttft_s = ttft_s or time.perf_counter() - started
            token_ids += event.token_ids
            num_cached = event.num_cached_tokens
    return token_ids, ttft_s, num_cached


def _following(load: Load, answer: list[int]) -> list[int] | None:
    try:
        return load.send(answer)
    except StopIteration:
        return None


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def _record(engine: Engine, case: PrefixCase, loads: dict[str, tuple[int, list[Side]]]) -> dict:
    shown: dict[str, dict] = {}
    for name, (num_prompt, sides) in loads.items():
        shown[name] = {"num_prompt": num_prompt}
        for granularity, side in zip(PREFIX_GRANULARITIES, sides, strict=True):
            ttft_ms = round(1e3 * statistics.median(side.ttft_s), 3) if side.ttft_s else None
            figures = {"num_cached": side.num_cached, "num_copied": side.num_copied, "num_copies": side.num_copies, "ttft_ms": ttft_ms}
            shown[name][granularity] = figures
    return {
        "bench": "prefix",
        "model": engine.model.name,
        **asdict(case),
        "block_size": engine.config.cache.block_size,
        "loads": shown,
        **measured_with(engine),
    }


def _report(record: dict) -> str:
    rows = [("load", "sharing by", "prompt tokens", "cached", "share", "copied", "copies", "TTFT ms")]
    for name, load in record["loads"].items():
        for granularity in PREFIX_GRANULARITIES:
            side = load[granularity]
            share = f"{100 * side['num_cached'] / load['num_prompt']:.1f} %"
            ttft = "-" if side["ttft_ms"] is None else f"{side['ttft_ms']:.2f}"
            counts = (load["num_prompt"], side["num_cached"], share, side["num_copied"], side["num_copies"], ttft)
            rows.append((name, granularity, *map(str, counts)))
    head = f"{record['model']}: blocks of {record['block_size']} tokens, threads: {record['threads']}, {record['isa']}"
    shape = f"{record['num_question']} tokens each behind a system prompt of {record['num_system']}, answers of {record['num_output']}"
    loads = f"chat: {record['users']} users, {record['turns']} turns each; system: {record['requests']} single requests; {shape}"
    below = "Copied: of the cached tokens, those in blocks that match in part, each of which is a copy."
    ttft = "TTFT: medians of requests alone, both engines in turn; answers are equal."
    return "\n".join((head, loads, table(rows, right="  >>>>>>"), below, ttft))
