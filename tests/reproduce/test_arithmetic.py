"""Figures that are arithmetic, to the printed digit; and the formulas behind them."""

from __future__ import annotations

import pytest

from octavo.reproduce import attention_arithmetic, bigram_formula, kv_bytes, kv_slots, speculation_formula
from octavo.reproduce.figure import ARITHMETIC, Figure, Row
from octavo.reproduce.leviathan import best_gamma, operations, speed_up, tokens_per_pass
from octavo.reproduce.setup import Setup


def row_of(figure: Figure, beginning: str) -> Row:
    (row,) = (row for row in figure.rows if row.what.startswith(beginning))
    return row


def misses(figure: Figure) -> list[str]:
    assert figure.evidence == ARITHMETIC
    assert all(row.published for row in figure.rows if row.hit is not None)
    return [row.what for row in figure.rows if row.hit is False]


def test_kv_bytes() -> None:
    figure = kv_bytes.run(Setup())
    assert misses(figure) == []
    assert row_of(figure, "Llama-2-7B, KV of 4096 tokens").ours == "2.0 GiB"
    assert row_of(figure, "Llama-2-7B, KV of one token").ours == "512 KiB"
    assert row_of(figure, "Llama-2-70B, KV of one token").ours == "327,680 B"
    assert row_of(figure, "SmolLM2-135M, KV of one token").ours == "23,040 B"
    assert row_of(figure, "SmolLM2-135M, by the published formula").ours == "69,120 B"


def test_kv_slots() -> None:
    figure = kv_slots.run(Setup())
    assert misses(figure) == ["OPT-66B, slots in 21 GB"]
    assert row_of(figure, "OPT-13B, KV of one").ours == "800 KiB"
    assert [row.ours for row in figure.rows if "slots in" in row.what] == ["15.7K (15,728)", "9.6K (9,557)", "60.1K (60,074)"]
    assert row_of(figure, "OPT-13B, requests at once").ours == "7.00"
    assert row_of(figure, "slots left over").ours == "8.9 % (1,392 slots)"


def test_the_tables_of_speculative_decoding() -> None:
    figure = speculation_formula.run(Setup())
    assert misses(figure) == []
    assert len(figure.rows) == 2 * 6 + 12
    for row in figure.rows[:12]:
        assert row.ours == row.published
    by_inputs = [row for row in figure.rows[12:] if "inputs that round so" in row.ours]
    assert [row.published for row in by_inputs] == ["2.4x", "2.0x", "1.6x"], "printed a and c give another digit in these alone"
    assert all(row.ours.startswith(row.published) for row in figure.rows[12:] if row not in by_inputs)


def test_a_value_that_no_rounding_explains_differs() -> None:
    far = speculation_formula._expected("EnDe", "large", 1, 3, 0.71, 0.11, "2.2x")
    assert far.hit is False and "1.90 to 1.97" in far.ours


def test_a_bigram_draft() -> None:
    figure = bigram_formula.run(Setup())
    assert misses(figure) == []
    assert row_of(figure, "speed-up").ours == "1.25x (1.2480)"


def test_attention() -> None:
    figure = attention_arithmetic.run(Setup())
    assert misses(figure) == ["230 TFLOP/s forward, of the peak"]
    assert row_of(figure, "tiles of a causal 16384").ours == "49.6 %"
    assert row_of(figure, "scores of a 16384").ours == "8 GiB"


@pytest.mark.parametrize(("length", "skipped"), [(128, 0), (256, 1), (384, 3), (1024, 28)])
def test_skipped_tiles_are_those_above_the_diagonal(length: int, skipped: int) -> None:
    blocks = length // attention_arithmetic.BLOCK
    assert sum(column > row for row in range(blocks) for column in range(blocks)) == skipped
    assert attention_arithmetic.skipped_share(length) == pytest.approx(skipped / blocks**2)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_tokens_of_a_pass_by_counting(alpha: float, gamma: int) -> None:
    """One token, and one more for each draft that is accepted with all before it."""
    assert tokens_per_pass(alpha, gamma) == pytest.approx(sum(alpha**drafts for drafts in range(gamma + 1)), rel=1e-9)
    assert operations(alpha, gamma) * tokens_per_pass(alpha, gamma) == pytest.approx(gamma + 1)


def test_the_best_number_of_drafts() -> None:
    for alpha, c in ((0.5, 0.02), (0.8, 0.1), (0.2, 0.3)):
        best = best_gamma(alpha, c, 30)
        assert all(speed_up(alpha, best, c) >= speed_up(alpha, gamma, c) for gamma in range(31))
    assert best_gamma(0.2, 0.3) == 0, "a draft that costs more than it is accepted gains nothing"
    assert speed_up(0.6, best_gamma(0.6, 0.1), 0.1) >= (1 + 0.6) / (1 + 0.1), "the paper's bound for alpha above c"
