"""How many requests run at once under paging and under reservations, at a rate of the PagedAttention paper (figure 13), by simulation."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.bench.waste import CV_OUTPUT, CV_PROMPT, NUM_SLOTS, WasteCase, fitted, simulate
from octavo.reproduce.figure import SIMULATED, Figure, Line, Plot, Row, within
from octavo.reproduce.kv_use import NAMES
from octavo.reproduce.setup import Setup

SLOWNESS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)  # step times, in multiples of the roofline's
_TWICE = 2.0  # of these; shown in words too
SHARE = 0.1  # of the published number that counts as agreement


@dataclass(frozen=True, slots=True)
class Batched:
    """``means``: tokens of prompts and answers. ``published``: requests at once by reservation. ``duration_s``: of the run that is
    compared; the others, on other step times, are of ``short_s``."""

    number: int
    dataset: str
    rate: float
    means: tuple[float, float]
    published: dict[str, float]
    duration_s: float
    short_s: float

    def case(self, setup: Setup, duration_s: float) -> WasteCase:
        return WasteCase(self.rate, duration_s / 6 if setup.quick else duration_s, setup.seed, *self.means)


def figure_of(which: Batched, setup: Setup) -> Figure:
    """Compared with the roofline's step times; for other step times a curve shows what would come out."""
    rows, lines = list[Row](), list[Line]()
    for reservation, name in NAMES.items():
        setup.say(f"  {name}")
        record = simulate(reservation, which.case(setup, which.duration_s)).every_step.record()
        ours = 0.0 if record is None else record["batched"]
        published = which.published[reservation]
        rows.append(Row(name, f"{published:.2f}", f"{ours:.2f}", within(published, ours, ours, SHARE)))
        lines.append(Line(name, tuple(_curve(which, setup, reservation))))
    for reservation, name in NAMES.items():
        over = rows[list(NAMES).index("paged")], rows[list(NAMES).index(reservation)]
        if reservation in ("oracle", "max"):
            published, ours = (float(getattr(over[0], key)) / float(getattr(over[1], key)) for key in ("published", "ours"))
            rows.append(Row(f"paged over {name}", f"{published:.1f}x", f"{ours:.1f}x", within(published, ours, ours, SHARE)))
    at_twice = [next((f"{y:.1f}" for x, y in line.points if x == _TWICE), "-") for line in lines]
    rows.append(Row(f"on steps of {_TWICE:g} times the roofline's time, in the same order", "", " / ".join(at_twice)))
    marks = tuple((NAMES[reservation], value) for reservation, value in which.published.items())
    x_label = "time of a step, in multiples of the roofline's"
    plot = Plot(f"{which.dataset}, {which.rate:g} requests/s", "requests at once", lines=tuple(lines), x_label=x_label, marks=marks)
    case = which.case(setup, which.duration_s)
    lengths = f"{fitted(case.mean_prompt, CV_PROMPT)} in, {fitted(case.mean_output, CV_OUTPUT)} out"
    how = (
        f"OPT-13B on one A100 of 40 GB by its roofline, {NUM_SLOTS:,} slots; lengths with {which.dataset}'s published means ({lengths}), "
        f"Poisson, {which.rate:g} requests/s for {case.duration_s:g} s, seed {case.seed}; mean over all steps; agrees: within "
        f"{100 * SHARE:g} %."
    )
    notes = (
        "How many run at once is rate times time in the engine, so with memory to spare it follows the time of a step, which the "
        "paper's engine "
        "of 2023 took more of than this roofline. The curve shows the same load on slower steps; nothing was fitted to the published "
        "numbers.",
    )
    return Figure(which.number, f"Requests at once, {which.dataset}", SIMULATED, how, rows, (plot,), notes)


def _curve(which: Batched, setup: Setup, reservation: str) -> list[tuple[float, float]]:
    points = []
    for slowness in SLOWNESS[:3:2] if setup.quick else SLOWNESS:
        record = simulate(reservation, which.case(setup, which.short_s), slowness).every_step.record()
        if record is not None:
            points.append((slowness, record["batched"]))
    return points
