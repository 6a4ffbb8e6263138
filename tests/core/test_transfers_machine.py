"""Random lives of two schedulers that hand over both ways, block by block and beside steps: every text equals its plain run.

What is copied goes into memories that remember what was written where, so that a block that was freed too early, copied too late or read
before it came gives another token. With window layers only what the receiver will ever read is copied, page by page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.request import ParameterError, Request
from octavo.core.step import TokenEvent
from tests.core.harness import Harness, make_request
from tests.core.kv_memory import plain_run
from tests.core.page_memory import PageMemoryBackend
from tests.core.test_kv_groups_machine import PAGES


@dataclass
class Side:
    """One engine. Text stops are not made: requests have none."""

    harness: Harness

    def begin(self) -> None:
        scheduler, backend = self.harness.scheduler, self.harness.backend
        plan = scheduler.plan()
        if plan is not None:
            self.harness.pending = backend.execute(plan)

    def finish(self) -> list[TokenEvent]:
        result, self.harness.pending = self.harness.pending, None
        assert result is not None
        return self.harness.scheduler.apply(result)


@dataclass
class Move:
    """A hand-off: ``sent`` leading blocks are copied. ``tokens``: once the request is offered."""

    request: Request
    sender: int
    num_tokens: int
    blocks: list[int] | None = None  # of the receiver, while reserved
    tokens: list[int] | None = None
    sent: int = 0


class HandoverMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.none() | PAGES,
        num_blocks=st.tuples(st.integers(4, 12), st.integers(4, 12)),
        block_size=st.sampled_from([1, 3, 4]),
        max_num_seqs=st.integers(2, 5),
        budget=st.integers(4, 14),
        caching=st.booleans(),
        lookahead=st.sampled_from([1, 8]),
        granularity=st.sampled_from(["block", "token"]),
        preemption=st.sampled_from(["recompute", "swap"]),
        num_host_blocks=st.sampled_from([0, 12]),
    )
    def start(self, num_blocks: tuple[int, int], caching: bool, granularity: str, **sizes: Any) -> None:
        granularity = granularity if caching else "block"
        self.sides = [Side(Harness(num, caching=caching, granularity=granularity, **sizes)) for num in num_blocks]
        self.requests: dict[str, Request] = {}
        self.drawn: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.moves: list[Move] = []

    # --- requests and steps

    @rule(place=st.integers(0, 1), prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20), max_tokens=st.integers(1, 12),
          seed=st.integers(0, 2), data=st.data())  # fmt: skip
    def add(self, place: int, prompt: list[int], max_tokens: int, seed: int, data: st.DataObject) -> None:
        if self.requests and data.draw(st.booleans(), label="repeat an earlier prompt"):
            prompt = self.requests[data.draw(st.sampled_from(sorted(self.requests)))].prompt_token_ids + prompt[:2]
        request = make_request(f"r{len(self.requests)}", prompt, seed, max_tokens=max_tokens)
        scheduler = self.sides[place].harness.scheduler
        if len(prompt) + max_tokens > min(side.harness.scheduler.limits.max_total_tokens for side in self.sides):
            return
        scheduler.add(request)
        self.requests[request.request_id], self.drawn[request.request_id] = request, []
        if data.draw(st.booleans(), label="hand over"):
            self.moves.append(Move(request, place, len(prompt)))

    @rule(place=st.integers(0, 1))
    def begin(self, place: int) -> None:
        if self.sides[place].harness.pending is None:
            self.sides[place].begin()

    @rule(place=st.integers(0, 1))
    def finish(self, place: int) -> None:
        if self.sides[place].harness.pending is not None:
            self.take(place, self.sides[place].finish())

    def take(self, place: int, events: list[TokenEvent]) -> None:
        for event in events:
            self.drawn[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                self.ended.add(event.request_id)
        for move in [m for m in self.moves if m.sender == place and m.tokens is None]:
            name = move.request.request_id
            if name in self.ended:
                self.give_up(move)
            elif self.drawn[name]:
                move.tokens = self.transfers(place).offer(name)
                assert move.tokens == self.drawn[name], "it decoded further"

    def transfers(self, place: int) -> Any:
        return self.sides[place].harness.scheduler.transfers

    # --- hand-offs

    @precondition(lambda self: self.moves)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        move = data.draw(st.sampled_from(self.moves))
        if move.blocks is None:
            try:
                move.blocks = self.transfers(1 - move.sender).reserve(move.request, move.num_tokens)
            except ParameterError as error:
                assert error.param == "output_token_ids" and move.request.params.max_tokens == 1

    @precondition(lambda self: any(move.blocks is not None for move in self.moves))
    @rule(data=st.data(), most=st.integers(1, 6))
    def copy(self, data: st.DataObject, most: int) -> None:
        move = data.draw(st.sampled_from([m for m in self.moves if m.blocks is not None]))
        seq = self.transfers(move.sender).sender_sequence(move.request.request_id)
        if seq is None:
            return
        size = self.sides[0].harness.backend.block_size
        whole = seq.num_computed >= move.num_tokens
        ready = -(-move.num_tokens // size) if whole else min(seq.num_computed, move.num_tokens) // size
        while move.sent < ready and most:
            self.copy_block(move, seq.block_table[move.sent], move.blocks[move.sent], move.sent)
            move.sent, most = move.sent + 1, most - 1

    def copy_block(self, move: Move, src: int, dst: int, number: int) -> None:
        backends = [self.sides[place].harness.backend for place in (move.sender, 1 - move.sender)]
        backends[1].memory[dst] = list(backends[0].memory[src])
        if not isinstance(backends[0], PageMemoryBackend):
            return
        layout, pages = backends[0].layout, []
        for place, block in ((move.sender, src), (1 - move.sender, dst)):
            pages.append(self.transfers(place).pages_of([block], layout.num_pages))
        assert layout.window is not None
        passed = max(0, move.num_tokens - layout.window + 1) // backends[0].block_size
        for column in range(layout.num_pages if number >= passed else layout.num_full):
            backends[1].pages[pages[1][column]][:] = backends[0].pages[pages[0][column]]

    @precondition(lambda self: any(move.tokens is not None for move in self.moves))
    @rule(data=st.data(), exact=st.booleans())
    def settle(self, data: st.DataObject, exact: bool) -> None:
        move = data.draw(st.sampled_from([m for m in self.moves if m.tokens is not None]))
        name, size = move.request.request_id, self.sides[0].harness.backend.block_size
        if move.blocks is not None and move.sent == -(-move.num_tokens // size):
            self.transfers(1 - move.sender).begin(name, move.tokens, exact)
            self.transfers(move.sender).release(name)
            self.moves.remove(move)
        elif data.draw(st.booleans(), label="give up"):
            self.give_up(move)

    @precondition(lambda self: self.moves)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.give_up(data.draw(st.sampled_from(self.moves)))

    def give_up(self, move: Move) -> None:
        if move.blocks is not None:
            self.transfers(1 - move.sender).cancel(move.request.request_id)
        if move.tokens is not None:
            self.transfers(move.sender).resume(move.request.request_id)
        self.moves.remove(move)

    @invariant()
    def books_balance(self) -> None:
        for side in getattr(self, "sides", ()):
            side.harness.check()

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        for move in list(self.moves):
            self.give_up(move)
        for place, side in enumerate(self.sides):
            for _ in range(2000):
                if side.harness.pending is None:
                    side.begin()
                if side.harness.pending is None:
                    break
                self.take(place, side.finish())
                side.harness.check()
            assert not side.harness.scheduler.has_work and side.harness.scheduler.num_used_blocks == 0
        assert self.ended == set(self.requests)
        for name, request in self.requests.items():
            limit = self.sides[0].harness.scheduler.limits.max_total_tokens
            assert self.drawn[name] == plain_run(request, 0, limit).token_ids, name


HandoverMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestHandovers = HandoverMachine.TestCase
