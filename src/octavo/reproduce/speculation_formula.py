"""Leviathan et al. (ICML 2023), table 1 and the expected column of table 4: what speculative decoding gains, by its formula."""

from __future__ import annotations

from octavo.reproduce.figure import ARITHMETIC, Figure, Line, Plot, Row
from octavo.reproduce.leviathan import best_gamma, operations, speed_up
from octavo.reproduce.setup import Setup

NUMBER = 15
NAME = "speculation-formula"
TABLE_1 = (  # alpha, gamma, operations, speed; c = 0
    (0.6, 2, "1.53x", "1.96x"),
    (0.7, 3, "1.58x", "2.53x"),
    (0.8, 2, "1.23x", "2.44x"),
    (0.8, 5, "1.63x", "3.69x"),
    (0.9, 2, "1.11x", "2.71x"),
    (0.9, 10, "1.60x", "6.86x"),
)
TABLE_4 = (  # task, draft, temperature, gamma, alpha, c, expected
    ("EnDe", "small", 0, 7, 0.75, 0.02, "3.2x"),
    ("EnDe", "base", 0, 7, 0.80, 0.04, "3.3x"),
    ("EnDe", "large", 0, 7, 0.82, 0.11, "2.5x"),
    ("EnDe", "small", 1, 7, 0.62, 0.02, "2.3x"),
    ("EnDe", "base", 1, 5, 0.68, 0.04, "2.4x"),
    ("EnDe", "large", 1, 3, 0.71, 0.11, "2.0x"),
    ("CNNDM", "small", 0, 5, 0.65, 0.02, "2.4x"),
    ("CNNDM", "base", 0, 5, 0.73, 0.04, "2.6x"),
    ("CNNDM", "large", 0, 3, 0.74, 0.11, "2.0x"),
    ("CNNDM", "small", 1, 5, 0.53, 0.02, "1.9x"),
    ("CNNDM", "base", 1, 3, 0.55, 0.04, "1.8x"),
    ("CNNDM", "large", 1, 3, 0.56, 0.11, "1.6x"),
)
_HALF_DIGIT = 0.005  # alpha and c are printed to two digits


def run(setup: Setup) -> Figure:
    rows = []
    for alpha, gamma, published_operations, published_speed in TABLE_1:
        for what, published, ours in (
            ("operations", published_operations, operations(alpha, gamma)),
            ("speed", published_speed, speed_up(alpha, gamma, 0.0)),
        ):
            text = f"{ours:.2f}x"
            rows.append(Row(f"table 1, alpha {alpha:g}, gamma {gamma}: {what}", published, text, text == published))
    rows += [_expected(*row) for row in TABLE_4]
    curves = tuple(_curve(alpha) for alpha in (0.5, 0.6, 0.7, 0.8, 0.9))
    plot = Plot("Speed-up by drafts per pass, c = 0.02", "speed-up", lines=curves, x_label="drafts per pass (gamma)")
    best = ", ".join(f"{alpha:g}: {best_gamma(alpha, 0.02)}" for alpha in (0.5, 0.6, 0.7, 0.8, 0.9))
    how = (
        "Speed-up (1 - a^(g+1)) / ((1 - a)(g c + 1)), operations (g + 1)(1 - a) / (1 - a^(g+1)), a: acceptance, g: drafts per pass, "
        "c: time "
        "of a draft over time of a pass. Table 1 has c = 0; table 4 has the paper's measured a and c, printed to two digits."
    )
    notes = (
        "Where our value from the printed a and c rounds to another digit, the range is what inputs that round to them give; the published "
        "value, of unrounded inputs, is in it.",
        f"Drafts per pass with the largest speed-up at c = 0.02, by alpha: {best}.",
    )
    return Figure(NUMBER, "Speculative decoding by its formula", ARITHMETIC, how, rows, (plot,), notes)


def _expected(task: str, draft: str, temperature: int, gamma: int, alpha: float, c: float, published: str) -> Row:
    ours = f"{speed_up(alpha, gamma, c):.1f}x"
    hit, text = ours == published, f"{ours} ({speed_up(alpha, gamma, c):.2f})"
    if not hit:
        least = speed_up(alpha - _HALF_DIGIT, gamma, c + _HALF_DIGIT)
        most = speed_up(alpha + _HALF_DIGIT, gamma, c - _HALF_DIGIT)
        hit = least < float(published[:-1]) + 0.05 and most >= float(published[:-1]) - 0.05
        text = f"{text[:-1]}, from {least:.2f} to {most:.2f} for inputs that round so)"
    what = f"table 4, {task}, T5-{draft}, temperature {temperature}, gamma {gamma}, alpha {alpha:.2f}, c {c:g}: expected"
    return Row(what, published, text, hit)


def _curve(alpha: float) -> Line:
    return Line(f"alpha {alpha:g}", tuple((float(gamma), speed_up(alpha, gamma, 0.02)) for gamma in range(21)))
