"""A front end with honest model workers behind it, and no socket, process or clock: messages of both directions are delivered one by one,
in whatever order a seed says, and between any two of them workers die, come back, fall silent, fail steps, or lose what they copy.

A worker answers as a stub does (``token_of``), so whatever becomes of it a stream's tokens are known. What it says is encoded and decoded
as on a channel, and goes the front end's own way (``Control``), which believes it to be a worker like any.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from octavo.bench.stub_worker import token_of
from octavo.core.request import FinishReason, SamplingParams
from octavo.distributed.attempts import RetryLimits
from octavo.distributed.channel import Address, Channel
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_options import ClusterOptions, HandoverOptions
from octavo.distributed.fleet import Change, WorkerState
from octavo.distributed.handoff import HandoffLimits
from octavo.distributed.link import Link
from octavo.distributed.messages import (
    Abort,
    Begin,
    Cancel,
    Copied,
    CopyFailed,
    Event,
    Events,
    FromWorker,
    Load,
    Message,
    NoRoom,
    Offered,
    PromptStarted,
    Ready,
    Release,
    Reserve,
    Reserved,
    Reset,
    Resume,
    Send,
    Submit,
    ToWorker,
    WorkerLimits,
    encode,
    from_worker,
    to_worker,
)
from octavo.distributed.worker_account import WorkerAccount
from octavo.distributed.worker_engine import engine_id
from octavo.engine.event_stream import EventStream
from tests.engine.scripted import bigram_config, bigram_model, byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.vocab_size
BLOCK = 16
MAX_LEN = 8192
ENDLESS = RetryLimits(10**6, 10**6)
OPTIONS = ClusterOptions(
    resubmit_per_s=1e9, resubmit_burst=1000, retries=ENDLESS, worker_wait_s=1e6, handover=HandoverOptions(limits=HandoffLimits(5, 5, 50))
)


def tokens_of(prompt: list[int], choice: int, start: int, number: int) -> list[int]:
    """So many of a choice's output, from ``start`` on."""
    return [token_of(prompt, 1000 * choice + place, VOCAB) for place in range(start, start + number)]


@dataclass(slots=True)
class Attempt:
    """What a worker has of one. ``to``: where its KV is to go; ``is_off``: it waits to be handed over."""

    prompt: list[int]
    made: list[list[int]]  # by choice
    max_tokens: int
    has_ticket: bool = False
    has_started: bool = False
    is_off: bool = False
    to: str | None = None


@dataclass(slots=True)
class Coming:
    """Room for KV that is to come."""

    prompt: list[int]
    max_tokens: int
    num_blocks: int
    is_copied: bool = False


@dataclass(eq=False)
class ModelWorker:
    """One process. ``inbox``: sent to it, and not yet heard; ``outbox``: said, and not yet delivered."""

    name: str
    role: str
    num_blocks: int
    boot_id: str
    inbox: deque[ToWorker] = field(default_factory=deque)
    outbox: deque[FromWorker] = field(default_factory=deque)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    coming: dict[int, Coming] = field(default_factory=dict)
    num_received: int = 0

    def begin_connection(self) -> None:
        self.inbox.clear()
        self.outbox.clear()
        self.attempts.clear()
        self.coming.clear()
        self.num_received = 0

    def say(self, *messages: FromWorker) -> None:
        self.outbox += [from_worker(encode(cast(Message, message))) for message in messages]

    @property
    def num_free(self) -> int:
        used = sum(-(-(len(one.prompt) + sum(map(len, one.made)) + 1) // BLOCK) for one in self.attempts.values())
        return max(0, self.num_blocks - used - sum(one.num_blocks for one in self.coming.values()))

    def load(self, pending_tokens: int, pending_s: float) -> Load:
        return Load(
            num_available_blocks=self.num_free, num_received=self.num_received, num_running=len(self.attempts),
            pending_tokens=pending_tokens, pending_s=pending_s,
        )  # fmt: skip

    # --- what it hears --------------------------------------------------------------------------------------------------------------------

    def hear(self) -> None:
        match self.inbox.popleft():
            case Submit(key, request, made, ticket):
                self.num_received += 1
                choices = [list(made) if made else list[int]() for _ in range(request.params.n)]
                self.attempts[key] = Attempt(request.prompt_token_ids, choices, request.params.max_tokens or 0, ticket is not None)
            case Abort(keys):
                for key in keys:
                    if self.attempts.pop(key, None) is not None:
                        self.say(Events([Event(key, finish_reason=FinishReason.ABORT, account=told(key, "aborted"))]))
                    self.coming.pop(key, None)
            case Reset():
                self.attempts.clear()
                self.coming.clear()
            case message:
                self._move(message)

    def _move(self, message: ToWorker) -> None:
        """What it hears of a hand-off."""
        match message:
            case Reserve(key, request, num_tokens):
                num_blocks = -(-(num_tokens + 1) // BLOCK)
                if self.num_free < num_blocks:
                    self.say(NoRoom(key))
                else:
                    self.coming[key] = Coming(request.prompt_token_ids, request.params.max_tokens or 0, num_blocks)
                    self.say(Reserved(key))
            case Cancel(key):
                self.coming.pop(key, None)
            case Begin(key, made):
                found = self.coming.pop(key, None)
                if found is None or not found.is_copied:
                    self.say(CopyFailed(key, "it has not come"))
                else:
                    self.attempts[key] = Attempt(found.prompt, [list(made)], found.max_tokens, has_started=True)
            case Send(key, kv_address) if key in self.attempts:
                self.attempts[key].to = kv_address
            case Release(key) if key in self.attempts and self.attempts[key].is_off:
                del self.attempts[key]
            case Resume(key) if key in self.attempts:
                self.attempts[key].has_ticket = self.attempts[key].is_off = False

    # --- what it does ---------------------------------------------------------------------------------------------------------------------

    def step(self, rng: random.Random, fails: bool) -> bool:
        """For one of its attempts; whether there was one."""
        live = [key for key, one in self.attempts.items() if not one.is_off]
        if not live:
            return False
        key = rng.choice(live)
        attempt = self.attempts[key]
        if attempt.has_ticket and not attempt.has_started:
            attempt.has_started = True
            self.say(PromptStarted(key))
            if rng.random() < 0.6:
                return True
        if fails and rng.random() < 0.02:
            del self.attempts[key]
            ends = [Event(key, choice, finish_reason=FinishReason.ERROR, error="a step failed") for choice in range(len(attempt.made))]
            ends[-1].account = told(key, "failed")
            self.say(Events(ends))
            return True
        self._make(rng, key, attempt)
        return True

    def _make(self, rng: random.Random, key: int, attempt: Attempt) -> None:
        choice = rng.choice([i for i, made in enumerate(attempt.made) if len(made) < attempt.max_tokens])
        made, is_alone = attempt.made[choice], len(attempt.made) == 1
        number = 1 if is_alone else min(rng.randint(1, 3), attempt.max_tokens - len(made))
        new = tokens_of(attempt.prompt, choice, len(made), number)
        made += new
        end = FinishReason.LENGTH if len(made) == attempt.max_tokens else None
        is_over = all(len(made) == attempt.max_tokens for made in attempt.made)
        account = told(key, "finished") if is_over else None
        self.say(Events([Event(key, choice, "".join(map(shown, new)), new, end, account=account)]))
        if is_over:
            del self.attempts[key]
        elif attempt.has_ticket:
            attempt.is_off = True
            self.say(Offered(key, list(made), told(key, "waiting")))

    def copy(self, rng: random.Random, there: Mapping[str, ModelWorker]) -> bool:
        """The KV of one of its attempts arrives, or does not; whether there was one."""
        for key, attempt in self.attempts.items():
            if attempt.to is not None and (attempt.is_off or attempt.has_started):
                receiver, attempt.to = there.get(attempt.to.removeprefix("tcp=")), None
                if receiver is None or key not in receiver.coming or rng.random() < 0.1:
                    self.say(CopyFailed(key, "the way is cut"))
                else:
                    receiver.coming[key].is_copied = True
                    receiver.say(Copied(key))
                return True
        return False


def told(key: int, state: str) -> WorkerAccount:
    """What a worker says of where the time of an attempt went."""
    return WorkerAccount(engine_id(key), 0.0, state)


def shown(token: int) -> str:
    return f"<{token}>"


class _Channel:
    """The front end's end of a worker's channel."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker, self.closed_for, self.is_peers_doing, self.peer = worker, cast(str | None, None), False, worker.name
        self.peer_host = self.local_host = cast(str | None, None)

    @property
    def is_open(self) -> bool:
        return self.closed_for is None

    def send(self, message: Message) -> None:
        if self.closed_for is None:
            self.worker.inbox.append(to_worker(encode(message)))

    def close(self, reason: str) -> None:
        self.closed_for = self.closed_for or reason


@dataclass(slots=True)
class Reader:
    """One client. ``got``: tokens and text, by choice."""

    stream: EventStream
    prompt: list[int]
    num_tokens: int
    got: list[tuple[list[int], list[str]]]

    def read(self) -> bool:
        """Take what there is; whether it is over, and then it is right."""
        events, self.stream._events, self.stream._num_bytes = self.stream._events, [], 0
        for event in events:
            assert event.error is None, event.error
            self.got[event.choice][0].extend(event.token_ids)
            self.got[event.choice][1].append(event.text)
        if self.stream.finished:
            for choice, (tokens, texts) in enumerate(self.got):
                wanted = tokens_of(self.prompt, choice, 0, self.num_tokens)
                assert tokens == wanted and "".join(texts) == "".join(map(shown, wanted)), (self.stream.request_ids, choice, tokens, wanted)
        return self.stream.finished


class World:
    """``roles`` by name; each worker has so many blocks. ``fails``: some steps cannot be computed. ``max_choices``: of a request."""

    def __init__(self, seed: int, roles: Mapping[str, str], num_blocks: int, fails: bool = False, max_choices: int = 1) -> None:
        self.rng, self.roles, self.num_blocks, self.fails, self.max_choices = random.Random(seed), roles, num_blocks, fails, max_choices
        self.engine = ClusterEngine(bigram_model(TOKENIZER, context=MAX_LEN), bigram_config(), Address("127.0.0.1", 0), b"x" * 20, OPTIONS)
        self.faults: list[tuple[Any, ...]] = []
        self.engine.flights.faults._log.say = lambda *said: self.faults.append(said)  # type: ignore[method-assign]
        self.workers: dict[str, ModelWorker] = {}
        self.links: dict[str, Link] = {}
        self.readers: dict[str, Reader] = {}
        self.numbers, self.boots = itertools.count(), itertools.count()
        for name in roles:
            self.join(name)

    # --- what happens ---------------------------------------------------------------------------------------------------------------------

    def join(self, name: str, worker: ModelWorker | None = None) -> None:
        """A worker connects: another process, or the same one again."""
        worker = worker or ModelWorker(name, self.roles[name], self.num_blocks, f"boot-{next(self.boots)}")
        worker.begin_connection()
        control, now = self.engine.control, self.engine.clock.now()
        record = control.fleet.hello(name, worker.role, "here", 1, worker.boot_id, now)
        link = control._links[name] = Link(cast(Channel[FromWorker], _Channel(worker)), record)
        limits = WorkerLimits(MAX_LEN, min(MAX_LEN, self.num_blocks * BLOCK + 1), 64, VOCAB, BLOCK, self.num_blocks, 1)
        self.workers[name], self.links[name] = worker, link
        control._take(link, Ready("stub", "bigram/stub", limits, f"tcp={name}", ["tcp"]))

    def die(self, name: str) -> ModelWorker:
        self.engine.control._closed(self.links.pop(name), "it has died")
        return self.workers.pop(name)

    def deliver(self, name: str) -> None:
        self.engine.control._take(self.links[name], self.workers[name].outbox.popleft())

    def submit(self) -> None:
        rng, number = self.rng, next(self.numbers)
        prompt, num_tokens, num_choices = [3 + number % 200] * rng.choice([3, 20, 40]), rng.randint(1, 6), rng.randint(1, self.max_choices)
        params = self.engine.check_params(SamplingParams(max_tokens=num_tokens, seed=1, n=num_choices))
        whose: dict[str, Any] = {"user": rng.choice("ab"), "session": rng.choice(["s", None])}
        stream = self.engine.submit([self.engine.prepare_checked(prompt, params, f"r{number}", **whose)])
        self.readers[f"r{number}"] = Reader(stream, prompt, num_tokens, [([], []) for _ in range(num_choices)])

    def leave(self) -> None:
        """A client does."""
        self.engine.abort(self.readers.pop(self.rng.choice(list(self.readers))).stream)

    def hang(self, link: Link) -> None:
        """It falls silent, or speaks again."""
        control, now = self.engine.control, self.engine.clock.now()
        if link.worker.state is WorkerState.READY:
            control.fleet._enter(link.worker, WorkerState.SUSPECT, now)
            control._changed(link, Change.SUSPECTED)
        elif link.worker.state is WorkerState.SUSPECT:
            control.fleet._enter(link.worker, WorkerState.READY, now)
            control._changed(link, Change.RECOVERED)

    def act(self) -> None:
        """One thing more, whatever it is."""
        rng, engine = self.rng, self.engine
        name = rng.choice(list(self.workers)) if self.workers else None
        what = rng.random()
        if what < 0.08:
            if len(self.readers) < 25:
                self.submit()
        elif what < 0.09:
            engine.clock.advance(rng.choice([0.1, 1.0, 6.0]))  # type: ignore[attr-defined]
        elif what < 0.10:
            engine._look()
        elif what < 0.11:
            if self.readers:
                self.leave()
        elif what < 0.125:
            if gone := [one for one in self.roles if one not in self.workers]:
                self.join(rng.choice(gone))
        elif name is not None:
            self._act_of(name, rng.random())

    def _act_of(self, name: str, what: float) -> None:
        rng, worker, link = self.rng, self.workers[name], self.links[name]
        if what < 0.37:
            if worker.inbox:
                worker.hear()
        elif what < 0.71:
            if worker.outbox:
                self.deliver(name)
        elif what < 0.85:
            worker.step(rng, self.fails)
        elif what < 0.92:
            worker.copy(rng, self.workers)
        elif what < 0.975:
            pending = (rng.choice([len(worker.attempts), 50]), rng.choice([0.0, 0.1, 3.0])) if worker.attempts else (0, 0.0)
            worker.say(worker.load(*pending))
        elif what < 0.981:
            self.die(name)
            if rng.random() < 0.3:
                self.join(name, worker)
        elif what < 0.992:
            self.hang(link)
        else:
            link.worker.draining = not link.worker.draining
