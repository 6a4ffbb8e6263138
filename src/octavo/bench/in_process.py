"""Requests of a workload given to an engine in this process as they fall due, and when each got its tokens.

The clock is the wall's while the engine has something to do. While it has nothing, nobody waits for the next arrival: the clock is moved
on to it. So what a request waits and takes is measured, and a run of low rate lasts no longer than its work. There is no HTTP and no event
loop; what is left out is what a server adds, the same for every engine that is compared. ``timed_load`` says what sets it apart.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.bench.latency import e2e_s, gaps_s, ttft_s
from octavo.bench.stream_record import StreamRecord
from octavo.core.request import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.llm import make_config
from octavo.workload.requests import TokenRange, WorkloadRequest

if TYPE_CHECKING:
    from octavo.engine.outputs import OutputEvent

T = TypeVar("T")

Options = dict[str, Any]
"""Of ``make_config``."""

_FIRST_TOKEN = 100  # ids below are special tokens in many vocabularies


@dataclass(slots=True)
class Run:
    """What came of a workload. Times of the records count from the start of the run; ``outputs`` [requests] are their tokens."""

    records: list[StreamRecord] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    num_steps: int = 0

    @property
    def seconds(self) -> float:
        """From the first request that was due to the end of the last answer."""
        return max(r.end_s for r in self.records) - min(r.due_s for r in self.records)

    @property
    def request_s(self) -> float:
        """Requests answered per second."""
        return len(self.records) / self.seconds

    @property
    def normalized_s(self) -> list[float]:
        """Of each request, in their order: seconds from due to the end per output token."""
        return [e2e_s(r) / r.num_tokens for r in self.records]

    @property
    def median_normalized_s(self) -> float:
        """As Orca has it (Yu et al., OSDI 2022, section 6.2)."""
        return statistics.median(self.normalized_s)

    @property
    def mean_normalized_s(self) -> float:
        """As PagedAttention has it (Kwon et al., SOSP 2023, section 6.1)."""
        return statistics.fmean(self.normalized_s)

    @property
    def ttft_s(self) -> list[float]:
        return [ttft_s(r) for r in self.records]

    @property
    def gaps_s(self) -> list[float]:
        """Between two tokens of a stream, of all streams."""
        return [gap for r in self.records for gap in gaps_s(r)]


def serve(engine: Engine, requests: Iterable[WorkloadRequest], salt: str | None = None, watch: Callable[[], None] | None = None) -> Run:
    """Every request of ``requests``, which are finite and by arrival, to its end: greedy, exactly as long as it says.

    ``salt``: of the prefix cache. ``watch`` is called in each step between its plan and its execution; KV tiers and bounded gaps, whose
    steps have more to them, are not to be used with it. Raises ParameterError for a request that the engine cannot run, RuntimeError
    with the message of the first one that fails.
    """
    run = Run()
    coming = deque((request, _prepare(engine, request, salt)) for request in requests)
    index: dict[str, int] = {}
    started_s = time.perf_counter()
    while coming or engine.has_work:
        now_s = time.perf_counter() - started_s
        if not engine.has_work and coming[0][0].arrival_s > now_s:
            started_s -= coming[0][0].arrival_s - now_s
            now_s = coming[0][0].arrival_s
        while coming and coming[0][0].arrival_s <= now_s:
            request, prepared = coming.popleft()
            index[prepared.request.request_id] = len(run.records)
            run.records.append(StreamRecord(len(request.prompt_token_ids), request.num_output, due_s=request.arrival_s, sent_s=now_s))
            run.outputs.append([])
            engine.add(prepared)
        events = _step(engine, watch)
        run.num_steps += 1
        now_s = time.perf_counter() - started_s
        for event in events:
            _take(run, index[event.request_id], event, now_s)
    return run


def _prepare(engine: Engine, request: WorkloadRequest, salt: str | None) -> Any:
    params = SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True)
    return engine.prepare(request.prompt_token_ids, params, cache_salt=salt)


def _step(engine: Engine, watch: Callable[[], None] | None) -> list[OutputEvent]:
    if watch is None:
        return engine.step()
    plan = engine.loop.begin_step(engine.clock.now())
    if plan is None:
        return []
    watch()
    return engine.loop.finish_step(plan, engine.backend.execute(plan))


def _take(run: Run, i: int, event: OutputEvent, now_s: float) -> None:
    if event.error is not None:
        raise RuntimeError(event.error)
    record = run.records[i]
    if event.token_ids:
        record.event_times.append(now_s)
        run.outputs[i] += event.token_ids
    if event.finish_reason is not None:
        record.end_s, record.num_reported = now_s, len(run.outputs[i])


def token_range(engine: Engine) -> TokenRange:
    """Ids for prompts of random tokens of the engine's model."""
    return TokenRange(_FIRST_TOKEN, engine.backend.vocab_size)


class Engines:
    """Engines of one model that differ in their options, open side by side, so that they can be run in turn. Closed on leaving a with."""

    def __init__(self, model: str, arms: Mapping[str, Options]) -> None:
        """``arms``: by name. Raises what ``Engine.load`` does."""
        self._stack = ExitStack()
        self.by_name: dict[str, Engine] = {}
        try:
            for name, options in arms.items():
                self.by_name[name] = self._stack.enter_context(closing(Engine.load(make_config(model, **options))))
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Engine:
        return self.by_name[name]

    @property
    def first(self) -> Engine:
        return next(iter(self.by_name.values()))

    def warm_up(self, num_prompt: int = 64, num_output: int = 8) -> None:
        """A prompt and some tokens on each, which find pages not yet backed and caches cold."""
        for engine in self.by_name.values():
            tokens = token_range(engine).draw(random.Random("warm-up"), num_prompt)
            serve(engine, [WorkloadRequest(0.0, tokens, num_output)], salt="warm-up")

    def describe(self) -> str:
        """Model, kernels and threads, in words."""
        engine = self.first
        threads, isa = getattr(engine.backend, "threads", None), getattr(engine.backend, "isa", None)
        return f"{engine.model.name} on {threads} threads, {isa}, KV {engine.backend.kv_capacity(0).dtype}"


def in_turn(names: Seq[T], round_number: int) -> Seq[T]:
    """The order of a round: there, and back in the next (A B B A), so that a drift of the machine favours none."""
    return names if round_number % 2 == 0 else names[::-1]


def sustained_rate(points: Seq[tuple[float, float]], limit: float) -> float | None:
    """The highest rate whose latency keeps ``limit``, by straight lines between the (rate, latency) measured, rates ascending.

    The last rate where all keep it; None where the first does not.
    """
    held: tuple[float, float] | None = None
    for rate, latency in points:
        if latency > limit:
            if held is None:
                return None
            return held[0] + (rate - held[0]) * (limit - held[1]) / (latency - held[1])
        held = (rate, latency)
    return None if held is None else held[0]
