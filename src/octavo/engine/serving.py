"""What a server needs of an engine, whether that runs in its own process or in many others: the one interface between the two.

``async_engine.AsyncEngine`` is the engine in this process, ``distributed.cluster_engine.ClusterEngine`` the one whose steps are made by
workers. All calls are made on the event loop's thread but for ``check_params``, ``prepare_checked`` and ``room``, which any thread may
make and which wait for nobody. What an engine tells of itself is asked for and awaited, since workers may have to be asked.
Protocols and plain records only; nothing here computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Unpack

if TYPE_CHECKING:
    from octavo.core.clock import Clock
    from octavo.core.request import SamplingParams
    from octavo.engine.event_stream import EventStream
    from octavo.engine.params import PreparedRequest, RequestOptions
    from octavo.engine.replay_advice import Replayer
    from octavo.models.loaded import LoadedModel

NO_WORKER = "no_worker"  # an error code of events: nobody was there to answer

@dataclass(frozen=True, slots=True)
class Health:
    """``live``: the process can serve again; ``ready``: it takes requests now. ``detail`` says what is wrong."""

    live: bool
    ready: bool
    detail: str


@dataclass(slots=True)
class MetricFamily:
    """One metric and its values. ``kind``: counter (its name without "_total"), gauge or histogram. ``samples``: labels and their value
    (None: not a number); of a histogram, how many lie in each of the classes that end at ``bounds`` and beyond, and last the sum of all."""

    name: str
    kind: str
    help: str
    samples: list[tuple[Mapping[str, str], float | Sequence[float] | None]] = field(default_factory=list)
    bounds: Sequence[float] = ()


class ReplayUnavailable(RuntimeError):
    """Nobody here replays windows; the message says why."""


class UnknownWorker(ValueError):
    """No worker of that name; the message says which there are."""


class Reports(Protocol):
    """What an engine tells of its requests and of itself. Contents are as the API has them (docs/explain.md)."""

    async def account(self, request_ids: Sequence[str]) -> dict[str, Any] | None:
        """Where the time of the requests of one call went: that of the one which ended last. None when nothing is known of them."""
        ...

    async def answers(self, answers: Mapping[str, Sequence[str]], sort: str, limit: int, state: str) -> list[dict[str, Any]]:
        """At most ``limit`` of ``answers`` (the requests of each by its id) by ``sort`` ("recent", "slowest") of a ``state`` ("all",
        "running", "finished"), those of which nothing is known left out."""
        ...

    async def summary(self, window_s: float, num_steps: int, objective: str) -> dict[str, Any]:
        """The last ``window_s`` seconds, the engine now, its last ``num_steps`` steps, and the last replay, if any, by ``objective``."""
        ...

    async def replay(self, window_s: float) -> None:
        """Have the last ``window_s`` seconds replayed, for ``summary`` to tell. Takes seconds. Raises ReplayUnavailable where nobody can,
        ReplayError where it cannot be done now."""
        ...

    async def metrics(self) -> list[MetricFamily]:
        """All metrics, read now."""
        ...


class Cluster(Protocol):
    """The workers behind an engine, for whoever runs them."""

    def status(self) -> dict[str, Any]:
        """Workers with their roles, states and loads, as the API has them (docs/cluster.md)."""
        ...

    async def drain(self, worker: str) -> dict[str, Any]:
        """Have a worker take no more requests; it ends when those it has are done. Returns its entry of ``status``. UnknownWorker."""
        ...

    async def undrain(self, worker: str) -> dict[str, Any]:
        """Have a worker that is being drained take requests again, and one that has ended be started again. Returns its entry of
        ``status``. UnknownWorker; ValueError when that cannot be done now, or not from here."""
        ...

    async def restart(self) -> dict[str, Any]:
        """Begin to replace the workers, one after another. Returns ``status``. Raises ValueError when they cannot be started from here, or
        a restart is going on."""
        ...


class ServingEngine(Protocol):
    """Life: ``start`` on the event loop, ``ready`` until requests can be served, ``submit`` and ``abort``, ``stop`` once."""

    @property
    def model(self) -> LoadedModel:
        """Its text: tokenizer and chat template. Weights need not have been read."""
        ...

    @property
    def model_name(self) -> str:
        """As requests and answers have it."""
        ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Of everything that results depend on; equal ones give equal bits."""
        ...

    @property
    def clock(self) -> Clock: ...

    @property
    def num_remembered(self) -> int:
        """Ended requests whose accounts are kept."""
        ...

    @property
    def draining(self) -> bool:
        """It is shutting down: no new requests are taken."""
        ...

    @property
    def cluster(self) -> Cluster | None:
        """None: there are no workers."""
        ...

    def start(self) -> None:
        """Begin to work, on the running event loop."""
        ...

    async def ready(self) -> None:
        """Wait until requests can be served. Raises what keeps that from ever happening."""
        ...

    async def stop(self, drain_s: float = 0.0) -> None:
        """Take no new requests, give running ones ``drain_s`` seconds, end what is left with error events, release everything. Idempotent,
        and allowed before ``start``."""
        ...

    def health(self) -> Health: ...

    def check_params(self, params: SamplingParams) -> SamplingParams:
        """The checks that need no prompt. Raises ParameterError, EngineUnavailable."""
        ...

    def prepare_checked(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None, **options: Unpack[RequestOptions]
    ) -> PreparedRequest:
        """The checks that need one; ``params`` come from ``check_params``, perhaps with a ``max_tokens`` since. Raises ParameterError."""
        ...

    def room(self, num_prompt_tokens: int) -> int:
        """Output tokens that a prompt of this length leaves room for; 0 or less: none."""
        ...

    def submit(self, prepared: Sequence[PreparedRequest]) -> EventStream:
        """Queue the requests of one call; their events come on the stream. Raises EngineUnavailable."""
        ...

    def abort(self, stream: EventStream) -> None:
        """Forget a call whose reader has gone, and end what is left of it. Does nothing when all of it has ended and been delivered."""
        ...

    def blocked(self, request_ids: Iterable[str], begin_s: float, end_s: float) -> None:
        """A write for these requests was held up by their client, from and to these moments on ``clock``."""
        ...

    def delivered(self, request_ids: Iterable[str], now_s: float) -> None:
        """The last byte of these requests, which are answered together, was handed to the connection."""
        ...

    def reports(self, shows_misses: bool, replayer: Replayer | None = None) -> Reports:
        """``shows_misses``: whether accounts may tell that a prompt is cached for others. ``replayer``: who runs windows again."""
        ...
