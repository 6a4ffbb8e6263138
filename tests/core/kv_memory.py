"""A backend without a model: its KV memory remembers what was written where, and every token is a hash of what is read back through the
block table. A block that is stale, missing, foreign or written by two gives another token, so equal texts prove the paging right.

``plain_run`` makes the same tokens from the same rule without any paging: the truth that a run is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.core.request import FinishReason, Request, derive_seed
from octavo.core.step import BlockCopy, BlockMove, SequenceSlice, SliceResult, SlotOpen, StepPlan, StepResult, TokenLogprobs

EOS = 3
VOCAB = 4  # tokens 0, 1, 2 and EOS: prompts of so few tokens share prefixes all the time


UNWRITTEN = -1


def digest(kind: int, numbers: list[int]) -> int:
    """64 bits that depend on every number and its place. (The hash of a tuple of ints is fast, and the same in every process.)"""
    value = hash((kind, *numbers))
    return (value * 0x9E3779B97F4A7C15 >> 7) & 0xFFFFFFFFFFFFFFFF


def kv_entry(read: list[int], token: int) -> int:
    """What a row stores: a function of its token and of all that it read, hence of its position too."""
    return digest(token, read)


def draw(read: list[int], seed: int, output: list[int]) -> tuple[int, float]:
    """The next token and its 'log-probability': functions of everything read from the cache, the seed, and the sampling state."""
    value = digest(digest(seed, output), read)
    return (EOS if value % 12 == 0 else value // 16 % 3), -(value % 1000) / 100.0


@dataclass
class SlotState:
    seed: int
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    beams: bool = False  # rows name the best tokens of the whole vocabulary


class KVMemoryBackend:
    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.memory = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self.host = [[UNWRITTEN] * block_size for _ in range(num_host_blocks)]
        self.slots: dict[int, SlotState] = {}
        self.num_rows = 0
        self.failed = False  # whether the last step has: then the next may close what is not open

    def fail(self, plan: StepPlan, num_slots: int) -> None:
        """Execute a step that fails after the first ``num_slots`` of its closes and opens."""
        self.failed = True
        self._move_slots(plan.slot_closes[:num_slots], plan.slot_opens[: max(0, num_slots - len(plan.slot_closes))])

    def _move_slots(self, closes: list[int], opens: list[SlotOpen]) -> None:
        for slot in closes:
            assert slot in self.slots or self.failed, f"slot {slot} is closed and was not open"
            self.slots.pop(slot, None)
        for opened in opens:
            assert opened.slot not in self.slots, f"slot {opened.slot} is opened twice"
            beams = opened.params.beam is not None
            self.slots[opened.slot] = SlotState(opened.seed, list(opened.prompt_token_ids), list(opened.output_token_ids), beams)

    def execute(self, plan: StepPlan) -> StepResult:
        self._move_slots(plan.slot_closes, plan.slot_opens)
        self.failed = False
        for move in plan.block_saves:
            self._save(move)
        assert len({(move.pool_block, *move.pages) for move in plan.block_loads}) == len(plan.block_loads), "a block is loaded twice"
        afters = [move.after_copies for move in plan.block_loads]
        assert afters == sorted(afters) and all(0 <= after <= len(plan.block_copies) for after in afters)
        for loads, copies in plan.loads_and_copies():
            for move in loads:
                self._load(move)
            for copy in copies:
                self._copy(copy)
        # One forward pass: nobody sees what another slice of the same step writes.
        writes: dict[tuple[int, int], int] = {}
        results = [self._run(piece, writes) for piece in plan.slices]
        for (block, offset), entry in writes.items():
            self._write(block, offset, entry)
        return StepResult(plan.step_index, results, seconds=0.001)

    def _save(self, move: BlockMove) -> None:
        self.host[move.host_block] = list(self.memory[move.pool_block])

    def _load(self, move: BlockMove) -> None:
        self.memory[move.pool_block] = list(self.host[move.host_block])

    def _copy(self, copy: BlockCopy) -> None:
        self.memory[copy.dst_block] = list(self.memory[copy.src_block])

    def read_host(self, host_block: int) -> Any:
        assert UNWRITTEN not in self.host[host_block]
        return list(self.host[host_block])

    def write_host(self, host_block: int, contents: Any) -> None:
        self.host[host_block] = list(contents)

    def _write(self, block: int, offset: int, entry: int) -> None:
        self.memory[block][offset] = entry

    def _run(self, piece: SequenceSlice, writes: dict[tuple[int, int], int]) -> SliceResult:
        size, table = self.block_size, piece.block_table
        read = [self.memory[table[p // size]][p % size] for p in range(piece.start)]
        result = SliceResult()
        if piece.prompt_logprobs is not None:
            result.prompt_logprobs = []
        for i, token in enumerate(piece.token_ids):
            position = piece.start + i
            place = (table[position // size], position % size)
            assert place not in writes, f"two slices write block {place[0]}"
            writes[place] = kv_entry(read, token)
            read.append(writes[place])
            self.num_rows += 1
            if i < len(piece.next_token_ids):
                assert result.prompt_logprobs is not None
                result.prompt_logprobs.append(logprobs_of(piece.next_token_ids[i], prompt_value(read)))
        assert len(piece.sample_slots) == piece.num_samples - piece.num_drafts
        for slot in piece.sample_slots:
            for i in range(piece.num_drafts, -1, -1):
                token = self._draw(piece, read[: len(read) - i], self.slots[slot], result)
                if i and token != piece.token_ids[piece.num_tokens - i]:
                    break
        return result

    def _draw(self, piece: SequenceSlice, read: list[int], state: SlotState, result: SliceResult) -> int:
        token, value = draw(read, state.seed, state.output)
        state.output.append(token)
        result.token_ids.append(token)
        if piece.logprobs is not None and state.beams:
            result.logprobs = [*(result.logprobs or []), best_tokens(read, piece.logprobs)]
        elif piece.logprobs is not None:
            result.logprobs = [*(result.logprobs or []), logprobs_of(token, value)]
        return token


def prompt_value(read: list[int]) -> float:
    return -(digest(-5, read) % 1000) / 100.0


def logprobs_of(token: int, value: float) -> TokenLogprobs:
    return TokenLogprobs(token, value, 1, [token], [value])


def best_tokens(read: list[int], k: int) -> TokenLogprobs:
    """The k best of all tokens, by values that depend on everything read."""
    values = [-(digest(token, read) % 30 + 1) / 8 for token in range(VOCAB)]  # few values, exact in binary: many ties
    order = sorted(range(VOCAB), key=lambda token: (-values[token], token))[:k]
    return TokenLogprobs(order[0], values[order[0]], 1, order, [values[token] for token in order])


@dataclass
class Text:
    """What a client gets of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


def text_stop(request: Request, output: list[int]) -> str | None:
    """Stop strings over a toy text in which token t is the digit t. ``output`` ends with the token that was just drawn."""
    if len(output) <= request.params.min_tokens:
        return None
    text = "".join(map(str, output))
    return next((stop for stop in request.params.stop if text.endswith(stop)), None)


def plain_run(request: Request, choice: int, max_total: int) -> Text:
    """One choice alone, with no cache at all. ``max_total``: most tokens of the sequence."""
    params, text = request.params, Text()
    read: list[int] = []
    for i, token in enumerate(request.prompt_token_ids):
        read.append(kv_entry(read, token))
        if params.prompt_logprobs is not None and choice == 0 and i + 1 < len(request.prompt_token_ids):
            text.prompt_logprobs.append(prompt_value(read))
    eos = () if params.ignore_eos else request.eos_token_ids
    limit = min(max_total - len(request.prompt_token_ids), params.max_tokens if params.max_tokens is not None else max_total)
    while text.finish_reason is None and len(text.token_ids) < limit:
        token, value = draw(read, derive_seed(request.seed, choice), text.token_ids)
        text.token_ids.append(token)
        if params.logprobs is not None:
            text.logprobs.append(value)
        stop = text_stop(request, text.token_ids)
        if stop is not None:
            text.finish_reason, text.stop_reason = FinishReason.STOP, stop
        elif len(text.token_ids) > params.min_tokens and token in eos:
            text.finish_reason = FinishReason.STOP
        elif len(text.token_ids) > params.min_tokens and token in params.stop_token_ids:
            text.finish_reason, text.stop_reason = FinishReason.STOP, token
        read.append(kv_entry(read, token))
    text.finish_reason = text.finish_reason or FinishReason.LENGTH
    return text
