"""The public simulator's machine once more, slow and obvious: one iteration at a time, everything counted afresh from the requests.

No heaps, no running sums, no queues by kind: a request is a record of how far it is, and every list is made by looking at all of them.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass


@dataclass(eq=False)
class TwinTask:
    number: int
    arrival_s: float
    is_prompt: bool
    num_prompt: int
    num_output: int
    behind: TwinTask | None = None  # its prompt, where that is here
    done: int = 0  # iterations
    started: bool = False
    passed_over: int = 0

    @property
    def length(self) -> int:
        return 1 if self.is_prompt else self.num_output - 1

    @property
    def ended(self) -> bool:
        return self.started and self.done == self.length

    @property
    def rows(self) -> int:
        return self.num_prompt if self.is_prompt else 1

    @property
    def tokens(self) -> int:
        return self.num_prompt + 1 if self.is_prompt else self.num_output - 1


class TwinMachine:
    def __init__(self, num_kv_tokens: float, max_tasks: int, max_tokens: int, max_passed_over: int) -> None:
        self.num_kv_tokens, self.max_tasks, self.max_tokens, self.max_passed_over = num_kv_tokens, max_tasks, max_tokens, max_passed_over
        self.tasks: list[TwinTask] = []
        self.batch: list[TwinTask] = []
        self.queue: list[TwinTask] = []
        self.blocked: list[TwinTask] = []
        self.received = 0  # KV that was sent here, less what decoding that ended gave back of it
        self.sent_away = 0
        self.batch_rows = 0
        self.rebuild = True

    @property
    def used(self) -> int:
        held = 0
        for task in self.tasks:
            partner_ended = any(other.behind is task and other.ended for other in self.tasks)
            if task.started and not task.is_prompt and not task.ended:
                held += task.tokens
            if task.started and task.is_prompt and not partner_ended:
                held += task.tokens
        return held + self.received - self.sent_away

    @property
    def context(self) -> int:
        return sum(task.num_prompt + 1 + task.done for task in self.batch if not task.is_prompt)

    def add(self, task: TwinTask) -> None:
        self.tasks.append(task)
        self._queue(task)
        if not self.batch:
            self.rebuild = self.rebuild or self.used + task.tokens <= self.num_kv_tokens
            return
        fits_beside_all = len(self.batch) < self.max_tasks and self.batch_rows + task.rows <= self.max_tokens
        fits_beside_prompts = task.is_prompt and task.rows <= self.max_tokens and not any(other.is_prompt for other in self.batch)
        self.rebuild = self.rebuild or fits_beside_all or fits_beside_prompts

    def sent(self, tokens: int) -> None:
        self.sent_away += tokens
        if not self.queue:
            return
        if not self.batch:
            self.rebuild = self.rebuild or self.used + self.queue[0].tokens <= self.num_kv_tokens
        elif len(self.batch) < self.max_tasks and self.batch_rows < self.max_tokens:
            self.rebuild = True

    def _queue(self, task: TwinTask) -> None:
        insort(self.queue, task, key=lambda other: (other.passed_over, other.arrival_s))

    def boundary(self) -> None:
        """The batch of the next iteration, in ``batch``."""
        if not self.rebuild:
            return
        old, new, used = self.batch, list[TwinTask](), self.used

        def is_full(task: TwinTask) -> bool:
            if len(new) == self.max_tasks:
                return True
            return bool(new) and sum(other.rows for other in new) + task.rows > self.max_tokens

        def fits(task: TwinTask) -> bool:
            return task.started or used + sum(other.tokens for other in new if not other.started) + task.tokens <= self.num_kv_tokens

        for task in self.queue:
            if task.passed_over < self.max_passed_over or is_full(task):
                break
            if fits(task):
                new.append(task)
        for task in [task for task in self.tasks if task.is_prompt and not task.started]:
            if is_full(task) or (task not in new and not fits(task)):
                break
            if task not in new:
                new.append(task)
        for task in self.blocked + old:
            if is_full(task):
                break
            if task not in new:
                new.append(task)
        live = [task for task in self.tasks if not task.ended and (task.behind is None or task.behind.ended)]
        for task in sorted(live, key=lambda task: task.arrival_s):
            if task in new:
                continue
            if is_full(task) or not fits(task):
                break
            new.append(task)
        self._take(old, new)
        for task in live:
            task.passed_over += task not in self.batch

    def _take(self, old: list[TwinTask], new: list[TwinTask]) -> None:
        for task in old:
            if task not in new:
                self._queue(task)
                self.blocked.append(task)
        self.batch = [task for task in old if task in new]
        for task in new:
            if task not in old:
                self.queue.remove(task)
                if task in self.blocked:
                    self.blocked.remove(task)
                task.started = True
                self.batch.append(task)
        self.batch_rows = sum(task.rows for task in self.batch)
        self.rebuild = any(task.is_prompt for task in self.batch)  # an idle machine waits to be told

    def iterate(self) -> list[TwinTask]:
        """Run the batch once; who ended."""
        for task in self.batch:
            task.done += 1
        ended = [task for task in self.batch if task.ended]
        self.batch = [task for task in self.batch if not task.ended]
        self.rebuild = self.rebuild or bool(ended)
        for task in ended:
            if not task.is_prompt and task.behind is None:
                self.received -= task.num_prompt + 1
        return ended
