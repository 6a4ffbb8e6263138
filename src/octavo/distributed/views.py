"""What routers see of engines and requests, and what a router is: the interface of ``router``. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class EngineView(Protocol):
    """What a router may know of an engine at the moment it asks."""

    @property
    def index(self) -> int:
        """Its number among all engines."""
        ...

    @property
    def pending_tokens(self) -> int:
        """Known tokens without KV, of waiting and running sequences; a decoding one counts 1."""
        ...

    @property
    def num_sequences(self) -> int:
        """Waiting and running."""
        ...

    @property
    def num_unseen(self) -> int:
        """Of these, requests that the engine has not told of itself: what they add to its figures is a guess."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV blocks in all."""
        ...

    @property
    def num_available_blocks(self) -> int:
        """KV blocks that can still be handed out."""
        ...

    @property
    def pending_s(self) -> float:
        """Seconds that ``pending_tokens`` are predicted to take, the step in flight aside."""
        ...


def waiting_s(engine: EngineView) -> float:
    """Of ``pending_s``, what waits: the token that each sequence is at does not, where a step takes long, either."""
    if engine.pending_tokens <= 0:
        return engine.pending_s
    return engine.pending_s * max(0.0, 1.0 - engine.num_sequences / engine.pending_tokens)


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """``num_output``: output tokens, where somebody knows or guesses; routers of real engines get None, and ``most_output``, what the
    request allows, where it says so. ``session``: requests that share it
    share a prefix. ``prefix_keys``: keys of the prompt's full blocks (``prefix_index.block_key``), from the first; may be empty.
    ``priority``: lower first, and ``user``: whose it is (an API key, say), where requests are held back."""

    request_id: str
    num_prompt: int
    num_output: int | None = None
    session: str | None = None
    prefix_keys: tuple[bytes, ...] = ()
    priority: int = 0
    user: str | None = None
    most_output: int | None = None

    def output_or(self, guess: float) -> float:
        """``num_output`` where it is known; else ``guess``, and no more than the request allows."""
        if self.num_output is not None:
            return self.num_output
        return guess if self.most_output is None else min(guess, self.most_output)


class Wait(NamedTuple):
    """``place`` is worth waiting for; ``elsewhere_s``: predicted seconds of the request at the best of those that need no waiting."""

    place: int
    elsewhere_s: float


class Router(Protocol):
    """Whoever subclasses it needs ``choose`` alone; the others are for routers that learn."""

    wants_keys: bool = False  # ``RouteRequest.prefix_keys`` is of use to it

    def choose(self, request: RouteRequest, engines: Seq[EngineView]) -> int:
        """The place in ``engines``, of which there is at least one, of the engine that is to take ``request``."""
        ...

    def waits_for(self, request: RouteRequest, engines: Seq[EngineView], open_places: AbstractSet[int]) -> Wait | None:
        """An engine that takes no more now, and where ``request`` would be sent if all did, in place of ``open_places``, of which there is
        at least one. None: it had better go now, as where an idle one is predicted to have it done sooner. Changes nothing."""
        return None

    def num_cached(self, request_id: str) -> int:
        """Prompt tokens of a request that were taken to be cached where it was sent last."""
        return 0

    def told(self, index: int, published: Iterable[bytes], forgotten: Iterable[bytes]) -> None:
        """Engine ``index`` offers the blocks of these keys from now on, and of those no longer. Keys may be cut short, alike everywhere."""
        return None

    def gone(self, index: int) -> None:
        """Engine ``index`` has lost all it had."""
        return None

    def lost(self, request_id: str) -> None:
        """The engine that a request was routed to has it no longer; the request is not over."""
        return None

    def ended(self, request_id: str, num_output: int | None) -> None:
        """A request that was routed is over. ``num_output``: tokens of its answer, of several the mean; None: it had none to its end."""
        return None


class Costs(Protocol):
    """Prices work on an engine, in seconds."""

    def prompt_s(self, engine: EngineView, start: int, num_tokens: int) -> float:
        """To compute ``num_tokens`` of a prompt after the ``start`` tokens that are cached."""
        ...

    def token_s(self, engine: EngineView, num_sequences: int, num_context: int) -> float:
        """A step in which so many sequences decode, each behind so many tokens."""
        ...
