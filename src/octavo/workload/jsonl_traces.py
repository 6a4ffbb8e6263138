"""Recorded loads as lines of JSON, one request each: arrival, lengths and, where they were published, which beginnings were shared.

Fields, by their first name that a line has: ``arrival_s`` or ``timestamp`` (milliseconds, as in the Mooncake traces), ``num_prompt`` or
``input_length``, ``num_output`` or ``output_length``. Optional: ``hash_ids`` (one for each ``block_tokens`` tokens of the prompt, the last
block perhaps short; equal ids are equal tokens) and ``session``. A request may have no output: then its prompt is all that is computed.
Owns the checks of every field.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.workload.lengths import MAX_TOKENS
from octavo.workload.requests import TokenRange, WorkloadRequest
from octavo.workload.traces import Trace, TraceError, TraceRow, decoded

HASH_BLOCK_TOKENS = 512  # of the published Mooncake traces


@dataclass(frozen=True, slots=True)
class JsonlTrace:
    """Lines of a file, by arrival; read again by each call, so that memory does not grow with the file.

    ``speed``: play it so many times as fast.
    """

    path: str | Path
    block_tokens: int = HASH_BLOCK_TOKENS
    tokens: TokenRange = TokenRange()
    seed: int | str = 0
    speed: float = 1.0

    def requests(self) -> Iterator[WorkloadRequest]:
        """Raises TraceError that names line and field, OSError."""
        rng, first_s, last_s = random.Random(f"{self.seed}:tokens"), None, -math.inf
        with open(self.path, "rb") as file:
            for number, text in enumerate(decoded(str(self.path), file), 1):
                if not text.strip():
                    continue
                where = f"{self.path}: line {number}"
                line = _object(where, text)
                arrival_s = _arrival_s(where, line)
                if arrival_s < last_s:
                    raise TraceError(f"{where}: it comes at {arrival_s:g} s, before the line above it at {last_s:g} s")
                last_s, first_s = arrival_s, arrival_s if first_s is None else first_s
                num_prompt = _tokens(where, line, 1, "num_prompt", "input_length")
                num_output = _tokens(where, line, 0, "num_output", "output_length")
                prompt, session = self._prompt(where, line, num_prompt, rng), line.get("session")
                due_s = (arrival_s - first_s) / self.speed
                yield WorkloadRequest(due_s, prompt, num_output, None if session is None else str(session))

    def _prompt(self, where: str, line: dict[str, Any], num_prompt: int, rng: random.Random) -> list[int]:
        ids = line.get("hash_ids")
        if ids is None:
            return self.tokens.draw(rng, num_prompt)
        size = self.block_tokens
        if not isinstance(ids, list) or any(type(one) is not int for one in ids):
            raise TraceError(f"{where}: hash_ids: {str(ids)[:80]} is not a list of integers")
        if len(ids) * size < num_prompt or (len(ids) - 1) * size >= num_prompt:
            raise TraceError(f"{where}: hash_ids: {len(ids)} of {size} tokens each do not make a prompt of {num_prompt} tokens")
        blocks = (self.tokens.draw(random.Random(f"{self.seed}:block:{one}"), size) for one in ids)
        return [token for block in blocks for token in block][:num_prompt]


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: it is no JSON: {error}") from None
    if not isinstance(line, dict):
        raise TraceError(f"{where}: an object is needed, not {text.strip()[:80]}")
    return line


def lengths_of(trace: JsonlTrace) -> Trace:
    """Its rows without their prompts. Raises TraceError, also when there is none, OSError."""
    rows = tuple(TraceRow(work.arrival_s, len(work.prompt_token_ids), work.num_output) for work in trace.requests())
    if not rows:
        raise TraceError(f"{trace.path}: there is no request in it")
    return Trace(rows)


def _arrival_s(where: str, line: dict[str, Any]) -> float:
    name, unit = ("arrival_s", 1.0) if "arrival_s" in line else ("timestamp", 1e-3)
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1e15:
        raise TraceError(f"{where}: {name}: {value!r} is not allowed; a number from 0 to 1e15")
    return value * unit


def _tokens(where: str, line: dict[str, Any], least: int, *names: str) -> int:
    name = next((name for name in names if name in line), names[0])
    value = line.get(name)
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        raise TraceError(f"{where}: {name}: {value!r} is not allowed; an integer from {least} to {MAX_TOKENS}")
    return value
