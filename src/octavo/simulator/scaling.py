"""Engines of a simulation that come and go with the load: the scalers of a cluster, told of simulated engines.

    START ─(start_s)─▶ takes requests ⇄ DRAIN: nothing new, KEEP: again ─▶ empty: STOP

Owns when the scalers are asked, what they are told, and which engines are starting, draining, or over. What becomes of engines is the
simulation's to do: it is told in ``Changes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.costs.full_step import full_step_prices
from octavo.distributed.autoscale import ScaleAction, ScaleLimits
from octavo.distributed.pool_scaling import ClusterLoad, PoolScaling, PoolWorker
from octavo.distributed.roles import RolePools
from octavo.simulator.handing_over import Handovers
from octavo.simulator.records import RequestLog
from octavo.simulator.sim_engine import SimEngine

ASK_S = 1.0  # as in a cluster


@dataclass(slots=True)
class Changes:
    """What is to be done. ``added``: roles of engines that begin to start; ``opened``: engines that take requests from now on, or again;
    ``closed``: that take no more; ``gone``: that are empty and end."""

    added: list[str] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)


class SimScaling:
    """``limits`` by role; ``start_s`` of these is what a start takes. ``engines``: all that there are or were, by index."""

    def __init__(self, limits: Mapping[str, ScaleLimits], engines: Seq[SimEngine], log: RequestLog) -> None:
        self._pools, self._limits, self._engines, self._log = PoolScaling(limits), limits, engines, log
        for role, one in limits.items():
            there = sum(engine.spec.role == role for engine in engines)
            if not one.least <= there <= one.most:
                raise ValueError(f"scale: {there} engines of role {role} are not allowed; from {one.least} to {one.most}")
        self.num_prompt_tokens = 0  # of all requests that came
        self._num_begun = self._num_begun_tokens = self._num_cached_tokens = 0  # of these with a first token
        self._starts: dict[int, float] = {}  # engine -> when it will be there
        self._draining = set[int]()
        self._gone = set[int]()
        self._ask_s = 0.0

    @property
    def next_s(self) -> float:
        """When there is something to do next."""
        return min(self._ask_s, *self._starts.values(), float("inf"))

    def is_gone(self, index: int) -> bool:
        """It was stopped for good."""
        return index in self._gone

    def is_closed(self, index: int) -> bool:
        """It takes no requests: it is starting, draining, or gone."""
        return index in self._starts or index in self._draining or index in self._gone

    def starts(self, engine: SimEngine, now: float) -> None:
        """An engine has been added, and will be there after its start."""
        self._starts[engine.index] = now + self._limits[engine.spec.role].start_s

    def begun(self, num_prompt: int, num_cached: int) -> None:
        """A request has its first token; so much of its prompt was cached."""
        self._num_begun += 1
        self._num_begun_tokens += num_prompt
        self._num_cached_tokens += min(num_prompt, num_cached)

    def advance(
        self, now: float, handoffs: Handovers, pools: RolePools | None, down: Mapping[int, bool], waiting: tuple[int, int]
    ) -> Changes:
        """All that is due by ``now``. ``down``: engines that an outage has taken, and whether they come back; ``waiting``: requests that no
        engine has, and their tokens."""
        changes = Changes(opened=[index for index, due_s in self._starts.items() if due_s <= now])
        for index in changes.opened:
            del self._starts[index]
        if now < self._ask_s:
            return changes
        self._ask_s = now + ASK_S
        for engine in self._engines:
            engine.interrupt()  # what has ended by now counts
        there = [engine for engine in self._engines if engine.index not in self._gone and down.get(engine.index, True)]
        workers = [self._worker(engine, handoffs, pools, engine.index in down) for engine in there]
        for role, step in self._pools.decide(workers, self._load(now, handoffs, waiting), now):
            if step.action is ScaleAction.START:
                changes.added.append(role)
            else:
                assert step.index is not None
                self._change(step.action, step.index, changes)
        return changes

    def _change(self, action: ScaleAction, index: int, changes: Changes) -> None:
        if action is ScaleAction.DRAIN:
            self._draining.add(index)
            changes.closed.append(index)
            return
        self._draining.remove(index)
        if action is ScaleAction.KEEP:
            changes.opened.append(index)
        else:
            self._gone.add(index)
            changes.gone.append(index)

    def _load(self, now: float, handoffs: Handovers, waiting: tuple[int, int]) -> ClusterLoad:
        log, (num_waiting, num_waiting_tokens) = self._log, waiting
        num_output = log.num_output_tokens + sum(live.num_output for live in log.live.values())
        num_ended = log.num_completed + log.num_refused + log.num_failed
        open_ones = len(log.live) - num_waiting
        came, begun = (self.num_prompt_tokens, num_output, self._num_begun, num_ended), (self._num_begun_tokens, self._num_cached_tokens)
        return ClusterLoad(*came, open_ones, num_waiting, num_waiting_tokens, *handoffs.without_room(now), *begun)

    def _worker(self, engine: SimEngine, handoffs: Handovers, pools: RolePools | None, is_down: bool) -> PoolWorker:
        index, scheduler = engine.index, engine.scheduler
        state = "draining" if index in self._draining else "starting" if index in self._starts or is_down else "ready"
        num_foreign, is_mixed = (0, False) if pools is None else (pools.num_foreign(index), pools.is_mixed(index))
        there = (engine.num_sequences + scheduler.num_offered, handoffs.num_coming(index), scheduler.num_waiting, num_foreign)
        return PoolWorker.of(index, engine, engine.spec.num_blocks, engine.spec.role, state, *there, is_mixed, _prices(engine))


def _prices(engine: SimEngine) -> tuple[float, float]:
    limits = engine.spec.scheduler
    contexts = [seq.num_computed for seq in engine.scheduler.running_sequences]
    num_held = engine.spec.num_blocks * engine.spec.cache.block_size
    shape_seconds = engine.backend.shape_seconds
    return full_step_prices(shape_seconds, limits.max_num_batched_tokens, limits.max_num_seqs, num_held, contexts)
