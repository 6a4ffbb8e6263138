"""What drafts gain, predicted from their own acceptance and cost and measured (Leviathan et al., ICML 2023, tables 2 and 4).

The published table is of T5-XXL with smaller T5 models as drafts, on a TPU. There is no such pair here: drafts are looked up in what was
read, or come from the model's own first layers, which were not trained to speak. What is rebuilt is the comparison of the two columns:
alpha and c, the gain that follows from them, and the gain measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.bench.in_process import Engines
from octavo.bench.spec import Gain, foretell
from octavo.engine.engine import Engine
from octavo.reproduce.drafted_work import DraftedWork
from octavo.reproduce.figure import MEASURED, Figure, Plot, Range, Row
from octavo.reproduce.measured import NOT_TRANSFERABLE, describe, times
from octavo.reproduce.setup import Setup

NUMBER = 16
NAME = "draft-gains"
TOLERANCE = 0.2  # of the measured gain, within which the predicted one agrees
PUBLISHED = {  # (task, temperature) -> its row with T5-small as the draft
    ("summaries", 0.0): ("alpha .65, predicted 2.4x, measured 3.1x", "CNN-DM"),
    ("summaries", 1.0): ("alpha .53, predicted 1.9x, measured 2.3x", "CNN-DM"),
    ("translation", 0.0): ("alpha .75, predicted 3.2x, measured 3.4x", "WMT EnDe"),
    ("translation", 1.0): ("alpha .62, predicted 2.3x, measured 2.6x", "WMT EnDe"),
}


@dataclass(frozen=True, slots=True)
class Draft(DraftedWork):
    """One line of the table. ``beside``: the published task that it stands beside."""

    k: int
    beside: str

    def __str__(self) -> str:
        return f"{DraftedWork.__str__(self)}, {self.k} drafts"


@dataclass(frozen=True, slots=True)
class Case:
    num_prompts: int
    num_output: int
    repeat: int
    drafts: tuple[Draft, ...] = (
        Draft("edit", "ngram", 0.0, 5, "summaries"),
        Draft("edit", "ngram", 1.0, 5, "summaries"),
        Draft("json", "ngram", 0.0, 5, "summaries"),
        Draft("code", "self", 0.0, 3, "translation"),
        Draft("code", "self", 1.0, 3, "translation"),
    )
    self_draft_layers: int = 24


FULL, QUICK = Case(2, 128, 3), Case(1, 48, 1)


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    with Engines(setup.model, {"": {"self_draft_layers": case.self_draft_layers, "num_kv_blocks": 1024}}) as engines:
        engines.warm_up()
        return shown(measure(engines.first, case), f"{describe(engines)} {told(case)}")


def measure(engine: Engine, case: Case) -> dict[Draft, Gain]:
    def gain(draft: Draft) -> Gain:
        spec = draft.case(case.num_output, case.repeat, draft.k)
        return foretell(engine, draft.prompts(case.num_prompts), spec, draft.k, draft.method)

    return {draft: gain(draft) for draft in case.drafts}


def told(case: Case) -> str:
    return (
        f"One stream, {case.num_prompts} prompts of each work, {case.num_output} tokens, {case.repeat} rounds, plain and with drafts in "
        "turn, medians; drafts are verified by Gumbel coupling, texts are equal with and without. Predicted: (1 - a^(K+1)) / ((1 - a) (K c "
        "+ v)), with alpha a and the time c of a draft and v of a step that verifies, in plain steps, from a round before those that are "
        f"measured; a step without drafts keeps one token. First layers: {case.self_draft_layers}. Agrees: predicted within "
        f"{100 * TOLERANCE:g} % of measured."
    )


def shown(gains: dict[Draft, Gain], setup: str) -> Figure:
    rows, ranges = list[Row](), list[Range]()
    for draft, gain in gains.items():
        published, task = PUBLISHED[draft.beside, draft.temperature]
        ours = (
            f"alpha {gain.alpha:.2f} at {100 * gain.share:.0f} % of the steps, c {gain.c:.2f}, v {gain.step_ratio:.2f}: predicted "
            f"{times(gain.predicted)}, measured {times(gain.measured)}"
        )
        hit = abs(gain.predicted - gain.measured) <= TOLERANCE * gain.measured
        rows.append(Row(str(draft), f"{published} ({task})", ours, hit))
        ranges.append(Range(str(draft), *sorted((gain.predicted, gain.measured))))
    by_measured = sorted(gains, key=lambda draft: gains[draft].measured)
    by_predicted = sorted(gains, key=lambda draft: gains[draft].predicted)
    same_ends = by_measured[0] == by_predicted[0] and by_measured[-1] == by_predicted[-1]
    rows.append(Row("what is predicted best and worst is so", "yes", f"best {by_measured[-1]}; worst {by_measured[0]}", same_ends))
    plot = Plot("Gain of drafts, from predicted to measured", "times plain decoding", tuple(ranges), marks=(("no gain", 1.0),))
    notes = (
        "The published formula takes a step that verifies to cost a plain one (v = 1), as on an accelerator bound by memory; on a CPU rows "
        "cost time, which is measured.",
        NOT_TRANSFERABLE,
    )
    return Figure(NUMBER, "Drafts: predicted and measured gain", MEASURED, setup, rows, (plot,), notes)
