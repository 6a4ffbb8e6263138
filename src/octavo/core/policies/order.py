"""Queue orders: which request comes before which, for admission, for the token budget, and (from the end) for preemption.

An order gives each request a *rank*; lower comes first, ties go by arrival. It sees counts, times and names, never blocks or tokens.

Ageing is linear: a request moves up by so much per second of waiting. All wait at the same pace, so the differences do not change with
time and the arrival time alone stands for it: rank + age is rank - arrival, with no clock to read.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Protocol

from octavo.core.request import Request, Sequence

PRIORITY_AGEING_S = 60.0
"""Seconds of waiting that make up for one level of priority."""

REMAINING_AGEING = 50.0
"""Tokens of remaining length that a second of waiting makes up for."""

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""What a key is charged per token, as in Sheng et al., Fairness in Serving Large Language Models (OSDI '24), section 5."""

MAX_KEY_CHARS = 64
MAX_IDLE_KEYS = 4096
"""Keys without requests whose counters are kept."""

Rank = tuple[float, ...]


class QueueOrder(Protocol):
    """``dynamic``: ranks change while requests live, and are asked for anew before each plan."""

    dynamic: bool

    def rank(self, request: Request, sequences: Seq[Sequence], max_tokens: int) -> Rank:
        """``sequences``: its unfinished ones; ``max_tokens``: output tokens that each may make."""
        ...

    def added(self, request: Request) -> None:
        """A request has come."""
        ...

    def started(self, request: Request) -> None:
        """It leaves the queue for the first time."""
        ...

    def drew(self, request: Request, num_tokens: int) -> None:
        """It got output tokens."""
        ...

    def ended(self, request: Request) -> None:
        """It is gone, for whatever reason."""
        ...


class FirstCome:
    """First come, first served."""

    dynamic = False

    def rank(self, request: Request, sequences: Seq[Sequence], max_tokens: int) -> Rank:
        return ()

    def added(self, request: Request) -> None:
        pass

    def started(self, request: Request) -> None:
        pass

    def drew(self, request: Request, num_tokens: int) -> None:
        pass

    def ended(self, request: Request) -> None:
        pass


class ByPriority(FirstCome):
    """Lower ``Request.priority`` first; whoever waits gains a level every ``ageing_s`` seconds, so that nobody waits for ever."""

    def __init__(self, ageing_s: float = PRIORITY_AGEING_S) -> None:
        self.ageing_s = ageing_s

    def rank(self, request: Request, sequences: Seq[Sequence], max_tokens: int) -> Rank:
        return (request.priority + request.queued_s / self.ageing_s,)


class ShortestRemaining(FirstCome):
    """Fewest tokens left first: prompt tokens without KV and output tokens up to max_tokens, of all choices, less what waiting earns."""

    dynamic = True

    def __init__(self, ageing: float = REMAINING_AGEING) -> None:
        self.ageing = ageing

    def rank(self, request: Request, sequences: Seq[Sequence], max_tokens: int) -> Rank:
        remaining = 0
        for seq in sequences:
            prompt = max(0, seq.num_prompt_tokens - seq.num_computed)
            remaining += prompt + seq.num_choices * (max_tokens - (len(seq.token_ids) - seq.num_prompt_tokens))
        return (remaining + self.ageing * request.queued_s,)


class FairByKey(ShortestRemaining):
    """The key (``Request.user``; all without one share a key) that has been served least comes first; inside a key, shortest remaining.

    Virtual token counters (Sheng et al., OSDI '24, algorithm 2): a key is charged for the prompt when a request starts and for each output
    token; a key that comes back from idleness is lifted to the least counter of those at work, so idleness earns no credit. Recomputation
    after a preemption is not charged.
    """

    def __init__(self, ageing: float = REMAINING_AGEING) -> None:
        super().__init__(ageing)
        self._served: dict[str | None, float] = {}  # counters of keys with requests
        self._num_requests: dict[str | None, int] = {}
        self._idle: dict[str | None, float] = {}  # counters of others
        self._floor = 0.0  # the counter of the key that went idle last: where a key starts when nobody is at work

    def rank(self, request: Request, sequences: Seq[Sequence], max_tokens: int) -> Rank:
        return (self._counter(_key(request)), *super().rank(request, sequences, max_tokens))

    def _counter(self, key: str | None) -> float:
        """Of a key at work, or what it is when the key comes back."""
        served = self._served.get(key)
        return max(min(self._served.values(), default=self._floor), self._idle.get(key, 0.0)) if served is None else served

    def served(self, key: str | None) -> float | None:
        """The counter of a key; None for one that has no request."""
        return self._served.get(key)

    def added(self, request: Request) -> None:
        key = _key(request)
        self._served[key] = self._counter(key)
        self._idle.pop(key, None)
        self._num_requests[key] = self._num_requests.get(key, 0) + 1

    def started(self, request: Request) -> None:
        self._served[_key(request)] += PROMPT_TOKEN_COST * len(request.prompt_token_ids)

    def drew(self, request: Request, num_tokens: int) -> None:
        self._served[_key(request)] += OUTPUT_TOKEN_COST * num_tokens

    def ended(self, request: Request) -> None:
        key = _key(request)
        self._num_requests[key] -= 1
        if self._num_requests[key] == 0:
            del self._num_requests[key]
            self._floor = self._idle[key] = self._served.pop(key)
            if len(self._idle) > MAX_IDLE_KEYS:  # the one that is owed most: when it comes back it is lifted most, so least is lost
                del self._idle[min(self._idle, key=self._idle.__getitem__)]


def _key(request: Request) -> str | None:
    """Names are kept after their requests, so a long one is kept as its hash."""
    user = request.user
    if user is None or len(user) <= MAX_KEY_CHARS:
        return user
    return blake2b(user.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def queue_order(scheduling_policy: str) -> QueueOrder:
    """The order behind a name. ValueError for a name that is none."""
    orders: dict[str, type[FirstCome]] = {
        "fcfs": FirstCome,
        "static": FirstCome,
        "priority": ByPriority,
        "fair": FairByKey,
        "srf": ShortestRemaining,
        "prefill_first": FirstCome,
    }
    if scheduling_policy not in orders:
        raise ValueError(f"scheduling_policy: {scheduling_policy!r} is not allowed; one of {', '.join(orders)}")
    return orders[scheduling_policy]()
