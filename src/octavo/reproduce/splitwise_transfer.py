"""Splitwise, section VI-A: what sending the KV cache costs a request, in one piece after the prompt and layer by layer behind it."""

from __future__ import annotations

from octavo.reproduce.figure import ARITHMETIC, Figure, Row, within
from octavo.reproduce.setup import Setup
from octavo.simulator.splitwise_study import A100, KV_BYTES_PER_TOKEN

NUMBER = 24
NAME = "kv-transfer"
NUM_PROMPT, NUM_OUTPUT = 1500, 13  # the code trace's medians
LINK_BYTES_PER_S = 8 * 25e9  # InfiniBand of an A100 machine
SHARE = 0.1  # of published values, which were measured
LAYER_WISE_S = 0.008  # what is left of the transfer when all but the last layers are sent during the prompt: published, measured


def run(setup: Setup) -> Figure:
    study = setup.study
    table = study.data.tables[A100]
    token_s = table.token_s(NUM_PROMPT)
    alone_s = table.prompt_s(NUM_PROMPT) + (NUM_OUTPUT - 1) * token_s
    rows = []
    for name, seconds, second_token, whole in (
        ("in one piece", NUM_PROMPT * KV_BYTES_PER_TOKEN / LINK_BYTES_PER_S, 64.0, 3.0),
        ("layer by layer", LAYER_WISE_S, 16.5, 0.8),
    ):
        for what, published, ours in (
            ("second token later by", second_token, 100 * seconds / token_s),
            ("request longer by", whole, 100 * seconds / alone_s),
        ):
            rows.append(Row(f"{name}: {what}", f"{published:g} %", f"{ours:.1f} %", within(published, ours, ours, SHARE)))
    how = (
        f"BLOOM-176B on A100, {NUM_PROMPT} prompt and {NUM_OUTPUT} output tokens without batching; {KV_BYTES_PER_TOKEN / 1e6:.3f} MB of "
        f"KV per token over {LINK_BYTES_PER_S / 1e9:g} GB/s; layer by layer: the published {1000 * LAYER_WISE_S:g} ms. "
        f"Agrees: within {100 * SHARE:g} % of what was published."
    )
    return Figure(NUMBER, "KV transfer in one piece and layer by layer", ARITHMETIC, how, rows)
