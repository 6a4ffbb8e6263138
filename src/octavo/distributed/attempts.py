"""One request's life over workers: what its client has been sent, what the next attempt is asked for, and what of its answer is new. Pure.

    waiting ──begin──▶ running ──take: the last event of every choice──▶ over
       ▲                  │
       └──────lost────────┘   (its worker died, hung, or had to leave)

An answer is a function of the request alone: whichever worker makes it, token k of a choice, its log-probabilities and the text up to it
are the same. So an attempt that was lost is followed by another, and the client sees a pause. One choice goes on after the tokens that have
been sent. Several choices, or beams, are made again from the start, and what has been sent of them is dropped here, by tokens and
characters. Tokens that are made again are compared with those that were sent: workers that disagree end the request.

A request may itself be what kills workers, so there are limits (``RetryLimits``). But one that fell silent may only have been stopped, or
cut off: such a loss is *open* until that process is back (``forgive``) or known to be gone (``confirm``). No request ends of a loss that is
open; it is held back meanwhile. What came of a worker that lived and spoke counts at once, and is never forgiven. Owns no channel, reads no
clock, and never begins an attempt by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from octavo.core.request import FinishReason, Request
from octavo.engine.outputs import OutputEvent


class Loss(Enum):
    """Why an attempt has no worker any more."""

    DIED = "died"  # the process ended, or its connection was cut
    HUNG = "hung"  # it said nothing for too long
    STALLED = "stalled"  # it spoke, and made no step for too long
    FAILED = "failed"  # its engine could not compute the step that the request was in
    LIED = "said what cannot be"  # and its channel was closed for it
    LEFT = "left"  # it was told to go, or to begin anew: nothing that the request could have caused

    @property
    def is_open(self) -> bool:
        """Whether it counts is not known before that process is back, or known to be gone."""
        return self in (Loss.DIED, Loss.HUNG)


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """``in_place``: losses in a row that the request may have caused, in which it got no further than before; at least 3, since it takes
    two to tell it from those that ran beside one that did (``Attempts.is_suspect``). ``in_all``: of all its life."""

    in_place: int = 3
    in_all: int = 8

    def __post_init__(self) -> None:
        for name, least in (("in_place", 3), ("in_all", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; at least {least}")


class Divergence(RuntimeError):
    """An attempt made other tokens than one before it: the workers do not compute the same."""


@dataclass(slots=True)
class _Choice:
    """What has been sent of a choice, and how much of the running attempt's answer only repeats it."""

    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    is_over: bool = False
    num_repeated: int = 0  # tokens of the running attempt that are still to come again
    num_repeated_chars: int = 0
    is_made: bool = False  # the running attempt has not ended it


class Attempts:
    """Of one request. ``key`` names the running attempt; 0: none runs."""

    __slots__ = ("request", "key", "num_attempts", "num_losses", "_choices", "_num_open", "_in_place", "_length_at_loss", "_limits",
                 "_has_sent", "_num_cached_tokens", "_num_open_losses", "_last_loss")  # fmt: skip

    def __init__(self, request: Request, limits: RetryLimits = RetryLimits()) -> None:  # noqa: B008 - frozen
        self.request = request
        self.key = 0
        self.num_attempts = 0
        self.num_losses = 0  # that the request may have caused
        self._choices = [_Choice() for _ in range(request.params.n)]
        self._num_open = request.params.n
        self._in_place = 0
        self._num_open_losses = 0
        self._last_loss = Loss.DIED
        self._length_at_loss = -1
        self._limits = limits
        self._has_sent = False
        self._num_cached_tokens = 0

    @property
    def is_over(self) -> bool:
        """Every choice has had its last event."""
        return self._num_open == 0

    @property
    def is_made_on(self) -> bool:
        """The running attempt goes on with a choice, be it one that was over before it began: its worker has to be told to leave off."""
        return any(choice.is_made for choice in self._choices)

    @property
    def is_suspect(self) -> bool:
        """It has been lost twice without getting any further: it should not run beside another such request until it does. So one that
        ran beside the cause both times is told from it."""
        return self._in_place >= 2 and self.num_sent_tokens <= self._length_at_loss

    @property
    def num_sent_tokens(self) -> int:
        """Of all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def usual_tokens(self) -> int:
        """Of a choice: the mean."""
        return -(-self.num_sent_tokens // len(self._choices))

    @property
    def made_token_ids(self) -> list[int]:
        """What the next attempt goes on after; empty: it begins at the beginning."""
        params = self.request.params
        return list(self._choices[0].token_ids) if params.n == 1 and params.beam is None else []

    def begin(self, key: int) -> list[int]:
        """The attempt ``key`` begins; returns ``made_token_ids``, which it is to be given."""
        assert not self.is_over and not self.key and key
        made = self.made_token_ids
        self.key = key
        self.num_attempts += 1
        for choice in self._choices:
            choice.is_made = True
            choice.num_repeated = 0 if made else len(choice.token_ids)
            choice.num_repeated_chars = 0 if made else choice.num_chars
        return made

    def room(self, choice: int) -> int | None:
        """Tokens that the running attempt may still say of a choice, those that it makes again among them. None: any number."""
        most, found = self.request.params.max_tokens, self._choices[choice]
        return None if most is None else most - len(found.token_ids) + found.num_repeated

    def take(self, event: OutputEvent) -> OutputEvent | None:
        """What is new of an event of the running attempt; None: nothing. Raises Divergence.

        What is said once, with a request's first event, is said once over all attempts.
        """
        choice = self._choices[event.choice]
        choice.is_made = choice.is_made and event.finish_reason is None
        if choice.is_over:
            return None
        if choice.num_repeated or choice.num_repeated_chars:
            self._drop_repeated(choice, event)
            if event.finish_reason is not None and choice.num_repeated and event.error is None:
                raise Divergence(f"a worker ended choice {event.choice} {choice.num_repeated} tokens before what one before it had made")
            if not event.token_ids and not event.text and event.finish_reason is None:
                return None
        choice.token_ids += event.token_ids
        choice.num_chars += len(event.text)
        if event.finish_reason is not None:
            choice.is_over = True
            self._num_open -= 1
        if self._has_sent:
            event.num_cached_tokens = self._num_cached_tokens
            event.cache_match = event.prompt_logprobs = None
        self._num_cached_tokens, self._has_sent = event.num_cached_tokens, True
        return event

    def _drop_repeated(self, choice: _Choice, event: OutputEvent) -> None:
        num_tokens = min(choice.num_repeated, len(event.token_ids))
        begin = len(choice.token_ids) - choice.num_repeated
        if event.token_ids[:num_tokens] != choice.token_ids[begin : begin + num_tokens]:
            raise Divergence(f"a worker made other tokens than the one before it, from output token {begin} of choice {event.choice} on")
        num_chars = min(choice.num_repeated_chars, len(event.text))
        choice.num_repeated -= num_tokens
        choice.num_repeated_chars -= num_chars
        event.token_ids, event.text = event.token_ids[num_tokens:], event.text[num_chars:]
        if event.logprobs is not None:
            event.logprobs = event.logprobs[num_tokens:]

    def lost(self, loss: Loss) -> str | None:
        """The running attempt is lost. None: another one may begin, unless it ``is_held``; else why the request has to fail."""
        self.key = 0
        if loss is Loss.LEFT:
            return None
        self.num_losses += 1
        self._last_loss = loss
        self._num_open_losses += loss.is_open
        length = self.num_sent_tokens
        self._in_place = self._in_place + 1 if length <= self._length_at_loss else 1
        self._length_at_loss = length
        return self._given_up(self._num_open_losses)

    @property
    def is_held(self) -> bool:
        """It has been lost as often as may be, if all of the open losses count: it is not to run before they are settled."""
        return self._given_up(0) is not None

    def _given_up(self, num_open: int) -> str | None:
        """Why it has to fail even if ``num_open`` losses do not count."""
        if self._in_place - num_open >= self._limits.in_place:
            how = self._last_loss.value
            return f"{self._in_place} workers in a row {how} while they ran this request, and it got no further; it is given up"
        if self.num_losses - num_open >= self._limits.in_all:
            return f"{self.num_losses} workers died, hung or failed while they ran this request; it is given up"
        return None

    def forgive(self) -> None:
        """A loss was none of the request's doing: the worker is back, and had never ended."""
        self.num_losses = max(0, self.num_losses - 1)
        self._in_place = max(0, self._in_place - 1)
        self._num_open_losses = max(0, self._num_open_losses - 1)

    def confirm(self) -> str | None:
        """A worker that it was lost with does not come back. None, or why the request has to fail."""
        self._num_open_losses = max(0, self._num_open_losses - 1)
        return self._given_up(self._num_open_losses)

    def failed(self, message: str, code: str | None = None) -> list[OutputEvent]:
        """End it: an error event for each choice that goes on."""
        events = []
        for index, choice in enumerate(self._choices):
            if not choice.is_over:
                choice.is_over = True
                events.append(OutputEvent(self.request.request_id, index, "", [], finish_reason=FinishReason.ERROR, error=message,
                                          error_code=code))  # fmt: skip
        self._num_open, self.key = 0, 0
        return events


class Pacer:
    """Spreads what would come all at once: at most ``per_s`` a second, and up to ``burst`` at a time after a rest (a token bucket)."""

    def __init__(self, per_s: float, burst: int) -> None:
        if not per_s > 0.0:
            raise ValueError(f"per_s: {per_s!r} is not allowed; above 0")
        if burst < 1:
            raise ValueError(f"burst: {burst!r} is not allowed; at least 1")
        self._per_s, self._burst = per_s, float(burst)
        self._left, self._since_s = float(burst), 0.0

    def take(self, now: float) -> bool:
        """Whether one more may go now; if so it counts."""
        self._left = min(self._burst, self._left + max(0.0, now - self._since_s) * self._per_s)
        self._since_s = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def wait_s(self) -> float:
        """Seconds from the last ``take`` until one more may go."""
        return max(0.0, (1.0 - self._left) / self._per_s)
