"""How often an n-gram model would draft what a real model draws: alpha = E[sum_x min(p(x), q(x))] (Leviathan et al., ICML 2023, table 3).

The model writes two texts of its own, from different beginnings: n-grams are counted on one, alpha is the mean over the positions of the
other, with p from the logits that the engine drew by. At temperature 0 both laws are their best token, so alpha is how often it is the
same.

An n-gram's law is its counts with those of the next shorter n-gram as a prior worth one count (MacKay and Peto, 1995); the shortest one's
is even over the vocabulary. Owns the counting and the sum; sums are float64.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import cast

import numpy as np

from octavo.backends.base import ShowsLogits
from octavo.bench.steps import steps_to_end
from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine

UNIGRAM, BIGRAM, TRIGRAM = 1, 2, 3
NAMES = {UNIGRAM: "unigram", BIGRAM: "bigram", TRIGRAM: "trigram"}


class NgramModel:
    """Counts of all n-grams up to ``order`` of some texts."""

    def __init__(self, texts: Seq[Seq[int]], order: int, vocab_size: int) -> None:
        self.order = order
        self._vocab_size = vocab_size
        counts: list[dict[tuple[int, ...], Counter[int]]] = [defaultdict(Counter) for _ in range(order)]  # [n - 1][context]
        for text in texts:
            for i, token in enumerate(text):
                for n in range(1, min(order, i + 1) + 1):
                    counts[n - 1][tuple(text[i - n + 1 : i])][token] += 1
        self._tables = [{context: _table(found) for context, found in level.items()} for level in counts]

    def laws(self, context: Seq[int]) -> list[np.ndarray]:
        """float64 [vocab_size] of the token after ``context``, by each n from 1 to ``order``."""
        law, laws = np.full(self._vocab_size, 1.0 / self._vocab_size), list[np.ndarray]()
        for n in range(1, self.order + 1):
            entry = self._tables[n - 1].get(tuple(context[len(context) - n + 1 :])) if len(context) >= n - 1 else None
            if entry is not None:
                ids, found = entry
                law = law / (1.0 + found.sum())
                law[ids] += found / (1.0 + found.sum())
            laws.append(law)
        return laws


def _table(found: Counter[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.fromiter(found.keys(), np.int64, len(found)), np.fromiter(found.values(), np.float64, len(found))


@dataclass(frozen=True, slots=True)
class AlphaCase:
    """``num_counted`` texts are counted, ``num_tested`` are drafted for; each begins with ``num_begin`` tokens that are given."""

    num_counted: int = 96
    num_tested: int = 24
    num_begin: int = 8
    num_output: int = 128
    order: int = TRIGRAM
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Alpha:
    """``by_order`` [order]: from the unigram on."""

    temperature: float
    by_order: tuple[float, ...]
    num_positions: int
    num_counted_tokens: int


def measure_alpha(engine: Engine, begin_token_ids: Seq[int], case: AlphaCase, temperature: float) -> Alpha:
    """``begin_token_ids``: a text whose passages the texts begin with. ValueError where it is too short; the cpu and reference backends
    show their logits, which this needs."""
    num_texts = case.num_counted + case.num_tested
    if len(begin_token_ids) < num_texts:
        raise ValueError(f"begin_token_ids: {num_texts} texts cannot begin at different places of {len(begin_token_ids)} tokens")
    starts = [i * len(begin_token_ids) // num_texts for i in range(num_texts)]
    beginnings = [[begin_token_ids[(start + k) % len(begin_token_ids)] for k in range(case.num_begin)] for start in starts]
    tested = range(0, num_texts, num_texts // case.num_tested)[: case.num_tested]  # spread over the whole text
    counted = sorted(set(range(num_texts)) - set(tested))
    model = NgramModel(_write(engine, [beginnings[i] for i in counted], case, temperature), case.order, engine.backend.vocab_size)
    overlaps = _Overlaps(engine, model, temperature)
    backend = cast(ShowsLogits, engine.backend)
    backend.logits_hook = overlaps.see
    try:
        texts = _write(engine, [beginnings[i] for i in tested], case, temperature, first_seed=len(counted))
    finally:
        backend.logits_hook = None
    sums = overlaps.sums
    assert overlaps.num_positions == sum(len(text) - case.num_begin for text in texts)
    return Alpha(
        temperature, tuple(float(s) / overlaps.num_positions for s in sums), overlaps.num_positions,
        len(counted) * (case.num_begin + case.num_output),
    )  # fmt: skip


class _Overlaps:
    """Sees each row of logits that a token is drawn from, while the sequence still ends with the row's own token."""

    def __init__(self, engine: Engine, model: NgramModel, temperature: float) -> None:
        self._engine, self._model, self._temperature = engine, model, temperature
        self.sums = np.zeros(model.order)
        self.num_positions = 0

    def see(self, seq_id: int, position: int, logits: np.ndarray) -> None:
        context = next(seq.token_ids for seq in self._engine.scheduler.running_sequences if seq.seq_id == seq_id)
        assert len(context) == position + 1
        laws = self._model.laws(context[-(self._model.order - 1) :] if self._model.order > 1 else [])
        self.sums += overlaps(logits, laws, self._temperature)
        self.num_positions += 1


def overlaps(logits: np.ndarray, laws: Seq[np.ndarray], temperature: float) -> np.ndarray:
    """sum_x min(p(x), q(x)) with p the softmax of ``logits`` [vocab_size] at ``temperature``, for each law q."""
    if temperature == 0.0:
        best = int(np.argmax(logits))
        return np.array([float(int(np.argmax(law)) == best) for law in laws])
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    weights /= weights.sum()
    return np.array([np.minimum(weights, law).sum() for law in laws])


def _write(
    engine: Engine, beginnings: Seq[list[int]], case: AlphaCase, temperature: float, first_seed: int = 0
) -> list[list[int]]:
    """The texts, their beginnings included."""
    texts: dict[str, list[int]] = {}
    for i, beginning in enumerate(beginnings):
        params = SamplingParams(temperature=temperature, seed=case.seed + first_seed + i, max_tokens=case.num_output, ignore_eos=True)
        prepared = engine.prepare(beginning, params)
        texts[prepared.request.request_id] = list(beginning)
        engine.add(prepared)
    for events in steps_to_end(engine):
        for event in events:
            texts[event.request_id] += event.token_ids
    return list(texts.values())
