"""The contract between scheduler and backend: StepPlan goes in, StepResult comes out, TokenEvents leave the scheduler.

Plain data only: ints, floats, lists, ``array``. All that a backend sees and all that a cost model prices.
A *step* is one forward pass over a mixed batch of slices; nothing here says "prefill" or "decode".
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby

from octavo.core.match_report import MatchReport
from octavo.core.request import FinishReason, Request, SamplingParams, derive_seed

NO_TOKEN_ALLOWED = "no_token_allowed"
"""An ``error_code``: what the request itself allows and forbids leaves no token to draw. Other errors have no code."""


@dataclass(slots=True)
class BlockCopy:
    """Copy one whole KV block (all layers) before the forward pass: copy-on-write.

    The copies of a plan take effect in their order: a block that was copied from may be the destination of a later one.
    """

    src_block: int
    dst_block: int
    src_pages: Seq[int] = ()  # with ``StepPlan.pages``: where they lie, by column; -1: what is not there is not copied
    dst_pages: Seq[int] = ()


@dataclass(slots=True)
class BlockMove:
    """Copy one whole KV block (all layers) between the pool and host memory; the list that it is in tells the direction.

    ``after_copies``: of a load, how many of the plan's block copies take effect before it, those that were planned before. They may read
    what the pool block held until then, or write what is of no use to anybody any more.

    ``pages``: with ``StepPlan.pages``, where the pool block lies, by column; -1: that is not moved. A host block has room for all of them.
    """

    pool_block: int
    host_block: int
    after_copies: int = 0
    pages: Seq[int] = ()


@dataclass(slots=True)
class SlotOpen:
    """Give a sequence a sampling-state slot, rebuilt from its tokens (penalty counts, bad-word tails)."""

    slot: int
    params: SamplingParams
    seed: int  # derive_seed(request seed, choice): the key of this sequence's noise
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, slot: int, request: Request, choice: int, output_token_ids: list[int]) -> SlotOpen:
        """For choice ``choice`` of a request that has these output tokens."""
        seed = derive_seed(request.seed, choice)
        return cls(slot, request.params, seed, request.prompt_token_ids, output_token_ids, request.eos_token_ids)


@dataclass(slots=True)
class SequenceSlice:
    """Consecutive known tokens of one sequence to compute in this step.

    Rows are positions ``start .. start + num_tokens``; KV of positions below ``start`` is already in the blocks of
    ``block_table`` (the sequence's own array, passed as it is; may be longer than needed).
    ``num_samples`` tokens are drawn from the last row: 0 for a chunk that does not reach the last known token,
    1 for one that does, n at a prompt's end of a request with n choices (choice i draws with its own slot/seed:
    ``sample_slots[i]``). ``prompt_logprobs`` k: log-probabilities of the known next token after each row are wanted.

    ``num_drafts`` of the tokens, the last ones, are drafts to verify: guesses of what will be drawn. A token is then drawn from the row
    before the first draft and, as long as each equals the draft behind it, from each row after: 1 + ``num_drafts`` = ``num_samples`` at
    most, all with the one slot in ``sample_slots``. KV of drafts that did not come true is overwritten later.

    ``draft_distributions``: what each draft was drawn from, for the accept/resample rule alone (``backends.resampling``); None, of all or
    of one: looked up, certain of itself. Opaque here.
    """

    seq_id: int
    start: int
    token_ids: list[int]  # [num_tokens]
    block_table: array[int]  # int32 block ids, position p lives in block_table[p // block_size]
    num_samples: int = 0
    sample_slots: list[int] = field(default_factory=list)  # [num_samples]; with drafts [1]
    logprobs: int | None = None  # top-k wanted for sampled tokens (None: not asked)
    prompt_logprobs: int | None = None
    next_token_ids: list[int] = field(default_factory=list)  # with prompt_logprobs: the known token after each row; the last may have none
    mask: array[int] | None = None  # packed bits (uint32, bit t%32 of word t//32 = token t allowed) for the sampled row
    num_drafts: int = 0
    draft_distributions: list[object] | None = None  # [num_drafts], each None or float64 [vocab_size]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def drafts_fault(self) -> str | None:
        """What contradicts itself about the drafts, for whoever is to verify them; None when nothing does."""
        if not self.num_drafts:
            return None
        if 0 < self.num_drafts < self.num_tokens and self.num_samples == 1 + self.num_drafts and self.prompt_logprobs is None:
            return None
        return f"{self.num_drafts} drafts among {self.num_tokens} tokens need {self.num_drafts + 1} samples, not {self.num_samples}"


@dataclass(slots=True)
class StepPlan:
    """One step. Order of effect: close slots, open slots, fork slots, save blocks, load and copy blocks, forward pass, sampling.

    ``block_saves`` go from the pool to host memory and see what the step before left; ``block_loads`` go from host memory to the pool,
    each after as many copies as it says (``loads_and_copies``). So a pool block may be saved and then, in the same plan, be copied from,
    loaded into, copied into or written by somebody else.

    ``slot_forks`` are (source slot, new slot, seed of the new slot). After a step that failed or was half planned, the next plan closes all
    slots that may be open: closing one that is not does nothing.
    """

    step_index: int
    slices: list[SequenceSlice] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)
    slot_opens: list[SlotOpen] = field(default_factory=list)
    slot_forks: list[tuple[int, int, int]] = field(default_factory=list)
    slot_closes: list[int] = field(default_factory=list)
    block_saves: list[BlockMove] = field(default_factory=list)
    block_loads: list[BlockMove] = field(default_factory=list)
    pages: array[int] | None = None  # the pool's own: column c of block b is page pages[b * columns + c]; None: it is page b * columns + c

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.slices)

    def loads_and_copies(self) -> Iterator[tuple[list[BlockMove], list[BlockCopy]]]:
        """In the order in which they take effect: some loads, then some copies, and so on. ``block_loads`` ascend in ``after_copies``."""
        begin, pending = 0, list[BlockMove]()
        for after_copies, loads in groupby(self.block_loads, key=lambda load: load.after_copies):
            if after_copies > begin:
                yield pending, self.block_copies[begin:after_copies]
            begin, pending = after_copies, list(loads)
        yield pending, self.block_copies[begin:]

    @property
    def num_moves(self) -> int:
        """Blocks that go to or come from host memory."""
        return len(self.block_saves) + len(self.block_loads)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of raw logits at one position: the token's own, its rank (1 = best), and the k best (best first)."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class SliceResult:
    """For one slice: the drawn tokens (one per sample), their logprobs when asked, and prompt logprobs when asked.

    With drafts: as many tokens as were drawn, at least one; all but the last equal the drafts.

    ``error`` says why a row allowed no answer (a nan logit, every token forbidden); ``token_ids`` is then empty.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    error_code: str | None = None


@dataclass(slots=True)
class StepResult:
    """Results in the order of ``plan.slices``; ``seconds`` is what the step took on its device, ``move_seconds`` of it for block moves."""

    step_index: int
    slices: list[SliceResult]
    seconds: float = 0.0
    move_seconds: float = 0.0


@dataclass(slots=True)
class TokenEvent:
    """What one step gave one sequence. A finished sequence's last event has the reason; ``token_ids`` may be empty (abort).

    ``prompt_logprobs`` come with the first event of a request that asked for them, one entry per prompt position after the first.
    ``match_report`` comes with the first event of a request that was looked up in the prefix cache.
    """

    request_id: str
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that ended it (None: EOS or length)
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    match_report: MatchReport | None = None
    cumulative_logprob: float | None = None  # of a beam search's hypothesis, which comes whole in one event
