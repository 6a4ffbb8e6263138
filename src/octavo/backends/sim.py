"""A backend that computes nothing: it draws placeholder tokens and asks a cost model how long the step would have taken.

Everything above it, the loop, the scheduler, the KV manager and the speculator, is the engine's own. Owns the seeds of open slots and
nothing else: no weights, no KV, no clock. What cannot be simulated without a model (log-probabilities, beams, masks) is refused.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

from octavo.backends.base import BackendError, KVCapacity
from octavo.core.cost import CostModel, StepShape
from octavo.core.request import MAX_N
from octavo.core.step import SequenceSlice, SliceResult, StepPlan, StepResult

DEFAULT_VOCAB_SIZE = 32_000
_NOTHING_DRAWN = SliceResult()


class TextSource(Protocol):
    """What the sequences of a simulation say. The same with drafts and without, as the text of a model is."""

    def token(self, key: int, position: int) -> int:
        """The token at ``position`` of the sequence whose noise has the seed ``key``."""
        ...


class PlaceholderText:
    """Each sequence repeats one token that its seed names: equal requests of equal seed give equal text, others part at once.

    ``only``: all repeat this one, so that a load can say beforehand what will have been answered.
    """

    def __init__(self, vocab_size: int = DEFAULT_VOCAB_SIZE, only: int | None = None) -> None:
        if only is not None and not 0 <= only < vocab_size:
            raise ValueError(f"only: {only!r} is not allowed; from 0 to {vocab_size - 1}")
        self._vocab_size = vocab_size
        self._only = only

    def token(self, key: int, position: int) -> int:
        return key % self._vocab_size if self._only is None else self._only


class SimBackend:
    """A Backend for ``EngineLoop``. ``cost`` prices plans; ``text`` says what is drawn (None: ``PlaceholderText``).

    ``move_s``: seconds to move one block between the pool and host memory. ``draft_s``: seconds that making a draft takes; both add to
    what ``cost`` says of a step.
    """

    name = "sim"

    def __init__(
        self,
        cost: CostModel,
        max_num_seqs: int,
        text: TextSource | None = None,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        move_s: float = 0.0,
        draft_s: float = 0.0,
    ) -> None:
        self.cost = cost
        self.vocab_size = vocab_size
        self.max_num_slots = max_num_seqs + MAX_N
        self._text = text or PlaceholderText(vocab_size)
        self._says_one_token = isinstance(self._text, PlaceholderText)
        self._move_s = move_s
        self._draft_s = draft_s
        self._keys: dict[int, int] = {}  # slot -> seed of the noise of its sequence

    def kv_capacity(self, memory_bytes: int) -> KVCapacity:
        """Blocks of one byte: the pool of a simulation is told in blocks."""
        return KVCapacity(1, memory_bytes, "none")

    def allocate_kv(self, num_blocks: int) -> None:
        """Nothing to allocate."""

    def allocate_host_kv(self, num_blocks: int) -> None:
        """Nothing to allocate."""

    def fingerprint(self) -> str:
        return "sim"

    def close(self) -> None:
        """Nothing to release."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Placeholder tokens, and the seconds that the cost model names. Raises BackendError for what takes a model."""
        keys = self._keys
        for slot in plan.slot_closes:
            keys.pop(slot, None)
        for entry in plan.slot_opens:
            keys[entry.slot] = entry.seed
        for _, slot, seed in plan.slot_forks:
            keys[slot] = seed
        slices = [self._draw(piece) if piece.num_samples else _nothing_drawn(piece) for piece in plan.slices]
        move_s = self._move_s * plan.num_moves
        return StepResult(plan.step_index, slices, self.cost.seconds(plan) + move_s + self._drafting_s(plan), move_s)

    def _drafting_s(self, plan: StepPlan) -> float:
        return self._draft_s * sum(piece.num_drafts for piece in plan.slices) if self._draft_s else 0.0

    def _draw(self, piece: SequenceSlice) -> SliceResult:
        if piece.logprobs is not None or piece.mask is not None:
            raise BackendError("logprobs and masks are not simulated: they depend on what a model computes")
        position = piece.start + piece.num_tokens - piece.num_drafts  # of the token that is drawn first
        token, keys = self._text.token, self._keys
        if not piece.num_drafts:
            return SliceResult([token(keys[slot], position) for slot in piece.sample_slots])
        key, drawn = keys[piece.sample_slots[0]], list[int]()
        for draft in (*piece.token_ids[-piece.num_drafts :], None):
            drawn.append(token(key, position + len(drawn)))
            if drawn[-1] != draft:
                break
        return SliceResult(drawn)

    def shape_seconds(self, shape: StepShape) -> float:
        """Seconds of a step of this shape; of a cost model that wants to see plans, a guess: as for one sequence."""
        seconds_of = getattr(self.cost, "seconds_of", None)
        if seconds_of is not None:
            seconds: float = seconds_of(shape)
            return seconds
        return self.cost.seconds(StepPlan(-1, [SequenceSlice(0, 0, [0] * shape.num_rows, array("i"), 1, [0])]))

    # --- repeated steps -----------------------------------------------------------------------------------------------------------------

    @property
    def says_one_token(self) -> bool:
        """Whether all tokens of a sequence are the same: then steps that only decode can be taken many at a time."""
        return self._says_one_token

    def token_of(self, slot: int) -> int:
        """What the sequence in an open slot says next, where it says one token."""
        return self._text.token(self._keys[slot], 0)

    def decode_seconds(self, lengths: Seq[int]) -> Iterator[float]:
        """Seconds of the coming steps in which sequences of ``lengths`` known tokens all decode: the first of them, the second, and so on.

        To the bit what ``execute`` would say of each.
        """
        seconds_of = getattr(self.cost, "seconds_of", None)
        if seconds_of is None:
            yield from self._decode_seconds_by_plan(lengths)
            return
        num = len(lengths)
        shape = StepShape(num, num, num, sum(lengths), sum(lengths))
        while True:
            yield seconds_of(shape)
            shape.num_context += num
            shape.num_pairs += num

    def _decode_seconds_by_plan(self, lengths: Seq[int]) -> Iterator[float]:
        """For a cost model that wants to see plans."""
        none = array("i")
        slices = [SequenceSlice(i, length - 1, [0], none, 1, [0]) for i, length in enumerate(lengths)]
        plan = StepPlan(-1, slices)
        while True:
            yield self.cost.seconds(plan)
            for piece in slices:
                piece.start += 1


def _nothing_drawn(piece: SequenceSlice) -> SliceResult:
    if piece.prompt_logprobs is not None:
        raise BackendError("prompt_logprobs are not simulated: they depend on what a model computes")
    return _NOTHING_DRAWN
