"""Leviathan et al. (ICML 2023), section 4.2: what a bigram model is worth as a draft, by the formula."""

from __future__ import annotations

from octavo.reproduce.figure import ARITHMETIC, Figure, Line, Plot, Row
from octavo.reproduce.leviathan import speed_up
from octavo.reproduce.setup import Setup

NUMBER = 18
NAME = "bigram-formula"
ALPHA, GAMMA = 0.2, 3
PUBLISHED = "1.25x"


def run(setup: Setup) -> Figure:
    ours = speed_up(ALPHA, GAMMA, 0.0)
    text = f"{ours:.2f}x"
    rows = [Row(f"speed-up, alpha {ALPHA:g}, gamma {GAMMA}", PUBLISHED, f"{text} ({ours:.4f})", text == PUBLISHED)]
    costs = (0.0, 0.05, 0.1, 0.2)
    lines = tuple(Line(f"c = {c:g}", tuple((float(gamma), speed_up(ALPHA, gamma, c)) for gamma in range(9))) for c in costs)
    marks = (("published", 1.25),)
    plot = Plot("Speed-up of a draft with alpha 0.2", "speed-up", lines=lines, x_label="drafts per pass (gamma)", marks=marks)
    how = "(1 - a^(g+1)) / (1 - a): a draft of a table costs no time, and a pass over four tokens is taken to cost as much as over one."
    notes = ("A draft that costs a fifth of a pass (c = 0.2) gains nothing at this acceptance: a gain needs a > c.",)
    return Figure(NUMBER, "A bigram model as a draft", ARITHMETIC, how, rows, (plot,), notes)
