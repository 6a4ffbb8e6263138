"""The rules of a machine of the public cluster simulator: each by itself, and all of them against a slow twin."""

from __future__ import annotations

import random

import pytest

from octavo.core.policies.splitwise import SplitwiseLimits, SplitwiseMachine, SplitwiseTask
from tests.core.splitwise_twin import TwinMachine, TwinTask


def prompt_of(num_prompt: int, num_output: int = 4, arrival_s: float = 0.0) -> SplitwiseTask:
    return SplitwiseTask(None, arrival_s, True, num_prompt, num_output)


def decoding_of(num_prompt: int, num_output: int, arrival_s: float = 0.0) -> SplitwiseTask:
    return SplitwiseTask(None, arrival_s, False, num_prompt, num_output)


def machine_of(num_kv_tokens: float = 10_000, max_tasks: int = 4, max_tokens: int = 20, max_passed_over: int = 4) -> SplitwiseMachine:
    return SplitwiseMachine(num_kv_tokens, SplitwiseLimits(max_tasks, max_tokens, max_passed_over))


def receive(machine: SplitwiseMachine, task: SplitwiseTask) -> bool:
    """Decoding whose prompt was computed elsewhere."""
    assert machine.receive(task.num_final - task.num_reserved)
    return machine.add(task)


def test_a_block_lasts_until_its_first_sequence_ends() -> None:
    machine = machine_of()
    long, short = decoding_of(5, 10), decoding_of(7, 4)
    assert receive(machine, long)
    assert machine.build() == 9
    assert receive(machine, short)  # fits beside it: the block ends at the next boundary
    machine.finish(2)
    assert machine.build() == 3
    assert machine.num_context == 5 + 1 + 2 + 7 + 1
    assert machine.finish(3) == [short]
    assert machine.build() == 4
    assert machine.num_context == 5 + 1 + 5
    assert machine.finish(4) == [long]
    assert machine.build() == 0
    assert machine.is_idle
    assert machine.num_used_tokens == 0


def test_a_prompt_of_any_length_runs_alone_and_blocks_decoding_without_cost() -> None:
    machine = machine_of()
    decoding = decoding_of(5, 10)
    receive(machine, decoding)
    assert machine.build() == 9
    prompt, follower = prompt_of(21), decoding_of(21, 4)
    assert not machine.add(prompt)  # too long to cut the block itself
    assert machine.add(follower, behind=prompt)  # counts one token, and does
    machine.finish(1)
    assert machine.build() == 1
    assert (machine.batch, machine.left_out) == ([prompt], [decoding])
    assert machine.finish(1) == [prompt]
    assert machine.build() == 3
    assert machine.batch == [decoding, follower]
    assert machine.num_context == 5 + 1 + 1 + 21 + 1


def test_prompts_join_in_order_until_the_rows_are_full() -> None:
    machine = machine_of()
    first, second, third = prompt_of(10, arrival_s=1.0), prompt_of(11, arrival_s=2.0), prompt_of(2, arrival_s=3.0)
    assert machine.add(first)
    assert machine.build() == 1
    assert not machine.add(second)  # this iteration is the last of its block anyway
    assert not machine.add(third)
    machine.finish(1)
    assert machine.build() == 1
    assert machine.batch == [second, third]


def test_the_head_is_not_overtaken_by_a_prompt_that_would_fit() -> None:
    machine = machine_of()
    first, second, third = prompt_of(10, arrival_s=1.0), prompt_of(11, arrival_s=2.0), prompt_of(2, arrival_s=3.0)
    for task in (first, second, third):
        machine.add(task)
    machine.build()
    assert machine.batch == [first]


def test_who_was_passed_over_four_times_comes_before_prompts() -> None:
    machine = machine_of(max_tokens=8)
    waiting, prompts = decoding_of(5, 3, arrival_s=0.0), [prompt_of(8, arrival_s=1.0 + i) for i in range(6)]
    receive(machine, waiting)
    for prompt in prompts:
        machine.add(prompt)
    for prompt in prompts[:4]:
        machine.build()
        assert machine.batch == [prompt]
        machine.finish(1)
    machine.build()
    assert machine.batch == [waiting]


@pytest.mark.parametrize("room, starts", [(13, True), (12, False)])
def test_memory_is_reserved_whole(room: int, starts: bool) -> None:
    """4 + 1 for the prompt, 9 - 1 for its decoding."""
    machine = machine_of(num_kv_tokens=room)
    prompt, decoding = prompt_of(4, 9), decoding_of(4, 9)
    machine.add(prompt)
    machine.build()
    machine.add(decoding, behind=prompt)
    machine.finish(1)
    machine.build()
    assert (machine.batch == [decoding]) is starts
    assert machine.num_used_tokens == (13 if starts else 5)


def test_kv_that_does_not_fit_is_not_received() -> None:
    machine = machine_of(num_kv_tokens=10)
    assert machine.receive(7)
    assert not machine.receive(4)
    assert machine.num_used_tokens == 7
    assert not machine.sent(7)  # nobody waits
    assert machine.receive(10)


def test_a_stalled_machine_starts_when_what_it_sent_makes_room() -> None:
    machine = machine_of(num_kv_tokens=10)
    first, second = prompt_of(6), prompt_of(7)
    machine.add(first)
    machine.build()
    machine.finish(1)
    assert not machine.add(second)
    assert machine.build() == 0
    assert machine.is_idle
    assert machine.sent(7)
    assert machine.build() == 1


def test_an_answer_of_one_token_takes_no_iteration() -> None:
    machine = machine_of()
    one, other = decoding_of(5, 1), decoding_of(5, 3)
    receive(machine, one)
    assert machine.build() == 0
    assert not machine.is_idle
    receive(machine, other)
    assert machine.finish(0) == [one]
    assert machine.build() == 2


class Pair:
    """The machine and its twin, told the same things. One iteration takes one second of a clock that both share."""

    def __init__(self, rng: random.Random) -> None:
        room, max_tasks = rng.choice([40, 80, 200]), rng.choice([1, 3, 8])
        max_tokens, passed = rng.choice([6, 12, 30]), rng.choice([1, 2, 4])
        self.machine = SplitwiseMachine(room, SplitwiseLimits(max_tasks, max_tokens, passed))
        self.twin = TwinMachine(room, max_tasks, max_tokens, passed)
        self.left = 0  # iterations of the machine's block
        self.is_due = True  # the machine builds at the next boundary
        self.numbers: dict[SplitwiseTask, int] = {}
        self.prompts_here: list[TwinTask] = []  # ended, their KV not sent yet

    def add(self, arrival_s: float, num_prompt: int, num_output: int, kind: str) -> None:
        prompt: tuple[SplitwiseTask | None, TwinTask | None] = (None, None)
        if kind == "sent here":
            fits = self.machine.receive(num_prompt + 1)
            assert fits == (self.twin.used + num_prompt + 1 <= self.twin.num_kv_tokens)
            if not fits:
                return
            self.twin.received += num_prompt + 1
        else:
            prompt = self._add(arrival_s, True, num_prompt, num_output, (None, None))
        if kind != "prompt":
            self._add(arrival_s, False, num_prompt, num_output, prompt)

    def _add(
        self, arrival_s: float, is_prompt: bool, num_prompt: int, num_output: int, behind: tuple[SplitwiseTask | None, TwinTask | None]
    ) -> tuple[SplitwiseTask, TwinTask]:
        task = SplitwiseTask(None, arrival_s, is_prompt, num_prompt, num_output)
        twin = TwinTask(len(self.numbers), arrival_s, is_prompt, num_prompt, num_output, behind[1])
        self.numbers[task] = twin.number
        if self.machine.add(task, behind[0]):
            self.left, self.is_due = 0, True
        self.twin.add(twin)
        return task, twin

    def sent(self, rng: random.Random) -> None:
        task = self.prompts_here.pop(rng.randrange(len(self.prompts_here)))
        if self.machine.sent(task.tokens):
            self.left, self.is_due = 0, True
        self.twin.sent(task.tokens)

    def iterate(self) -> None:
        """A boundary, and the iteration behind it."""
        self.machine.check_invariants()
        if self.is_due:
            self.left = self.machine.build()
        self.twin.boundary()
        decoding_first = sorted(self.twin.batch, key=lambda task: task.is_prompt)
        assert [self.numbers[task] for task in self.machine.batch] == [task.number for task in decoding_first]
        assert self.machine.num_used_tokens == self.twin.used
        assert self.machine.num_context == self.twin.context
        self.is_due = False
        if self.machine.is_idle:
            return
        self.left -= 1
        ended = self.machine.finish(1)
        twins = self.twin.iterate()
        assert sorted(self.numbers[task] for task in ended) == sorted(task.number for task in twins)
        self.is_due = self.left <= 0
        self.prompts_here += [task for task in twins if task.is_prompt and not any(other.behind is task for other in self.twin.tasks)]


@pytest.mark.parametrize("seed", range(40))
def test_against_the_twin(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(rng)
    for now in range(120):
        for part in range(rng.choice([0, 0, 1, 1, 2])):
            kind = rng.choice(["both", "both", "prompt", "sent here"])
            pair.add(now + part / 4, rng.choice([1, 2, 4, 9, 15]), rng.randint(2, 9), kind)
        if pair.prompts_here and rng.random() < 0.5:
            pair.sent(rng)
        pair.iterate()
