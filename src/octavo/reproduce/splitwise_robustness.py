"""Splitwise, section VI-E and F: conversation on clusters sized for code, and requests per dollar when far too many come."""

from __future__ import annotations

from statistics import median

from octavo.reproduce.figure import SIMULATED, Figure, Row, within
from octavo.reproduce.setup import Setup
from octavo.reproduce.splitwise_rates import AA, BASELINE_A100, BASELINE_H100, HA, HH, HHCAP, LOOKUPS, setup_of
from octavo.simulator.rate_curve import ratio_of
from octavo.simulator.splitwise_study import Design, Study

NUMBER = 30
NAME = "robustness"
OVERLOAD = 3.0  # times the highest rate that holds
CODE_SIZED = (  # published change in percent, the design for conversation, (prompt, token) machines of the one for code
    (0, AA, (55, 15)),
    (0, HH, (35, 5)),
    (-7, HA, (35, 8)),
    (-7, HHCAP, (35, 7)),
)


def run(setup: Setup) -> Figure:
    study = setup.study
    rows = []
    for lookup in LOOKUPS:
        for published, design, (num_prompt, num_token) in CODE_SIZED:
            other = Design(design.name, design.token_hardware, num_token, design.prompt_hardware, num_prompt)
            least, middle, most = ratio_of(study.brackets(other, lookup), study.brackets(design, lookup))
            ours = f"{100 * (middle - 1):+.0f} % ({100 * (least - 1):+.0f} to {100 * (most - 1):+.0f} %)"
            is_judged = lookup == "published"
            hit = within(1 + published / 100, least, most) if is_judged else None
            rows.append(Row(f"conversation on {other} instead of {design}, {lookup}", f"{published:+d} %" if is_judged else "", ours, hit))
    for published_rate, design in ((0.89, BASELINE_A100), (0.75, BASELINE_H100), (0.89, AA), (0.75, HH)):
        for lookup in LOOKUPS:
            ours_rate = _overload(study, design, lookup) / design.cost
            is_judged = lookup == "published"
            hit = within(published_rate, ours_rate, ours_rate, 0.1) if is_judged else None
            name = f"{design} under overload, requests/s per $, {lookup}"
            rows.append(Row(name, f"{published_rate:g}" if is_judged else "", f"{ours_rate:.2f}", hit))
    how = (
        f"{setup_of(study)} Overload: {OVERLOAD:g} times the rate that holds; requests per second while the middle half of them ends, over "
        "the $ per GPU and hour of all machines."
    )
    notes = ("The published figures of overload are of A100-based and H100-based designs together, without a definition of the load.",)
    return Figure(NUMBER, "Conversation on clusters sized for code; overload", SIMULATED, how, rows, notes=notes)


def _overload(study: Study, design: Design, lookup: str) -> float:
    """Requests per second of a crowd that is worked off, without the first and the last quarter of it: the median over seeds."""
    rates = []
    for seed in study.options.seeds:
        rate = OVERLOAD * study.bracket(design, lookup, seed).holds_at
        result = study.run(design, lookup, rate, seed)
        arrivals = (arrival_s for arrival_s, _, _ in study.requests("conversation", rate, seed))
        ends_s = sorted(arrival_s + e2e_s for arrival_s, e2e_s in zip(arrivals, result.e2e_s, strict=True))
        first, last = len(ends_s) // 4, len(ends_s) * 3 // 4
        rates.append((last - first) / (ends_s[last] - ends_s[first]))
    return median(rates)
