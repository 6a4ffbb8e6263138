"""An engine in another process, as its router sees it: what it last told, and what was sent to it since. Pure.

What an engine tells is old by the time it is read. ``num_received``, the number of requests that it had got by then, says which of those
that were sent are in its figures; the others are added here, so that requests that come in a burst do not all go to who was idle last.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from octavo.core.limits import LengthLimits


@dataclass(frozen=True, slots=True)
class Told:
    """Figures of an engine at one moment; see ``EngineView``. ``num_received``: requests that it has been sent and had got by then, of all
    time of this connection."""

    num_received: int = 0
    pending_tokens: int = 0
    pending_s: float = 0.0
    num_sequences: int = 0
    num_available_blocks: int = 0


@dataclass(slots=True)
class ToldLoad:
    """An ``EngineView``. ``token_s``: seconds of a prompt's token where the engine has told none; then what it last told is used. What it
    tells while sequences only wait for their next token counts until it has told of a prompt: a step of few tokens takes nearly as long
    as one of many. ``lengths``: of requests that its whole pool holds (None: of any)."""

    index: int
    block_size: int = 16
    num_blocks: int = 0
    token_s: float = 1e-3
    lengths: LengthLimits | None = None
    last: Told = field(init=False)
    _sent: deque[tuple[int, int]] = field(default_factory=deque)  # (tokens to compute, blocks) of requests that ``last`` does not count
    _num_sent: int = 0  # of all time
    _extra_tokens: int = 0
    _knows_prompts: bool = False

    def __post_init__(self) -> None:
        self.last = Told(num_available_blocks=self.num_blocks)

    def sent(self, num_tokens: int, num_cached: int = 0) -> None:
        """A request was sent with so many tokens, of which ``num_cached`` are taken not to be computed there, since they are cached."""
        num_new = max(1, num_tokens - num_cached)
        self._num_sent += 1
        self._sent.append((num_new, -(-num_tokens // self.block_size)))
        self._extra_tokens += num_new

    def told(self, told: Told) -> None:
        """The engine tells its figures. ValueError when it has got more than was sent, or less than it had."""
        if not self.last.num_received <= told.num_received <= self._num_sent:
            limit = f"from {self.last.num_received} to {self._num_sent}"
            raise ValueError(f"num_received: {told.num_received!r} is not allowed; {limit}")
        for _ in range(told.num_received - self.last.num_received):
            self._extra_tokens -= self._sent.popleft()[0]
        self.last = told
        is_prompt = told.pending_tokens > told.num_sequences
        if told.pending_tokens > 0 and told.pending_s > 0.0 and (is_prompt or not self._knows_prompts):
            self._knows_prompts = is_prompt
            self.token_s = told.pending_s / told.pending_tokens

    def reset(self) -> None:
        """The engine has dropped all it had, and counts from 0 again."""
        self._sent.clear()
        self._num_sent = self._extra_tokens = 0
        self.last = Told(num_available_blocks=self.num_blocks)

    @property
    def num_unseen(self) -> int:
        """Requests that it has not told of."""
        return len(self._sent)

    @property
    def pending_tokens(self) -> int:
        return self.last.pending_tokens + self._extra_tokens

    @property
    def num_sequences(self) -> int:
        return self.last.num_sequences + len(self._sent)

    @property
    def num_available_blocks(self) -> int:
        return max(0, self.last.num_available_blocks - sum(num_blocks for _, num_blocks in self._sent))

    @property
    def pending_s(self) -> float:
        return self.last.pending_s + self._extra_tokens * self.token_s
