"""What the steps of an engine take on this machine: short scenes of requests, run as a server runs them, whose steps are fitted.

    scenes ─▶ AsyncEngine (loop thread, text, events read on the event loop) ─▶ StepLog ─▶ costs.fitting ─▶ Coefficients

A *scene* is a few requests of random tokens that are there for the steps they make: single prompts after a pause, batches that decode,
batches behind long contexts, prompts that come beside running streams, rows of drafts, rows whose logits are wanted. Their sizes come from
sequences that fill each range evenly on a logarithmic scale however many scenes there is time for (Halton, 1960). Every fifth scene is kept
out of the fit: the errors that are stated are those on its steps.

Owns the scenes and their order. Changes nothing of the engine but its cache of prefixes, which ends up with prompts of no use.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from octavo.core.cost import StepShape
from octavo.core.request import SamplingParams
from octavo.core.speculative_params import SpeculativeParams
from octavo.core.words import counted
from octavo.costs.coefficients import Coefficients
from octavo.costs.fitting import MIN_STEPS, MeasuredStep, errors_of, fit, waking_s
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.engine import Engine
from octavo.engine.params import PreparedRequest
from octavo.engine.serving import ServingEngine
from octavo.engine.step_costs import fitted_for
from octavo.engine.step_log import StepLog

HELD_OUT = 5  # one scene in so many
PAUSE_S = 0.03  # before a prompt that is to find the engine idle
MAX_CONTEXT_TOKENS = 6000  # of all sequences of a scene together
_LOW_TOKEN = 100  # ids near 0 are special tokens in many vocabularies

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SceneRequest:
    """``after``: tokens that the scene's first request has to have before this one comes. ``num_drafts``: of each step, looked up in its
    own text, which then repeats itself. ``scores``: the logits of all its prompt rows are wanted."""

    num_prompt: int
    num_output: int
    after: int = 0
    num_drafts: int = 0
    scores: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """``pauses``: it begins with the engine idle for a moment."""

    kind: str
    requests: tuple[SceneRequest, ...]
    pauses: bool = False


@dataclass(frozen=True, slots=True)
class SceneLimits:
    """What the engine takes. ``max_tokens``: prompt and output of one sequence together."""

    max_tokens: int
    max_num_seqs: int
    max_rows: int  # of one step
    num_pool_tokens: int

    @classmethod
    def of(cls, engine: Engine) -> SceneLimits:
        config = engine.config
        pool = engine.num_kv_blocks * config.cache.block_size
        scheduler = config.scheduler
        return cls(engine.scheduler.limits.max_total_tokens, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, pool)


_ORDER = ("prompt", "decode", "mixed", "prompt", "context", "mixed", "decode", "prompt", "drafts", "mixed", "prompt", "logits")


def scenes(limits: SceneLimits, seed: int = 0) -> Iterator[Scene]:
    """Scenes without end, each within ``limits``; the same seed gives the same ones."""
    rng, counts = random.Random(f"calibrate:{seed}"), dict.fromkeys(_ORDER, 0)
    number = 0
    while True:
        kind = _ORDER[number % len(_ORDER)]
        counts[kind] += 1
        size, other = _halton(counts[kind] + 20 * seed, 2), _halton(counts[kind] + 20 * seed, 3)
        yield _within(_MAKERS[kind](size, other, limits, rng), limits)
        number += 1


def _halton(index: int, base: int) -> float:
    """The radical inverse: from 0 to 1, evenly however many of them there are."""
    result, share = 0.0, 1.0
    while index:
        share /= base
        result += share * (index % base)
        index //= base
    return result


def _between(low: float, high: float, share: float) -> int:
    """A whole number from ``low`` to ``high``, on a logarithmic scale."""
    high = max(low, high)
    return round(low * (high / low) ** share)


def _prompt(size: float, other: float, limits: SceneLimits, rng: random.Random) -> Scene:
    return Scene("prompt", (SceneRequest(_between(1, 2.5 * limits.max_rows, size), 2),), pauses=True)


def _decode(size: float, other: float, limits: SceneLimits, rng: random.Random) -> Scene:
    num_sequences = _between(1, limits.max_num_seqs, size)
    return Scene("decode", tuple(SceneRequest(rng.randint(4, 40), 14 + rng.randint(0, 4)) for _ in range(num_sequences)))


def _context(size: float, other: float, limits: SceneLimits, rng: random.Random) -> Scene:
    num_sequences = _between(1, min(16, limits.max_num_seqs), size)
    context = min(_between(150, 2500, other), MAX_CONTEXT_TOKENS // num_sequences)
    return Scene("context", tuple(SceneRequest(rng.randint(context * 3 // 4, context), 12) for _ in range(num_sequences)))


def _mixed(size: float, other: float, limits: SceneLimits, rng: random.Random) -> Scene:
    """Streams, and beside them prompts of all sizes, one after the other."""
    num_streams, num_prompts = _between(1, 0.6 * limits.max_num_seqs, size), 5
    streams = [SceneRequest(rng.randint(8, _between(16, 400, rng.random())), 12 + 6 * num_prompts) for _ in range(num_streams)]
    sizes = [_between(4, 1.5 * limits.max_rows, (other + i / num_prompts) % 1.0) for i in range(num_prompts)]
    return Scene("mixed", (*streams, *(SceneRequest(one, 3, after=4 + 6 * i) for i, one in enumerate(sizes))))


def _drafts(size: float, other: float, limits: SceneLimits, rng: random.Random) -> Scene:
    num_sequences, num_drafts = _between(1, min(8, limits.max_num_seqs), size), _between(1, 8, other)
    return Scene("drafts", (SceneRequest(48, 24, num_drafts=num_drafts),) * num_sequences)


def _logits(size: float, other: float, limits: SceneLimits, rng: random.Random) -> Scene:
    return Scene("logits", (SceneRequest(_between(4, 96, size), 2, scores=True),))


_MAKERS = {"prompt": _prompt, "decode": _decode, "context": _context, "mixed": _mixed, "drafts": _drafts, "logits": _logits}


def _within(scene: Scene, limits: SceneLimits) -> Scene:
    """With prompts cut, and sequences left out, as far as the engine has no room for them all at once."""
    kept, num_tokens = list[SceneRequest](), 0
    for one in scene.requests:
        num_output = max(1, min(one.num_output, limits.max_tokens // 2))
        cut = replace(one, num_prompt=max(1, min(one.num_prompt, limits.max_tokens - num_output)), num_output=num_output)
        num_tokens += cut.num_prompt + num_output + 64
        if kept and (num_tokens > 0.8 * limits.num_pool_tokens or len(kept) == limits.max_num_seqs):
            break
        kept.append(cut)
    return replace(scene, requests=tuple(kept))


@dataclass(slots=True)
class Calibration:
    """What was measured so far. ``firsts``: (shape of the only step, seconds from the request to its first token) of prompts that found the
    engine idle and took one step."""

    train: list[MeasuredStep] = field(default_factory=list)
    held_out: list[MeasuredStep] = field(default_factory=list)
    firsts: list[tuple[StepShape, float]] = field(default_factory=list)
    num_scenes: int = 0
    seconds: float = 0.0

    def cost(self, engine: Engine) -> Coefficients:
        """The cost of ``engine``'s steps, with its errors on the steps that were held out. Raises FitError when too few were measured."""
        fitted = fit(self.train, f"{counted(self.num_scenes, 'scene')} in {self.seconds:.3g} s")
        errors = errors_of(fitted, self.held_out)
        key = fitted_for(engine.backend, engine.model.name, _today())
        median_error = errors["all"].median if errors else None
        return replace(fitted, errors=errors, median_error=median_error, wake_s=waking_s(fitted, self.firsts), fitted_for=key)


def _today() -> str:
    return time.strftime("%Y-%m-%d")


class ScenePlayer:
    """Plays scenes on whatever serves requests, with prompts that no cache knows. ``engine``: started."""

    def __init__(self, engine: ServingEngine, seed: int | str = 0) -> None:
        self._engine = engine
        self._rng = random.Random(f"calibrate:tokens:{seed}")
        self._name = f"scene-{secrets.token_hex(6)}"
        self._numbers = count()

    async def play(self, scene: Scene) -> float:
        """All requests of a scene, each when it is due; returns when the first token of the first one came, from its submission. Raises
        RuntimeError when a request fails."""
        leader, *others = scene.requests
        due = {one.after: asyncio.Event() for one in others if one.after}
        started_s, first_s = time.perf_counter(), 0.0

        async def lead() -> None:
            nonlocal first_s
            num_tokens, marks = 0, sorted(due)
            async for num_more in self._tokens_of(leader):
                first_s = first_s or time.perf_counter() - started_s
                num_tokens += num_more
                while marks and num_tokens >= marks[0]:
                    due[marks.pop(0)].set()
            for event in due.values():
                event.set()

        async def follow(one: SceneRequest) -> None:
            if one.after:
                await due[one.after].wait()
            async for _ in self._tokens_of(one):
                pass

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(lead())
                for one in others:
                    tasks.create_task(follow(one))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the others fail for the same reason
        return first_s

    async def _tokens_of(self, one: SceneRequest) -> AsyncIterator[int]:
        """How many tokens came, each time some did. Raises RuntimeError when the request fails."""
        stream = self._engine.submit([self._prepared(one)])
        while events := await stream.read():
            for event in events:
                if event.error is not None:
                    raise RuntimeError(f"a request of {one.num_prompt} + {one.num_output} tokens failed: {event.error}")
            yield sum(len(event.token_ids) for event in events)

    def _prepared(self, one: SceneRequest) -> PreparedRequest:
        engine, rng = self._engine, self._rng
        vocab_size = engine.model.program.vocab_size
        low = min(_LOW_TOKEN, vocab_size // 2)
        if one.num_drafts:
            piece = [rng.randrange(low, vocab_size) for _ in range(6)]
            prompt = (piece * (one.num_prompt // 6 + 1))[: one.num_prompt]
        else:
            prompt = [rng.randrange(low, vocab_size) for _ in range(one.num_prompt)]
        scored = 0 if one.scores else None
        params = SamplingParams(temperature=0.0, max_tokens=one.num_output, ignore_eos=True, prompt_logprobs=scored)
        drafts = SpeculativeParams(one.num_drafts, "ngram") if one.num_drafts else None
        name = f"{self._name}-{next(self._numbers)}"
        return engine.prepare_checked(prompt, engine.check_params(params), name, speculative=drafts)


class Calibrator:
    """Runs scenes on an engine that nobody else uses meanwhile: ``run`` as often as wanted, each time the scenes that follow."""

    def __init__(self, engine: AsyncEngine, seed: int = 0) -> None:
        """``engine``: started, and idle."""
        self.calibration = Calibration()
        self._engine = engine
        self._scenes = scenes(SceneLimits.of(engine.engine), seed)
        self._player = ScenePlayer(engine, seed)

    async def run(self, budget_s: float, progress: Progress | None = None) -> Calibration:
        """Scenes until ``budget_s`` have passed, at least one and, the first time, until there are steps enough to fit and to judge by."""
        started_s, calibration = time.perf_counter(), self.calibration
        before_s = calibration.seconds
        while True:
            await self._play(next(self._scenes))
            passed_s = time.perf_counter() - started_s
            calibration.seconds = before_s + passed_s
            if progress is not None:
                num_steps = len(calibration.train) + len(calibration.held_out)
                scenes = counted(calibration.num_scenes, "scene")
                progress(f"{min(passed_s, budget_s):.3g} of {budget_s:.3g} s: {scenes}, {counted(num_steps, 'step')}")
            if passed_s >= budget_s and len(calibration.train) >= 2 * MIN_STEPS and calibration.held_out:
                return calibration

    async def _play(self, scene: Scene) -> None:
        calibration, engine = self.calibration, self._engine.engine
        log = engine.step_log = StepLog()
        if scene.pauses:
            await asyncio.sleep(PAUSE_S)
        try:
            ttft_s = await self._player.play(scene)
        finally:
            engine.step_log = None
        is_held_out = calibration.num_scenes % HELD_OUT == HELD_OUT - 1
        calibration.num_scenes += 1
        steps = log.take()
        (calibration.held_out if is_held_out else calibration.train).extend(steps)
        if scene.pauses and scene.requests[0].num_prompt <= engine.config.scheduler.max_num_batched_tokens and not is_held_out and steps:
            calibration.firsts.append((steps[0].shape, ttft_s))


def calibrate(engine: Engine, budget_s: float, progress: Progress | None = None, seed: int = 0) -> Coefficients:
    """The cost of ``engine``'s steps, measured for ``budget_s`` and a little more. The engine is closed then. Raises FitError, and
    RuntimeError when a request fails."""

    async def measure() -> Coefficients:
        running = AsyncEngine(engine)
        running.start()
        try:
            calibration = await Calibrator(running, seed).run(budget_s, progress)
        finally:
            await running.stop()
        return calibration.cost(engine)

    return asyncio.run(measure())
