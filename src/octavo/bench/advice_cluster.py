"""Switches of a cluster, thrown: the trials of `octavo bench advice --cluster`. Workers are processes of this host, of a thread each.

    trial ─▶ two clusters, without and with the switch ─▶ clients that each wait for their answer ─▶ the window that a front end tells

Requests go through the front end without HTTP. Some loads are of conversations, each turn of which carries all before it, answers included.
Owns the clusters, on an event loop of their own that goes on while somebody replays: workers leave a front end that falls silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from octavo.bench.advice import AdviceCase
from octavo.bench.advice_engine import HIGH, LOW, Fields, configured
from octavo.bench.handoff import PATIENT
from octavo.config import EngineConfig
from octavo.core.clock import VirtualClock
from octavo.core.cluster_window import ClusterWindow
from octavo.core.request import SamplingParams
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.cluster_reports import ClusterReports
from octavo.distributed.local_cluster import ClusterPlan, open_cluster
from octavo.distributed.recorded_cluster import front_end_of

T = TypeVar("T")

CLUSTER_KINDS = ("router", "more", "apart", "together", "nothing")
_WARM = 99  # number of the run that is not measured
_TWO, _APART = {"both": 2}, {"prefill": 1, "decode": 1}
_START_S = 120.0
_LEAST_S = 1e-6  # more than rounding can swallow, and less than a request takes


@dataclass(frozen=True, slots=True)
class Setting:
    """A cluster: workers by role, and what all of them run."""

    workers: Mapping[str, int] = field(default_factory=lambda: dict(_TWO))
    router: str = "shortest-queue"
    fields: Fields = ({}, {})


@dataclass(frozen=True, slots=True)
class Talk:
    """A load: ``num_clients`` that wait for their answers; lengths (from, below) of what is new in a prompt, and of answers. It comes
    behind a beginning of so many tokens and all that was said before in its conversation, of which there are so many (0: each request is
    one of its own)."""

    num_clients: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    beginning: int = 0
    conversations: int = 0


@dataclass(frozen=True, slots=True)
class ClusterThrown:
    """See ``Trial``."""

    name: str
    kind: str
    objective: str
    without: Setting
    with_it: Setting
    talk: Talk
    values: Seq[str] = ()


def thrown_in_clusters(block_size: int) -> list[ClusterThrown]:
    """Conversations: eight, of which a worker's cache holds about five; sent round, they are computed again and again."""
    five = {"max_num_seqs": 8}, {"num_kv_blocks": 5 * 800 // block_size}
    many = {"max_num_seqs": 8}, {"num_kv_blocks": 8000 // block_size}
    more = {"max_num_seqs": 8}, {"num_kv_blocks": 16000 // block_size}
    two, apart = Setting(fields=many), Setting(_APART, fields=many)
    talk = Talk(4, (16, 32), (8, 24), beginning=480, conversations=8)
    short, prompts = Talk(8, (100, 400), (30, 60)), Talk(8, (300, 500), (4, 12))
    turns, kept = Setting(router="round-robin", fields=five), Setting(router="soonest", fields=five)
    return [
        ClusterThrown("router", "router", "wall", turns, kept, talk, ["soonest"]),
        ClusterThrown("more", "more_both", "wall", replace(two, workers={"both": 1}), two, Talk(8, (20, 160), (10, 60))),
        ClusterThrown("apart", "apart", "itl_p50", two, apart, short),
        ClusterThrown("together", "together", "wall", apart, two, prompts),
        ClusterThrown("nothing", "pool", "wall", two, replace(two, fields=more), Talk(8, (20, 160), (10, 60))),
    ]


# --- a load -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """``token_ids``: what is new; ``conversation``: what it comes behind."""

    name: str
    conversation: int
    token_ids: list[int]
    num_output: int


def asked_of(case: AdviceCase, talk: Talk, token_ids: tuple[int, int], run: int) -> tuple[list[Asked], list[list[int]]]:
    """(the requests of a run in their order, the beginning of each conversation). Lengths and order are the same in every run; tokens, ids
    (from, below), are each run's own."""
    lengths, tokens = random.Random(f"{case.seed}:lengths"), random.Random(f"{case.seed}:{run}:tokens")

    def drawn(number: int) -> list[int]:
        return [tokens.randrange(*token_ids) for _ in range(number)]

    num = talk.conversations or case.num_requests
    order = itertools.chain.from_iterable(lengths.sample(range(num), num) for _ in itertools.count())
    found = [
        Asked(f"{run}-{i}", place, drawn(lengths.randrange(*talk.prompt)), lengths.randrange(*talk.output))
        for i, place in zip(range(case.num_requests), order, strict=False)
    ]
    return found, [drawn(talk.beginning) for _ in range(num)]


async def run_clients(engine: ClusterEngine, asked: Seq[Asked], beginnings: list[list[int]], num_clients: int) -> None:
    """All of them, by as many clients, each the next in the order as soon as it has its answer and the conversation's last one has come.
    Raises RuntimeError for one that is not answered."""
    said, coming = [list(one) for one in beginnings], iter(asked)
    turns = [asyncio.Lock() for _ in beginnings]

    async def client() -> None:
        for one in coming:
            async with turns[one.conversation]:
                said[one.conversation] += one.token_ids
                said[one.conversation] += await _answer(engine, one, said[one.conversation])

    async with asyncio.TaskGroup() as clients:
        for _ in range(num_clients):
            clients.create_task(client())


async def _answer(engine: ClusterEngine, one: Asked, prompt: Seq[int]) -> list[int]:
    params = engine.check_params(SamplingParams(temperature=0.0, max_tokens=one.num_output, ignore_eos=True))
    stream, answer = engine.submit([engine.prepare_checked(list(prompt), params, one.name)]), list[int]()
    while events := await stream.read():
        for event in events:
            if event.error is not None:
                raise RuntimeError(f"request {one.name} of {len(prompt)} tokens has no answer: {event.error}")
            answer += event.token_ids
    return answer


# --- clusters ---------------------------------------------------------------------------------------------------------------------------


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """There, while the caller waits."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass(slots=True)
class ClusterRig:
    """A front end with its workers. ``load``: the requests of a run, and the beginnings of its conversations."""

    engine: ClusterEngine
    loop: LoopThread
    load: Callable[[int], tuple[list[Asked], list[list[int]]]]
    num_clients: int
    begun_s: float = 0.0  # the last run, on the engine's clock

    def run(self, number: int) -> None:
        """See Rig."""
        self.begun_s = self.engine.clock.now()
        self.loop.do(run_clients(self.engine, *self.load(number), self.num_clients))

    def window(self, number: int) -> ClusterWindow:
        """See Rig."""
        engine, ended = self.engine, VirtualClock()
        ended.advance_to(engine.clock.now())  # however long it takes to ask, the window begins where the run did
        front_end, name = front_end_of(engine.options), engine.model_name
        reports = ClusterReports(engine.journeys, engine, ended, name, True, None, front_end, engine.attendance)
        return self.loop.do(reports.recorded(ended.now() - self.begun_s + _LEAST_S))


@dataclass(frozen=True, slots=True)
class ClusterTrial:
    """A ``Trial``. ``config``: of the workers, whose model is on this host; ``tokens``: ids (from, below) of prompts."""

    config: EngineConfig
    case: AdviceCase
    thrown: ClusterThrown
    tokens: tuple[int, int] = (LOW, HIGH)
    rate: None = None

    @property
    def name(self) -> str:
        return self.thrown.name

    @property
    def kind(self) -> str:
        return self.thrown.kind

    @property
    def objective(self) -> str:
        return self.thrown.objective

    @property
    def values(self) -> Seq[str]:
        return self.thrown.values

    @contextmanager
    def open(self) -> Iterator[tuple[ClusterRig, ClusterRig]]:
        """See Trial."""
        with contextlib.closing(LoopThread()) as loop:
            stack, talk = AsyncExitStack(), self.thrown.talk
            engines = [self._opened(setting) for setting in (self.thrown.without, self.thrown.with_it)]
            try:
                loop.do(_start(stack, engines))
                load = partial(asked_of, self.case, talk, self.tokens)
                rigs = [ClusterRig(engine, loop, load, talk.num_clients) for engine in engines]
                for rig in rigs:
                    rig.run(_WARM)
                yield rigs[0], rigs[1]
            finally:
                loop.do(stack.aclose())

    def _opened(self, setting: Setting) -> ClusterEngine:
        """Reads the model's text, which takes a while: not on a loop to which workers come."""
        config = configured(self.config, setting.fields)
        config = replace(config, backend=replace(config.backend, threads=config.backend.threads or 1))
        options = ClusterOptions(liveness=PATIENT, start_s=_START_S, router=setting.router)
        return open_cluster(config, config.model.model, ClusterPlan(setting.workers, options=options))


async def _start(stack: AsyncExitStack, engines: Seq[ClusterEngine]) -> None:
    """One after the other. Raises EngineUnavailable."""
    for engine in engines:
        stack.push_async_callback(engine.stop)
    for engine in engines:
        engine.start()
        await engine.ready()


def cluster_trials(config: EngineConfig, case: AdviceCase) -> list[ClusterTrial]:
    """Those that the case names."""
    every = thrown_in_clusters(config.cache.block_size)
    return [ClusterTrial(config, case, one) for one in every if not case.kinds or one.name in case.kinds]
