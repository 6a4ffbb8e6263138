"""Speculative decoding beside plain decoding, on the same engine and prompts, in turn: what it gains where answers repeat what was read,
and what it costs where they do not.

Each case is one kind of work at one batch size. Runs alternate (plain, speculative, plain, ...); decode_tok_s counts the tokens behind each
sequence's first, over the time in which they came; medians over the runs. Token ids of all runs are compared: they must be equal, but for
texts that are sampled and verified by the accept/resample rule.

The table of lengths holds the drafts at K = 1 .. 8. Predicted is (1 - a^(K+1)) / ((1 - a) (K c + v)) (Leviathan et al., 2023, Theorem 3.8,
with the time v of a step that verifies, in plain steps, measured instead of taken as 1), a and v from the same runs. For proposals that
are certain of themselves, as those that look text up, E[sum min(p, q)] is the probability of the draft, so that a is estimated by the
share of the tested drafts that came true; under the accept/resample rule the sum itself is known, and is the column "overlap". c, the time
of a draft, is the host's time for proposing one, which is in no step's time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.bench.spec_prompts import WORKS, Work
from octavo.bench.steps import steps_to_end
from octavo.bench.tables import table
from octavo.core.request import SamplingParams
from octavo.core.speculative_params import SpeculativeParams
from octavo.engine.engine import Engine

if TYPE_CHECKING:
    from octavo.config import EngineConfig

PLAIN = SpeculativeParams("off")


@dataclass(frozen=True, slots=True)
class SpecCase:
    works: tuple[str, ...]
    batches: tuple[int, ...]
    num_output: int
    repeat: int
    temperature: float
    num_drafts: int | str  # as SpeculativeParams
    method: str
    lengths: bool  # the table of K = 1 .. 8


@dataclass(frozen=True, slots=True)
class SpecRun:
    decode_tok_s: float
    num_steps: int
    tokens: tuple[tuple[int, ...], ...]  # by prompt
    num_tested: int
    num_accepted: int
    num_drafted: int
    propose_s: float
    step_s: float  # mean of the steps that decode, less the time of proposing
    overlap: float | None  # sum min(p, q), summed over the tested drafts; None: the rule that verifies does not know it


def run_spec(config: EngineConfig, case: SpecCase, echo: Callable[[str], None], as_json: bool) -> None:
    """Measure ``case``; the last line given to ``echo`` is the JSON record. ValueError when a text with drafts is not that without."""
    engine = Engine.load(config)
    say: Callable[[str], None] = (lambda line: None) if as_json else echo
    try:
        wanted = SpeculativeParams(case.num_drafts, case.method)
        wanted.validate(engine.speculator.methods)
        rows = [
            _compare(engine, work, batch, case, wanted) for work in WORKS if work.name in case.works for batch in case.batches
        ]
        say(_comparison_table(rows))
        by_length = _by_length(engine, case) if case.lengths else []
        if by_length:
            say("\n" + _length_table(by_length))
        record = {
            "bench": "spec", "model": engine.model.name, "num_drafts": case.num_drafts, "method": case.method,
            "rule": config.speculative.spec_rule,
            "temperature": case.temperature, "num_output": case.num_output, "repeat": case.repeat, "cases": rows, "lengths": by_length,
            "threads": getattr(engine.backend, "threads", None),
            "fingerprint": engine.backend.fingerprint(), "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
    finally:
        engine.close()
    echo(json.dumps(record))


def _compare(engine: Engine, work: Work, batch: int, case: SpecCase, wanted: SpeculativeParams) -> dict[str, Any]:
    """Plain and speculative in turn, after one run of each to warm up."""
    prompts = [work.prompts[i % len(work.prompts)] for i in range(batch)]
    runs: dict[SpeculativeParams, list[SpecRun]] = {PLAIN: [], wanted: []}
    for i in range(case.repeat + 1):
        for how in (PLAIN, wanted):
            run = measure(engine, prompts, case, how)
            if i:
                runs[how].append(run)
    plain, spec = runs[PLAIN], runs[wanted]
    sampled_anew = case.temperature > 0 and engine.config.speculative.spec_rule == "resample"
    if any(run.tokens != plain[0].tokens for run in (*plain, *([] if sampled_anew else spec))):
        raise ValueError(f"{work.name}, batch {batch}: the text with drafts is not that without")
    ratios = [b.decode_tok_s / a.decode_tok_s for a, b in zip(plain, spec, strict=True)]
    tested, accepted = sum(run.num_tested for run in spec), sum(run.num_accepted for run in spec)
    return {
        "work": work.name, "batch": batch, "plain_tok_s": round(_median(plain), 1), "spec_tok_s": round(_median(spec), 1),
        "ratio": round(statistics.median(ratios), 3), "lowest_ratio": round(min(ratios), 3),
        "alpha": round(accepted / tested, 3) if tested else None, "overlap": _mean_overlap(spec),
        "tokens_per_step": round(statistics.median(sum(map(len, run.tokens)) / batch / run.num_steps for run in spec), 2),
        "drafted": sum(run.num_drafted for run in spec), "accepted": accepted,
    }  # fmt: skip


def measure(engine: Engine, prompts: Sequence[str], case: SpecCase, how: SpeculativeParams) -> SpecRun:
    """All prompts at once, ``num_output`` tokens each. Prompts are computed first, apart from what is measured."""
    params = SamplingParams(temperature=case.temperature, seed=1, max_tokens=case.num_output, ignore_eos=True)
    ids = []
    for i, prompt in enumerate(prompts):
        tokens = engine.model.tokenizer.encode(prompt)
        prepared = engine.prepare(tokens, replace(params, seed=1 + i), cache_salt=str(i), speculative=how)
        ids.append(prepared.request.request_id)
        engine.add(prepared)
    texts: dict[str, list[int]] = {request_id: [] for request_id in ids}
    before = replace(engine.speculator.stats, tested=list(engine.speculator.stats.tested))
    overlap = _overlap(engine)
    started = last = time.perf_counter()
    num_steps = num_first = 0
    for events in steps_to_end(engine):
        last = time.perf_counter()
        for event in events:
            texts[event.request_id] += event.token_ids
        if all(texts.values()) and num_first == 0:
            num_first, started = sum(map(len, texts.values())), last
        elif num_first:
            num_steps += 1
    after = engine.speculator.stats
    num_tokens = sum(map(len, texts.values())) - num_first
    tested, seconds, propose_s = sum(after.tested) - sum(before.tested), last - started, after.propose_s - before.propose_s
    total = _overlap(engine)
    return SpecRun(
        num_tokens / seconds, num_steps, tuple(tuple(texts[i]) for i in ids), tested, after.num_accepted - before.num_accepted,
        after.num_proposed - before.num_proposed, propose_s, (seconds - propose_s) / num_steps,
        None if total is None or overlap is None else total - overlap,
    )  # fmt: skip


def _by_length(engine: Engine, case: SpecCase) -> list[dict[str, Any]]:
    """One stream of the work that copies, with K drafts wherever there are K: measured beside predicted."""
    prompts = [next(work for work in WORKS if work.copies).prompts[0]]
    rows = []
    for k in range(1, 9):
        how = SpeculativeParams(k, case.method)
        plain, spec = [], []
        for _ in range(case.repeat):
            plain.append(measure(engine, prompts, case, PLAIN))
            spec.append(measure(engine, prompts, case, how))
        plain_s = statistics.median(run.step_s for run in plain)
        tested, accepted = sum(r.num_tested for r in spec), sum(r.num_accepted for r in spec)
        a = _mean_overlap(spec) or (accepted / tested if tested else 0.0)
        v = statistics.median(run.step_s for run in spec) / plain_s
        c = sum(r.propose_s for r in spec) / max(1, sum(r.num_drafted for r in spec)) / plain_s
        kept = k + 1 if a >= 1.0 else (1 - a ** (k + 1)) / (1 - a)
        gain = statistics.median(y.decode_tok_s / x.decode_tok_s for x, y in zip(plain, spec, strict=True))
        predicted = kept / (v + k * c)
        row = {"k": k, "alpha": a, "c": c, "step_ratio": v, "predicted": predicted, "measured": gain}
        rows.append({name: value if name == "k" else round(value, 4 if name == "c" else 2) for name, value in row.items()})
    return rows


def _overlap(engine: Engine) -> float | None:
    acceptance = getattr(engine.backend, "acceptance", None)  # of the accept/resample rule
    return None if acceptance is None else sum(acceptance.overlap)


def _mean_overlap(runs: Sequence[SpecRun]) -> float | None:
    """Over the tested drafts of the runs."""
    known = [run for run in runs if run.overlap is not None and run.num_tested]
    return round(sum(run.overlap or 0.0 for run in known) / sum(run.num_tested for run in known), 3) if known else None


def _median(runs: Sequence[SpecRun]) -> float:
    return statistics.median(run.decode_tok_s for run in runs)


def _comparison_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("work", "batch", "plain token/s", "with drafts", "gain", "lowest", "alpha", "overlap", "tokens a step")
    keys = ("work", "batch", "plain_tok_s", "spec_tok_s", "ratio", "lowest_ratio", "alpha", "overlap", "tokens_per_step")
    return table([head, *(["-" if row[k] is None else str(row[k]) for k in keys] for row in rows)], "<>>>>>>>>")


def _length_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("K", "alpha", "c", "step", "predicted gain", "measured gain")
    return table([head, *([str(row[k]) for k in ("k", "alpha", "c", "step_ratio", "predicted", "measured")] for row in rows)], ">>>>>>")
