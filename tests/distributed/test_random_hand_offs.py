"""Random load on two workers that hand over, in small pools, with clients that leave: every answer is to the bit that of one engine, and
nothing is left over. What is random comes from a seed; who is quicker is the threads' business."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.step import StepPlan, StepResult
from octavo.distributed.handover import Order, OrderKind
from octavo.distributed.messages import CopyFailed, Events, FromWorker, Offered, PromptStarted
from octavo.engine.engine import Engine
from octavo.engine.outputs import CompletionOutput
from tests.distributed.pair import RECEIVER, SENDER, Answer, Cluster, running, tiny_engine
from tests.distributed.test_worker_handover import transports
from tests.models.tiny import write_tiny_gguf

SIZES = {"max_num_seqs": 5, "max_num_batched_tokens": 48}
TIERS = {"kv_host_memory": 8 << 20}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tiers": TIERS,
    "tiers by the token": {**TIERS, "prefix_granularity": "token"},
    "by the token": {"prefix_granularity": "token"},
    "swap": {"swap_space": 4 << 20, "preemption": "swap"},
    "ngram drafts": {"spec": 4, "spec_method": "ngram"},
    "drafts of its own": {"spec": 3, "spec_method": "self", "self_draft_layers": 1},
    "prompts first": {"scheduling_policy": "prefill_first"},
    "no chunks": {"enable_chunked_prefill": False},
    "bounded gaps": {"max_itl_ms": 50.0},
    "reserved": {"kv_reservation": "max", "enable_prefix_caching": False, "max_model_len": 256},
    "steps that fail": {},
}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "gemma3": {"layers": 6, "hidden": 32, "heads": 2, "ffn": 32}}
NUM_BASES, BASE_TOKENS = 4, 220  # beginnings that prompts have in common


@dataclass(slots=True)
class Sent:
    answer: Answer
    prompt: list[int]
    params: SamplingParams
    has_left: bool = False


class RandomLoad:
    """Rounds of it on new engines each. ``num_requests``, ``num_handed_over`` and ``num_restored`` (tokens from host memory): in all."""

    def __init__(self, folder: Path, model: str, which: str, seed: int) -> None:
        self.rng = random.Random(f"{model} {which} {seed}")
        self.path = write_tiny_gguf(folder / f"{model}.gguf", model, context=512, **MODELS[model])
        self.num_requests = self.num_handed_over = self.num_restored = self.num_rounds = 0
        self._which, self._options = which, OPTIONS[which]
        self._bases = [self._tokens(BASE_TOKENS) for _ in range(NUM_BASES)]
        self._one: LLM | None = None
        self._right: dict[tuple[Any, ...], CompletionOutput] = {}

    def _tokens(self, num: int) -> list[int]:
        return [3 + self.rng.randrange(400) for _ in range(num)]

    @contextmanager
    def beside_one_engine(self) -> Iterator[None]:
        """Which says what is right."""
        with LLM(str(self.path), num_kv_blocks=96, threads=1, enable_prefix_caching=False) as self._one:
            yield

    def _is_right(self, one: Sent) -> bool:
        """To the bit. Of steps that fail a request may have an error, and nothing that is wrong."""
        key = (*one.prompt, -1, one.params.seed, one.params.max_tokens)
        if key not in self._right:
            assert self._one is not None
            self._right[key] = self._one.generate(one.prompt, one.params)[0].outputs[0]
        right, got = self._right[key], one.answer
        logprobs = [entry.logprob for entry in right.logprobs or ()]
        if got.error is not None:
            n = len(got.token_ids)
            return self._which == "steps that fail" and (got.token_ids, got.logprobs) == (right.token_ids[:n], logprobs[:n])
        return (got.token_ids, got.logprobs) == (right.token_ids, logprobs)

    async def round(self) -> None:
        self.num_rounds += 1
        engines = [self._engine(self.rng.choice(sizes)) for sizes in ((24, 40), (20, 30))]
        async with running(engines, transports, self.rng.choice(sorted(transports()))) as cluster, _ticking(cluster) as left:
            sent = []
            for _ in range(self.rng.randrange(6, 20)):
                sent.append(self._submit(cluster))
                if self.rng.random() < 0.4:
                    await asyncio.sleep(self.rng.random() * 0.02)
            for one in sent:
                if self.rng.random() < 0.15:
                    one.has_left = True
                    left.add(key := cluster.key_of(one.answer))
                    cluster.abort(key)
                    await asyncio.sleep(self.rng.choice((0.0, 0.005)))
            try:
                await cluster.until(lambda: all(one.answer.over or one.has_left for one in sent))
                await cluster.quiet()
            except TimeoutError:
                raise AssertionError(f"round {self.num_rounds}: {_state(cluster)}") from None
            for one in sent:
                key = cluster.key_of(one.answer)
                assert one.has_left or self._is_right(one), f"round {self.num_rounds}: request {key} by {one.answer.by}"
            self.num_requests += len(sent)
            self.num_handed_over += cluster.desk.stats.num_handed_over
            self.num_restored += sum(engine.tiering.tiers.stats.host_hit_tokens for engine in engines if engine.tiering is not None)

    def _submit(self, cluster: Cluster) -> Sent:
        rng = self.rng
        prompt = rng.choice(self._bases)[: rng.randrange(1, 180)] + self._tokens(rng.choice((0, 1, 5, 40)))
        seed, num_tokens = rng.randrange(1000), rng.randrange(2, 40)
        params = SamplingParams(temperature=0.9, seed=seed, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
        goes, layerwise = rng.random() < 0.7, rng.random() < 0.7
        worker = SENDER if goes else rng.choice((SENDER, RECEIVER))
        return Sent(cluster.submit(prompt, params, layerwise, goes, worker), prompt, params)

    def _engine(self, num_blocks: int) -> Engine:
        engine = tiny_engine(self.path, **{"num_kv_blocks": num_blocks, **SIZES, **self._options})
        if engine.tiering is not None:  # what it has it takes back, however quickly it could compute it
            engine.tiering.cost.restoring_pays = lambda *_: True  # type: ignore[method-assign]
            engine.tiering.cost.recompute_s = lambda *_: 60.0  # type: ignore[method-assign]
        if self._which == "steps that fail":
            self._break(engine)
        return engine

    def _break(self, engine: Engine) -> None:
        """Steps fail now and then, before they are computed or after."""
        rng, execute = random.Random(self.rng.random()), engine.backend.execute

        def failing(plan: StepPlan) -> StepResult:
            if plan.slices and rng.random() < 0.02:
                raise RuntimeError("it cannot be computed")
            result = execute(plan)
            if plan.slices and rng.random() < 0.01:
                raise RuntimeError("it was computed in vain")
            return result

        engine.backend.execute = failing  # type: ignore[method-assign]


@asynccontextmanager
async def _ticking(cluster: Cluster) -> AsyncIterator[set[int]]:
    """The rest of a front end: it looks for room now and then, heeds of each request only the worker that has it, forgets what nobody
    wants, and ends what a receiver has begun and lost. Gives the keys of requests whose clients have left."""
    left, begun, take = set[int](), set[int](), cluster._take

    def follow(order: Order[int]) -> bool:
        if order.kind is OrderKind.BEGIN:
            begun.add(order.moving.key)
        return True

    def heed(worker: int, message: FromWorker) -> None:
        if isinstance(message, PromptStarted | Offered) and message.key in left:
            return
        if isinstance(message, Events) and worker == SENDER:  # of a step that failed before it heard that they had gone
            message = Events([event for event in message.events if event.key not in begun])
        if isinstance(message, CopyFailed) and worker == RECEIVER and message.key in begun:
            answer = cluster.answers[message.key]
            if not answer.over:
                answer.over, answer.error = True, message.reason
                cluster.workers[RECEIVER].abort([message.key])
        take(worker, message)

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.01)
            cluster.desk.room_may_be_there()
            cluster._follow(cluster.desk.tick(time.monotonic()))

    cluster.order_hook = follow
    cluster._take = heed  # type: ignore[method-assign]
    ticking = asyncio.create_task(tick())
    try:
        yield left
    finally:
        ticking.cancel()


def _state(cluster: Cluster) -> str:
    parts = [f"open {sorted(key for key, answer in cluster.answers.items() if not answer.over)}, at the desk {len(cluster.desk)}"]
    for worker, side in zip(cluster.workers, cluster.sides, strict=True):
        s = worker.engine.scheduler
        queues = f"running {s.num_running}, waiting {s.num_waiting}, offered {s.num_offered}, reserved {s.num_reserved}"
        kept = f"used {s.num_used_blocks}, going {sorted(side._going)}, coming {sorted(side._coming)}"
        parts.append(f"{queues}, {kept}, died {worker.thread.died}")
    return "; ".join(parts)


def play(load: RandomLoad, num_rounds: int) -> None:
    with load.beside_one_engine():
        for _ in range(num_rounds):
            asyncio.run(load.round())
    assert load.num_handed_over > load.num_requests / 5, "hardly anything was handed over"


@pytest.mark.parametrize("which", ["plain", "tiers"])
def test_answers_are_right_under_a_random_load(tmp_path: Path, which: str) -> None:
    load = RandomLoad(tmp_path, "llama", which, 13)
    play(load, 12)
    assert which == "plain" or load.num_restored > 0


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("which", OPTIONS)
def test_answers_are_right_under_a_long_random_load(tmp_path: Path, which: str, model: str) -> None:
    load = RandomLoad(tmp_path, model, which, 1)
    try:
        play(load, 100)
    finally:
        print(f"Measures: {model}, {which}: {load.num_requests} requests, {load.num_handed_over} handed over")
