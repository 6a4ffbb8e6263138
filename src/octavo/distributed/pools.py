"""Which machines get a request, by the rules of the public cluster simulator of Splitwise (Patel et al., ISCA 2024): pure bookkeeping.

    assign ─▶ (prompt machine, decode machine)      prompt_ended / decode_ended / kv_freed / drained keep the books

Owns what has been assigned to each machine and not yet done, and which pool it is in. Never looks inside a machine but for whether prompts
wait there, moves no blocks, and reads no clock. ``FewestPendingTokens`` is for machines that run both phases; ``MixedPools`` for a prompt
pool and a token pool that lend each other machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

MAX_PENDING_TOKENS = 8192  # of a prompt machine with a queue; beyond it another pool is asked


class PoolMachine:
    """The books of one machine. ``num_waiting`` tells how many tasks wait there; ``num_kv_tokens``: whose KV fits."""

    __slots__ = ("index", "is_mixed", "is_prompt", "num_kv_tokens", "num_pending", "num_reserved", "num_waiting")

    def __init__(self, index: int, is_prompt: bool, num_kv_tokens: float, num_waiting: Callable[[], int]) -> None:
        self.index = index
        self.is_prompt = is_prompt  # its home is the prompt pool
        self.num_kv_tokens = num_kv_tokens
        self.num_waiting = num_waiting
        self.is_mixed = False
        self.num_pending = 0  # prompt tokens of unfinished prompts + 1 for each unfinished decoding
        self.num_reserved = 0  # KV tokens of all requests assigned here, whole


class PoolRule(Protocol):
    """Chooses machines and keeps the books of what it assigned."""

    def assign(self, num_prompt: int, num_output: int) -> tuple[PoolMachine, PoolMachine]:
        """The machines for prompt and decoding of a request; the same one twice: its KV stays there."""
        ...

    def drained(self, machine: PoolMachine) -> None:
        """An iteration boundary found ``machine`` with nothing to do."""
        ...


def prompt_ended(machine: PoolMachine, num_prompt: int) -> None:
    machine.num_pending -= num_prompt


def decode_ended(machine: PoolMachine) -> None:
    machine.num_pending -= 1


def kv_freed(machine: PoolMachine, num_tokens: int) -> None:
    """KV that was assigned to ``machine`` is no longer there: it was sent on, or its request ended."""
    machine.num_reserved -= num_tokens


def _pending(machine: PoolMachine) -> int:
    return machine.num_pending


def _reserved(machine: PoolMachine) -> int:
    return machine.num_reserved


class FewestPendingTokens:
    """``token_jsq``: both phases on the machine with the fewest pending tokens, the first of equals."""

    def __init__(self, machines: Iterable[PoolMachine]) -> None:
        self._machines = list(machines)

    def assign(self, num_prompt: int, num_output: int) -> tuple[PoolMachine, PoolMachine]:
        machine = min(self._machines, key=_pending)
        machine.num_pending += num_prompt + 1
        machine.num_reserved += num_prompt + num_output
        return machine, machine

    def drained(self, machine: PoolMachine) -> None:
        pass


class MixedPools:
    """``mixed_pool``: prompts go to the prompt pool and decoding to the token pool. A machine that is asked for what its pool is not for
    becomes mixed, and goes home when it has drained.

    Prompt: the fewest pending tokens of the prompt pool, unless tasks wait there and the prompt would bring it above
    ``max_pending_tokens``; then the mixed pool by the same test; then the token machine with the fewest pending tokens becomes mixed.
    Decoding: the least reserved KV of the token pool, unless the request would fill it; then the mixed pool; then the prompt machine with
    the least reserved KV becomes mixed. When there is none left to take, both phases go to the one of all with the fewest pending tokens.
    """

    def __init__(self, machines: Iterable[PoolMachine], max_pending_tokens: int = MAX_PENDING_TOKENS) -> None:
        machines = list(machines)
        self.prompt_pool = [machine for machine in machines if machine.is_prompt]
        self.token_pool = [machine for machine in machines if not machine.is_prompt]
        self.mixed_pool: list[PoolMachine] = []
        self._max_pending_tokens = max_pending_tokens

    def assign(self, num_prompt: int, num_output: int) -> tuple[PoolMachine, PoolMachine]:
        prompt = self._prompt_machine(self.prompt_pool, num_prompt) or self._prompt_machine(self.mixed_pool, num_prompt)
        num_final = num_prompt + num_output
        token = self._token_machine(self.token_pool, num_final) or self._token_machine(self.mixed_pool, num_final)
        if prompt is None and self.token_pool:
            prompt = self._lend(self.token_pool, min(self.token_pool, key=_pending))
        if token is None and self.prompt_pool:
            token = self._lend(self.prompt_pool, min(self.prompt_pool, key=_reserved))
        if prompt is None or token is None:
            prompt = token = min([*self.prompt_pool, *self.mixed_pool, *self.token_pool], key=_pending)
        if prompt is not token:
            prompt.num_reserved += num_prompt + 1
        token.num_reserved += num_final
        prompt.num_pending += num_prompt
        token.num_pending += 1
        return prompt, token

    def drained(self, machine: PoolMachine) -> None:
        if machine.is_mixed:
            machine.is_mixed = False
            self.mixed_pool.remove(machine)
            (self.prompt_pool if machine.is_prompt else self.token_pool).append(machine)

    def _prompt_machine(self, pool: list[PoolMachine], num_prompt: int) -> PoolMachine | None:
        if not pool:
            return None
        machine = min(pool, key=_pending)
        is_long = machine.num_pending + num_prompt > self._max_pending_tokens and machine.num_waiting() > 0
        return None if is_long else machine

    def _token_machine(self, pool: list[PoolMachine], num_final: int) -> PoolMachine | None:
        if not pool:
            return None
        machine = min(pool, key=_reserved)
        return None if machine.num_reserved + num_final >= machine.num_kv_tokens else machine

    def _lend(self, pool: list[PoolMachine], machine: PoolMachine) -> PoolMachine:
        pool.remove(machine)
        self.mixed_pool.append(machine)
        machine.is_mixed = True
        return machine
