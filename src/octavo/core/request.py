"""Requests, their sampling parameters, and the sequences that continue them.

A *request* is what a user asked; a *sequence* is one continuation of it (``n > 1`` makes several).
The truth of a sequence is its tokens and its parameters; everything a backend keeps can be rebuilt from them.
This module owns those records. It never schedules, samples, or looks at text.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.core.speculative_params import SpeculativeParams

from octavo.core.match_report import MatchReport


class ParameterError(ValueError):
    """A request field is outside its limits. ``param`` names the field as the user wrote it."""

    def __init__(self, param: str, value: object, limit: str, code: str = "invalid_value") -> None:
        self.param = param
        self.value = value
        self.limit = limit
        self.code = code
        super().__init__(f"{param}: {shown(value)} is not allowed; {limit}")


def shown(value: object, limit: int = 200) -> str:
    """A value of a request, as a message quotes it: JSON's own words are as in JSON."""
    try:
        text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "a number that is too long to show"
    return text if len(text) <= limit else f"{text[:limit]}..."


class SequenceStatus(IntEnum):
    WAITING = 0  # admitted to the queue; holds no blocks
    RUNNING = 1  # holds a block table; may be in the next plan
    FINISHED = 2  # has a finish reason; holds nothing


class FinishReason(str, Enum):
    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the engine failed; the message is in the event


MAX_LOGPROBS = 20  # as OpenAI's chat API; top entries a row may ask for
MAX_N = 64
MAX_LENGTH_PENALTY = 10.0  # either way: length ** penalty stays a finite number


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search in place of drawing: ``width`` hypotheses are followed at a time. The rule is in ``core.beam``.

    ``length_penalty``: a hypothesis counts as its sum of log-probabilities / length ** length_penalty. ``early_stopping``: the search ends
    when ``width`` hypotheses are finished and (True) at once; (False) no running one would be better if it ended now; ("never") no
    running one can become better.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def validate(self) -> None:
        """Raise ParameterError for the first field outside its limits."""
        _int_range("beam_width", self.width, 1, MAX_LOGPROBS // 2)
        _float_range("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if type(self.early_stopping) is not bool and self.early_stopping != "never":
            raise ParameterError("early_stopping", self.early_stopping, 'true, false or "never"')

    def num_candidates(self, num_ends: int) -> int:
        """Best tokens that a row has to name when ``num_ends`` of them may end or be barred: enough for twice ``width`` whatever these are,
        and for ``width`` that go on."""
        return max(2 * self.width, self.width + num_ends)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a sequence ends. Names and meanings follow vLLM and the OpenAI API.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 and anything at or above the vocabulary is off; ``top_p`` 1 is off; ``min_p`` 0 is off.
    ``max_tokens`` None means: up to the context limit. ``logprobs`` k asks for the k best log-probabilities of the raw
    logits at each output position (0: the chosen token alone); ``prompt_logprobs`` likewise for prompt positions.
    Token-id forms of ``bad_words`` are in ``bad_words_token_ids``, filled by the engine, which owns the tokenizer.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    beam: BeamParams | None = None  # ``n`` is then how many of the best hypotheses are wanted

    def __post_init__(self) -> None:
        # Accept lists from callers, and None for nothing; what the record holds does not change with theirs.
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            self._set(name, (texts,) if isinstance(texts, str) else _as_tuple(name, texts, "a string or a list of strings"))
        for name in ("stop_token_ids", "bad_words_token_ids"):
            self._set(name, _as_tuple(name, getattr(self, name), "a list"))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids, "a list of token ids"))
        if self.logit_bias is None:
            self._set("logit_bias", {})

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def validate(self, vocab_size: int) -> None:
        """Raise ParameterError for the first field outside its limits. NaN fails every range."""
        if self.beam is not None:
            self.beam.validate()
        _int_range("n", self.n, 1, MAX_N)
        _float_range("temperature", self.temperature, 0.0, 100.0)
        if type(self.top_k) is not int or self.top_k < -1:
            raise ParameterError("top_k", self.top_k, "an integer, -1 or 0 (off) or at least 1")
        if not (_is_number(self.top_p) and 0.0 <= self.top_p <= 1.0):
            raise ParameterError("top_p", self.top_p, "a number from 0 (greedy) to 1 (off)")
        _float_range("min_p", self.min_p, 0.0, 1.0)
        _float_range("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _float_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _float_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._validate_tokens(vocab_size)
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text:
                    raise ParameterError(name, text, "each entry is a non-empty string")
        if self.seed is not None and (type(self.seed) is not int or not -(2**63) <= self.seed < 2**64):
            raise ParameterError("seed", self.seed, "an integer of at most 64 bits")
        _int_range("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None:
            _int_range("max_tokens", self.max_tokens, 0, 2**31)
            if self.min_tokens > self.max_tokens:
                raise ParameterError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(self, name)
            if k is not None:
                _int_range(name, k, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if type(getattr(self, name)) is not bool:
                raise ParameterError(name, getattr(self, name), "True or False")
        if self.beam is not None:
            self._validate_beam(self.beam)

    def _validate_beam(self, beam: BeamParams) -> None:
        """Beam search goes by the model's own probabilities: what would change a draw is refused."""
        if self.n > beam.width:
            raise ParameterError("n", self.n, f"at most the beam width ({beam.width})")
        if self.max_tokens == 0:
            raise ParameterError("max_tokens", 0, "at least 1 with beam search")
        neutral = SamplingParams()
        for name in _NOT_WITH_BEAMS:
            value = getattr(self, name)
            if value != getattr(neutral, name) and not (name == "top_k" and value == -1):
                raise ParameterError(name, value, "it is not available with beam search, which follows the model's own probabilities")
        if self.temperature not in (0.0, 1.0):
            raise ParameterError("temperature", self.temperature, "0 or 1 with beam search, which draws nothing")

    def _validate_tokens(self, vocab_size: int) -> None:
        """The fields that name tokens."""
        if not isinstance(self.logit_bias, Mapping):
            raise ParameterError("logit_bias", self.logit_bias, "a dict from token ids to numbers")
        for token, bias in self.logit_bias.items():
            _token_id("logit_bias", token, vocab_size)
            if not (_is_number(bias) and -100.0 <= bias <= 100.0):
                raise ParameterError("logit_bias", bias, "each bias is a number from -100 to 100")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ParameterError("allowed_token_ids", [], "at least one token id")
            for token in self.allowed_token_ids:
                _token_id("allowed_token_ids", token, vocab_size)
        for token in self.stop_token_ids:
            _token_id("stop_token_ids", token, vocab_size)
        for word in self.bad_words_token_ids:
            if not isinstance(word, (tuple, list)) or not word:
                raise ParameterError("bad_words_token_ids", word, "each entry is a list of at least one token id")
            for token in word:
                _token_id("bad_words_token_ids", token, vocab_size)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_p == 0.0


_NOT_WITH_BEAMS = (
    "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids",
    "bad_words", "bad_words_token_ids", "stop", "prompt_logprobs",
)  # fmt: skip


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)  # of any size: comparing takes no float of it


def _as_tuple(name: str, values: object, limit: str) -> tuple[object, ...]:
    """A sequence of entries as a tuple, None as an empty one. Raises ParameterError for what is no sequence of entries."""
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ParameterError(name, values, limit)
    return tuple(values)


def _float_range(name: str, value: object, low: float, high: float) -> None:
    if not (_is_number(value) and low <= value <= high):  # type: ignore[operator]
        raise ParameterError(name, value, f"a number from {low:g} to {high:g}")


def _int_range(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ParameterError(name, value, f"an integer from {low} to {high}")


def _token_id(name: str, value: object, vocab_size: int) -> None:
    if type(value) is not int or not 0 <= value < vocab_size:
        raise ParameterError(name, value, f"token ids are integers from 0 to {vocab_size - 1}")


def num_places(params: SamplingParams) -> int:
    """Sequences that a request runs side by side."""
    return params.n if params.beam is None else params.beam.width


@dataclass(slots=True)
class Request:
    """One user request after tokenisation.

    ``seed`` is always set (drawn by the engine when the user gave none), so that a run can be replayed.
    ``eos_token_ids`` end a sequence unless ``params.ignore_eos``. ``cache_salt`` separates prefix-cache entries.
    ``arrival_s`` is on the engine's clock, and so is ``received_s``: when its HTTP request came, if there was one. ``came_s``: when another
    engine had got it first that has lost it since; it keeps its place in queues by that.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    arrival_s: float = 0.0
    cache_salt: str | None = None
    priority: int = 0  # lower first, under scheduling_policy priority
    user: str | None = None  # whose request it is, under scheduling_policy fair
    speculative: SpeculativeParams | None = None  # None: as the engine is configured
    received_s: float | None = None
    came_s: float | None = None
    session: str | None = None  # requests that share one probably share a prefix: a router of several engines keeps them together

    @property
    def queued_s(self) -> float:
        """Since when it waits, as queues see it."""
        return self.arrival_s if self.came_s is None else self.came_s


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a request.

    ``token_ids`` are known tokens: prompt, then output. ``num_computed`` of them have their KV in the cache.
    ``num_scheduled`` is what the plan in flight computes of them, and ``num_drafts`` how many drafts beyond (both 0 between steps).
    ``block_table`` is owned by KVManager.
    Until the prompt is computed a request with n > 1 has one sequence with ``num_choices`` = n, ``choice`` = 0;
    then KVManager forks it. ``slot`` is the backend's sampling-state slot (-1: none).
    """

    seq_id: int
    request: Request
    choice: int = 0
    num_choices: int = 1  # tokens the prompt's last row still has to yield
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_computed: int = 0
    num_scheduled: int = 0
    num_drafts: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache before the first output token
    match_report: MatchReport | None = None  # of the prefix cache, until the first event takes it along
    match_waits: bool = False  # match_report is of a sequence that sits out and may find more, or hear why not
    num_preemptions: int = 0
    is_moved: bool = False  # it came with tokens of another engine, whose KV was lost there: the first of its preemptions
    num_tokens_at_return: int = -1  # known tokens when it last came back after a preemption; -1: it never was preempted
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    block_table: array[int] = field(default_factory=lambda: array("i"))
    slot: int = -1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> Seq[int]:
        return self.token_ids[self.num_prompt_tokens :]


def derive_seed(seed: int, choice: int) -> int:
    """The seed of choice ``choice`` of a request: derive(s, 0) = s; others by SplitMix64 (Steele et al., 2014) over (s, choice)."""
    seed &= 0xFFFFFFFFFFFFFFFF
    if choice == 0:
        return seed
    z = (seed + 0x9E3779B97F4A7C15 * choice) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)
