"""KV sent in one piece and layer by layer between two workers of this host, measured (Splitwise, Patel et al., ISCA 2024, section 6.6).

A prefill and a decode worker, a thread each, answer one request at a time; their link is held back to a rate. What is judged is the order:
the second token comes sooner layer by layer, and the whole answer is held up less.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.bench.handoff import ALONE, WAYS, HandoffCase, measure_handoff
from octavo.bench.handoff import Row as Timed
from octavo.engine.llm import make_config
from octavo.reproduce.figure import MEASURED, Figure, Line, Plot, Row
from octavo.reproduce.measured import NOT_TRANSFERABLE
from octavo.reproduce.setup import Setup

NUMBER = 24
NAME = "kv-transfer-measured"
LINK_GBPS = 1.0
SERIAL, LAYERWISE = WAYS
PUBLISHED = {SERIAL: (64.0, 3.0), LAYERWISE: (16.5, 0.8)}  # second token later by %, whole answer longer by %


@dataclass(frozen=True, slots=True)
class Case:
    prompts: tuple[int, ...]
    num_output: int
    repeat: int


FULL, QUICK = Case((512, 1024, 2048), 64, 3), Case((256,), 16, 1)


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    handoffs = HandoffCase(case.prompts, case.num_output, case.repeat, "tcp", "auto", 1, (LINK_GBPS,))
    return shown(measure_handoff(make_config(setup.model), handoffs, lambda line: setup.say(f"  {line}")), told(setup.model, case))


def told(model: str, case: Case) -> str:
    return (
        f"{model}, a prefill and a decode worker of one thread each, TCP held back to {LINK_GBPS:g} Gb/s; prompts of "
        f"{', '.join(map(str, case.prompts))} tokens that no cache has, {case.num_output} output tokens, one request at a time, medians of "
        f"{case.repeat}; against one worker that computes it all. Answers are equal."
    )


def shown(timed: Seq[Timed], setup: str) -> Figure:
    rows, lines = list[Row](), []
    by_way = {way: {one.num_prompt: one for one in timed if one.way == way} for way in (ALONE, *WAYS)}
    for num_prompt, plain in by_way[ALONE].items():
        serial, layerwise = by_way[SERIAL][num_prompt], by_way[LAYERWISE][num_prompt]
        name = f"{num_prompt} tokens, {plain.kv_bytes / 1e6:.1f} MB"
        for way, one in ((SERIAL, serial), (LAYERWISE, layerwise)):
            second, whole = PUBLISHED[way]
            later = f"{one.second_ms:.1f} ms after the first, {plain.second_ms:.1f} alone"
            rows.append(Row(f"{name}, {way}: second token", f"{second:g} % later", later))
            rows.append(Row(f"{name}, {way}: whole answer longer by", f"{whole:g} %", f"{one.e2e_over or 0.0:.1f} %"))
        both = f"{layerwise.second_ms:.1f} against {serial.second_ms:.1f} ms"
        rows.append(Row(f"{name}: the second token is sooner layer by layer", "yes", both, layerwise.second_ms < serial.second_ms))
        both = f"{layerwise.e2e_ms:.0f} against {serial.e2e_ms:.0f} ms"
        rows.append(Row(f"{name}: the whole answer is, too", "yes", both, layerwise.e2e_ms < serial.e2e_ms))
    for way in (ALONE, *WAYS):
        lines.append(Line(way, tuple((float(n), one.second_ms) for n, one in sorted(by_way[way].items()))))
    plot = Plot("When the second token comes", "ms after the first", lines=tuple(lines), x_label="prompt tokens")
    notes = ("The published links are 200 Gb/s and more, the tokens ten times as slow: shares of a token do not compare.", NOT_TRANSFERABLE)
    return Figure(NUMBER, "KV transfer in one piece and layer by layer", MEASURED, setup, rows, (plot,), notes)
