"""Two workers of one tiny model that hand requests over: the answers of one engine, whatever happens on the way, and nothing left over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.request import FinishReason
from octavo.core.step import StepPlan, StepResult
from octavo.distributed import shm_transport
from octavo.distributed.handover import Order, OrderKind
from octavo.distributed.messages import Copied, CopyFailed, Events, NoRoom, Offered, PromptStarted
from octavo.distributed.shm_transport import ShmTransport
from octavo.distributed.tcp_transport import TcpTransport
from octavo.distributed.throttle import Throttle
from octavo.distributed.transport import Transport
from octavo.engine.engine import Engine
from octavo.engine.outputs import OutputEvent
from tests.distributed.pair import RECEIVER, SENDER, Answer, Cluster, running, tiny_engine
from tests.models.tiny import write_tiny_gguf

SECRET = b"a secret of the tests"
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=10, ignore_eos=True, logprobs=1, frequency_penalty=0.3)


def transports(throttle: Throttle | None = None) -> dict[str, Transport]:
    made: dict[str, Transport] = {"tcp": TcpTransport(SECRET, throttle)}
    if shm_transport.is_available():
        made["shm"] = ShmTransport(SECRET, throttle)
    return made


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    gemma = write_tiny_gguf(folder / "g.gguf", "gemma3", layers=6, hidden=32, heads=2, ffn=32, context=2048)
    return {"llama": write_tiny_gguf(folder / "l.gguf", context=2048), "gemma3": gemma}


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    return [5 + (i * i + 7 * i + 13 * salt) % 480 for i in range(num_tokens)]


def alone(path: Path, prompt: list[int], params: SamplingParams, **options: Any) -> Any:
    with LLM(str(path), num_kv_blocks=96, threads=1, **options) as llm:
        return llm.generate(prompt, params)[0].outputs[0]


def run(engines: list[Engine], use: Callable[[Cluster], Awaitable[None]], make: Callable[[], dict[str, Transport]] = transports,
        **options: Any) -> None:  # fmt: skip
    async def body() -> None:
        async with running(engines, make, **options) as cluster:
            await use(cluster)
            await cluster.quiet()

    asyncio.run(body())


def pair(path: Path, **options: Any) -> list[Engine]:
    return [tiny_engine(path, **options), tiny_engine(path, **options)]


def check(answer: Answer, expected: Any) -> None:
    assert (answer.token_ids, answer.text, answer.finish_reason) == (expected.token_ids, expected.text, FinishReason.LENGTH)
    assert answer.logprobs == [entry.logprob for entry in expected.logprobs or ()]


def post_with_rounds_between(cluster: Cluster, worker: int) -> None:
    """Whatever is posted to ``worker``'s engine has a whole round of its loop to itself before the poster goes on."""
    thread, side, rounds = cluster.workers[worker].thread, cluster.sides[worker], [0]
    real_post, real_after_step = thread.post, side.after_step

    def after_step(events: list[OutputEvent]) -> None:
        real_after_step(events)
        rounds[0] += 1

    def post(action: Callable[[], list[OutputEvent]]) -> None:
        begun = list[int]()

        def act() -> list[OutputEvent]:
            begun.append(rounds[0])
            return action()

        real_post(act)
        while threading.current_thread() is threading.main_thread() and not (begun and rounds[0] > begun[0]):
            time.sleep(0.0002)

    side.after_step, thread.post = after_step, post  # type: ignore[method-assign]


def test_a_round_between_any_two_posts_loses_no_hand_off(paths: dict[str, Path]) -> None:
    """A ticket and its request reach the engine at once: a round that saw the one alone took the request for ended, now and then."""

    async def use(cluster: Cluster) -> None:
        post_with_rounds_between(cluster, SENDER)
        answers = [cluster.submit(prompt_of(40, i), SAMPLED) for i in range(3)]
        await cluster.answered(*answers)
        assert [answer.by[-1] for answer in answers] == [RECEIVER] * 3
        assert cluster.desk.stats.num_handed_over == 3

    run(pair(paths["llama"]), use)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("transport", sorted(transports()))
@pytest.mark.parametrize("layerwise", [True, False])
def test_an_answer_is_that_of_one_engine(paths: dict[str, Path], model: str, transport: str, layerwise: bool) -> None:
    """Of several lengths, beside each other; gemma3 has window layers, of which only the last blocks go over."""
    path = paths[model]
    prompts = [prompt_of(n, n) for n in (1, 16, 17, 100, 150)]
    expected = [alone(path, prompt, SAMPLED) for prompt in prompts]

    async def use(cluster: Cluster) -> None:
        answers = [cluster.submit(prompt, SAMPLED, layerwise) for prompt in prompts]
        await cluster.answered(*answers)
        for answer, one in zip(answers, expected, strict=True):
            check(answer, one)
            assert answer.by == [SENDER, RECEIVER], "it was not handed over"
        assert cluster.desk.stats.num_handed_over == len(prompts)
        again = cluster.submit(prompts[3], SAMPLED)  # its beginning is cached on both sides now
        await cluster.answered(again)
        check(again, expected[3])

    run(pair(path, max_num_batched_tokens=32), use, transport=transport)


def test_int8_on_the_wire_is_near(paths: dict[str, Path]) -> None:
    """And is not offered to others as if it were exact."""
    prompt, greedy = prompt_of(100), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    expected = alone(paths["llama"], prompt, greedy, kv_cache_dtype="f32")

    async def use(cluster: Cluster) -> None:
        answer = cluster.submit(prompt, greedy)
        await cluster.answered(answer)
        assert answer.by == [SENDER, RECEIVER] and len(answer.token_ids) == 6
        want = [entry.logprob for entry in expected.logprobs]
        assert answer.logprobs[0] == want[0], "drawn before anything went over"
        assert answer.logprobs[1] != want[1] and abs(answer.logprobs[1] - want[1]) < 0.5
        await cluster.until(lambda: cluster.workers[SENDER].engine.scheduler.num_cached_blocks == 6)
        assert cluster.workers[RECEIVER].engine.scheduler.num_cached_blocks == 0

    run(pair(paths["llama"], kv_cache_dtype="f32"), use, wire_dtype="int8")


def test_a_request_that_ends_with_its_first_token_goes_nowhere(paths: dict[str, Path]) -> None:
    async def use(cluster: Cluster) -> None:
        answer = cluster.submit(prompt_of(40), SamplingParams(temperature=0.0, max_tokens=1))
        await cluster.answered(answer)
        assert answer.by == [SENDER] and not cluster.heard(Offered)

    run(pair(paths["llama"]), use)


def test_several_choices_stay(paths: dict[str, Path]) -> None:
    async def use(cluster: Cluster) -> None:
        engine = cluster.workers[SENDER].engine
        prepared = engine.prepare(prompt_of(20), SamplingParams(n=2, seed=1, max_tokens=3, ignore_eos=True), "several")
        assert prepared.request.params.n == 2
        answer = cluster.submit(prompt_of(20), SamplingParams(n=2, seed=1, max_tokens=3, ignore_eos=True))
        await cluster.until(lambda: not engine.has_work and len(answer.token_ids) == 6)
        assert answer.by == [SENDER] and not cluster.heard(PromptStarted)

    def take(self: Answer, worker: int, event: Any) -> None:
        self.token_ids += event.token_ids
        self.by = [worker]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Answer, "take", take)
        run(pair(paths["llama"]), use)


def test_without_room_it_stays_and_goes_on(paths: dict[str, Path]) -> None:
    """The receiver can never hold it: the sender decodes itself."""
    prompt = prompt_of(150)
    expected = alone(paths["llama"], prompt, SAMPLED)

    async def use(cluster: Cluster) -> None:
        answer = cluster.submit(prompt, SAMPLED)
        await cluster.until(lambda: bool(cluster.heard(NoRoom)) and bool(cluster.heard(Offered)))
        key = cluster.key_of(answer)
        assert "prompt" in cluster.heard(NoRoom)[0][1].reason
        cluster._follow(cluster.desk.failed(key, "nobody can have it", 0.0))
        await cluster.answered(answer)
        check(answer, expected)
        assert answer.by == [SENDER]

    engines = [tiny_engine(paths["llama"]), tiny_engine(paths["llama"], num_kv_blocks=4)]
    run(engines, use)


class Gate:
    """Holds an engine's steps back: each waits until it is let go, or ``open``."""

    def __init__(self, engine: Engine) -> None:


        self.entered, self._leave = threading.Semaphore(0), threading.Semaphore(0)
        self.is_open = False
        self.plans: list[StepPlan] = []
        execute = engine.backend.execute

        def held(plan: StepPlan) -> StepResult:
            self.plans.append(plan)
            if not self.is_open:
                self.entered.release()
                assert self._leave.acquire(timeout=120.0)
            return execute(plan)

        engine.backend.execute = held  # type: ignore[method-assign]

    async def step_begins(self) -> None:
        await asyncio.to_thread(self.entered.acquire, True, 120.0)

    def let_go(self) -> None:
        self._leave.release()

    def open(self) -> None:
        self.is_open = True
        for _ in range(100):
            self._leave.release()


@pytest.mark.parametrize("moment", ["queued", "prompt", "copy", "held", "decode"])
def test_a_client_that_leaves_is_forgotten_everywhere(paths: dict[str, Path], moment: str) -> None:
    """``quiet`` wants all blocks back on both sides; then another request is answered."""
    engines = pair(paths["llama"], max_num_batched_tokens=32)
    gates = [Gate(engine) for engine in engines]
    gates[RECEIVER].is_open = moment != "decode"
    gates[SENDER].is_open = moment in ("held", "decode")
    expected = alone(paths["llama"], prompt_of(70), SAMPLED)

    async def use(cluster: Cluster) -> None:
        if moment == "held":
            cluster.order_hook = lambda order: order.kind is not OrderKind.SEND
        answer = cluster.submit(prompt_of(120), SAMPLED)
        key = cluster.key_of(answer)
        if moment in ("prompt", "copy"):
            await gates[SENDER].step_begins()
        if moment == "copy":
            await cluster.until(lambda: any(side._port._expected for side in cluster.sides))
            gates[SENDER].let_go()
            await gates[SENDER].step_begins()
            port = cluster.sides[RECEIVER]._port
            await cluster.until(lambda: key in port._expected and any(m.bit_count() < 8 for m in port._expected[key].missing))
        if moment == "held":
            await cluster.until(lambda: bool(cluster.heard(Offered)))
        if moment == "decode":
            await gates[RECEIVER].step_begins()
        cluster.abort(key)
        for gate in gates:
            gate.open()
        await cluster.quiet()
        cluster.order_hook = lambda order: True
        other = cluster.submit(prompt_of(70), SAMPLED)
        await cluster.answered(other)
        check(other, expected)
        assert other.by == [SENDER, RECEIVER]
        events = [event for _, said in cluster.heard(Events) for event in said.events if event.key == key]
        (end,) = [event for event in events if event.account is not None]
        assert answer.finish_reason is None and end.finish_reason is FinishReason.ABORT and end.account.has_ended

    run(engines, use)


@pytest.mark.parametrize("how", ["it is not expected any more", "the port is closed", "the transport is unknown"])
def test_a_copy_that_fails_leaves_the_request_with_its_sender(paths: dict[str, Path], how: str) -> None:
    prompt = prompt_of(120)
    expected = alone(paths["llama"], prompt, SAMPLED)
    engines = pair(paths["llama"], max_num_batched_tokens=32)

    async def use(cluster: Cluster) -> None:
        def hook(order: Order[int]) -> bool:
            if order.kind is OrderKind.SEND and how == "it is not expected any more":
                cluster.sides[RECEIVER]._port.cancel(order.moving.key)
            if order.kind is OrderKind.SEND and how == "the port is closed":
                for listener in cluster.sides[RECEIVER]._listeners.values():
                    listener.close()
            if order.kind is OrderKind.SEND and how == "the transport is unknown":
                cluster.sides[SENDER]._ways = {"tcp": TcpTransport(SECRET)}
            return True

        cluster.order_hook = hook
        answer = cluster.submit(prompt, SAMPLED)
        await cluster.answered(answer)
        check(answer, expected)
        assert answer.by == [SENDER] and cluster.heard(CopyFailed) and cluster.desk.stats.num_failed == 1

    run(engines, use)


def test_kv_goes_while_the_prompt_is_computed(paths: dict[str, Path]) -> None:
    """Full blocks of finished chunks are there before the next is done; of the last chunk every layer but the last may be."""
    engines = pair(paths["llama"], max_num_batched_tokens=32)
    gate = Gate(engines[SENDER])

    async def use(cluster: Cluster) -> None:
        answer = cluster.submit(prompt_of(100), SAMPLED)
        key, port = cluster.key_of(answer), cluster.sides[RECEIVER]._port
        await gate.step_begins()
        await cluster.until(lambda: key in port._expected)
        for num_chunks in (1, 2, 3):
            gate.let_go()
            await gate.step_begins()
            await cluster.until(lambda n=num_chunks: all(m.bit_count() == 7 - 2 * n for m in port._expected[key].missing))
            assert not answer.token_ids and not cluster.heard(Copied)
        gate.open()
        await cluster.answered(answer)
        assert answer.by == [SENDER, RECEIVER]

    run(engines, use)


SWAPPING = {"preemption": "swap", "swap_space": 1 << 20}


@pytest.mark.parametrize("how", [{}, SWAPPING], ids=["recomputed", "swapped"])
def test_a_sender_that_is_preempted_sends_what_is_right(paths: dict[str, Path], how: dict[str, Any]) -> None:
    """Beside others in a pool that is too small: sequences are put out while their KV is on its way, over a slow link."""
    options = {"num_kv_blocks": 14, "admission_lookahead": 1, "max_num_batched_tokens": 48, **how}
    # The others alone, which run side by side, need 18 blocks in the end.
    others, params = [prompt_of(30, salt) for salt in (1, 2, 3)], SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    prompts = [prompt_of(90, salt) for salt in (4, 5, 6)]
    expected = [alone(paths["llama"], prompt, SAMPLED) for prompt in prompts]
    engines = [tiny_engine(paths["llama"], **options), tiny_engine(paths["llama"])]
    gate = Gate(engines[SENDER])

    async def use(cluster: Cluster) -> None:
        beside = [cluster.submit(prompt, params, ticket=False) for prompt in others]
        answers = [cluster.submit(prompt, SAMPLED) for prompt in prompts]
        gate.open()
        await cluster.answered(*answers, *beside)
        for answer, one in zip(answers, expected, strict=True):
            check(answer, one)
        assert cluster.workers[SENDER].engine.scheduler.stats.num_preemptions > 0

    run(engines, use, lambda: transports(Throttle(3e6, 4096)))


@pytest.mark.parametrize("place", [SENDER, RECEIVER])
def test_a_step_that_fails_ends_what_was_held_or_reserved(paths: dict[str, Path], place: int) -> None:
    engines = pair(paths["llama"])
    expected = alone(paths["llama"], prompt_of(60), SAMPLED)

    async def use(cluster: Cluster) -> None:
        cluster.order_hook = lambda order: order.kind is not OrderKind.SEND
        answer = cluster.submit(prompt_of(60), SAMPLED)
        await cluster.until(lambda: bool(cluster.heard(Offered)) and len(cluster.sides[RECEIVER]._coming) == 1)
        execute = engines[place].backend.execute
        engines[place].backend.execute = lambda plan: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        broken = cluster.submit(prompt_of(5), SAMPLED, ticket=False, worker=place)
        await cluster.answered(broken)
        assert broken.error is not None and "ZeroDivisionError" in broken.error
        engines[place].backend.execute = execute  # type: ignore[method-assign]
        await cluster.answered(answer)
        if place == SENDER:
            assert answer.error is not None and "ZeroDivisionError" in answer.error
        else:
            check(answer, expected)
            assert answer.by == [SENDER]

    run(engines, use)


NO_BEGINNINGS = {"KV of 0 of them is reserved for": [], "token ids are integers from 0": [10**9], "output_token_ids: -1": [-1]}


@pytest.mark.parametrize("reason", NO_BEGINNINGS)
def test_a_begin_that_cannot_be_ends_the_hand_off_and_not_the_engine(paths: dict[str, Path], reason: str) -> None:
    async def use(cluster: Cluster) -> None:
        def hook(order: Order[int]) -> bool:
            if order.kind is OrderKind.BEGIN:
                order.moving.output_token_ids[:] = NO_BEGINNINGS[reason]
            return True

        cluster.order_hook = hook
        cluster.submit(prompt_of(40), SAMPLED)
        await cluster.until(lambda: bool(cluster.heard(CopyFailed)))
        assert reason in cluster.heard(CopyFailed)[0][1].reason
        cluster.order_hook = lambda order: True
        other = cluster.submit(prompt_of(50), SAMPLED)
        await cluster.answered(other)
        assert other.by == [SENDER, RECEIVER]

    run(pair(paths["llama"]), use)
