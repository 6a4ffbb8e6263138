"""The sampling rule, slow and obvious: what every backend's fast sampler must match bit for bit.

Owns the order of the steps, the total order of tokens, the draw, and the state a slot keeps between draws. It never looks
at text, at other sequences, or at a clock, so a token depends on (logits, parameters, known tokens, seed, position) alone.

One draw, on float32 logits l [vocab_size]; the order is vLLM's:

 1. A raw logit that is nan or +inf is an error. -inf means forbidden.
 2. l[t] += logit_bias[t].
 3. Tokens outside the masks (``allowed_token_ids``, the step's mask), the last token of every bad-word sequence whose other
    tokens are the newest output, and end and stop tokens while fewer than ``min_tokens`` are out, become -inf.
 4. Penalties. For each token of prompt or output: l = l / r if l > 0 else l * r (repetition, as in HF). For each output token,
    with its count c: l = (l - c * frequency) - presence.
 5. Greedy (temperature 0 or top_p 0): the best token, ties to the lower id.
 6. z = (l - max l) / temperature, so the best has z = 0 and weight exp(z) = 1.
 7. The kept tokens are a prefix of the order (l descending, id ascending): min_p keeps z >= log(min_p), that is a
    probability of at least min_p times the best one's; top_k keeps the first k; top_p then keeps the smallest prefix of what is left
    whose share of its mass reaches p, the crossing token included.
 8. Draw: the kept token with the greatest z + g, ties to the lower id, g the Gumbel noise of (seed, position, id). Gumbel-max: this is
    a draw from softmax(z) over the kept tokens.

Mass is counted in integers, trunc(exp(z) * 2**30): integer sums are the same in any order, so a fast sampler may add them
as it likes and need not sort the vocabulary. A token is kept by top_p iff the mass before it is below p * (mass of all left), that product
rounded once in float64.

Log-probabilities are of the raw logits: (l[t] - max l) - log(sum exp(l - max l)), the sum in the order of ``lane_sum``.
All parameters are rounded to float32 first; a temperature or top_p that rounds to 0 is greedy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from octavo.core.request import MAX_LOGPROBS, SamplingParams
from octavo.core.step import NO_TOKEN_ALLOWED, SlotOpen, TokenLogprobs
from octavo.sampling.arithmetic import SMALLEST_NORMAL, exp, gumbel, lane_sum, log
from octavo.sampling.structured import mask_from_ids, num_mask_words

WEIGHT_ONE = np.float32(2**30)  # integer mass of the best token


class LogitsError(ValueError):
    """The logits of a row allow no answer; the message names the token and the value."""

    code: str | None = None


class NoTokenAllowed(LogitsError):
    """Every logit is -inf."""

    code = NO_TOKEN_ALLOWED


@dataclass(slots=True)
class SampleOutcome:
    """``token_id`` is -1 when ``error`` says why nothing could be drawn; the slot is then unchanged. ``error_code`` as in SliceResult."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    error_code: str | None = None


@dataclass(slots=True)
class _Slot:
    """State of one sequence between draws; everything in it follows from its tokens and parameters."""

    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]  # forbidden until min_tokens are out
    allowed: np.ndarray | None  # [vocab_size] bool
    prompt_ids: frozenset[int]
    output_counts: Counter[int]
    output_ids: list[int]


def _unpack_mask(mask: object, vocab_size: int) -> np.ndarray:
    """Packed uint32 words (array or ndarray) -> bool [vocab_size]."""
    words = np.frombuffer(mask, np.uint32)  # type: ignore[call-overload]
    if words.size != num_mask_words(vocab_size):
        raise ValueError(f"mask: {words.size} words; a vocabulary of {vocab_size} needs {num_mask_words(vocab_size)}")
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)


def _check_raw(logits: np.ndarray) -> None:
    bad = np.flatnonzero(~(logits < np.inf))
    if bad.size:
        raise LogitsError(f"logit of token {bad[0]} is {'nan' if np.isnan(logits[bad[0]]) else 'inf'}; every logit must be finite or -inf")


def _best_logit(logits: np.ndarray) -> np.float32:
    """max of the logits, with a zero's sign dropped so that it does not depend on which zero came first."""
    best = logits.max()
    if best == -np.inf:
        raise NoTokenAllowed("every token is forbidden: no finite logit is left after bias, masks, bad words and min_tokens")
    if best == np.inf:
        raise LogitsError(f"logit of token {logits.argmax()} is inf after bias and penalties")
    return np.float32(best + np.float32(0))


def _order(logits: np.ndarray) -> np.ndarray:
    """Token ids by (logit descending, id ascending)."""
    return np.argsort(-logits, kind="stable")


def kept_tokens(logits: np.ndarray, z: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Step 7: ids [at least 1] of the tokens that may be drawn, best first."""
    kept = _order(logits)
    if np.float32(params.min_p) > 0:
        floor = log(np.float32(params.min_p))
        kept = kept[z[kept] >= floor]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    top_p = np.float32(params.top_p)
    if top_p < 1:
        weights = (exp(z[kept]) * WEIGHT_ONE).astype(np.int64)
        before = np.cumsum(weights) - weights
        kept = kept[before < np.float64(top_p) * np.float64(weights.sum())]
    return kept


def raw_logprobs(logits: np.ndarray, token_id: int, k: int) -> TokenLogprobs:
    """Log-probabilities of float32 ``logits`` [vocab_size]: of ``token_id``, with its rank, and of the best ``k`` (at most 20).

    Raises LogitsError for logits that are nan, +inf or all -inf, ValueError for a token or k out of range.
    """
    logits = np.asarray(logits, np.float32)
    if not 0 <= token_id < logits.size:
        raise ValueError(f"token_id: {token_id} is not in 0 .. {logits.size - 1}")
    if not 0 <= k <= MAX_LOGPROBS:
        raise ValueError(f"logprobs: {k} is not in 0 .. {MAX_LOGPROBS}")
    _check_raw(logits)
    with np.errstate(all="ignore"):
        shifted = logits - _best_logit(logits)
        logprobs = shifted - log(lane_sum(exp(shifted)))
    own = logits[token_id]
    rank = 1 + int(np.count_nonzero(logits > own)) + int(np.count_nonzero(logits[:token_id] == own))
    top = _order(logits)[:k]
    return TokenLogprobs(token_id, float(logprobs[token_id]), rank, [int(t) for t in top], [float(logprobs[t]) for t in top])


class ReferenceSampler:
    """Slots of sequences and the draw from a row of logits. Errors of use are ValueError; errors of logits are in the outcome."""

    def __init__(self, vocab_size: int, max_num_slots: int) -> None:
        self.vocab_size = vocab_size
        self.max_num_slots = max_num_slots
        self._slots: dict[int, _Slot] = {}

    def open(self, entry: SlotOpen) -> None:
        """Give ``entry.slot`` the state that its tokens imply.

        Raises ValueError for a slot in use, parameters outside their limits, or an id outside the vocabulary.
        """
        self._check_free(entry.slot)
        p = entry.params
        p.validate(self.vocab_size)
        if not np.float32(p.repetition_penalty) >= SMALLEST_NORMAL:
            raise ValueError(f"repetition_penalty: {p.repetition_penalty!r} is not a positive normal float32")
        if any(not word for word in p.bad_words_token_ids):
            raise ValueError("bad_words_token_ids: a sequence is empty")
        self._check_ids("prompt_token_ids", entry.prompt_token_ids)
        self._check_ids("output_token_ids", entry.output_token_ids)
        self._check_ids("eos_token_ids", entry.eos_token_ids)
        for word in p.bad_words_token_ids:
            self._check_ids("bad_words_token_ids", word)
        stop_ids = frozenset(p.stop_token_ids) | entry.eos_token_ids
        allowed = None
        if p.allowed_token_ids is not None:
            allowed = _unpack_mask(mask_from_ids(p.allowed_token_ids, self.vocab_size), self.vocab_size)
        prompt_ids, output_ids = frozenset(entry.prompt_token_ids), list(entry.output_token_ids)
        self._slots[entry.slot] = _Slot(p, entry.seed, stop_ids, allowed, prompt_ids, Counter(output_ids), output_ids)

    def fork(self, src: int, dst: int, seed: int) -> None:
        """Slot ``dst`` becomes a copy of ``src`` that draws with ``seed``."""
        s = self._get(src)
        self._check_free(dst)
        self._slots[dst] = _Slot(s.params, seed, s.stop_ids, s.allowed, s.prompt_ids, Counter(s.output_counts), list(s.output_ids))

    def is_open(self, slot: int) -> bool:
        return slot in self._slots

    def close(self, slot: int) -> None:
        self._get(slot)
        del self._slots[slot]

    def sample(self, slot: int, logits: np.ndarray, position: int, mask: object = None, logprobs: int | None = None) -> SampleOutcome:
        """Draw the token at index ``position`` of the slot's sequence from float32 ``logits`` [vocab_size] and append it to the slot.

        ``mask``: packed uint32 words or None. ``logprobs`` k: also the raw log-probabilities of the token and the best k.
        """
        logits = self._row(logits)
        try:
            token = self.choose(slot, logits, position, mask)
            entry = None if logprobs is None else raw_logprobs(logits, token, logprobs)
        except LogitsError as error:
            return SampleOutcome(-1, error=str(error), error_code=error.code)
        self.append(slot, token)
        return SampleOutcome(token, entry)

    def choose(self, slot: int, logits: np.ndarray, position: int, mask: object = None) -> int:
        """The token that ``sample`` draws; the slot stays as it is. Raises LogitsError where ``sample`` has an error."""
        s = self._get(slot)
        kept, z = self._candidates(s, logits, mask)
        return int(kept[np.argmax(z + gumbel(s.seed, position, kept))]) if kept.size > 1 else int(kept[0])

    def distribution(self, slot: int, logits: np.ndarray, mask: object = None) -> np.ndarray:
        """The law by which ``sample`` draws from these logits: float64 [vocab_size], 0 for what cannot be drawn. The slot stays as it is.

        softmax(z) over the kept tokens (steps 1 to 7). Raises LogitsError where ``sample`` has an error.
        """
        kept, z = self._candidates(self._get(slot), logits, mask)
        weights = np.exp(z.astype(np.float64))
        law = np.zeros(self.vocab_size)
        law[kept] = weights / weights.sum()
        return law

    def append(self, slot: int, token_id: int) -> None:
        """A token that was drawn otherwise joins the output of a slot's sequence."""
        s = self._get(slot)
        self._check_ids("token_id", (token_id,))
        s.output_ids.append(token_id)
        s.output_counts[token_id] += 1

    def output_token_ids(self, slot: int) -> list[int]:
        """A copy of what the slot's sequence has said."""
        return list(self._get(slot).output_ids)

    def _row(self, logits: np.ndarray) -> np.ndarray:
        logits = np.asarray(logits, np.float32)
        if logits.shape != (self.vocab_size,):
            raise ValueError(f"logits: shape {logits.shape} is not ({self.vocab_size},)")
        return logits

    def _processed(self, s: _Slot, raw: np.ndarray, mask: object) -> np.ndarray:
        """Steps 2 to 4: a new array [vocab_size]."""
        p, logits = s.params, raw.copy()
        for token, bias in p.logit_bias.items():
            logits[token] += np.float32(bias)
        if s.allowed is not None:
            logits[~s.allowed] = -np.inf
        if mask is not None:
            logits[~_unpack_mask(mask, self.vocab_size)] = -np.inf
        for word in p.bad_words_token_ids:
            tail = list(word[:-1])
            if not tail or s.output_ids[-len(tail) :] == tail:
                logits[word[-1]] = -np.inf
        if len(s.output_ids) < p.min_tokens:
            logits[list(s.stop_ids)] = -np.inf
        _penalise(logits, s)
        return logits

    def _candidates(self, s: _Slot, logits: np.ndarray, mask: object) -> tuple[np.ndarray, np.ndarray]:
        """Steps 1 to 7: ids [at least 1] of the tokens that may be drawn, ascending, and their z; a greedy draw has one."""
        logits = self._row(logits)
        _check_raw(logits)
        with np.errstate(all="ignore"):
            return _drawable(s.params, self._processed(s, logits, mask))

    def _get(self, slot: int) -> _Slot:
        if slot not in self._slots:
            raise ValueError(f"slot: {slot} is not open")
        return self._slots[slot]

    def _check_free(self, slot: int) -> None:
        if not 0 <= slot < self.max_num_slots:
            raise ValueError(f"slot: {slot} is not in 0 .. {self.max_num_slots - 1}")
        if slot in self._slots:
            raise ValueError(f"slot: {slot} is already open")

    def _check_ids(self, name: str, ids: object) -> None:
        for token in ids:  # type: ignore[attr-defined]
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"{name}: token id {token} is not in 0 .. {self.vocab_size - 1}")


def _drawable(params: SamplingParams, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps 5 to 7: ids [at least 1] of the tokens that may be drawn, ascending, and their z."""
    best = _best_logit(logits)
    temperature = np.float32(params.temperature)
    if temperature == 0 or np.float32(params.top_p) == 0:
        return np.array([logits.argmax()]), np.zeros(1, np.float32)
    z = (logits - best) / temperature
    if np.float32(params.min_p) == 0 and params.top_k <= 0 and np.float32(params.top_p) >= 1:
        return np.arange(logits.size), z  # all of them: there is nothing to sort for
    kept = np.sort(kept_tokens(logits, z, params))
    return kept, z[kept]


def _penalise(logits: np.ndarray, s: _Slot) -> None:
    """Step 4, in place."""
    p = s.params
    repetition, frequency, presence = np.float32(p.repetition_penalty), np.float32(p.frequency_penalty), np.float32(p.presence_penalty)
    for token in s.prompt_ids | s.output_counts.keys():
        logit = logits[token]
        logits[token] = logit / repetition if logit > 0 else logit * repetition
    for token, count in s.output_counts.items():
        logits[token] = (logits[token] - np.float32(count) * frequency) - presence
