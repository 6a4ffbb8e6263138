"""A StepPlan as flat arrays for the native call, and its output arrays as SliceResults.

Rows are the plan's tokens in slice order. A *request* is one thing wanted of one row's logits: a drawn token (slot >= 0) or
the log-probability of a known token. Behind drafts there is one for each row, in order: a token is drawn from a row only if the one drawn
before it is the draft. Checks what would be lost in flattening; ranges of ids and positions are the native side's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

from octavo.core.request import MAX_LOGPROBS
from octavo.core.step import NO_TOKEN_ALLOWED, SequenceSlice, SliceResult, StepPlan, TokenLogprobs
from octavo.sampling.structured import num_mask_words

REQUEST_FIELDS = 5  # logit index, slot, position of the token, known token, number of logprobs (-1: none)
ALL_FORBIDDEN = 3  # SampleStatus::kAllForbidden of the native sampler


class StepArrays:
    """Inputs and outputs of one native step. All int32 unless said otherwise. ValueError for a slice that contradicts itself."""

    __slots__ = (
        "tokens", "seq_start", "seq_rows", "table_offset", "tables", "logit_rows", "requests", "masks", "mask_offset", "num_requests",
        "num_positions", "vocab_size", "max_top", "out_token", "out_status", "out_rank", "out_logprob", "out_top_ids", "out_top_logprobs",
    )  # fmt: skip

    def __init__(self, plan: StepPlan, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.tokens = array("i")
        self.seq_start = array("i")
        self.seq_rows = array("i")
        self.table_offset = array("i")
        self.tables = array("i")
        self.logit_rows = array("i")
        self.requests = array("i")
        self.masks = array("I")
        self.mask_offset = array("i")
        self.max_top = 0
        self.num_positions = 0
        for s in plan.slices:
            _check(s, vocab_size)
            try:
                self._add(s)
            except OverflowError as e:
                raise ValueError(f"sequence {s.seq_id}: a position, token, block or slot id does not fit 32 bits") from e
        n = self.num_requests = len(self.mask_offset)
        self.out_token = _zeros("i", n)
        self.out_status = _zeros("i", n)
        self.out_rank = _zeros("i", n)
        self.out_logprob = _zeros("f", n)
        self.out_top_ids = _zeros("i", n * self.max_top)
        self.out_top_logprobs = _zeros("f", n * self.max_top)

    def _add(self, s: SequenceSlice) -> None:
        first, count = len(self.tokens), len(s.token_ids)
        self.tokens.extend(s.token_ids)
        self.seq_start.append(s.start)
        self.seq_rows.append(count)
        self.table_offset.append(len(self.tables))
        self.tables.extend(s.block_table)
        end = s.start + count
        self.num_positions = max(self.num_positions, end)
        if s.prompt_logprobs is not None:
            for i, token in enumerate(s.next_token_ids):
                self._request(first + i, -1, s.start + i + 1, token, min(s.prompt_logprobs, self.vocab_size), -1)
        if s.num_samples:
            mask = -1
            if s.mask is not None:
                mask = len(self.masks)
                self.masks.extend(s.mask)
            logprobs = -1 if s.logprobs is None else min(s.logprobs, self.vocab_size)
            for slot in s.sample_slots:
                for i in range(s.num_drafts, -1, -1):
                    draft = s.token_ids[count - i] if i else -1
                    self._request(first + count - 1 - i, slot, end - i, draft, logprobs, mask)

    def _request(self, row: int, slot: int, position: int, token: int, logprobs: int, mask: int) -> None:
        if not self.logit_rows or self.logit_rows[-1] != row:
            self.logit_rows.append(row)
        self.requests.extend((len(self.logit_rows) - 1, slot, position, token, logprobs))
        self.mask_offset.append(mask)
        self.max_top = max(self.max_top, logprobs)

    def logit_positions(self, plan: StepPlan) -> Iterator[tuple[int, int]]:
        """(sequence id, position of the row) of each logit row, in order."""
        rows = iter(self.logit_rows)
        row, first = next(rows, None), 0
        for s in plan.slices:
            while row is not None and row < first + len(s.token_ids):
                yield s.seq_id, s.start + row - first
                row = next(rows, None)
            first += len(s.token_ids)


def _check(s: SequenceSlice, vocab_size: int) -> None:
    where = f"sequence {s.seq_id}"
    if fault := s.drafts_fault():
        raise ValueError(f"{where}: {fault}")
    if len(s.sample_slots) != s.num_samples - s.num_drafts:
        raise ValueError(f"{where}: {s.num_samples} samples and {len(s.sample_slots)} slots; one each")
    if len(s.next_token_ids) > len(s.token_ids):
        raise ValueError(f"{where}: {len(s.next_token_ids)} next tokens and {len(s.token_ids)} rows; at most one a row")
    if s.mask is not None and len(s.mask) != num_mask_words(vocab_size):
        raise ValueError(f"{where}: {len(s.mask)} mask words; a vocabulary of {vocab_size} needs {num_mask_words(vocab_size)}")
    for name, k in (("logprobs", s.logprobs), ("prompt_logprobs", s.prompt_logprobs)):
        if k is not None and not 0 <= k <= MAX_LOGPROBS:
            raise ValueError(f"{where}: {name} is {k}; from 0 to {MAX_LOGPROBS}")


def read_results(plan: StepPlan, a: StepArrays) -> list[SliceResult]:
    """One SliceResult per slice; a row that allows no answer becomes its slice's error."""
    from octavo.backends.cpu import _native

    results, r = [], 0
    for s in plan.slices:
        result = SliceResult()
        if s.prompt_logprobs is not None:
            count = len(s.next_token_ids)
            good = next((i for i in range(count) if a.out_status[r + i]), count)
            result.prompt_logprobs = [_logprobs(a, r + i, s.prompt_logprobs) for i in range(good)]
            if good < count:
                result.error = f"position {s.start + good}: {_native.sample_error(a.out_status[r + good], a.out_token[r + good])}"
            r += count
        _read_samples(s, a, r, result)
        r += s.num_samples
        if result.error is not None:
            result.token_ids, result.logprobs = [], None
        results.append(result)
    return results


def _read_samples(s: SequenceSlice, a: StepArrays, first: int, result: SliceResult) -> None:
    """The slice's drawn tokens, from request ``first`` on."""
    from octavo.backends.cpu import _native

    if s.num_samples and s.logprobs is not None:
        result.logprobs = []
    for r in range(first, first + s.num_samples):
        if a.out_status[r] and s.num_drafts and r > first:
            return  # the draft before did not come true, or the row allows no answer: then the next step begins with it
        if a.out_status[r] and result.error is None:
            result.error = _native.sample_error(a.out_status[r], a.out_token[r])
            result.error_code = NO_TOKEN_ALLOWED if a.out_status[r] == ALL_FORBIDDEN else None
        result.token_ids.append(a.out_token[r])
        if result.logprobs is not None and s.logprobs is not None:
            result.logprobs.append(_logprobs(a, r, s.logprobs))


def _logprobs(a: StepArrays, i: int, k: int) -> TokenLogprobs:
    begin, k = i * a.max_top, min(k, a.vocab_size)
    return TokenLogprobs(
        a.out_token[i], a.out_logprob[i], a.out_rank[i], list(a.out_top_ids[begin : begin + k]), list(a.out_top_logprobs[begin : begin + k])
    )


def _zeros(code: str, n: int) -> array[Any]:
    return array(code, bytes(4 * n))
