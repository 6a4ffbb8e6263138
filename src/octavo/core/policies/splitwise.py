"""The rules of one machine of the public cluster simulator of Splitwise (Patel et al., ISCA 2024), as a batch that changes at boundaries.

    add ─▶ queue ─▶ build() at a boundary ─▶ a block of equal iterations ─▶ finish(iterations) ─▶ tasks that ended

Why this is not a policy of ``core.scheduler``: a *task* here is half a request, its prompt or its decoding, and the halves may be on
different machines; memory is reserved whole when a task starts and by the token, not by the block; a prompt is never chunked and the first
task of a batch may exceed the limit; and the batch is built anew at some boundaries only: a batch that only decodes runs on until its first
sequence ends or somebody who fits comes. The one scheduler has none of these and would have to be bent for each. ``SplitwiseScheduler``
(in ``splitwise_scheduler``) puts these rules behind its interface.

Owns who is in the batch and what is reserved. Never reads a clock, prices a step or chooses a machine. Written from the simulator's rules;
where words leave a choice (who of several blocked tasks comes first, what an empty queue head does) it does what that program does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from typing import Any

_LONG_QUEUE = 64


@dataclass(frozen=True, slots=True)
class SplitwiseLimits:
    """``max_passed_over``: boundaries at which a task may be left out before it comes first."""

    max_tasks: int = 512
    max_tokens: int = 2048
    max_passed_over: int = 4


class SplitwiseTask:
    """The prompt of a request, or the decoding of its other tokens.

    ``num_rows``: what it adds to an iteration. ``num_reserved``: KV tokens taken when it starts. ``num_left``: iterations until it ends.
    ``num_final``: prompt and output tokens of its request. ``owner``: whatever the caller wants to find again.
    """

    __slots__ = (
        "arrival_s", "blocked", "counted_from", "ends_at", "follower", "is_prompt", "num_final", "num_left", "num_reserved", "num_rows",
        "owner", "passed_over", "waits",
    )  # fmt: skip

    def __init__(self, owner: Any, arrival_s: float, is_prompt: bool, num_prompt: int, num_output: int) -> None:
        self.owner = owner
        self.arrival_s = arrival_s
        self.is_prompt = is_prompt
        self.num_final = num_prompt + num_output
        self.num_rows = num_prompt if is_prompt else 1
        self.num_reserved = num_prompt + 1 if is_prompt else num_output - 1
        self.num_left = 1 if is_prompt else num_output - 1
        self.follower: SplitwiseTask | None = None  # of a prompt: the decoding that is queued behind it on the same machine
        self.waits = False  # it is such a follower, and its prompt has not ended
        self.passed_over = 0  # boundaries at which it was left out, but for those since ``counted_from``
        self.counted_from: int | None = None  # the machine's count of selections since when each is one more
        self.blocked = False
        self.ends_at = -1  # on the machine's count of iterations, while it is in the batch


def _arrival(task: SplitwiseTask) -> float:
    return task.arrival_s


class SplitwiseMachine:
    """``num_kv_tokens``: tokens whose KV fits beside the weights; it need not be whole."""

    def __init__(self, num_kv_tokens: float, limits: SplitwiseLimits = SplitwiseLimits()) -> None:
        self.num_kv_tokens = num_kv_tokens
        self.limits = limits
        self.num_used_tokens = 0  # reserved by tasks that started, by what they left behind, and by what is being sent here
        self.num_batch_rows = 0  # of the batch as it was built
        self.joined: list[SplitwiseTask] = []  # with the last build, prompts and decoding
        self.left_out: list[SplitwiseTask] = []  # of decoding, with the last build
        self._iteration = 0
        self._num_selections = 0
        self._prompts: list[SplitwiseTask] = []  # of the batch
        self._decoding: dict[SplitwiseTask, None] = {}  # of the batch, in the order in which they joined
        self._context_base = 0  # sum over _decoding of num_final - ends_at: its context at iteration 0
        self._ends: list[tuple[int, int, SplitwiseTask]] = []  # heap of (ends_at, number, task); an entry is stale when the task's differs
        self._num_entries = 0
        self._queue: list[SplitwiseTask] = []  # all that wait, each put in its order when it came; it is not kept sorted as counts grow
        self._prompt_queue: list[SplitwiseTask] = []
        self._blocked: dict[SplitwiseTask, None] = {}
        self._fresh: list[SplitwiseTask] = []  # decoding that may start, by arrival of its request

    # --- gauges -------------------------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nothing is in the batch; tasks may wait for memory."""
        return not self._prompts and not self._decoding

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_prompt_rows(self) -> int:
        return sum(task.num_rows for task in self._prompts)

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    @property
    def num_context(self) -> int:
        """Tokens, prompt and output, that the decoding sequences of the batch hold now."""
        return self._context_base + self._iteration * len(self._decoding)

    def num_passed_over(self, task: SplitwiseTask) -> int:
        """Boundaries at which ``task`` was left out. Nobody counts them one by one: a long queue costs no more than a short one."""
        return task.passed_over if task.counted_from is None else task.passed_over + self._num_selections - task.counted_from

    @property
    def batch(self) -> list[SplitwiseTask]:
        return [*self._decoding, *self._prompts]

    # --- arrivals -----------------------------------------------------------------------------------------------------------------------

    def add(self, task: SplitwiseTask, behind: SplitwiseTask | None = None) -> bool:
        """Queue a task; ``behind`` is its prompt where that is here too. Whether the machine, when it is idle, is to start now, or, when
        it runs, is to end its block at the next boundary."""
        self._put_in_queue(task)
        if task.is_prompt:
            self._prompt_queue.append(task)
        elif behind is not None:
            behind.follower, task.waits = task, True
        else:
            insort(self._fresh, task, key=_arrival)
        if not task.waits:
            task.counted_from = self._num_selections
        if self.is_idle:
            return task.num_reserved + self.num_used_tokens <= self.num_kv_tokens
        if self._prompts:
            return False  # this iteration is the last of its block anyway
        limits = self.limits
        if len(self._decoding) < limits.max_tasks and self.num_batch_rows + task.num_rows <= limits.max_tokens:
            return True
        return task.is_prompt and task.num_rows <= limits.max_tokens

    def sent(self, num_tokens: int) -> bool:
        """The KV of a prompt has left, and its memory is free. The answer is as that of ``add``."""
        self.num_used_tokens -= num_tokens
        if not self._queue or self._prompts:
            return False
        if self.is_idle:
            return self._queue[0].num_reserved + self.num_used_tokens <= self.num_kv_tokens
        return len(self._decoding) < self.limits.max_tasks and self.num_batch_rows < self.limits.max_tokens

    def receive(self, num_tokens: int) -> bool:
        """Reserve room for the KV of a prompt that another machine computed; False, and nothing is reserved, when there is none."""
        if self.num_used_tokens + num_tokens > self.num_kv_tokens:
            return False
        self.num_used_tokens += num_tokens
        return True

    def remove(self, task: SplitwiseTask) -> None:
        """``task`` ends before its time, between iterations: it leaves, and so does the decoding behind it. All that was reserved for the
        request here is free."""
        if task.follower is not None:
            self._take_from_queue(task.follower)
            task.follower = None
        if task in self._decoding:
            self._leave(task)
            self.num_used_tokens -= task.num_final
        elif task in self._prompts:
            self._prompts.remove(task)
            self.num_used_tokens -= task.num_reserved
        else:
            self._take_from_queue(task)
            if task.blocked:
                del self._blocked[task]
                self.num_used_tokens -= task.num_final
            elif task.is_prompt:
                self._prompt_queue.remove(task)
            else:
                self._fresh.remove(task)
                self.num_used_tokens -= task.num_final - task.num_reserved  # what its prompt left behind

    # --- a block ------------------------------------------------------------------------------------------------------------------------

    def build(self) -> int:
        """Build the batch anew at a boundary. Iterations until the first of it ends; 0 when there is nothing to run, for want of tasks or
        of memory (or when what there is has nothing left to do: ``finish`` it)."""
        self.joined, self.left_out = [], []
        if self._queue:
            self._select()
        self.num_batch_rows = len(self._decoding) + self.num_prompt_rows
        if self._prompts:
            return 1
        while self._ends:
            ends_at, _, task = self._ends[0]
            if task.ends_at == ends_at:
                return ends_at - self._iteration
            heappop(self._ends)
        return 0

    def finish(self, num_iterations: int) -> list[SplitwiseTask]:
        """So many iterations have been run. The tasks that ended, decoding ones first; what these reserved is free. The memory of a prompt
        stays until its decoding ends here, or its KV was ``sent``."""
        self._iteration = now = self._iteration + num_iterations
        ended: list[SplitwiseTask] = []
        ends = self._ends
        while ends and ends[0][0] <= now:
            ends_at, _, task = heappop(ends)
            if task.ends_at == ends_at:
                self._leave(task)
                task.num_left = 0
                self.num_used_tokens -= task.num_final  # prompt + 1 and output - 1
                ended.append(task)
        if self._prompts:
            ended += self._prompts
            for task in self._prompts:
                task.num_left = 0
                follower = task.follower
                if follower is not None:
                    task.follower, follower.waits, follower.counted_from = None, False, self._num_selections
                    insort(self._fresh, follower, key=_arrival)
            self._prompts = []
        return ended

    # --- selection ----------------------------------------------------------------------------------------------------------------------

    def _select(self) -> None:
        """Who comes in and who is left out: first who was passed over too often, then prompts, blocked decoding, the decoding of the batch,
        and other decoding by arrival."""
        chosen = _Choice(self)
        for task in self._queue:
            if task.waits or self.num_passed_over(task) < self.limits.max_passed_over or not chosen.has_room(task):
                break
            chosen.take(task)
        for task in self._prompt_queue:
            if not chosen.has_room(task) or not chosen.take(task):
                break
        for task in self._blocked:
            if not chosen.has_room(task):
                break
            chosen.take(task)
        if chosen.num_places < len(self._decoding):
            self.left_out = list(self._decoding)[chosen.num_places :]
        else:
            chosen.keep(len(self._decoding))
            for task in merge(self._fresh, self._prompt_queue, key=_arrival):
                if task not in chosen.tasks and not (chosen.has_room(task) and chosen.take(task)):
                    break
        for task in self.left_out:
            self._block(task)
        self.joined = list(chosen.tasks)
        for task in self.joined:
            self._join(task)
        self._num_selections += 1

    def check_invariants(self) -> None:
        """AssertionError unless queues, batch and sums agree. For tests: slow."""
        waiting = {*self._prompt_queue, *self._blocked, *self._fresh}
        assert len(waiting) == len(self._prompt_queue) + len(self._blocked) + len(self._fresh), "a task waits twice"
        assert waiting == {task for task in self._queue if not task.waits}, "queues differ"
        assert not waiting & {*self._decoding, *self._prompts}, "a task of the batch waits"
        assert self._context_base == sum(task.num_final - task.ends_at for task in self._decoding), "the context is miscounted"
        ends = {(ends_at, task) for ends_at, _, task in self._ends}
        assert all((task.ends_at, task) in ends and task.ends_at >= self._iteration for task in self._decoding), "an end is not foreseen"
        assert 0 <= self.num_used_tokens <= self.num_kv_tokens, f"{self.num_used_tokens} tokens of {self.num_kv_tokens} are reserved"

    def _queue_order(self, task: SplitwiseTask) -> tuple[int, float]:
        return self.num_passed_over(task), task.arrival_s

    def _put_in_queue(self, task: SplitwiseTask) -> None:
        insort(self._queue, task, key=self._queue_order)

    def _take_from_queue(self, task: SplitwiseTask) -> None:
        """By halving where the queue is long and happens to be in order, which it mostly is; else by looking at all."""
        queue = self._queue
        if len(queue) > _LONG_QUEUE:
            place = bisect_left(queue, self._queue_order(task), key=self._queue_order)
            if place < len(queue) and queue[place] is task:
                del queue[place]
                return
        queue.remove(task)

    def _block(self, task: SplitwiseTask) -> None:
        task.num_left = task.ends_at - self._iteration
        self._leave(task)
        task.blocked = True
        self._put_in_queue(task)
        task.counted_from = self._num_selections
        self._blocked[task] = None

    def _leave(self, task: SplitwiseTask) -> None:
        del self._decoding[task]
        self._context_base -= task.num_final - task.ends_at
        task.ends_at = -1

    def _join(self, task: SplitwiseTask) -> None:
        self._take_from_queue(task)
        task.passed_over, task.counted_from = self.num_passed_over(task), None
        if task.blocked:
            task.blocked = False
            del self._blocked[task]
        else:
            self.num_used_tokens += task.num_reserved
            (self._prompt_queue if task.is_prompt else self._fresh).remove(task)
        if task.is_prompt:
            self._prompts.append(task)
            return
        task.ends_at = self._iteration + task.num_left
        self._decoding[task] = None
        self._context_base += task.num_final - task.ends_at
        self._num_entries += 1
        heappush(self._ends, (task.ends_at, self._num_entries, task))


class _Choice:
    """Tasks that come into a batch that is being built, and the room that is left in it."""

    __slots__ = ("_free_tokens", "_limits", "_num_rows", "_num_tasks", "tasks")

    def __init__(self, machine: SplitwiseMachine) -> None:
        self.tasks: dict[SplitwiseTask, None] = {}
        self._limits = machine.limits
        self._num_tasks = 0
        self._num_rows = 0
        self._free_tokens = machine.num_kv_tokens - machine.num_used_tokens

    @property
    def num_places(self) -> int:
        """Tasks of one row that still fit."""
        return max(min(self._limits.max_tasks - self._num_tasks, self._limits.max_tokens - self._num_rows), 0)

    def keep(self, num_tasks: int) -> None:
        """So many decoding tasks of the batch stay in it."""
        self._num_tasks += num_tasks
        self._num_rows += num_tasks

    def has_room(self, task: SplitwiseTask) -> bool:
        """By tasks and rows; the first fits whatever its size."""
        if self._num_tasks == 0:
            return self._limits.max_tasks > 0
        return self._num_tasks < self._limits.max_tasks and self._num_rows + task.num_rows <= self._limits.max_tokens

    def take(self, task: SplitwiseTask) -> bool:
        """False, and it stays out, when there is no memory for it (a blocked one has kept its own). One that is in is not taken twice."""
        if task in self.tasks:
            return True
        if not task.blocked:
            if task.num_reserved > self._free_tokens:
                return False
            self._free_tokens -= task.num_reserved
        self.tasks[task] = None
        self._num_tasks += 1
        self._num_rows += task.num_rows
        return True
