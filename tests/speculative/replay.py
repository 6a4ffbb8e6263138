"""Texts that are known beforehand, decoded on a device whose steps take a known time: what speculation gains or loses can be computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.core.clock import VirtualClock
from octavo.core.request import FinishReason, Request, SamplingParams, Sequence, SequenceStatus
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.step import SequenceSlice, SliceResult, StepPlan, StepResult
from octavo.speculative.proposer import Proposer
from octavo.speculative.speculator import Speculator
from octavo.speculative.suffix import SuffixProposer

CurveOfRows = Callable[[int], float]


def flat_then_linear(free_rows: int, row_s: float = 4e-4, step_s: float = 2.4e-3) -> CurveOfRows:
    """A device that reads its weights in ``step_s``, during which the arithmetic of ``free_rows`` rows is done."""
    return lambda rows: step_s + row_s * max(0, rows - free_rows)


def linear(row_s: float = 2e-3) -> CurveOfRows:
    """A device on which every row costs as much as the first: no draft can pay."""
    return lambda rows: row_s * rows


def measured(rows: int) -> float:
    """The shape of a 135M model in 4 bits on two cores."""
    return 2.6e-3 + 4.2e-4 * rows + (6e-4 if rows > 4 else 0.0)


@dataclass
class Device:
    """Seconds of a step by its rows and context; ``noise``: relative width of normal scatter; one step in ``hiccup_every`` takes longer."""

    curve: CurveOfRows
    position_s: float = 2e-7
    noise: float = 0.0
    hiccup_every: int = 0
    seed: int = 1
    pace: Callable[[int], float] = lambda step: 1.0
    _rng: random.Random = field(init=False)
    _num_steps: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def true_seconds(self, num_rows: int, num_context: int) -> float:
        return self.curve(num_rows) + self.position_s * num_context

    def seconds(self, num_rows: int, num_context: int) -> float:
        self._num_steps += 1
        seconds = self.true_seconds(num_rows, num_context) * self.pace(self._num_steps) * max(0.5, self._rng.gauss(1.0, self.noise))
        late = self.hiccup_every and self._rng.randrange(self.hiccup_every) == 0
        return seconds + 0.03 if late else seconds


@dataclass
class Text:
    prompt: list[int]
    output: list[int]
    params: SpeculativeParams | None = None


@dataclass
class Outcome:
    """``plain_s``: what the same tokens take without drafts on the same device, without its noise."""

    seconds: float = 0.0
    plain_s: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    drafts: list[int] = field(default_factory=list)  # of each step

    @property
    def speedup(self) -> float:
        return self.plain_s / self.seconds


class Replay:
    """Decodes ``texts``, ``batch`` of them at a time, with drafts from ``speculator``; checks every draft's bounds on the way."""

    def __init__(self, speculator: Speculator, device: Device, texts: Seq[Text], batch: int = 1, max_rows: int = 512) -> None:
        self.speculator, self.device, self.batch, self.max_rows = speculator, device, batch, max_rows
        self.waiting = list(enumerate(texts))
        self.texts = list(texts)
        self.running: list[Sequence] = []
        self.outcome = Outcome()

    def run(self) -> Outcome:
        while self.waiting or self.running:
            self.step()
        return self.outcome

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.batch:
            i, text = self.waiting.pop(0)
            params = SamplingParams(max_tokens=len(text.output), ignore_eos=True)
            request = Request(f"r{i}", text.prompt, params, seed=i, speculative=text.params)
            tokens = [*text.prompt, text.output[0]]
            seq = Sequence(i, request, token_ids=tokens, num_prompt_tokens=len(text.prompt), num_computed=len(text.prompt))
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)

    def step(self) -> None:
        self._admit()
        drafts = self.speculator.drafts(self.running, self.max_rows)
        plan, results = StepPlan(self.outcome.num_steps), []
        for seq in self.running:
            known, whole = len(seq.token_ids), self.texts[seq.seq_id].prompt + self.texts[seq.seq_id].output
            guess = drafts.pop(seq.seq_id, [])
            assert len(guess) <= max(0, len(whole) - known - 1), "drafts past the end"
            plan.slices.append(SequenceSlice(seq.seq_id, known - 1, [seq.token_ids[-1], *guess], seq.block_table, 1 + len(guess), [0]))
            plan.slices[-1].num_drafts = len(guess)
            num_right = 0
            while num_right < len(guess) and guess[num_right] == whole[known + num_right]:
                num_right += 1
            results.append(SliceResult(whole[known : known + num_right + 1]))
        assert not drafts, "drafts for a sequence that does not run"
        assert plan.num_tokens <= self.max_rows
        context = sum(piece.start + 1 for piece in plan.slices)
        result = StepResult(plan.step_index, results, self.device.seconds(plan.num_tokens, context))
        self._book(plan, result, context)
        for seq, outcome in zip(self.running, results, strict=True):
            seq.token_ids += outcome.token_ids
            seq.num_computed = len(seq.token_ids) - 1
            if len(seq.token_ids) >= seq.num_prompt_tokens + len(self.texts[seq.seq_id].output):
                seq.status, seq.finish_reason = SequenceStatus.FINISHED, FinishReason.LENGTH
        self.running = [seq for seq in self.running if seq.status is SequenceStatus.RUNNING]
        self.speculator.observe(plan, result)

    def _book(self, plan: StepPlan, result: StepResult, context: int) -> None:
        outcome, batch = self.outcome, len(plan.slices)
        num_kept = sum(len(piece.token_ids) for piece in result.slices)
        outcome.num_steps += 1
        outcome.num_tokens += num_kept
        outcome.seconds += result.seconds
        outcome.plain_s += self.device.true_seconds(batch, context) * num_kept / batch
        outcome.drafts.append(sum(piece.num_drafts for piece in plan.slices))


def make_speculator(
    num_drafts: int | str = "auto", proposer: Proposer | None = None, max_total_tokens: int = 10**6, clock: VirtualClock | None = None
) -> Speculator:
    """A Speculator whose clock stands still, unless it is given one: what it decides depends on the steps alone."""
    proposer = proposer or SuffixProposer()
    proposers, params = {proposer.name: proposer}, SpeculativeParams(num_drafts)
    return Speculator(proposers, params, max_total_tokens, clock or VirtualClock(), auto_method=proposer.name)
