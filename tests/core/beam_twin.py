"""Beam search written down a second time, slow and obvious: over the whole vocabulary, with sequences as tuples and no parents.

``slow_search`` follows the documented rule step by step; ``enumerate_all`` knows no beams: it scores every sequence there is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from octavo.core.request import BeamParams, FinishReason, Request
from tests.core.kv_memory import EOS, VOCAB, best_tokens, kv_entry

Row = Callable[[tuple[int, ...]], dict[int, float]]
"""Output tokens so far -> log-probability of each token of the vocabulary."""


@dataclass(frozen=True)
class Ends:
    eos: frozenset[int] = frozenset()
    stops: frozenset[int] = frozenset()
    min_tokens: int = 0
    max_tokens: int = 4
    ignore_eos: bool = False

    def ends(self, tokens: tuple[int, ...]) -> bool:
        return len(tokens) > self.min_tokens and (tokens[-1] in self.stops or (tokens[-1] in self.eos and not self.ignore_eos))

    def may_take(self, tokens: tuple[int, ...]) -> bool:
        return len(tokens) > self.min_tokens or tokens[-1] not in self.eos | self.stops


@dataclass(frozen=True)
class Found:
    token_ids: list[int]
    sum_logprob: float
    score: float
    reason: FinishReason
    stop_reason: int | None


def found(tokens: tuple[int, ...], total: float, ends: Ends, penalty: float) -> Found:
    ended = ends.ends(tokens)
    score = total / max(len(tokens) - ended, 1) ** penalty
    by_stop = ended and (ends.ignore_eos or tokens[-1] not in ends.eos)
    return Found(list(tokens), total, score, FinishReason.STOP if ended else FinishReason.LENGTH, tokens[-1] if by_stop else None)


def best_first(hypotheses: Iterable[Found]) -> list[Found]:
    return sorted(hypotheses, key=lambda h: (-h.score, h.token_ids))


def slow_search(row: Row, params: BeamParams, ends: Ends, to_the_end: bool = False) -> list[Found]:
    """``to_the_end``: never stop before max_tokens."""
    running: dict[tuple[int, ...], float] = {(): 0.0}
    finished: list[Found] = []
    for length in range(1, ends.max_tokens + 1):
        every = {(*tokens, t): total + logprob for tokens, total in running.items() for t, logprob in row(tokens).items()}
        ranked = sorted(((-total, tokens) for tokens, total in every.items() if ends.may_take(tokens)))
        for place, (negative, tokens) in enumerate(ranked):
            if ends.ends(tokens) and place < params.width:
                finished.append(found(tokens, -negative, ends, params.length_penalty))
        running = {tokens: -negative for negative, tokens in [r for r in ranked if not ends.ends(r[1])][: params.width]}
        finished = best_first(finished)[: params.width]
        if len(finished) == params.width and running and not to_the_end:
            best = max(running.values())
            bounds = {True: float("-inf"), False: best / length**params.length_penalty}
            bounds["never"] = max(best / n**params.length_penalty for n in range(length, ends.max_tokens + 1))
            if finished[-1].score >= bounds[params.early_stopping]:
                return finished
    finished += [found(tokens, total, ends, params.length_penalty) for tokens, total in running.items()]
    return best_first(finished)[: params.width]


def enumerate_all(row: Row, ends: Ends, penalty: float, vocab_size: int) -> list[Found]:
    """Every sequence that ends by itself or at max_tokens, best first."""
    out = []
    for length in range(1, ends.max_tokens + 1):
        for tokens in itertools.product(range(vocab_size), repeat=length):
            parts = [tokens[:i] for i in range(1, length + 1)]
            if any(ends.ends(part) for part in parts[:-1]) or not all(ends.may_take(part) for part in parts):
                continue
            if ends.ends(tokens) or length == ends.max_tokens:
                total = 0.0
                for i, token in enumerate(tokens):
                    total += row(tokens[:i])[token]
                out.append(found(tokens, total, ends, penalty))
    return best_first(out)


def plain_beams(request: Request, max_tokens: int) -> list[Found]:
    """The hypotheses of a request on ``KVMemoryBackend``, with no cache at all."""
    params = request.params
    assert params.beam is not None

    def row(output: tuple[int, ...]) -> dict[int, float]:
        read: list[int] = []
        for token in (*request.prompt_token_ids, *output):
            read.append(kv_entry(read, token))
        best = best_tokens(read, VOCAB)
        return dict(zip(best.top_ids, best.top_logprobs, strict=True))

    ends = Ends(frozenset([EOS]), frozenset(params.stop_token_ids), params.min_tokens, max_tokens, params.ignore_eos)
    return slow_search(row, params.beam, ends)
