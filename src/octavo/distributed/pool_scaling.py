"""How many workers each role should have: a scaler for each pool that is scaled, and what is whose work. Pure: times are told.

    prompts that come, wait, or are pending ────────────▶ prefill     (wherever they are: a borrowed decode worker's prompts, too)
    tokens made, KV held, answers without a receiver ───▶ decode      (wherever they are: answers that prefill workers keep, too)
    the share of both that workers of both roles take ──▶ both

Work is a pool's by what it is, not by where it is done: that a worker had to be borrowed is what shows that its lender's neighbours are too
few. Of prompts that come or wait at the front end only as much is taken to be work as was not cached of those that began lately. Prices of
tokens are a pool's own workers', in steps that are full. Workers that do both take as many of the requests that come as they are, among all
that compute prompts, and answer what they began.

An answer that a decode worker has no blocks for any more waits in its queue: what that has free is of no use, and counts as taken. One
without room at any is made on the worker of its prompt, or waits there, and prompts wait behind it: they wait for room as well, all decode
workers count as taken, and more prefill workers would only wait along. So it is with what waits at the front end once an answer has waited
too long: the decode pool is *short*. While somebody waits for room, what comes is counted where it begins, since what is held cannot grow.

Owns the scalers and what they have learned. A cluster and a simulation ask the same object, and do what it says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.distributed.autoscale import Autoscaler, ScaledWorker, ScaleLimits, ScaleStep
from octavo.distributed.roles import ROLES
from octavo.distributed.views import EngineView, waiting_s

ROOM_MEMORY = 10.0  # the room that an answer takes is averaged over so many times what the rate of work is


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """A worker as it stands. ``state``, ``is_own``: as ``ScaledWorker``'s. ``num_sequences``: that it has, and that are on their way to it.

    ``pending_s``: seconds of what is pending there; ``prompts_s``: of that, without the token that each sequence is at. ``num_waiting``:
    in its queue. ``room``: share of its KV blocks that is taken; ``lent_room``: by answers that are here for want of room elsewhere.
    ``is_mixed``: it is borrowed. ``prompt_token_s`` and ``output_token_s``: what a token takes of its full steps; 0: not known."""

    index: int
    role: str
    state: str
    num_sequences: int = 0
    pending_s: float = 0.0
    prompts_s: float = 0.0
    num_waiting: int = 0
    room: float = 0.0
    lent_room: float = 0.0
    is_mixed: bool = False
    prompt_token_s: float = 0.0
    output_token_s: float = 0.0
    is_own: bool = True

    @classmethod
    def of(
        cls,
        index: int,
        view: EngineView,
        num_blocks: int,
        role: str,
        state: str,
        num_here: int,
        num_coming: int,
        num_waiting: int,
        num_foreign: int,
        is_mixed: bool,
        prices: tuple[float, float],
        is_own: bool = True,
    ) -> PoolWorker:
        """Of what is known of it. ``num_here``: sequences, ``num_foreign`` of them for want of room elsewhere; ``prices``: of a prompt's
        and an output's token."""
        room = 1.0 - min(1.0, view.num_available_blocks / num_blocks) if num_blocks else 0.0
        lent = room * min(1.0, num_foreign / num_here) if num_here else 0.0
        there = (num_here + num_coming, view.pending_s, waiting_s(view), num_waiting)
        return cls(index, role, state, *there, room, lent, is_mixed, *prices, is_own)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role: {self.role!r} is not allowed; one of {', '.join(ROLES)}")

    @property
    def is_on(self) -> bool:
        return self.state != "draining"

    @property
    def num_unroomed(self) -> int:
        """Who waits in its queue for decode workers with room. At a decode worker: answers that it had to drop the KV of; the queue of a
        borrowed one is of prompts. At a prefill worker: all, while it keeps answers that should have been elsewhere."""
        waits = self.lent_room > 0.0 if self.role == "prefill" else self.role == "decode" and not self.is_mixed
        return self.num_waiting if waits else 0


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """What there is to do. ``num_prompt_tokens``, ``num_output_tokens``, ``num_begun`` (requests that have their first token) and
    ``num_ended`` (requests): of all time. ``num_open``: requests that workers have. ``num_waiting``, ``num_waiting_tokens``: requests that
    no worker has, and their known tokens. ``num_without_room``: answers that have their first token and no decode worker to go on;
    ``without_room_s``: how long the first of them has waited. ``num_begun_tokens``: of all time, prompt tokens of those that have begun,
    and of these ``num_cached_tokens``, which nobody had to compute."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_begun: int = 0
    num_ended: int = 0
    num_open: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_without_room: int = 0
    without_room_s: float = 0.0
    num_begun_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class _Lately:
    """Two sums over what happened lately, which fade with ``memory_s``: of interest is the first over the second."""

    memory_s: float
    above: float = 0.0
    below: float = 0.0

    def learn(self, above: float, below: float, passed_s: float) -> None:
        left = math.exp(-passed_s / self.memory_s)
        self.above = left * self.above + above
        self.below = left * self.below + below


class _Computed(_Lately):
    """The share of prompts that is computed, of those that began lately: tokens that were cached, over all."""

    @property
    def share(self) -> float:
        """All of it, before any has begun."""
        return 1.0 - min(1.0, self.above / self.below) if self.below > 0.0 else 1.0


class _RoomOfAnswers(_Lately):
    """Seconds of room that an answer takes: what is held, over how many end."""

    def of_one(self, num_running: int) -> float:
        """While few have ended yet, those that run have had no more than what was held, together."""
        return self.above / max(1.0, self.below, num_running)


class PoolScaling:
    """``limits`` by role; a role that has none stays as it is. ValueError for a role that is none, or when there is no role."""

    def __init__(self, limits: Mapping[str, ScaleLimits]) -> None:
        if not limits or not set(limits) <= set(ROLES):
            raise ValueError(f"limits: roles {', '.join(limits) or 'none'} are not allowed; some of {', '.join(ROLES)}")
        self.scalers = {role: Autoscaler(limits[role]) for role in ROLES if role in limits}
        self._patience_s = min(one.up_wait_s for one in limits.values())
        self._before = ClusterLoad()
        self._looked_s: float | None = None
        decode = limits.get("decode", ScaleLimits())
        self._answers = _RoomOfAnswers(ROOM_MEMORY * decode.rate_s)
        self._computed = _Computed(max(one.rate_s for one in limits.values()))

    def came(self, workers: Seq[PoolWorker], load: ClusterLoad, now: float) -> None:
        """Time has passed, in which nothing is to be changed: what came in it counts."""
        before, self._before = self._before, load
        num_output = max(0, load.num_output_tokens - before.num_output_tokens)
        passed_s = 0.0 if self._looked_s is None else max(0.0, now - self._looked_s)
        self._looked_s = now
        num_begun, num_cached = load.num_begun_tokens - before.num_begun_tokens, load.num_cached_tokens - before.num_cached_tokens
        self._computed.learn(num_cached, num_begun, passed_s)
        num_prompt = self._computed.share * (load.num_prompt_tokens - before.num_prompt_tokens)
        prompts, answers = self._split(workers)
        room = self._room(workers, load)
        room_s = room * passed_s
        self._answers.learn(room_s, answers * (load.num_ended - before.num_ended), passed_s)
        if self._num_held(workers, load, answers):
            room_s = max(room_s, answers * (load.num_begun - before.num_begun) * self._answers.of_one(_num_running(workers)))
        for role, scaler in self.scalers.items():
            prompt_s, output_s = _prices(workers, role)
            if role == "both":
                scaler.arrived((1.0 - prompts) * num_prompt * prompt_s + (1.0 - answers) * num_output * output_s)
            elif role == "prefill":
                scaler.arrived(prompts * num_prompt * prompt_s)
            else:
                scaler.arrived(answers * num_output * output_s, room_s)

    def decide(self, workers: Seq[PoolWorker], load: ClusterLoad, now: float) -> list[tuple[str, ScaleStep]]:
        """What is to be done now, by role. Calls ``came``."""
        self.came(workers, load, now)
        waits = {"both": self._both_waits, "prefill": self._prompts_wait, "decode": self._answers_wait}
        steps = list[tuple[str, ScaleStep]]()
        for role, scaler in self.scalers.items():
            wait = waits[role]([one for one in workers if one.role == role], workers, load)
            steps += [(role, step) for step in scaler.decide(wait.workers, wait.work_s, now, wait.room_s, wait.room_of_all)]
        return steps

    # --- whose work it is -----------------------------------------------------------------------------------------------------------------

    def _split(self, workers: Seq[PoolWorker]) -> tuple[float, float]:
        """(share of the prompts that are the prefill pool's, share of the answers that are the decode pool's); the rest is theirs who do
        both. Who begins at a worker of both stays there, and where nobody decodes they do for all."""
        num_prefill = sum(one.role == "prefill" and one.is_on for one in workers)
        num_both = sum(one.role == "both" and one.is_on for one in workers)
        num_able = num_prefill + num_both
        prompts = num_prefill / num_able if num_able else float("both" not in self.scalers)
        return prompts, prompts if self._has_decode(workers) else 0.0

    def _has_decode(self, workers: Seq[PoolWorker]) -> bool:
        return "decode" in self.scalers or any(one.role == "decode" for one in workers)

    def _is_short(self, load: ClusterLoad) -> bool:
        """Answers have waited too long for a decode worker with room."""
        return load.num_without_room > 0 and load.without_room_s > self._patience_s

    def _room(self, workers: Seq[PoolWorker], load: ClusterLoad) -> float:
        """What answers hold, in decode workers. What is free is taken where it is of no use to those that wait."""
        is_of_no_use = self._is_short(load) or any(one.num_unroomed for one in workers if one.role == "prefill")
        decode = [one for one in workers if one.role == "decode" and one.state != "starting"]
        held = sum(1.0 if (is_of_no_use or one.num_unroomed) and one.state == "ready" else one.room for one in decode)
        return held + sum(one.lent_room for one in workers if one.role == "prefill")

    def _num_held(self, workers: Seq[PoolWorker], load: ClusterLoad, answers: float) -> float:
        """Answers that wait for room, ``answers`` of those that wait for their prompt among them where these wait for it as well."""
        num_held: float = sum(one.num_unroomed for one in workers)
        if self._is_short(load):
            num_held += load.num_without_room + answers * load.num_waiting
            num_held += sum(one.num_waiting - one.num_unroomed for one in workers if one.role == "prefill")
        return num_held

    # --- what waits -----------------------------------------------------------------------------------------------------------------------

    def _both_waits(self, own: Seq[PoolWorker], workers: Seq[PoolWorker], load: ClusterLoad) -> _Wait:
        prompt_s, output_s = _prices(workers, "both")
        share, answer_s = 1.0 - self._split(workers)[0], _answer_tokens(load) * output_s
        held_back_s = share * (self._computed.share * load.num_waiting_tokens * prompt_s + load.num_waiting * answer_s)
        if self._is_short(load) and not self._has_decode(workers):  # answers go on at those that do both
            held_back_s += load.num_without_room * answer_s
        return _Wait([_scaled(one, one.pending_s + one.num_waiting * answer_s) for one in own], held_back_s)

    def _prompts_wait(self, own: Seq[PoolWorker], workers: Seq[PoolWorker], load: ClusterLoad) -> _Wait:
        if self._is_short(load):
            return _Wait([_scaled(one, 0.0) for one in own])
        num_waiting_tokens = self._computed.share * load.num_waiting_tokens
        held_back_s = self._split(workers)[0] * num_waiting_tokens * _prices(workers, "prefill")[0]
        held_back_s += sum(one.prompts_s for one in workers if one.role == "decode" and one.is_mixed)
        return _Wait([_scaled(one, 0.0 if one.num_unroomed else one.prompts_s) for one in own], held_back_s)

    def _answers_wait(self, own: Seq[PoolWorker], workers: Seq[PoolWorker], load: ClusterLoad) -> _Wait:
        """What a decode worker has dropped the KV of is computed again there; the prompts of a borrowed one are others' work."""
        num_held, num_running = self._num_held(workers, load, self._split(workers)[1]), _num_running(workers)
        answer_s, room = _answer_tokens(load) * _prices(workers, "decode")[1], self._room(workers, load)
        scaled = [_scaled(one, 0.0 if one.is_mixed else one.prompts_s) for one in own]
        room_of_all = room + num_held * room / max(1, num_running)
        return _Wait(scaled, num_held * answer_s, num_held * self._answers.of_one(num_running), room_of_all)


@dataclass(frozen=True, slots=True)
class _Wait:
    """What a scaler is told: its workers with the work that is pending there; see ``Autoscaler.decide`` for the others."""

    workers: list[ScaledWorker]
    work_s: float = 0.0
    room_s: float = 0.0
    room_of_all: float = 0.0


def _num_running(workers: Seq[PoolWorker]) -> int:
    """Answers that are made, at decode workers and where they are kept for want of room there."""
    makes = (one for one in workers if one.role == "decode" or one.lent_room > 0.0)
    return sum(max(0, one.num_sequences - one.num_waiting) for one in makes)


def _scaled(worker: PoolWorker, pending_s: float) -> ScaledWorker:
    return ScaledWorker(worker.index, worker.state, pending_s, worker.num_sequences, worker.is_own)


def _answer_tokens(load: ClusterLoad) -> float:
    """Of an answer, on average; of those that are being made, what is there."""
    return load.num_output_tokens / max(1, load.num_ended + load.num_open)


def _prices(workers: Seq[PoolWorker], role: str) -> tuple[float, float]:
    """Seconds that a prompt token and an output token take of a full step, as the workers of that role say, or, before any of them has,
    all; 0 before any has. Who is at work knows how long sequences are, the others guess."""
    told = [one for one in workers if one.prompt_token_s or one.output_token_s]
    told = [one for one in told if one.role == role] or told
    told = [one for one in told if one.num_sequences] or told
    num = max(1, len(told))
    return sum(one.prompt_token_s for one in told) / num, sum(one.output_token_s for one in told) / num
