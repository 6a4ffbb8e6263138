"""A device whose steps take a known time on a virtual clock: what the bound on gaps does can be computed, to the last digit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from octavo.config import SpeculativeConfig
from octavo.core.clock import VirtualClock
from octavo.core.cost import StepShape
from octavo.core.request import SamplingParams
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.outputs import OutputEvent
from tests.engine.scripted import Bigram, bigram_config, bigram_model, byte_tokenizer

HOST_S = 0.0004
MOVE_S = 0.0001  # of a block, to host memory or back


@dataclass(frozen=True)
class Law:
    """Seconds of a step: weights of its parts, times normal noise of relative width ``noise``."""

    step: float = 2.0e-3
    row: float = 4.0e-4
    pair: float = 4.0e-8
    position: float = 1.0e-7
    logit_row: float = 5.0e-5
    noise: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        linear = self.step + self.row * shape.num_rows + self.logit_row * shape.num_logit_rows
        return linear + self.pair * shape.num_pairs + self.position * shape.num_context


class TimedDevice(Bigram):
    """Advances ``clock`` by the law's seconds of each step. ``delay``: seconds more of a step, by its index: what the system holds up."""

    def __init__(self, vocab_size: int, clock: VirtualClock, law: Law) -> None:
        super().__init__(vocab_size)
        self.clock, self.law = clock, law
        self.delay: Callable[[int], float] = lambda step: 0.0
        self.seconds: list[float] = []
        self._rng = random.Random(7)

    def allocate_host_kv(self, num_blocks: int) -> None:
        """Its blocks hold nothing that could be lost."""

    def read_host_block(self, block: int) -> bytes:
        return bytes(self.kv_capacity(0).bytes_per_block)

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        noise = max(0.5, self._rng.gauss(1.0, self.law.noise))
        result.move_seconds = MOVE_S * plan.num_moves
        result.seconds = self.law.seconds(StepShape.of(plan)) * noise + self.delay(plan.step_index) + result.move_seconds
        self.seconds.append(result.seconds)
        self.clock.advance(result.seconds + HOST_S)
        return result


class TimedRun:
    """An engine on a TimedDevice, and when each of its requests got its tokens."""

    def __init__(
        self, law: Law, num_kv_blocks: int = 4096, cache: dict[str, Any] | None = None, spec: int | str = "off", **scheduler: object
    ) -> None:
        tokenizer, self.clock = byte_tokenizer(), VirtualClock()
        self.device = TimedDevice(tokenizer.vocab_size, self.clock, law)
        config = bigram_config(num_kv_blocks, **scheduler)
        config = replace(config, cache=replace(config.cache, **(cache or {})), speculative=SpeculativeConfig(spec=spec))
        self.engine = Engine(bigram_model(tokenizer, context=40000), config, self.device, self.clock)
        self.arrival_s: dict[str, float] = {}
        self.times_s: dict[str, list[float]] = {}
        self._rng = random.Random(3)

    def add(self, name: str, prompt: int | list[int], num_output: int) -> None:
        """``prompt``: its tokens, or how many random ones."""
        if isinstance(prompt, int):
            prompt = [self._rng.randrange(4, self.device.vocab_size) for _ in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        self.arrival_s[name], self.times_s[name] = self.clock.now(), []
        self.engine.add(self.engine.prepare(prompt, params, name))

    def step(self) -> list[OutputEvent]:
        events = self.engine.step()
        self.engine.scheduler.check_invariants()
        for event in events:
            assert event.error is None, event.error
            self.times_s[event.request_id] += [self.clock.now()] * len(event.token_ids)
        return events

    def run_until(self, name: str, num_tokens: int = 1) -> None:
        """Until ``name`` has got so many tokens."""
        for _ in range(100_000):
            if len(self.times_s[name]) >= num_tokens:
                return
            self.step()
        raise AssertionError(f"{name} does not get {num_tokens} tokens")

    def ttft_s(self, name: str) -> float:
        return self.times_s[name][0] - self.arrival_s[name]

    def gaps_s(self, name: str, since_s: float = 0.0, until_s: float = float("inf")) -> list[float]:
        times = self.times_s[name]
        return [b - a for a, b in zip(times, times[1:], strict=False) if b > since_s and a < until_s]
