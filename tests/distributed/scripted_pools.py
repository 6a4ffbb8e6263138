"""Prefill and decode workers under a load that is written down, in steps of a quarter of a second: what scalers of pools are tried on.

Prompts are computed in order, by all prefill workers together, at ``PROMPT_S`` a token. An answer then needs blocks of a decode worker for
all its tokens; until one has them it stays with the worker of its prompt, and where too many do no prompt is computed. A decode worker's
step takes ``STEP_S`` and ``ROW_S`` for each of its answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.distributed.autoscale import ScaleAction, ScaleLimits, ScaleStep
from octavo.distributed.pool_scaling import ClusterLoad, PoolScaling, PoolWorker

PROMPT_S = 0.001
STEP_S, ROW_S, MOST_SEQUENCES = 0.04, 0.001, 40  # 80 ms a step of 40: 500 tokens a second at most
OUTPUT_S = (STEP_S + ROW_S * MOST_SEQUENCES) / MOST_SEQUENCES
BLOCK_SIZE = 16
TICK_S = 0.25
START_S = 5.0
MOST_KEPT = 8  # answers that a prefill worker keeps while they wait for room; then it computes no prompt


@dataclass(slots=True)
class Answer:
    num_prompt: int
    num_output: int
    left_prompt: float = 0.0
    left_output: float = 0.0
    drawn_s: float = 0.0

    def __post_init__(self) -> None:
        self.left_prompt, self.left_output = self.num_prompt, self.num_output

    @property
    def num_blocks(self) -> int:
        return -(-(self.num_prompt + self.num_output) // BLOCK_SIZE)


@dataclass(slots=True)
class Worker:
    """``ready_s``: when it has started. A prefill worker that drains has what it is at for two seconds more."""

    index: int
    role: str
    num_blocks: int
    ready_s: float
    drains_s: float | None = None
    answers: list[Answer] = field(default_factory=list)

    @property
    def free(self) -> int:
        return self.num_blocks - sum(answer.num_blocks for answer in self.answers)


class Pools:
    """``scaler`` is asked once a second, and what it says is done. ``numbers``: workers that are on, by role, after each time."""

    def __init__(self, limits: Mapping[str, ScaleLimits], workers: Mapping[str, int], num_blocks: int = 4000) -> None:
        self.scaler, self.num_blocks, self.now = PoolScaling(limits), num_blocks, 0.0
        self.workers = list[Worker]()
        self.prompts, self.without_room, self.done = deque[Answer](), deque[Answer](), list[Answer]()
        self.num_prompt = self.num_begun = 0
        self.made = 0.0  # output tokens
        self.steps = list[tuple[float, str, ScaleAction]]()
        self.numbers: dict[str, list[int]] = {role: [] for role in workers}
        self._due = 0.0
        for role, number in workers.items():
            for _ in range(number):
                self._add(role, 0.0)

    def _add(self, role: str, ready_s: float) -> None:
        index = next(i for i in range(len(self.workers) + 1) if all(one.index != i for one in self.workers))
        self.workers.append(Worker(index, role, self.num_blocks, ready_s))

    def ready(self, role: str) -> list[Worker]:
        return [one for one in self.workers if one.role == role and one.ready_s <= self.now and one.drains_s is None]

    def num_on(self, role: str) -> int:
        return sum(one.role == role and one.drains_s is None for one in self.workers)

    def run(self, num_seconds: float, per_s: float, num_prompt: int = 100, num_output: int = 100) -> None:
        """Requests of these lengths come evenly."""
        for _ in range(round(num_seconds / TICK_S)):
            self._due += per_s * TICK_S
            while self._due >= 1.0:
                self._due -= 1.0
                self.num_prompt += num_prompt
                self.prompts.append(Answer(num_prompt, num_output))
            self._tick()
            if self.now == int(self.now):
                self._ask()

    # --- what workers do ------------------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.now += TICK_S
        prefill = self.ready("prefill")
        tokens = TICK_S / PROMPT_S * len(prefill)
        while self.prompts and tokens > 0.0 and len(self.without_room) < MOST_KEPT * len(prefill):
            first = self.prompts[0]
            computed = min(tokens, first.left_prompt)
            first.left_prompt -= computed
            tokens -= computed
            if first.left_prompt <= 0.0:
                first.drawn_s = self.now
                self.num_begun += 1
                self.without_room.append(self.prompts.popleft())
        while self.without_room:
            need, decode = self.without_room[0].num_blocks, self.ready("decode")
            able = [one for one in decode if len(one.answers) < MOST_SEQUENCES and one.free >= need]
            if not able:
                break
            max(able, key=lambda one: one.free).answers.append(self.without_room.popleft())
        for worker in self.workers:
            made = TICK_S / (STEP_S + ROW_S * len(worker.answers))
            for answer in list(worker.answers):
                self.made += min(made, answer.left_output)
                answer.left_output -= made
                if answer.left_output <= 0.0:
                    worker.answers.remove(answer)
                    self.done.append(answer)

    # --- what the scaler is told, and says ------------------------------------------------------------------------------------------------

    def _view(self, worker: Worker, share: float) -> PoolWorker:
        state = "draining" if worker.drains_s is not None else "ready" if worker.ready_s <= self.now else "starting"
        pending_s, num = 0.0, len(worker.answers)
        if worker.role == "prefill":
            pending_s, num = (share if state == "ready" else 0.0), int(state == "draining" and self.now < (worker.drains_s or 0.0) + 2.0)
        room = 1.0 - worker.free / worker.num_blocks
        return PoolWorker(
            worker.index, worker.role, state, num, pending_s, pending_s, room=room, prompt_token_s=PROMPT_S, output_token_s=OUTPUT_S
        )

    def _ask(self) -> None:
        share = sum(answer.left_prompt for answer in self.prompts) * PROMPT_S / max(1, len(self.ready("prefill")))
        views = [self._view(worker, share) for worker in self.workers]
        num_open = len(self.prompts) + len(self.without_room) + sum(len(one.answers) for one in self.workers)
        waited_s = self.now - self.without_room[0].drawn_s if self.without_room else 0.0
        came = (self.num_prompt, int(self.made), self.num_begun, len(self.done))
        load = ClusterLoad(*came, num_open, 0, 0, len(self.without_room), waited_s)
        for role, step in self.scaler.decide(views, load, self.now):
            self.steps.append((self.now, role, step.action))
            self._do(role, step)
        for role, numbers in self.numbers.items():
            numbers.append(self.num_on(role))

    def _do(self, role: str, step: ScaleStep) -> None:
        if step.action is ScaleAction.START:
            self._add(role, self.now + START_S)
            return
        worker = next(one for one in self.workers if one.index == step.index)
        assert worker.role == role
        if step.action is ScaleAction.DRAIN:
            worker.drains_s = self.now
            assert self.ready(role), "the last worker of a role drains"
        elif step.action is ScaleAction.KEEP:
            worker.drains_s = None
        else:
            assert worker.drains_s is not None and not worker.answers, "a worker is stopped with work on it"
            self.workers.remove(worker)
