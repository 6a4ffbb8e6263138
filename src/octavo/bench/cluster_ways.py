"""Ways of serving with several workers of this host, measured: their answers to a load, and the steps that each worker made for them.

    requests ─▶ ClusterEngine ─▶ workers (``logged_worker``) ─▶ records of the answers, steps of each worker
    scenes   ─▶      "                   "                  ─▶ steps of all sizes, beside a busy and beside an idle neighbour
    probes   ─▶      "                   "                  ─▶ what the way to a worker, back, and from one to another takes
    streams  ─▶      "                   "                  ─▶ when tokens are read, after their steps

Requests take the way that those of a server take behind its handlers; there is no HTTP. Owns the front ends and how a hand-off is seen in
the steps of two workers. What is compared with what is its caller's business.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from octavo.bench.engine_load import run_engine_load
from octavo.bench.logged_worker import LoggedStep, StepFile, step_file
from octavo.bench.stream_record import StreamRecord
from octavo.config import EngineConfig
from octavo.core.cost import StepShape
from octavo.distributed.channel import Address
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions, HandoverOptions
from octavo.distributed.dispatcher import Backpressure
from octavo.distributed.fleet import LivenessLimits
from octavo.distributed.handoff import HandoffLimits
from octavo.distributed.handshake import new_secret
from octavo.distributed.link import Link
from octavo.distributed.local_cluster import worker_names
from octavo.distributed.process_worker import LocalProcesses
from octavo.engine.calibrate import PAUSE_S, Scene, SceneLimits, ScenePlayer, SceneRequest, scenes
from octavo.models.loading import open_model
from octavo.workload.requests import TokenRange, WorkloadRequest

ROUTER = "shortest-queue"
MIN_LAYERWISE = HandoverOptions().min_layerwise
"""Tokens of a prompt from which on its KV goes over while it is computed."""
WORKER = (sys.executable, "-m", "octavo.bench.logged_worker")
_PATIENT = LivenessLimits(suspect_s=60.0, stall_s=120.0, gone_s=600.0)  # nobody dies here, and a busy machine is no reason to suspect it
_HANDOFF = HandoffLimits(reserve_s=300.0, copy_s=300.0, prompt_s=3600.0)
_REST_S = 0.1  # between looks whether every worker has nothing to do, after the last answer: so that the next load finds them at rest
_KINDS = ("prompt", "decode", "context", "mixed")  # scenes without drafts, and without logits of prompts
_MAX_SCENE_ROWS = 256  # prompts of scenes have up to 2.5 times as many tokens
_LONGEST_ALONE = 500  # prompt tokens of a stream that has all workers to itself
_STREAMS = (((0.0, 24, 32),), ((0.0, 24, 32), (0.0, 40, 28)), ((0.0, 24, 40), (0.06, 200, 1)))
"""When each comes, its tokens, and those of its answer: a stream alone, beside another one, and beside a prompt."""
_PROBES = (16, 128, 256, 480)  # prompt tokens: each goes in one step, and its KV in one piece


@dataclass(frozen=True, slots=True)
class Way:
    """``workers``: how many of each role, as `octavo serve --workers` has them; ``config``: what all of them run, threads included."""

    name: str
    workers: Mapping[str, int]
    config: EngineConfig

    @property
    def is_apart(self) -> bool:
        """Whether answers are handed over."""
        return "prefill" in self.workers


@dataclass(frozen=True, slots=True)
class WayRun:
    """A load as it was answered. ``records`` in the order of its requests; ``steps`` by worker."""

    records: list[StreamRecord]
    steps: Mapping[str, Seq[LoggedStep]]


class Probe(NamedTuple):
    """A request that had all workers to itself. Seconds: ``in_s`` from when it was sent until its first step began, ``out_s`` from the end
    of the step that drew its first token until that was read, ``handoff_s`` from there to its first step on the other worker (None: it
    stayed), which moved ``num_bytes``."""

    num_prompt: int
    in_s: float
    out_s: float
    handoff_s: float | None
    num_bytes: int


class RunningWay:
    """A front end with its workers. ``folder``: where these write their steps."""

    def __init__(self, way: Way, engine: ClusterEngine, folder: Path) -> None:
        self.way, self.engine = way, engine
        self._files = {name: StepFile(step_file(folder, name)) for name in worker_names(way.workers)}
        self._rng = random.Random(f"probes:{way.name}")

    async def run(self, requests: Iterable[WorkloadRequest]) -> WayRun:
        """Send each of the requests when it is due, and read all answers."""
        self.take_steps()
        records = await run_engine_load(self.engine, requests)
        return WayRun(records, await self.rested())

    def take_steps(self) -> dict[str, list[LoggedStep]]:
        """Of each worker, what it has written since it was last asked."""
        return {name: file.take() for name, file in self._files.items()}

    async def rested(self) -> dict[str, list[LoggedStep]]:
        """As ``take_steps``, once all answers have ended and the workers are idle. They say that they are after they have written."""
        await asyncio.sleep(_REST_S)
        while not all(map(_is_idle, self.engine.control)):
            await asyncio.sleep(_REST_S)
        return self.take_steps()

    async def probe(self, num_prompt: int) -> Probe | None:
        """None: something held it up so that its steps cannot be told, or the prompt took more than one."""
        vocab_size = self.engine.model.program.vocab_size
        prompt = TokenRange(min(100, vocab_size // 2), vocab_size).draw(self._rng, num_prompt)
        run = await self.run([WorkloadRequest(0.0, prompt, 4)])
        return probe_of(run, num_prompt, num_prompt * self.engine.limits.kv_bytes_per_token)


def _is_idle(link: Link) -> bool:
    """Whether a worker has told that there is nothing left to do of all that it was sent."""
    load = link.load
    return link.view.num_unseen == 0 and not (load.num_running or load.num_waiting or load.num_offered or load.num_reserved)


def probe_of(run: WayRun, num_prompt: int, num_bytes: int) -> Probe | None:
    """See ``RunningWay.probe``."""
    record = run.records[0]
    steps = sorted((step.begin_s, name, step) for name, found in run.steps.items() for step in found)
    if record.error_kind is not None or len(record.event_times) < 2 or len(steps) != record.num_output:
        return None
    (_, sender, first), (_, receiver, second) = steps[:2]
    if first.shape.num_rows != num_prompt:
        return None
    handoff_s = second.begin_s - first.end_s if sender != receiver else None
    return Probe(num_prompt, first.begin_s - record.sent_s, record.event_times[0] - first.end_s, handoff_s, num_bytes)


class Overlap(NamedTuple):
    """Shares of a step's time in which other workers were in steps that only decode, and in steps with prompts; of several others the
    sum."""

    decode: float = 0.0
    prompt: float = 0.0


def overlaps(steps: Mapping[str, Seq[LoggedStep]]) -> list[tuple[LoggedStep, Overlap]]:
    """Every step with what others did meanwhile."""
    out = []
    for name, own in steps.items():
        others = [sorted(found, key=lambda step: step.begin_s) for other, found in steps.items() if other != name]
        places = [0] * len(others)
        for step in sorted(own, key=lambda step: step.begin_s):
            shared_s = [0.0, 0.0]
            for i, other in enumerate(others):
                while places[i] < len(other) and other[places[i]].end_s <= step.begin_s:
                    places[i] += 1
                for one in itertools.islice(other, places[i], None):
                    if one.begin_s >= step.end_s:
                        break
                    shared_s[not one.shape.only_decodes] += min(one.end_s, step.end_s) - max(one.begin_s, step.begin_s)
            out.append((step, Overlap(*(seconds / step.total_s for seconds in shared_s)) if step.total_s > 0.0 else Overlap()))
    return out


# --- scenes -----------------------------------------------------------------------------------------------------------------------------


class SceneRounds:
    """Rounds of scenes on several ways in turn: two scenes at once, and a stream that has all workers to itself. ``run`` as often as
    wanted, each time the rounds that follow."""

    def __init__(self, ways: Seq[RunningWay], seed: int = 0) -> None:
        self._rounds = itertools.cycle([_rounds(way, seed) for way in ways])
        self.steps: list[tuple[LoggedStep, Overlap]] = []  # so far
        self.num_rounds = 0

    async def run(self, budget_s: float, min_steps: int = 0) -> None:
        """Rounds until ``budget_s`` have passed, and as many steps are there; at least one."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + budget_s
        while True:
            self.steps += await anext(next(self._rounds))
            self.num_rounds += 1
            if loop.time() >= end_s and len(self.steps) >= min_steps:
                return


async def _rounds(running: RunningWay, seed: int) -> AsyncIterator[list[tuple[LoggedStep, Overlap]]]:
    """The steps of each round."""
    config, limits = running.way.config, running.engine.limits
    rows = min(_MAX_SCENE_ROWS, config.scheduler.max_num_batched_tokens)
    pool = limits.num_kv_blocks * limits.block_size
    bounds = SceneLimits(limits.max_total_tokens, config.scheduler.max_num_seqs, rows, pool)
    source = (scene for scene in scenes(bounds, seed) if scene.kind in _KINDS)
    rng = random.Random(f"alone:{running.way.name}:{seed}")
    players = [ScenePlayer(running.engine, f"{running.way.name}:{seed}:{i}") for i in range(2)]
    longest = min(_LONGEST_ALONE, limits.max_total_tokens // 2)
    while True:
        running.take_steps()
        await asyncio.gather(*(player.play(next(source)) for player in players))
        found = overlaps(await running.rested())
        num_output = min(24, limits.max_total_tokens // 4)
        alone = Scene("alone", (SceneRequest(max(1, round(longest ** rng.uniform(0.3, 1.0))), num_output),), pauses=True)
        await asyncio.sleep(PAUSE_S)
        await players[0].play(alone)
        yield found + overlaps(await running.rested())


async def probes(running: RunningWay, repeat: int, sizes: Seq[int] = _PROBES) -> list[Probe]:
    """Requests one by one, each size ``repeat`` times; those that tell something."""
    most = min(running.way.config.scheduler.max_num_batched_tokens, running.engine.limits.max_total_tokens - 4)
    found = []
    for _ in range(repeat):
        for num_prompt in sizes:
            if num_prompt <= most and (probe := await running.probe(num_prompt)) is not None:
                found.append(probe)
    return found


# --- streams ----------------------------------------------------------------------------------------------------------------------------


class Delivered(NamedTuple):
    """A token that followed another: seconds from the end of its step until it was read (below 0: the next step began later), and what
    another worker was in meanwhile, a step with prompts before others (None: in none)."""

    delay_s: float
    beside: StepShape | None


async def deliveries(running: RunningWay, repeat: int) -> list[Delivered]:
    """Of streams that have a worker to themselves, while the other one idles, decodes, and computes a prompt, each ``repeat`` times."""
    vocab_size, limits = running.engine.model.program.vocab_size, running.engine.limits
    tokens, rng = TokenRange(min(100, vocab_size // 2), vocab_size), random.Random(f"streams:{running.way.name}")
    found = []
    for load in _STREAMS * repeat:
        most = limits.max_total_tokens - max(num_output for _, _, num_output in load)
        run = await running.run([WorkloadRequest(due_s, tokens.draw(rng, min(num, most)), output) for due_s, num, output in load])
        found += deliveries_of(run)
    return found


def deliveries_of(run: WayRun) -> list[Delivered]:
    """Of every stream that can be told to have had a worker's decoding to itself: nobody else has as many tokens."""
    lengths = Counter(len(record.event_times) for record in run.records)
    found = []
    for record in run.records:
        num_output = len(record.event_times)
        for name, steps in run.steps.items():
            decoding = sorted((step for step in steps if step.shape.only_decodes), key=lambda step: step.begin_s)
            if lengths[num_output] == 1 and 1 < num_output == len(decoding) + 1 and all(step.shape.num_rows == 1 for step in decoding):
                others = [step for other, some in run.steps.items() if other != name for step in some]
                for read_s, step in zip(record.event_times[1:], decoding, strict=True):
                    found.append(Delivered(read_s - step.end_s, _in_a_step(others, step.end_s)))
    return found


def _in_a_step(steps: Iterable[LoggedStep], moment_s: float) -> StepShape | None:
    there = [step.shape for step in steps if step.begin_s <= moment_s < step.end_s]
    return min(there, key=lambda shape: shape.only_decodes, default=None)


# --- front ends -------------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running_ways(ways: Seq[Way], path: str, command: Seq[str] = WORKER) -> AsyncIterator[list[RunningWay]]:
    """All of them, with their workers ready. ``path``: of the model on this host; ``command``: what starts a worker, as ``WORKER``."""
    async with AsyncExitStack() as stack:
        found = []
        for way in ways:
            running = _front_end(way, path, command)
            stack.push_async_callback(running.engine.stop)
            running.engine.start()
            found.append(running)
        for running in found:
            await running.engine.ready()
        yield found


def _front_end(way: Way, path: str, command: Seq[str]) -> RunningWay:
    secret, folder = new_secret(), tempfile.mkdtemp(prefix="octavo-")
    handover = HandoverOptions(limits=_HANDOFF, may_borrow=False)
    options = ClusterOptions(liveness=_PATIENT, router=ROUTER, handover=handover, backpressure=Backpressure(most_pending_s=float("inf")))
    processes = LocalProcesses(worker_names(way.workers), secret, way.config.backend.threads or 1, [*command, "--log", folder])
    engine = ClusterEngine(
        open_model(path).read_text(), way.config, Address(path=str(Path(folder) / "workers")), secret.encode(), options, processes,
        functools.partial(shutil.rmtree, folder, ignore_errors=True),
    )  # fmt: skip
    return RunningWay(way, engine, Path(folder))
