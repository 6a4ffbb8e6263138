"""Drafts from a second, smaller model: it draws what the target will draw, with the same noise.

Owns the draft's backend, its KV blocks and what they hold of each sequence. A draft token is drawn by the target's own rule: the same
parameters, seed and positions, so that for temperatures above 0 both models pick the same token wherever their distributions agree enough
(Gumbel coupling; design in docs/speculation.md), and greedy drafts are the draft model's best tokens. It never decides how much is drafted,
and nothing it says changes a text.

KV of the draft is kept for the tokens of a sequence that turned out as drafted; the rest is overwritten. When blocks are short, its own or,
where they are lent by the target's pool, those of the target, the sequence that was drafted for least recently gives its blocks back, and
its tokens are computed again if it comes back.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.backends.base import Backend
from octavo.core.kv_manager import KVManager
from octavo.core.kv_pages import GuestLayout
from octavo.core.lodging import Lodging
from octavo.core.request import Request, SamplingParams
from octavo.core.step import SequenceSlice, SlotOpen, StepPlan
from octavo.models.tokenizer import Tokenizer
from octavo.sampling.structured import mask_from_ids
from octavo.speculative.proposer import NO_TOKEN

if TYPE_CHECKING:
    from octavo.speculative.draft_distributions import DraftDistributions

MAX_ROWS = 512  # of one step of the draft model, unless one sequence alone has more to catch up with


class VocabularyMismatch(ValueError):
    """The draft model's tokens are not the target's; the message names the first difference."""

    def __init__(self, difference: str) -> None:
        super().__init__(f"draft_model: {difference}; they must be the same")


def check_vocabularies(target: Tokenizer, draft: Tokenizer, target_eos: frozenset[int], draft_eos: frozenset[int]) -> None:
    """Raise VocabularyMismatch unless a token id means the same to both. Rows of padding at the end of either do not matter."""
    target_size, draft_size, shared = _used_size(target), _used_size(draft), min(target.vocab_size, draft.vocab_size)
    sizes = f"its vocabulary has {draft_size} tokens and the target's {target_size}"
    for token in range(min(max(target_size, draft_size), shared)):
        if target.token_bytes(token) != draft.token_bytes(token) or target.is_special(token) != draft.is_special(token):
            if token >= min(target_size, draft_size):
                raise VocabularyMismatch(sizes)
            ours, theirs = target.token_text(token), draft.token_text(token)
            raise VocabularyMismatch(f"token {token} is {theirs!r} in the draft and {ours!r} in the target")
    if target_size != draft_size and max(target_size, draft_size) > shared:
        raise VocabularyMismatch(sizes)
    if target_eos != draft_eos:
        raise VocabularyMismatch(f"it ends with tokens {sorted(draft_eos)} and the target with {sorted(target_eos)}")


def _used_size(tokenizer: Tokenizer) -> int:
    """Tokens without the padding at the end, which some files give names to."""
    size = tokenizer.vocab_size
    while size > 0 and tokenizer.is_unused(size - 1):
        size -= 1
    return size


def _named_tokens(params: SamplingParams) -> list[Iterable[int]]:
    """The token ids in each field that has some."""
    return [params.logit_bias, params.allowed_token_ids or (), params.stop_token_ids, *params.bad_words_token_ids]


@dataclass(slots=True)
class _Drafted:
    """One sequence. ``computed``: the tokens whose KV is in the blocks of ``table``; what does not lead ``known`` is overwritten.

    ``has_strangers``: it names tokens that the draft has no row for, so nothing can be drafted for it.
    """

    request: Request
    choice: int
    known: list[int]
    has_strangers: bool = False
    computed: list[int] = field(default_factory=list)
    table: array[int] = field(default_factory=lambda: array("i"))
    slot: int = -1
    drafts: list[int] = field(default_factory=list)


class OwnBlocks:
    """A pool of ``num_blocks`` that nobody else uses, as plain as can be: who gives blocks up, and when, its user decides."""

    pages = None

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))

    def take(self, num_blocks: int) -> list[int] | None:
        """So many blocks; None: there are not."""
        if num_blocks > len(self._free):
            return None
        return [self._free.pop() for _ in range(num_blocks)]

    def give(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)


class DraftModel:
    """A Proposer. ``backend`` has a pool of ``num_blocks`` of its own, or lodges with the target; then ``lender`` is the books of that
    pool, and how blocks lie in its pages. ``vocab_size`` is the target's, ``max_len`` the draft's context.

    ``keep_distributions``: ``take_distributions`` tells what drafts were drawn from, for the accept/resample rule; ``backend`` has to show
    its logits then.
    """

    name = "draft"
    looks_up = False

    def __init__(
        self,
        backend: Backend,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        max_len: int,
        keep_distributions: bool = False,
        lender: tuple[KVManager, GuestLayout] | None = None,
    ) -> None:
        self._backend = backend
        self._blocks: OwnBlocks | Lodging = OwnBlocks(num_blocks)
        if lender is not None:
            kv, layout = lender
            self._blocks = Lodging(kv, layout.pages.num_pages, layout.per_page, kv.num_pages, lambda: self._evict_one({}))
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._max_len = max_len
        self._sequences: OrderedDict[int, _Drafted] = OrderedDict()  # drafted for least recently first
        self._slots = list(range(backend.max_num_slots - 1, -1, -1))
        self._closes: list[int] = []
        self._num_steps = 0
        self._distributions: DraftDistributions | None = None
        if keep_distributions:
            from octavo.speculative.draft_distributions import DraftDistributions

            self._distributions = DraftDistributions(backend, vocab_size)
        # Padding behind the target's vocabulary is nothing that the target could draw.
        self._mask = mask_from_ids(range(vocab_size), backend.vocab_size) if backend.vocab_size > vocab_size else None
        self._lacks_rows = backend.vocab_size < vocab_size  # padding of the target, which requests may name all the same

    # --- Proposer ---------------------------------------------------------------------------------------------------------------------

    def begin(self, seq_id: int, token_ids: Seq[int], request: Request, choice: int) -> None:
        self._sequences[seq_id] = _Drafted(request, choice, list(token_ids), self._are_strange(token_ids, *_named_tokens(request.params)))

    def extend(self, seq_id: int, token_ids: Seq[int]) -> None:
        drafted = self._sequences[seq_id]
        drafted.known.extend(token_ids)
        drafted.has_strangers = drafted.has_strangers or self._are_strange(token_ids)

    def _are_strange(self, *token_ids: Iterable[int]) -> bool:
        return self._lacks_rows and max(max(ids, default=0) for ids in token_ids) >= self._backend.vocab_size

    def peek(self, seq_id: int) -> tuple[int, int]:
        """A model always has something to say; how far it can be trusted shows only by what comes true."""
        return (1 if self._max_drafts(self._sequences[seq_id]) > 0 else 0), NO_TOKEN

    def propose(self, requests: Seq[tuple[int, int]]) -> list[list[int]]:
        wanted = {seq_id: min(most, self._max_drafts(self._sequences[seq_id])) for seq_id, most in requests}
        for seq_id in wanted:
            self._sequences[seq_id].drafts = []
        drafting = [seq_id for seq_id, most in wanted.items() if most > 0 and self._prepare(seq_id, most, wanted)]
        while drafting:
            self._step(self._fitting(drafting))
            drafting = [s for s in drafting if len(self._sequences[s].drafts) < wanted[s] and self._goes_on(self._sequences[s])]
        out = []
        for seq_id, _ in requests:
            drafted = self._sequences[seq_id]
            out.append([token for token in drafted.drafts if token < self._vocab_size])
            self._close(drafted)
        return out

    def take_distributions(self, seq_id: int) -> list[object] | None:
        """What the drafts that ``propose`` gave last were drawn from, handed over: float64 [vocab_size] each. None: nothing is kept."""
        return None if self._distributions is None else self._distributions.take(seq_id)

    def end(self, seq_id: int) -> None:
        drafted = self._sequences.pop(seq_id, None)
        if drafted is not None:
            self._release(drafted)
            self.take_distributions(seq_id)

    def _max_drafts(self, drafted: _Drafted) -> int:
        return 0 if drafted.has_strangers else self._max_len - len(drafted.known)

    # --- drafting ---------------------------------------------------------------------------------------------------------------------

    def _prepare(self, seq_id: int, most: int, wanted: dict[int, int]) -> bool:
        """Blocks for the known tokens and all drafts but the last, and a slot. False: there is no room, and there will be no drafts."""
        drafted = self._sequences[seq_id]
        self._sequences.move_to_end(seq_id)
        num_same = 0
        for have, want in zip(drafted.computed, drafted.known, strict=False):
            if have != want:
                break
            num_same += 1
        del drafted.computed[min(num_same, len(drafted.known) - 1) :]  # the last known token always runs: the first draft is drawn from it
        num_blocks = -(-(len(drafted.known) + most - 1) // self._block_size) - len(drafted.table)
        if not self._slots:
            return False
        while (blocks := self._blocks.take(max(0, num_blocks))) is None:
            if not self._evict_one(wanted):
                return False
        drafted.table.extend(blocks)
        return True

    def _evict_one(self, keep: dict[int, int]) -> bool:
        """Give up the blocks of whom was drafted for least recently, but of none of ``keep``. False: there are none."""
        for seq_id, drafted in self._sequences.items():
            if seq_id not in keep and drafted.table:
                self._release(drafted)
                return True
        return False

    def _fitting(self, drafting: list[int]) -> list[int]:
        """As many of them as MAX_ROWS hold, one at least; those that have fewer tokens to catch up with go first."""
        gaps = {s: len(one.known) + len(one.drafts) - len(one.computed) for s, one in ((s, self._sequences[s]) for s in drafting)}
        chosen: list[int] = []
        rows = 0
        for seq_id in sorted(drafting, key=gaps.__getitem__):
            rows += gaps[seq_id]
            if chosen and rows > MAX_ROWS:
                break
            chosen.append(seq_id)
        return chosen

    def _step(self, drafting: list[int]) -> None:
        """One more draft token for each."""
        plan = StepPlan(self._num_steps, slot_closes=self._closes, pages=self._blocks.pages)
        self._num_steps += 1
        self._closes = []
        for seq_id in drafting:
            drafted = self._sequences[seq_id]
            if drafted.slot < 0:
                drafted.slot = self._slots.pop()
                output = drafted.known[len(drafted.request.prompt_token_ids) :]
                plan.slot_opens.append(SlotOpen.of(drafted.slot, drafted.request, drafted.choice, output))
                if self._distributions is not None:
                    self._distributions.begin(seq_id, plan.slot_opens[-1])
            tokens, start = drafted.known + drafted.drafts, len(drafted.computed)
            plan.slices.append(SequenceSlice(seq_id, start, tokens[start:], drafted.table, 1, [drafted.slot], mask=self._mask))
            drafted.computed = tokens
        for seq_id, outcome in zip(drafting, self._backend.execute(plan).slices, strict=True):
            if self._distributions is not None and outcome.error is None:
                self._distributions.drew(seq_id, outcome.token_ids[0], self._mask)
            # A draft that cannot draw says a token that there is not: it ends the drafts, and is left out of them like padding.
            self._sequences[seq_id].drafts.append(outcome.token_ids[0] if outcome.error is None else self._vocab_size)

    def _goes_on(self, drafted: _Drafted) -> bool:
        if not drafted.drafts:  # its text did not fit the step beside the others
            return True
        token, request = drafted.drafts[-1], drafted.request
        if token >= self._vocab_size:
            return False
        return request.params.ignore_eos or token not in request.eos_token_ids

    # --- slots and blocks -------------------------------------------------------------------------------------------------------------

    def _close(self, drafted: _Drafted) -> None:
        if drafted.slot >= 0:
            self._closes.append(drafted.slot)
            self._slots.append(drafted.slot)
            drafted.slot = -1

    def _release(self, drafted: _Drafted) -> None:
        self._close(drafted)
        self._blocks.give(drafted.table)
        drafted.table = array("i")
        drafted.computed = []

    def close(self) -> None:
        self._backend.close()
