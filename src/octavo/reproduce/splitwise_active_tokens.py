"""Splitwise, figure 4: how many tokens a machine works on at a time, when two requests come each second and both phases are batched."""

from __future__ import annotations

from octavo.reproduce.figure import SIMULATED, Figure, Line, Plot, Row
from octavo.reproduce.setup import Setup
from octavo.simulator.splitwise_study import A100, H100, Design, Study

NUMBER = 22
NAME = "active-tokens"
RATE = 2.0
FEW = 20


def run(setup: Setup) -> Figure:
    study = setup.study
    rows, lines = list[Row](), list[Line]()
    for hardware in (A100, H100):
        for workload in ("conversation", "code"):
            points = _cumulative(study, hardware, workload)
            few, one = (100 * max((share for tokens, share in points if tokens <= most), default=0.0) for most in (FEW, 1))
            name = f"{hardware}, {workload}: share of busy time with"
            if workload == "conversation":
                rows.append(Row(f"{name} at most {FEW} tokens", "60 to 70 %", f"{few:.0f} %", 60 <= few <= 70))
            else:
                rows.append(Row(f"{name} one token", "above 20 %", f"{one:.0f} %", one > 20))
            lines.append(Line(f"{hardware}, {workload}", points))
    plot = Plot("Active tokens", "share of busy time with at most so many", lines=tuple(lines), x_label="tokens in the batch", log_x=True)
    how = (
        f"BLOOM-176B on one machine of 8 GPUs, {RATE:g} requests/s, Poisson, {study.options.duration_s:g} s, "
        f"seeds {', '.join(map(str, study.options.seeds))}; decode times in two variables."
    )
    notes = (
        "The published runs are measurements of vLLM on machines and arrivals that are not named there; the traces' own arrivals of code "
        "are far from Poisson.",
    )
    return Figure(NUMBER, "Active tokens in a batch at two requests per second", SIMULATED, how, rows, (plot,), notes)


def _cumulative(study: Study, hardware: str, workload: str) -> tuple[tuple[float, float], ...]:
    """(tokens in the batch, share of busy time with at most so many), over all seeds."""
    rows_s = dict[int, float]()
    for seed in study.options.seeds:
        found = study.run(Design(hardware, hardware, 1), "two-variable", RATE, seed, workload)
        for num_rows, seconds in found.rows_s.items():
            rows_s[num_rows] = rows_s.get(num_rows, 0.0) + seconds
    busy_s, share, points = sum(rows_s.values()), 0.0, []
    for num_rows in sorted(rows_s):
        share += rows_s[num_rows] / busy_s
        points.append((float(num_rows), share))
    return tuple(points)
