"""Recorded loads as lines of JSON, one request each: arrival, lengths and, where they were published, which beginnings were shared.

Fields, each by one of its names: ``arrival_s`` or ``timestamp`` (milliseconds, as in the Mooncake traces), ``num_prompt`` or
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

from octavo.core.words import as_written
from octavo.workload.lengths import MAX_TOKENS
from octavo.workload.requests import TokenRange, WorkloadRequest
from octavo.workload.traces import MAX_SECONDS, Trace, TraceError, TraceRow, check_order, decoded

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
                check_order(where, arrival_s, last_s)
                last_s, first_s = arrival_s, arrival_s if first_s is None else first_s
                num_prompt = _tokens(where, line, 1, "num_prompt", "input_length")
                num_output = _tokens(where, line, 0, "num_output", "output_length")
                due_s = (arrival_s - first_s) / self.speed
                yield WorkloadRequest(due_s, self._prompt(where, line, num_prompt, rng), num_output, _session(where, line))

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
        line = json.loads(text, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: it is no JSON: {error}") from None
    if not isinstance(line, dict):
        raise TraceError(f"{where}: an object is needed, not {text.strip()[:80]}")
    return line


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there more than once")
    return found


def lengths_of(trace: JsonlTrace) -> Trace:
    """Its rows without their prompts. Raises TraceError, also when there is none, OSError."""
    rows = tuple(TraceRow(work.arrival_s, len(work.prompt_token_ids), work.num_output) for work in trace.requests())
    if not rows:
        raise TraceError(f"{trace.path}: there is no request in it")
    return Trace(rows)


def _arrival_s(where: str, line: dict[str, Any]) -> float:
    name = _the_one(where, line, "arrival_s", "timestamp")
    value, unit = line.get(name), 1.0 if name == "arrival_s" else 1e-3
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= MAX_SECONDS:
        raise TraceError(f"{where}: {name}: {as_written(value)} is not allowed; a number from 0 to {MAX_SECONDS:g}")
    return value * unit


def _tokens(where: str, line: dict[str, Any], least: int, *names: str) -> int:
    name = _the_one(where, line, *names)
    value = line.get(name)
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        raise TraceError(f"{where}: {name}: {as_written(value)} is not allowed; an integer from {least} to {MAX_TOKENS}")
    return value


def _session(where: str, line: dict[str, Any]) -> str | None:
    session = line.get("session")
    if session is not None and type(session) not in (str, int):
        raise TraceError(f"{where}: session: {as_written(session)} is not allowed; a text or an integer")
    return None if session is None else str(session)


def _the_one(where: str, line: dict[str, Any], *names: str) -> str:
    """Which of the names of one thing the line has."""
    found = [name for name in names if name in line]
    if len(found) != 1:
        raise TraceError(f"{where}: exactly one of {' and '.join(names)} is needed; it has {' and '.join(found) or 'neither'}")
    return found[0]
