"""n-gram laws against counting by hand, and alpha on a model whose probabilities are known."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from octavo.bench import ngram_alpha
from octavo.bench.ngram_alpha import AlphaCase, NgramModel, measure_alpha, overlaps
from octavo.engine.engine import Engine
from tests.engine.scripted import Bigram, bigram_config, bigram_model, byte_tokenizer

TEXTS = ([1, 2, 1, 2, 3, 1], [2, 2, 1])


def by_hand(context: tuple[int, ...], vocab_size: int) -> list[float]:
    """The law after ``context`` by the recursion, counted again for every token."""
    shorter = [1 / vocab_size] * vocab_size if not context else by_hand(context[1:], vocab_size)
    if not context:
        found = Counter(token for text in TEXTS for token in text)
        prior = [1 / vocab_size] * vocab_size
    else:
        n = len(context)
        found = Counter(text[i + n] for text in TEXTS for i in range(len(text) - n) if tuple(text[i : i + n]) == context)
        prior = shorter
    total = sum(found.values())
    return [(prior[x] + found[x]) / (1 + total) for x in range(vocab_size)]


@pytest.mark.parametrize("context", [(1, 2), (2, 1), (2, 2), (3, 1), (0, 4), (4, 2), (2,), ()])
def test_laws(context: tuple[int, ...]) -> None:
    model = NgramModel(TEXTS, 3, 6)
    laws = model.laws(context)
    assert len(laws) == 3
    for n, law in enumerate(laws, 1):
        seen = context[len(context) - n + 1 :] if len(context) >= n - 1 else context
        assert law == pytest.approx(by_hand(tuple(seen), 6)) and law.sum() == pytest.approx(1)


def test_overlaps() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    laws = [np.array([0.1, 0.6, 0.3, 0.0]), np.array([0.5, 0.25, 0.125, 0.125])]
    assert overlaps(logits, laws, 1.0) == pytest.approx([0.1 + 0.25 + 0.125, 1.0], abs=1e-6)
    assert list(overlaps(logits, laws, 0.0)) == [0.0, 1.0]
    hot = np.exp(2 * logits) / np.exp(2 * logits).sum()
    assert overlaps(logits, laws, 0.5) == pytest.approx([np.minimum(hot, law).sum() for law in laws], abs=1e-6)


def engine_of(seed: int, spread: float = 4.0) -> Engine:
    """A bigram model of small, random probabilities."""
    tokenizer = byte_tokenizer()
    backend = Bigram(tokenizer.vocab_size, 64)
    backend.logits[:] = np.random.default_rng(seed).normal(0, spread, backend.logits.shape)
    return Engine(bigram_model(tokenizer), bigram_config(512), backend)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_alpha_of_a_known_model(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha is the mean over the positions of the tested texts of sum min(p, q), with p as the model has it."""
    engine, written = engine_of(2), list[list[list[int]]]()
    write = ngram_alpha._write
    monkeypatch.setattr(ngram_alpha, "_write", lambda *args, **options: written.append(write(*args, **options)) or written[-1])
    case = AlphaCase(num_counted=9, num_tested=3, num_begin=2, num_output=11, order=2)
    found = measure_alpha(engine, list(range(10, 100)), case, temperature)
    counted, tested = written
    assert len(counted) == 9 and len(tested) == 3 and all(len(text) == 13 for text in counted + tested)
    model, wanted = NgramModel(counted, 2, engine.backend.vocab_size), np.zeros(2)
    for text in tested:
        for i in range(2, 13):
            wanted += overlaps(engine.backend.logits[text[i - 1]], model.laws(text[i - 1 : i]), temperature)  # type: ignore[attr-defined]
    assert found.by_order == pytest.approx(tuple(wanted / 33), abs=1e-6) and found.num_positions == 33
    assert found.num_counted_tokens == 9 * 13 and found.temperature == temperature
    assert engine.backend.logits_hook is None  # type: ignore[attr-defined]


def test_counts_of_the_model_itself_find_it_again() -> None:
    """Where the model is a bigram and its text is long, the bigram's alpha is near 1 and the unigram's is not."""
    found = measure_alpha(engine_of(5, 12.0), list(range(3, 250)), AlphaCase(16, 2, 1, 40, 2), 1.0)
    assert found.by_order[1] > 0.5 > 0.3 > found.by_order[0] > 0


def test_a_text_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="begin_token_ids: 12 texts cannot begin at different places of 5 tokens"):
        measure_alpha(engine_of(1), [1, 2, 3, 4, 5], AlphaCase(9, 3), 0.0)
