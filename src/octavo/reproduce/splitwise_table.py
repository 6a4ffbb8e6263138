"""Splitwise, section III: what its characterisation says of prompts and batches, from the published table of its measurements."""

from __future__ import annotations

from octavo.reproduce.figure import ARITHMETIC, Figure, Line, Plot, Row, within
from octavo.reproduce.setup import Setup
from octavo.simulator.splitwise_study import A100, H100

NUMBER = 23
NAME = "machine-table"
PROMPT = 1500
GROWTH_SHARE, RATIO_SHARE = 0.15, 0.05  # of published values, which are read off plots or of another model


def run(setup: Setup) -> Figure:
    study = setup.study
    rows, lines = list[Row](), list[Line]()
    for hardware in (A100, H100):
        table = study.data.tables[hardware]
        throughput = [(tokens, tokens / seconds) for tokens, seconds in table.prompt_s.points]
        peak = max(throughput, key=lambda point: point[1])
        ours = f"{peak[0]:g} ({peak[1]:,.0f} tokens/s)"
        rows.append(Row(f"{hardware}: prompt throughput peaks at, tokens", "2048", ours, peak[0] == 2048))
        growth = table.batch_s(64) / table.batch_s(1)
        hit = within(2.0, growth, growth, GROWTH_SHARE)
        rows.append(Row(f"{hardware}: token time at batch 64 over batch 1", "2x", f"{growth:.2f}x", hit))
        worth = table.prompt_s(PROMPT) / table.token_s(PROMPT)
        name = f"{hardware}: output tokens that take as long as a prompt of {PROMPT} tokens"
        rows.append(Row(name, "6", f"{worth:.1f}", round(worth) == 6))
        lines.append(Line(hardware, tuple(throughput)))
    a100, h100 = study.data.tables[A100], study.data.tables[H100]
    prompt, token = h100.prompt_s(PROMPT) / a100.prompt_s(PROMPT), h100.token_s(PROMPT) / a100.token_s(PROMPT)
    rows.append(Row(f"H100 over A100, time of a {PROMPT}-token prompt", "0.51", f"{prompt:.2f}", within(0.51, prompt, prompt, RATIO_SHARE)))
    rows.append(Row("H100 over A100, token time", "0.70", f"{token:.2f}", within(0.70, token, token, RATIO_SHARE)))
    marks = (("published peak", 2048.0),)
    plot = Plot("Prompt throughput", "tokens/s", lines=tuple(lines), x_label="prompt tokens in the batch", x_marks=marks)
    how = (
        "Medians of the published table, BLOOM-176B, 8 GPUs; straight lines between measured sizes. Agrees: growth of the token time "
        f"within {100 * GROWTH_SHARE:g} % of what was published, ratios within {100 * RATIO_SHARE:g} %, the others to the printed digit."
    )
    notes = ("The text does not say which machine its 6 output tokens are of. Its ratios of table IV are of Llama2-70B on the traces.",)
    return Figure(NUMBER, "Prompts, batches and token times", ARITHMETIC, how, rows, (plot,), notes)
