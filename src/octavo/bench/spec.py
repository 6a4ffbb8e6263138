"""Speculative decoding beside plain decoding, on the same engine and prompts, in turn: what it gains where answers repeat what was read,
and what it costs where they do not.

Each case is one kind of work at one batch size: all its prompts, so many at a time, where one ends the next begins. Runs alternate (plain,
speculative, plain, ...); decode_tok_s counts what steps gave that decoded a full batch and computed no prompt; medians over the runs.
Token ids of all runs are compared: they must be equal, but for texts that are sampled and verified by the accept/resample rule.

The table of lengths holds the drafts at K = 1 .. 8. Predicted is (1 - a^(K+1)) / ((1 - a) (K c + v)) (Leviathan et al., 2023, Theorem 3.8,
with the time v of a step that verifies, in plain steps, measured instead of taken as 1; a step without drafts keeps one token), a and v
from the same runs. For proposals that are certain of themselves, as those that look text up, E[sum min(p, q)] is the probability of the
draft, so that a is estimated by the share of the tested drafts that came true; under the accept/resample rule the sum itself is known, and
is the column "overlap". c, the time of a draft, is the host's time for proposing one, which is in no step's time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.bench.record import measured_with
from octavo.bench.spec_prompts import WORKS, Work
from octavo.bench.steps import steps_to_end
from octavo.bench.tables import table
from octavo.core.request import SamplingParams
from octavo.core.speculative_params import SpeculativeParams
from octavo.engine.engine import Engine

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.params import PreparedRequest

PLAIN = SpeculativeParams("off")
_ROUNDS = 2  # of a batch


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
    num_decoded: int  # tokens of the steps that are timed
    seconds: float
    num_steps: int
    tokens: tuple[tuple[int, ...], ...]  # by prompt
    num_tested: int
    num_accepted: int
    num_drafted: int
    propose_s: float
    overlap: float | None  # sum min(p, q), summed over the tested drafts; None: the rule that verifies does not know it

    @property
    def decode_tok_s(self) -> float:
        return self.num_decoded / self.seconds

    @property
    def step_s(self) -> float:
        """Mean, less the time of proposing."""
        return (self.seconds - self.propose_s) / self.num_steps


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
            **measured_with(engine),
        }  # fmt: skip
    finally:
        engine.close()
    echo(json.dumps(record))


def _compare(engine: Engine, work: Work, batch: int, case: SpecCase, wanted: SpeculativeParams) -> dict[str, Any]:
    """Plain and speculative in turn, after one run of each to warm up."""
    prompts = [work.prompts[i % len(work.prompts)] for i in range(max(_ROUNDS * batch, len(work.prompts)))]
    runs: dict[SpeculativeParams, list[SpecRun]] = {PLAIN: [], wanted: []}
    for i in range(case.repeat + 1):
        for how in (PLAIN, wanted):
            run = measure(engine, prompts, batch, case, how)
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
        "tokens_per_step": round(statistics.median(run.num_decoded / batch / run.num_steps for run in spec), 2),
        "drafted": sum(run.num_drafted for run in spec), "accepted": accepted,
    }  # fmt: skip


def measure(engine: Engine, prompts: Sequence[str], batch: int, case: SpecCase, how: SpeculativeParams) -> SpecRun:
    """``prompts``, ``batch`` at a time: where one ends the next begins. Timed are steps that decode ``batch`` sequences and no prompt."""
    waiting = [_prepare(engine, prompt, i, case, how) for i, prompt in enumerate(prompts)][::-1]
    texts: dict[str, list[int]] = {}  # by request, in their order

    def begin_next() -> None:
        if waiting:
            prepared = waiting.pop()
            texts[prepared.request.request_id] = []
            running.add(prepared.request.request_id)
            engine.add(prepared)

    running: set[str] = set()
    for _ in range(batch):
        begin_next()
    stats = engine.speculator.stats
    before, overlap = replace(stats, tested=list(stats.tested)), _overlap(engine)
    num_decoded, num_steps, seconds, propose_s = 0, 0, 0.0, 0.0
    started, proposed_s = time.perf_counter(), stats.propose_s
    for events in steps_to_end(engine):
        elapsed = time.perf_counter() - started
        if len(running) == batch and all(texts[request_id] for request_id in running):
            num_decoded += sum(len(event.token_ids) for event in events)
            num_steps, seconds, propose_s = num_steps + 1, seconds + elapsed, propose_s + stats.propose_s - proposed_s
        for event in events:
            texts[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                running.remove(event.request_id)
                begin_next()
        started, proposed_s = time.perf_counter(), stats.propose_s
    total = _overlap(engine)
    return SpecRun(
        num_decoded, seconds, num_steps, tuple(map(tuple, texts.values())), sum(stats.tested) - sum(before.tested),
        stats.num_accepted - before.num_accepted, stats.num_proposed - before.num_proposed, propose_s,
        None if total is None or overlap is None else total - overlap,
    )  # fmt: skip


def _prepare(engine: Engine, prompt: str, index: int, case: SpecCase, how: SpeculativeParams) -> PreparedRequest:
    params = SamplingParams(temperature=case.temperature, seed=1 + index, max_tokens=case.num_output, ignore_eos=True)
    return engine.prepare(engine.model.tokenizer.encode(prompt), params, cache_salt=str(index), speculative=how)


def drafts_by(k: int, method: str) -> SpeculativeParams:
    """``k`` drafts wherever the method has some."""
    return SpeculativeParams(k, method)


@dataclass(frozen=True, slots=True)
class Gain:
    """K drafts wherever there are some beside plain decoding, one stream at a time. Times are in steps of plain decoding."""

    k: int
    alpha: float  # share of the tested drafts that came true, or the overlap where it is known
    c: float  # host time of a draft
    step_ratio: float  # time of a step, its drafts' left out
    share: float  # of K drafts at every step, those that there were
    measured: float

    @property
    def kept(self) -> float:
        """Tokens of a step with K drafts, each of which comes true with ``alpha``."""
        return self.k + 1 if self.alpha >= 1.0 else (1 - self.alpha ** (self.k + 1)) / (1 - self.alpha)

    @property
    def tokens_per_step(self) -> float:
        """Expected; a step without drafts gives one."""
        return self.share * self.kept + 1 - self.share

    @property
    def predicted(self) -> float:
        return self.tokens_per_step / (self.step_ratio + self.share * self.k * self.c)


def compare(engine: Engine, prompts: Sequence[str], case: SpecCase, k: int, method: str) -> Gain:
    """Plain and with ``k`` drafts, in turn. ValueError when a text with drafts is not that without."""
    how = drafts_by(k, method)
    plain, spec = [], []
    for _ in range(case.repeat):
        plain.append(measure(engine, prompts, 1, case, PLAIN))
        spec.append(measure(engine, prompts, 1, case, how))
    sampled_anew = case.temperature > 0 and engine.config.speculative.spec_rule == "resample"
    if any(run.tokens != plain[0].tokens for run in (*plain, *([] if sampled_anew else spec))):
        raise ValueError(f"{k} drafts by {method}: the text with drafts is not that without")
    plain_s = statistics.median(run.step_s for run in plain)
    tested, accepted, drafted = (sum(getattr(r, name) for r in spec) for name in ("num_tested", "num_accepted", "num_drafted"))
    return Gain(
        k,
        alpha=_mean_overlap(spec) or (accepted / tested if tested else 0.0),
        c=sum(r.propose_s for r in spec) / max(1, drafted) / plain_s,
        step_ratio=statistics.median(run.step_s for run in spec) / plain_s,
        share=min(1.0, drafted / (k * sum(r.num_steps for r in spec))),
        measured=statistics.median(y.decode_tok_s / x.decode_tok_s for x, y in zip(plain, spec, strict=True)),
    )


def foretell(engine: Engine, prompts: Sequence[str], case: SpecCase, k: int, method: str) -> Gain:
    """As ``compare``, but what predicts comes from a round of its own, before those that are measured."""
    before = compare(engine, prompts, replace(case, repeat=1), k, method)
    return replace(before, measured=compare(engine, prompts, case, k, method).measured)


def _by_length(engine: Engine, case: SpecCase) -> list[dict[str, Any]]:
    """One stream of the work that copies, with K drafts wherever there are K: measured beside predicted."""
    prompts = [next(work for work in WORKS if work.copies).prompts[0]]
    rows = []
    for k in range(1, 9):
        gain = compare(engine, prompts, case, k, case.method)
        figures = {"alpha": gain.alpha, "c": gain.c, "step_ratio": gain.step_ratio, "predicted": gain.predicted, "measured": gain.measured}
        rows.append({"k": k, **{name: round(value, 4 if name == "c" else 2) for name, value in figures.items()}})
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
