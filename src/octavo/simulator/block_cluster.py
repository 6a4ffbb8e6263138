"""A cluster under the rules of the public simulator of Splitwise, run block by block: what it does on a trace, at tens of thousands of
requests per second.

    (arrival, prompt, output) ─▶ pools ─▶ machine: blocks of equal iterations ─▶ KV transfer ─▶ machine ─▶ ClusterResult

Owns the events: arrivals, ends of blocks, transfers. Who runs is told by ``core.policies.splitwise``, where by ``distributed.pools``, how
long by a ``TableCost``. A block has one price, told when it starts, as there; an arrival that fits ends it at its next iteration boundary.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from octavo.core.policies.splitwise import SplitwiseLimits, SplitwiseMachine, SplitwiseTask
from octavo.distributed.pools import FewestPendingTokens, MixedPools, PoolMachine, PoolRule, decode_ended, kv_freed, prompt_ended
from octavo.simulator.sketch import QuantileSketch

RETRY_S = 1.0  # until a transfer whose target was full is tried again


class IterationCost(Protocol):
    """Prices one iteration of a machine."""

    def step_s(self, num_prompt: int, num_decoding: int, num_context: int) -> float:
        """Seconds with ``num_prompt`` rows of prompts beside ``num_decoding`` sequences that hold ``num_context`` tokens together."""
        ...


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """``machines``: (cost, whether its home is the prompt pool), in the order that ties go by. ``mixed_pools``: prompt and token pools;
    else every machine runs both phases, whatever its home.

    ``num_kv_tokens``: whose KV one machine holds. ``transfer_s_per_token``: to send the KV of a prompt token; links are not shared.
    """

    machines: Seq[tuple[IterationCost, bool]]
    mixed_pools: bool
    num_kv_tokens: float
    transfer_s_per_token: float
    limits: SplitwiseLimits = SplitwiseLimits()


@dataclass(slots=True)
class ClusterResult:
    """Per request, in the order of arrival; times in seconds, nan for a request that never ended. ``prompt_machine`` and
    ``decode_machine`` are places in ``ClusterSpec.machines``. ``gap_s``: between any two tokens of a request, all of them; blocked
    decoding and transfers are in it, which a mean over the tokens of a request hides."""

    num_prompt: array[int] = field(default_factory=lambda: array("i"))
    num_output: array[int] = field(default_factory=lambda: array("i"))
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    e2e_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_machine: array[int] = field(default_factory=lambda: array("i"))
    decode_machine: array[int] = field(default_factory=lambda: array("i"))
    end_s: float = 0.0
    num_blocks: int = 0
    busy_s: array[float] = field(default_factory=lambda: array("d"))  # by machine
    gap_s: QuantileSketch = field(default_factory=QuantileSketch)
    rows_s: dict[int, float] = field(default_factory=dict)  # seconds, over all machines, that iterations of so many rows took together

    @property
    def tbt_s(self) -> list[float]:
        """(e2e - ttft) / output tokens, as the public simulator has it: not output tokens - 1."""
        return [(e2e - ttft) / n for e2e, ttft, n in zip(self.e2e_s, self.ttft_s, self.num_output, strict=True)]

    @property
    def num_unfinished(self) -> int:
        return sum(e2e != e2e for e2e in self.e2e_s)


class _Job:
    """A request on its way."""

    __slots__ = ("arrival_s", "index", "last_s", "num_output", "num_prompt", "source", "target")

    def __init__(self, index: int, arrival_s: float, num_prompt: int, num_output: int, source: _Machine, target: _Machine) -> None:
        self.index = index
        self.arrival_s = arrival_s
        self.num_prompt = num_prompt
        self.num_output = num_output
        self.source = source
        self.target = target
        self.last_s = 0.0  # when the last token came, while it is in no batch


class _Machine:
    """A machine and the block that it runs. ``block``: its number, which makes events of a block that was cut short stale."""

    __slots__ = ("block", "books", "cost", "is_cut", "iteration_s", "num_iterations", "rules", "start_s")

    def __init__(self, index: int, cost: IterationCost, is_prompt: bool, spec: ClusterSpec) -> None:
        self.cost = cost
        self.rules = SplitwiseMachine(spec.num_kv_tokens, spec.limits)
        self.books = PoolMachine(index, is_prompt, spec.num_kv_tokens, lambda: self.rules.num_waiting)
        self.block = 0
        self.num_iterations = 0
        self.iteration_s = self.start_s = 0.0
        self.is_cut = False


class BlockCluster:
    """One run: made, ``run`` once, done."""

    def __init__(self, spec: ClusterSpec) -> None:
        if not spec.machines:
            raise ValueError("machines: at least one is needed")
        self._machines = [_Machine(i, cost, is_prompt, spec) for i, (cost, is_prompt) in enumerate(spec.machines)]
        books = [machine.books for machine in self._machines]
        self._rule: PoolRule = MixedPools(books) if spec.mixed_pools else FewestPendingTokens(books)
        self._transfer_s_per_token = spec.transfer_s_per_token
        self._events: list[tuple[float, int, _Machine | _Job, int]] = []  # time, number, what, its block (or what a transfer is to do)
        self._num_events = 0
        self._now = 0.0
        self._result = ClusterResult(busy_s=array("d", [0.0] * len(self._machines)))

    def run(self, requests: Iterable[tuple[float, int, int]]) -> ClusterResult:
        """Run all ``requests`` (arrival in seconds, prompt tokens, output tokens; by arrival) to their end. ValueError when they are not
        by arrival or a length is below 1."""
        events, result = self._events, self._result
        for arrival_s, num_prompt, num_output in requests:
            if not (arrival_s >= self._now and num_prompt >= 1 and num_output >= 1):
                raise ValueError(f"request: {(arrival_s, num_prompt, num_output)} is not allowed; by arrival, at least 1 token each")
            while events and events[0][0] < arrival_s:
                self._next_event()
            self._now = arrival_s
            self._arrive(arrival_s, num_prompt, num_output)
        while events:
            self._next_event()
        result.end_s = self._now
        return result

    def _next_event(self) -> None:
        self._now, _, what, number = heappop(self._events)
        if type(what) is _Machine:
            if number == what.block:
                self._end_block(what)
        elif type(what) is _Job:
            if number == _TRY:
                self._send(what)
            else:
                self._received(what)

    def _at(self, time_s: float, what: _Machine | _Job, number: int) -> None:
        self._num_events += 1
        heappush(self._events, (time_s, self._num_events, what, number))

    # --- requests -----------------------------------------------------------------------------------------------------------------------

    def _arrive(self, arrival_s: float, num_prompt: int, num_output: int) -> None:
        result, nan = self._result, float("nan")
        prompt_books, token_books = self._rule.assign(num_prompt, num_output)
        source, target = self._machines[prompt_books.index], self._machines[token_books.index]
        job = _Job(len(result.ttft_s), arrival_s, num_prompt, num_output, source, target)
        result.num_prompt.append(num_prompt)
        result.num_output.append(num_output)
        result.ttft_s.append(nan)
        result.e2e_s.append(nan)
        result.prompt_machine.append(prompt_books.index)
        result.decode_machine.append(token_books.index)
        prompt = SplitwiseTask(job, arrival_s, True, num_prompt, num_output)
        self._add(source, prompt)
        if source is target:
            self._add(source, SplitwiseTask(job, arrival_s, False, num_prompt, num_output), prompt)

    def _add(self, machine: _Machine, task: SplitwiseTask, behind: SplitwiseTask | None = None) -> None:
        if machine.rules.add(task, behind):
            self._start_or_cut(machine)

    def _send(self, job: _Job) -> None:
        """The prompt has ended, or a second has passed since its target was found full."""
        if job.target.rules.receive(job.num_prompt + 1):
            self._at(self._now + job.num_prompt * self._transfer_s_per_token, job, _ARRIVES)
        else:
            self._at(self._now + RETRY_S, job, _TRY)

    def _received(self, job: _Job) -> None:
        source, num_tokens = job.source, job.num_prompt + 1
        is_to_start = source.rules.sent(num_tokens)
        kv_freed(source.books, num_tokens)
        self._add(job.target, SplitwiseTask(job, job.arrival_s, False, job.num_prompt, job.num_output))
        if is_to_start:
            self._start_or_cut(source)

    # --- blocks -------------------------------------------------------------------------------------------------------------------------

    def _start_or_cut(self, machine: _Machine) -> None:
        if machine.rules.is_idle:
            self._start_block(machine)
        elif not machine.is_cut:
            machine.is_cut = True
            num_iterations = int((self._now - machine.start_s) // machine.iteration_s) + 1
            if num_iterations < machine.num_iterations:
                machine.num_iterations = num_iterations
                self._schedule_end(machine)

    def _start_block(self, machine: _Machine) -> None:
        rules = machine.rules
        num_iterations = rules.build()
        if rules.is_idle:
            if not rules.num_waiting:
                self._rule.drained(machine.books)
            return
        for task in rules.left_out:
            task.owner.last_s = self._now
        machine.iteration_s = machine.cost.step_s(rules.num_prompt_rows, rules.num_decoding, rules.num_context)
        machine.start_s, machine.num_iterations, machine.is_cut = self._now, num_iterations, False
        self._schedule_end(machine)
        self._result.num_blocks += 1

    def _schedule_end(self, machine: _Machine) -> None:
        machine.block += 1
        self._at(machine.start_s + machine.iteration_s * machine.num_iterations, machine, machine.block)

    def _end_block(self, machine: _Machine) -> None:
        now, result, books = self._now, self._result, machine.books
        busy_s, num_rows = machine.iteration_s * machine.num_iterations, machine.rules.num_batch_rows
        result.busy_s[books.index] += busy_s
        result.rows_s[num_rows] = result.rows_s.get(num_rows, 0.0) + busy_s
        self._count_gaps(machine)
        for task in machine.rules.finish(machine.num_iterations):
            job: _Job = task.owner
            if task.is_prompt:
                job.last_s = now
                result.ttft_s[job.index] = now - job.arrival_s
                prompt_ended(books, job.num_prompt)
                if job.target is not machine:
                    self._send(job)
            else:
                result.e2e_s[job.index] = now - job.arrival_s
                decode_ended(books)
                kv_freed(books, task.num_final)
        self._start_block(machine)

    def _count_gaps(self, machine: _Machine) -> None:
        """A block has ended: most of its sequences got a token each iteration; who came in with it had its last one before."""
        rules, gaps, iteration_s = machine.rules, self._result.gap_s, machine.iteration_s
        num_gaps = rules.num_decoding * machine.num_iterations
        for task in rules.joined:
            if not task.is_prompt and machine.num_iterations:
                gaps.add(machine.start_s + iteration_s - task.owner.last_s)
                num_gaps -= 1
        if num_gaps:
            gaps.add(iteration_s, num_gaps)


_TRY, _ARRIVES = 0, 1  # what a transfer's event is to do
