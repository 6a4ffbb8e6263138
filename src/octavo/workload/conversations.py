"""Conversations: requests that carry all that was said before, so that each begins with its predecessor and the answer to it.

Sessions come by a process of arrivals; a turn follows the one before after a time to read and to write. Times do not depend on the server
(an open loop): a server that is slow meets the next turn before it has answered the last. Everything follows from the seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from octavo.workload.arrivals import Arrivals
from octavo.workload.lengths import Lengths
from octavo.workload.requests import TokenRange, WorkloadRequest

_Waiting = tuple[float, int, WorkloadRequest, Iterator[WorkloadRequest]]  # (due, number, turn, turns after it), of a session


@dataclass(frozen=True, slots=True)
class Conversations:
    """``mean_turns``: of a session, geometric; ``most_turns`` at most. ``system``: tokens that the sessions of a group begin with, of
    ``num_groups`` groups (0: none). ``pause_s``: mean time from a turn to the next, exponential beyond ``least_pause_s``.

    ``answer_token``: what is taken to have been answered, as often as the answer is long: an engine whose text is this token
    (``backends.sim.PlaceholderText``) finds its answers again in the next turn. None: random tokens, which no engine has said.
    ``most_tokens``: a session ends before a prompt and its answer would be longer.
    """

    sessions: Arrivals
    question: Lengths
    answer: Lengths
    mean_turns: float = 5.0
    most_turns: int = 20
    num_system: int = 0
    num_groups: int = 1
    pause_s: float = 10.0
    least_pause_s: float = 2.0
    answer_token: int | None = None
    most_tokens: int = 8192
    tokens: TokenRange = TokenRange()
    seed: int | str = 0

    def __post_init__(self) -> None:
        if not 1.0 <= self.mean_turns < float("inf"):
            raise ValueError(f"mean_turns: {self.mean_turns!r} is not allowed; a finite number from 1")
        for name, least in (("most_turns", 1), ("num_system", 0), ("num_groups", 1), ("most_tokens", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; at least {least}")
        for name in ("pause_s", "least_pause_s"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed; a finite number of seconds from 0")

    def requests(self) -> Iterator[WorkloadRequest]:
        """By arrival, without end where the sessions have none; each call gives the same ones."""
        waiting, numbers = list[_Waiting](), count()
        for number, start_s in enumerate(self.sessions.times(random.Random(f"{self.seed}:sessions"))):
            while waiting and waiting[0][0] <= start_s:
                yield self._follow(waiting, numbers)
            turns = self._turns(number, start_s)
            first = next(turns, None)
            if first is not None:
                heapq.heappush(waiting, (first.arrival_s, next(numbers), first, turns))
        while waiting:
            yield self._follow(waiting, numbers)

    def _follow(self, waiting: list[_Waiting], numbers: Iterator[int]) -> WorkloadRequest:
        """The next turn of all, which the one after it replaces."""
        _, _, request, turns = heapq.heappop(waiting)
        following = next(turns, None)
        if following is not None:
            heapq.heappush(waiting, (following.arrival_s, next(numbers), following, turns))
        return request

    def _turns(self, number: int, start_s: float) -> Iterator[WorkloadRequest]:
        rng = random.Random(f"{self.seed}:session:{number}")
        group = random.Random(f"{self.seed}:group:{rng.randrange(self.num_groups)}")
        history, now = self.tokens.draw(group, self.num_system), start_s
        for turn in range(self.most_turns):
            num_question, num_answer = self.question.draw(rng), self.answer.draw(rng)
            prompt = history + self.tokens.draw(rng, num_question)
            if len(prompt) + num_answer > self.most_tokens:
                return
            yield WorkloadRequest(now, prompt, num_answer, f"session-{number}")
            said = [self.answer_token] * num_answer if self.answer_token is not None else self.tokens.draw(rng, num_answer)
            history = prompt + said
            now += self.least_pause_s + (rng.expovariate(1.0 / self.pause_s) if self.pause_s else 0.0)
            if turn + 1 < self.most_turns and rng.random() < 1.0 / self.mean_turns:
                return
