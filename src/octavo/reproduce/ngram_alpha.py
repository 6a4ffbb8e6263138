"""How often n-gram drafts come true on a decoder of about 100 million parameters, measured (Leviathan et al., ICML 2023, table 3).

Published for a GPT-like decoder of 97 million on news sentences, with n-grams of its training data. Here n-grams are counted on a text that
the model itself has written, and much less of it; see ``bench.ngram_alpha``.
"""

from __future__ import annotations

from octavo.bench.in_process import Engines
from octavo.bench.ngram_alpha import BIGRAM, NAMES, TRIGRAM, UNIGRAM, Alpha, AlphaCase, measure_alpha
from octavo.bench.sharing import own_text
from octavo.reproduce.figure import MEASURED, Figure, Line, Plot, Row
from octavo.reproduce.measured import describe
from octavo.reproduce.setup import Setup

NUMBER = 17
NAME = "ngram-alpha"
PUBLISHED = {UNIGRAM: 0.03, BIGRAM: 0.05}  # at temperature 0 and 1 alike
POOR = 0.2  # twice the largest bigram's alpha that is published for any task
FACTOR = 2.0  # within which a share agrees that is published to one digit
TEMPERATURES = (0.0, 1.0)
FULL, QUICK = AlphaCase(), AlphaCase(24, 8, num_output=64)


def run(setup: Setup) -> Figure:
    case = sized(setup)
    with Engines(setup.model, {"": {"num_kv_blocks": 1024, "enable_prefix_caching": False}}) as engines:
        engine = engines.first
        token_ids = engine.model.tokenizer.encode(own_text(), add_special_tokens=False)
        found = [measure_alpha(engine, token_ids, case, temperature) for temperature in TEMPERATURES]
        return shown(found, f"{describe(engines)} {told(case)}")


def sized(setup: Setup) -> AlphaCase:
    base = QUICK if setup.quick else FULL
    return AlphaCase(base.num_counted, base.num_tested, base.num_begin, base.num_output, base.order, setup.seed)


def told(case: AlphaCase) -> str:
    return (
        f"{case.num_counted} texts of {case.num_output} tokens are counted and {case.num_tested} drafted for, all written by the model "
        f"from passages of {case.num_begin} tokens, at the temperature of the row, seeds from {case.seed}. alpha = E[sum min(p, q)] at "
        f"every position. Agrees: within a factor of {FACTOR:g}."
    )


def shown(found: list[Alpha], setup: str) -> Figure:
    rows = list[Row]()
    for alpha in found:
        for n, ours in enumerate(alpha.by_order, 1):
            published, hit = "-", None
            if n in PUBLISHED:
                published, hit = f"{PUBLISHED[n]:.2f}", PUBLISHED[n] / FACTOR <= ours <= PUBLISHED[n] * FACTOR
            rows.append(Row(f"{NAMES[n]}, T = {alpha.temperature:g}", published, f"{ours:.3f}", hit))
    for alpha in found:
        at, unigram, bigram = f"T = {alpha.temperature:g}", alpha.by_order[UNIGRAM - 1], alpha.by_order[BIGRAM - 1]
        where = f"{alpha.num_positions:,} positions, {alpha.num_counted_tokens:,} tokens counted"
        rows.append(Row(f"a bigram drafts better than a unigram, {at}", "yes", where, bigram > unigram))
        rows.append(Row(f"a bigram is a poor draft, {at}", f"below {POOR:g}", f"{bigram:.3f}", bigram < POOR))
    lines = tuple(Line(f"T = {a.temperature:g}", tuple((float(n), value) for n, value in enumerate(a.by_order, 1))) for a in found)
    marks = tuple((NAMES[n], value) for n, value in PUBLISHED.items())
    plot = Plot("alpha of n-gram drafts", "alpha", lines=lines, x_label=f"n, to {TRIGRAM}", marks=marks)
    notes = (
        "Another model, another text, and counts of what the model wrote in place of its training data: a near analogue, not the same.",
        "At temperature 0 a small model repeats itself, which n-grams of the same kind of text find.",
    )
    return Figure(NUMBER, "n-gram drafts for a small decoder", MEASURED, setup, rows, (plot,), notes)
