"""Prefill, decode, and workers that lend each other a hand: who computes a prompt and who goes on with it. Pure: times are told.

    home ──its own role's workers are under pressure: another role's worker is borrowed──▶ mixed
    mixed ──the foreign work is done, the pressure is off, and it was long enough──▶ home

Splitwise (Patel et al., ISCA 2024, section IV): machines have a pool by their role, and one whose pool is not enough becomes mixed, running
both phases batched together, until it has drained. Being mixed is a state: the role stays. Here with hysteresis, which the paper's program
has not: a worker is borrowed above one mark of pressure and returns below a lower one, and no state lasts less than ``hold_s``. So the
number of changes of a worker is bounded by the time (``most_moves``), whatever the load does.

Owns which worker has which foreign work. What work there is and how long it takes is seen through ``EngineView``; who is best is a router's
business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.distributed.views import EngineView, Router, RouteRequest

ROLES = ("both", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class MixedLimits:
    """``borrow_s``: predicted seconds of work on the least busy prefill worker beyond which a decode worker is borrowed for prompts;
    ``return_s``: below which it may go home. ``borrow_free``: share of a decode worker's blocks that has to be left beside a request, or a
    prefill worker is borrowed for decoding; ``return_free``: share that has to be free on some decode worker before it goes home.
    ``hold_s``: shortest time in either state. ``guess_output``: tokens that are expected of an answer nobody knows the length of, until
    some have ended; then a running mean."""

    borrow_s: float = 1.0
    return_s: float = 0.25
    borrow_free: float = 0.0
    return_free: float = 0.2
    hold_s: float = 5.0
    guess_output: int = 256

    def __post_init__(self) -> None:
        if not 0.0 <= self.return_s < self.borrow_s:
            raise ValueError(f"return_s: {self.return_s!r} is not allowed; from 0 and below borrow_s ({self.borrow_s!r})")
        if not 0.0 <= self.borrow_free < self.return_free <= 1.0:
            raise ValueError(f"return_free: {self.return_free!r} is not allowed; above borrow_free ({self.borrow_free!r}), at most 1")
        if not self.hold_s >= 0.0:
            raise ValueError(f"hold_s: {self.hold_s!r} is not allowed; at least 0 seconds")
        if self.guess_output < 1:
            raise ValueError(f"guess_output: {self.guess_output!r} is not allowed; at least 1 token")

    def most_moves(self, duration_s: float) -> float:
        """Most changes of state of one worker in that time."""
        return float("inf") if self.hold_s == 0.0 else duration_s // self.hold_s + 1


@dataclass(slots=True)
class PooledWorker:
    """``foreign``: requests whose phase that is not of its role runs here, or will. ``promised``: blocks for the answers that will be made
    here, of requests that are not here yet. ``since_s``: when the state changed last."""

    index: int
    role: str
    num_blocks: int
    is_mixed: bool = False
    since_s: float = -float("inf")
    num_moves: int = 0
    foreign: set[str] = field(default_factory=set)
    promised: dict[str, int] = field(default_factory=dict)

    @property
    def num_promised(self) -> int:
        return sum(self.promised.values())


@dataclass(frozen=True, slots=True)
class Placement:
    """Indexes of engines. Equal ones: nothing is handed over."""

    prefill: int
    decode: int

    @property
    def is_split(self) -> bool:
        return self.prefill != self.decode


class RolePools:
    """``prompts`` chooses who computes a prompt, of those that may. Workers come and go by ``add`` and ``remove``."""

    def __init__(self, prompts: Router, limits: MixedLimits | None = None, block_size: int = 16, may_borrow: bool = True) -> None:
        self.limits = limits or MixedLimits()
        self._prompts = prompts
        self._block_size = block_size
        self.may_borrow = may_borrow
        self._workers: dict[int, PooledWorker] = {}
        self._placed: dict[str, Placement] = {}
        self._guess_output = float(self.limits.guess_output)

    # --- workers ------------------------------------------------------------------------------------------------------------------------

    def add(self, index: int, role: str, num_blocks: int) -> None:
        """A worker is there. ValueError for a role that is none, or an index that is taken."""
        if role not in ROLES:
            raise ValueError(f"role: {role!r} is not allowed; one of {', '.join(ROLES)}")
        if index in self._workers:
            raise ValueError(f"index: {index} is not allowed; a worker has it")
        self._workers[index] = PooledWorker(index, role, num_blocks)

    def remove(self, index: int) -> list[str]:
        """A worker is gone; returns the requests that it had a part in, which are forgotten."""
        self._workers.pop(index, None)
        lost = [request_id for request_id, placed in self._placed.items() if index in (placed.prefill, placed.decode)]
        for request_id in lost:
            self.ended(request_id)
        return lost

    def worker(self, index: int) -> PooledWorker:
        return self._workers[index]

    def role_of(self, index: int) -> str | None:
        """None: no worker has that index."""
        worker = self._workers.get(index)
        return None if worker is None else worker.role

    def computes_prompts(self, index: int) -> bool:
        """By its role, or because it is borrowed for that."""
        worker = self._workers.get(index)
        return worker is not None and (worker.role != "decode" or worker.is_mixed)

    def is_mixed(self, index: int) -> bool:
        """It is borrowed now."""
        worker = self._workers.get(index)
        return worker is not None and worker.is_mixed

    def num_foreign(self, index: int) -> int:
        """Requests whose phase that is not of its role runs there, or will."""
        worker = self._workers.get(index)
        return 0 if worker is None else len(worker.foreign)

    def placement(self, request_id: str) -> Placement | None:
        """Of a request that was placed and is not over."""
        return self._placed.get(request_id)

    def mixed(self) -> list[int]:
        """Workers that are borrowed now."""
        return [worker.index for worker in self._workers.values() if worker.is_mixed]

    # --- requests -----------------------------------------------------------------------------------------------------------------------

    def place(self, request: RouteRequest, engines: Seq[EngineView], now: float) -> Placement | None:
        """The workers for both phases, among ``engines``; None: nobody there computes prompts. A worker may be borrowed for it."""
        self.settle(engines, now)
        prefill = self._prefill(request, engines, now)
        if prefill is None:
            return None
        need = self._blocks(request)
        decode = self._decode(prefill, need, engines, now)
        placed = self._placed[request.request_id] = Placement(prefill.index, decode.index)
        if prefill.role == "decode":  # and mixed, or it would not have been chosen
            prefill.foreign.add(request.request_id)
        if decode.role == "prefill" and decode.is_mixed:  # where nobody decodes it does so at home: there is nowhere to return to
            decode.foreign.add(request.request_id)
        decode.promised[request.request_id] = need
        return placed

    def _prefill(self, request: RouteRequest, engines: Seq[EngineView], now: float) -> PooledWorker | None:
        """Of its own pool; under pressure of the mixed one too; then a decode worker that has less to do becomes mixed."""
        own = self._views(engines, lambda worker: worker.role != "decode")
        least_s = min((view.pending_s for view in own), default=float("inf"))
        if own and (least_s <= self.limits.borrow_s or not self.may_borrow):
            return self._chosen(request, own)
        if not self.may_borrow:
            return None
        able = own + self._views(engines, lambda worker: worker.role == "decode" and worker.is_mixed)
        least_s = min((view.pending_s for view in able), default=float("inf"))
        if able and least_s <= self.limits.borrow_s:
            return self._chosen(request, able)
        idle = self._views(engines, lambda worker: worker.role == "decode" and self._may_move(worker, now) and not worker.is_mixed)
        lent = min(idle, key=lambda view: (view.pending_s, view.index), default=None)
        if lent is not None and lent.pending_s < least_s:
            worker = self._workers[lent.index]
            self._move(worker, True, now)
            return worker
        return self._chosen(request, able) if able else None

    def _chosen(self, request: RouteRequest, engines: Seq[EngineView]) -> PooledWorker:
        return self._workers[engines[self._prompts.choose(request, engines)].index]

    def _decode(self, prefill: PooledWorker, need: int, engines: Seq[EngineView], now: float) -> PooledWorker:
        """The worker that has the prompt, if decoding is its role; else the decode worker with most room; when none has enough the prompt's
        own worker goes on, borrowed, so that nothing is moved; and where it may not, or has no room either (prompts would wait behind
        answers), who has most room all the same."""
        views = {view.index: view for view in engines}
        if prefill.role == "both" or (prefill.role == "decode" and self._has_room(views[prefill.index], need)):
            return prefill
        pool = self._views(engines, lambda worker: worker.role == "decode")
        if not pool:
            pool = self._views(engines, lambda worker: worker.role == "both")
        best = max(pool, key=lambda view: (self._free(view), -view.index), default=None)
        if best is not None and self._has_room(best, need):
            return self._workers[best.index]
        may_keep = self.may_borrow and prefill.role == "prefill" and (best is None or self._has_room(views[prefill.index], need))
        if may_keep and (prefill.is_mixed or self._may_move(prefill, now)):
            if not prefill.is_mixed:
                self._move(prefill, True, now)
            return prefill
        return prefill if best is None else self._workers[best.index]

    def prefilled(self, request_id: str) -> None:
        """Its prompt is computed."""
        placed = self._placed.get(request_id)
        if placed is not None and not placed.is_split:
            self.arrived(request_id)
        worker = None if placed is None else self._workers.get(placed.prefill)
        if worker is not None and worker.role == "decode":
            worker.foreign.discard(request_id)

    def reserved(self, request_id: str, index: int, num_tokens: int) -> None:
        """Worker ``index`` has reserved blocks for so many of its tokens, which its view shows: only what the answer will take beside them
        is still promised, and only there."""
        placed, worker = self._placed.get(request_id), self._workers.get(index)
        if placed is None or worker is None:
            return
        num_promised = self._workers[placed.decode].promised.pop(request_id, 0)
        worker.promised[request_id] = max(0, num_promised - -(-num_tokens // self._block_size))
        self._placed[request_id] = Placement(placed.prefill, index)

    def arrived(self, request_id: str) -> None:
        """Its KV is where its answer is made: the blocks are no longer promised but taken, which the engine's view shows."""
        placed = self._placed.get(request_id)
        worker = None if placed is None else self._workers.get(placed.decode)
        if worker is not None:
            worker.promised.pop(request_id, None)

    def stayed(self, request_id: str) -> None:
        """It was not handed over: the worker of its prompt makes the answer, whatever its role."""
        placed = self._placed.get(request_id)
        if placed is None or not placed.is_split:
            return
        self.arrived(request_id)
        if placed.decode in self._workers:
            self._workers[placed.decode].foreign.discard(request_id)
        self._placed[request_id] = Placement(placed.prefill, placed.prefill)

    def ended(self, request_id: str, num_output: int | None = None) -> None:
        """It is over, for whatever reason; one that is not known changes nothing. ``num_output``: as ``Router.ended`` is told."""
        if num_output:
            self._guess_output += 0.02 * (num_output - self._guess_output)
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        for index in (placed.prefill, placed.decode):
            worker = self._workers.get(index)
            if worker is not None:
                worker.foreign.discard(request_id)
                worker.promised.pop(request_id, None)

    # --- states -------------------------------------------------------------------------------------------------------------------------

    def settle(self, engines: Seq[EngineView], now: float) -> list[int]:
        """Borrowed workers that may go home do; returns these."""
        prompts = self._views(engines, lambda worker: worker.role != "decode")
        prompts_rest = any(view.pending_s <= self.limits.return_s for view in prompts)
        decoding = self._views(engines, lambda worker: worker.role == "decode")
        room = max((self._free(view) / max(1, self._workers[view.index].num_blocks) for view in decoding), default=0.0)
        went = []
        for worker in self._workers.values():
            rests = prompts_rest if worker.role == "decode" else room >= self.limits.return_free
            if worker.is_mixed and not worker.foreign and rests and self._may_move(worker, now):
                self._move(worker, False, now)
                went.append(worker.index)
        return went

    def _may_move(self, worker: PooledWorker, now: float) -> bool:
        return now - worker.since_s >= self.limits.hold_s

    def _move(self, worker: PooledWorker, is_mixed: bool, now: float) -> None:
        worker.is_mixed, worker.since_s = is_mixed, now
        worker.num_moves += 1

    # --- room ---------------------------------------------------------------------------------------------------------------------------

    def _blocks(self, request: RouteRequest) -> int:
        return -(-(request.num_prompt + math.ceil(request.output_or(self._guess_output))) // self._block_size)

    def _free(self, view: EngineView) -> int:
        """Blocks that are neither taken nor promised."""
        return view.num_available_blocks - self._workers[view.index].num_promised

    def _has_room(self, view: EngineView, need: int) -> bool:
        """A request that is thought to need more than there is may be as short as one that fits: it has room in what is all free."""
        num_blocks = self._workers[view.index].num_blocks
        return self._free(view) - min(need, num_blocks) >= self.limits.borrow_free * num_blocks

    def _views(self, engines: Seq[EngineView], may: Callable[[PooledWorker], bool]) -> list[EngineView]:
        return [view for view in engines if view.index in self._workers and may(self._workers[view.index])]

    def check_invariants(self) -> None:
        """AssertionError unless foreign work is on mixed workers alone, and everything that is kept belongs to a placed request."""
        for worker in self._workers.values():
            assert worker.is_mixed or not worker.foreign, f"worker {worker.index} does foreign work at home"
            assert worker.foreign <= set(self._placed) and set(worker.promised) <= set(self._placed)
            assert worker.role != "both" or not worker.is_mixed
        for placed in self._placed.values():
            assert placed.prefill in self._workers and placed.decode in self._workers
