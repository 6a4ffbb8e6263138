"""A worker without an engine: speaks the control protocol and makes up the tokens. It measures a front end, which cannot tell it apart.

Every attempt gets ``tokens_per_s`` tokens a second or, where that is 0, none until it is told to (``give``): a stream that idles. Token k
of an attempt is ``token_of(prompt, k)``, so that a reader can tell a lost or doubled one. ``python -m octavo.bench.stub_worker`` is a
process of its own; ``StubWorker`` can also live in the program that measures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
from collections import OrderedDict
from dataclasses import dataclass, field

from octavo.core.request import FinishReason
from octavo.distributed.channel import Address, Channel, connect
from octavo.distributed.fleet import HEARTBEAT_S
from octavo.distributed.handshake import read_secret
from octavo.distributed.messages import (
    PROTOCOL,
    Abort,
    Event,
    Events,
    Hello,
    Load,
    Ready,
    Reset,
    Shutdown,
    Submit,
    ToWorker,
    Welcome,
    WorkerLimits,
    config_of,
    to_worker,
)

TICK_S = 0.01  # events of so long go in one message, as those of a step do


def token_of(prompt_token_ids: list[int], place: int, vocab_size: int) -> int:
    """Output token number ``place`` of a prompt, from 0."""
    return (sum(prompt_token_ids) * 31 + place * 17) % (vocab_size - 3) + 3  # the first ids are control tokens, often


@dataclass(slots=True)
class _Attempt:
    key: int
    prompt_token_ids: list[int]
    num_made: int
    max_tokens: int
    num_owed: float = 0.0


@dataclass(slots=True)
class StubWorker:
    """``model_fingerprint``: of the front end's model, as its file says. ``num_sent``: token events."""

    name: str
    model_fingerprint: str
    vocab_size: int
    tokens_per_s: float = 0.0
    max_model_len: int = 8192
    num_kv_blocks: int = 1 << 20
    role: str = "both"
    num_sent: int = 0
    boot_id: str = field(default_factory=lambda: secrets.token_hex(8))
    num_received: int = 0  # attempts
    _attempts: OrderedDict[int, _Attempt] = field(default_factory=OrderedDict)  # whose turn it is comes first
    _channel: Channel[ToWorker] | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, address: Address, secret: bytes) -> None:
        """Until told to end, or the front end is gone; then again, if wanted, as the same worker that comes back."""
        self._attempts.clear()
        self._ended.clear()
        self.num_received = 0
        channel = self._channel = await connect(address, secret, to_worker)
        channel.start(self._take, lambda reason: self._ended.set())
        channel.send(Hello(PROTOCOL, self.name, self.role, socket.gethostname(), os.getpid(), self.boot_id))
        ticking = asyncio.create_task(self._tick())
        try:
            await self._ended.wait()
        finally:
            ticking.cancel()
            channel.close("the stub ends")

    @property
    def num_attempts(self) -> int:
        return len(self._attempts)

    def give(self, num_tokens: int = 1) -> None:
        """So many tokens to every attempt."""
        events = [event for attempt in list(self._attempts.values()) for event in self._events(attempt, num_tokens)]
        if events and self._channel is not None:
            self._channel.send(Events(events))

    def give_in_turn(self, num_tokens: int) -> None:
        """So many tokens, one to each attempt whose turn it is; each at most one, as in a step."""
        events = list[Event]()
        for _ in range(min(num_tokens, len(self._attempts))):
            key, attempt = next(iter(self._attempts.items()))
            self._attempts.move_to_end(key)
            events += self._events(attempt, 1)
        if events and self._channel is not None:
            self._channel.send(Events(events))

    def _events(self, attempt: _Attempt, num_tokens: int) -> list[Event]:
        """An event for each token, the last with the end when that is reached."""
        events = []
        for _ in range(min(num_tokens, attempt.max_tokens - attempt.num_made)):
            token = token_of(attempt.prompt_token_ids, attempt.num_made, self.vocab_size)
            attempt.num_made += 1
            is_last = attempt.num_made == attempt.max_tokens
            events.append(Event(attempt.key, 0, f" {token}", [token], FinishReason.LENGTH if is_last else None))
            if is_last:
                del self._attempts[attempt.key]
        self.num_sent += len(events)
        return events

    def _take(self, messages: list[ToWorker]) -> None:
        assert self._channel is not None
        for message in messages:
            match message:
                case Welcome():
                    self._channel.send(self._ready(message))
                case Submit():
                    self.num_received += 1
                    made, request = len(message.output_token_ids), message.request
                    most = request.params.max_tokens or 0
                    self._attempts[message.key] = _Attempt(message.key, request.prompt_token_ids, made, most)
                case Abort():
                    for key in message.keys:
                        self._attempts.pop(key, None)
                case Reset():
                    self._attempts.clear()
                case Shutdown():
                    self._ended.set()
                case _:
                    pass

    def _ready(self, welcome: Welcome) -> Ready:
        config = config_of(welcome.config)
        block_size, max_num_seqs = config.cache.block_size, config.scheduler.max_num_seqs
        most = min(self.max_model_len, self.num_kv_blocks * block_size + 1)
        limits = WorkerLimits(self.max_model_len, most, max_num_seqs, self.vocab_size, block_size, self.num_kv_blocks, 1)
        return Ready("stub", f"{self.model_fingerprint}/stub", limits)

    async def _tick(self) -> None:
        """Tokens at the rate, and the heartbeat."""
        loop = asyncio.get_running_loop()
        last_s, beat_s = loop.time(), 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self._make(self.tokens_per_s * (now - last_s))
            last_s = now
            if now - beat_s >= HEARTBEAT_S and self._channel is not None:
                beat_s = now
                self._channel.send(Load(num_running=len(self._attempts), num_available_blocks=1 << 20, num_received=self.num_received))

    def _make(self, num_tokens: float) -> None:
        """What each attempt has come to be owed."""
        if num_tokens <= 0.0 or self._channel is None:
            return
        events = list[Event]()
        for attempt in list(self._attempts.values()):
            attempt.num_owed += num_tokens
            whole = int(attempt.num_owed)
            if whole:
                attempt.num_owed -= whole
                events += self._events(attempt, whole)
        if events:
            self._channel.send(Events(events))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--tokens-per-s", type=float, default=0.0)
    args = parser.parse_args()
    stub = StubWorker(args.name, args.fingerprint, args.vocab_size, args.tokens_per_s)
    asyncio.run(stub.run(Address.parse(args.connect), read_secret()))


if __name__ == "__main__":
    main()
