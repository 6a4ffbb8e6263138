"""What leaves the engine: events step by step, and whole outputs gathered from them. Plain records; nothing here computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from octavo.core.match_report import MatchReport
from octavo.core.request import FinishReason, Request
from octavo.core.step import TokenEvent, TokenLogprobs

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer


class GenerationError(RuntimeError):
    """The engine could not finish a request; the message says why.

    ``code`` is the event's ``error_code``. From a call for several prompts ``outputs`` holds all of them, in order: those that have
    no ``error`` are whole.
    """

    def __init__(self, message: str, code: str | None = None, outputs: Sequence[RequestOutput] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.outputs = list(outputs)


@dataclass(frozen=True, slots=True)
class CacheMatch:
    """Why a prompt was found no further in the prefix cache.

    ``reason``: a value of ``core.match_report.MatchEnd``. ``position``: the first token that the cache does not go on with. With
    ``different_token`` the prompt's token there and one that the cache has instead, by id and text (no text without a tokenizer).
    ``computed_tokens`` of those before ``position`` had been computed when the cache was found to know them, since an earlier match had
    ended before them for ``computed_reason`` (None: that was not so).
    """

    reason: str
    position: int
    token_id: int | None = None
    token: str | None = None
    expected_id: int | None = None
    expected: str | None = None
    computed_tokens: int | None = None
    computed_reason: str | None = None

    @classmethod
    def of(cls, report: MatchReport, tokenizer: Tokenizer | None) -> CacheMatch:
        texts = [None if t is None or tokenizer is None else tokenizer.token_text(t) for t in (report.token_id, report.expected_id)]
        match = cls(report.end.value, report.position, report.token_id, texts[0], report.expected_id, texts[1])
        if report.computed_end is None:
            return match
        return replace(match, computed_tokens=report.num_computed, computed_reason=report.computed_end.value)


@dataclass(slots=True)
class OutputEvent:
    """What one step gave one choice of a request: tokens and the text they completed.

    ``text`` is empty while a character is incomplete or might begin a stop string. The last event of a choice has ``finish_reason``.
    """

    request_id: str
    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None  # as in TokenEvent
    cache_match: CacheMatch | None = None  # with the first event of a request that was looked up in the prefix cache
    cumulative_logprob: float | None = None  # of a whole hypothesis (beam search)

    @classmethod
    def of(cls, event: TokenEvent, text: str) -> OutputEvent:
        return cls(
            event.request_id,
            event.choice,
            text,
            event.token_ids,
            event.logprobs,
            event.prompt_logprobs,
            event.finish_reason,
            event.stop_reason,
            event.num_cached_tokens,
            event.error,
            event.error_code,
            cumulative_logprob=event.cumulative_logprob,
        )


@dataclass(slots=True)
class CompletionOutput:
    """One continuation. ``logprobs`` has an entry per token when asked; ``cumulative_logprob`` is their sum (None when not asked; a
    hypothesis of a beam search always has it).

    ``text`` leaves out the end-of-sequence token and the stop string, ``token_ids`` has every token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its continuations, by choice.

    ``prompt_logprobs`` has an entry per prompt token, the first None. ``num_cached_tokens`` counts the prompt tokens whose KV was
    found in the prefix cache, ``cache_match`` says why no more were (None: not looked up). ``warnings`` say what was changed about the
    request. ``error`` says why it could not be finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    seed: int = 0
    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    error_code: str | None = None
    cache_match: CacheMatch | None = None

    @classmethod
    def start(cls, request: Request, prompt: str | None, warnings: list[str]) -> RequestOutput:
        """The output of a request that has just been queued."""
        outputs = [CompletionOutput(choice) for choice in range(request.params.n)]
        prompt_logprobs: list[TokenLogprobs | None] | None = None if request.params.prompt_logprobs is None else [None]
        return cls(request.request_id, prompt, request.prompt_token_ids, outputs, prompt_logprobs, seed=request.seed, warnings=warnings)

    @property
    def finished(self) -> bool:
        return all(o.finish_reason is not None for o in self.outputs)

    def apply(self, event: OutputEvent) -> None:
        """Take in one event of this request."""
        output = self.outputs[event.choice]
        output.text += event.text
        output.token_ids += event.token_ids
        if event.logprobs is not None:
            if output.logprobs is None:
                output.logprobs = []
            output.logprobs += event.logprobs
            output.cumulative_logprob = sum((entry.logprob for entry in event.logprobs), output.cumulative_logprob or 0.0)
        if event.cumulative_logprob is not None:
            output.cumulative_logprob = event.cumulative_logprob
        self.apply_to_prompt(event)
        if event.finish_reason is not None:
            output.finish_reason = event.finish_reason.value
            output.stop_reason = event.stop_reason
        if event.error is not None:
            self.error, self.error_code = event.error, event.error_code

    def apply_to_prompt(self, event: OutputEvent) -> None:
        """Take in only what an event says of the prompt: for readers that keep no output."""
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or [None]), *event.prompt_logprobs]
        if event.num_cached_tokens:
            self.num_cached_tokens = event.num_cached_tokens
        if event.cache_match is not None:
            self.cache_match = event.cache_match
