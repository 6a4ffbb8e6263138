"""Three drafts by bigrams of the text so far, measured (Leviathan et al., ICML 2023, section 4.1: alpha .2, gamma 3, a gain of 1.25x).

A bigram draft is what followed the last token the last time it stood in prompt or answer: prompt lookup with n-grams of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.bench.in_process import Engines
from octavo.bench.spec import Gain, SpecCase, foretell
from octavo.bench.spec_prompts import WORKS
from octavo.engine.engine import Engine
from octavo.reproduce.figure import MEASURED, Figure, Plot, Range, Row
from octavo.reproduce.measured import NOT_TRANSFERABLE, describe, times
from octavo.reproduce.setup import Setup

NUMBER = 18
NAME = "bigram-gain"
ALPHA, K, GAIN = 0.2, 3, 1.25
TOLERANCE = 0.1  # of the measured gain, within which the predicted one agrees
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Case:
    works: tuple[str, ...]
    num_output: int
    repeat: int


FULL, QUICK = Case(("stories", "facts"), 96, 3), Case(("stories",), 48, 1)


def run(setup: Setup) -> Figure:
    case = QUICK if setup.quick else FULL
    with Engines(setup.model, {"": {"ngram_min": 1, "ngram_max": 1, "num_kv_blocks": 512}}) as engines:
        engines.warm_up()
        return shown(measure(engines.first, case), f"{describe(engines)} {told(case)}")


def measure(engine: Engine, case: Case) -> dict[float, Gain]:
    """By temperature."""
    prompts = [prompt for work in WORKS if work.name in case.works for prompt in work.prompts]
    return {
        temperature: foretell(
            engine, prompts, SpecCase(case.works, (1,), case.num_output, case.repeat, temperature, K, "ngram", False), K, "ngram"
        )
        for temperature in TEMPERATURES
    }


def told(case: Case) -> str:
    return (
        f"One stream, the prompts of {' and '.join(case.works)}, {case.num_output} tokens, {K} drafts wherever the last token stood "
        f"before, {case.repeat} rounds, plain and with drafts in turn, medians; texts are equal. Agrees: the prediction from alpha, the "
        f"share of steps with drafts and the time of a step that verifies, all of a round before, within {100 * TOLERANCE:g} % of the "
        "measured gain."
    )


def shown(gains: dict[float, Gain], setup: str) -> Figure:
    rows, ranges = list[Row](), list[Range]()
    for temperature, gain in gains.items():
        at = f"T = {temperature:g}"
        rows.append(Row(f"alpha, {at}", f"{ALPHA:g}", f"{gain.alpha:.2f}, drafts at {100 * gain.share:.0f} % of the steps"))
        rows.append(Row(f"gain if a step that verifies cost a plain one, {at}", times(GAIN), times(gain.tokens_per_step)))
        hit = abs(gain.predicted - gain.measured) <= TOLERANCE * gain.measured
        ours = f"{times(gain.measured)}, predicted {times(gain.predicted)} with v {gain.step_ratio:.2f}"
        rows.append(Row(f"gain measured, {at}", "as predicted", ours, hit))
        rows.append(Row(f"even a bigram gains, {at}", "yes", times(gain.measured), gain.measured > 1))
        ranges.append(Range(f"measured, {at}", 0.0, gain.measured))
        ranges.append(Range(f"predicted, {at}", 0.0, gain.predicted))
    plot = Plot("Gain of three bigram drafts", "times plain decoding", tuple(ranges), marks=(("published", GAIN),))
    return Figure(NUMBER, "Bigram drafts", MEASURED, setup, rows, (plot,), (NOT_TRANSFERABLE,))
