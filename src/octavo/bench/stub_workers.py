"""Workers without an engine, in one process: they join a front end like any other and answer at a rate that they are told.

    python -m octavo.bench.stub_workers --connect unix:PATH --secret-file FILE --workers 4 --rate 2000

What is sent to them waits until a line is read from stdin; then every attempt in turn gets an event with one token, ``rate`` a second in
all, until it has its max_tokens. Each line on stdout is a JSON object: how many attempts there are, and how many events have been sent. So
what a front end costs by itself can be measured: see ``bench.cluster``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass

from octavo.core.request import FinishReason
from octavo.distributed.channel import Address, Channel, connect
from octavo.distributed.handshake import read_secret
from octavo.distributed.messages import (
    PROTOCOL,
    Abort,
    Answer,
    Ask,
    Event,
    Events,
    Hello,
    Load,
    Ready,
    Refuse,
    Reset,
    Shutdown,
    Submit,
    ToWorker,
    Welcome,
    WorkerLimits,
    config_of,
    to_worker,
)

HEARTBEAT_S = 0.2
TICK_S = 0.005  # between two messages with events: a short step
MAX_SEQS = 1 << 16
TEXT = " token"


@dataclass(slots=True)
class _Attempt:
    key: int
    num_left: int
    token_id: int


class StubWorker:
    """One of them. ``attempts`` get their events in turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.attempts: deque[_Attempt] = deque()
        self.num_received = 0
        self.num_sent = 0  # events
        self.ended = asyncio.Event()
        self.refused: str | None = None
        self._channel: Channel[ToWorker] | None = None
        self._dropped: set[int] = set()

    async def join(self, address: Address, secret: bytes) -> None:
        """Connect, trying again until there is a listener."""
        while self._channel is None:
            try:
                self._channel = await connect(address, secret, to_worker)
            except OSError:
                await asyncio.sleep(0.1)
        self._channel.start(self._take, lambda reason: self.ended.set())
        self._channel.send(Hello(PROTOCOL, self.name, "both", socket.gethostname(), os.getpid(), secrets.token_hex(8)))

    def _take(self, messages: list[ToWorker]) -> None:
        assert self._channel is not None
        for message in messages:
            match message:
                case Submit():
                    self.num_received += 1
                    tokens = message.request.params.max_tokens or 1
                    self.attempts.append(_Attempt(message.key, tokens, message.request.prompt_token_ids[-1]))
                case Abort():
                    self._dropped.update(message.keys)
                case Welcome():
                    self._channel.send(_ready(message))
                case Ask():
                    self._channel.send(Answer(message.number, error="a stub tells nothing of its requests"))
                case Reset():
                    self.attempts.clear()
                case Refuse():
                    self.refused = message.reason
                    self.ended.set()
                case Shutdown():
                    self.ended.set()

    def beat(self) -> None:
        """Its load: everything runs, nothing waits."""
        if self._channel is not None:
            num_running = len(self.attempts)
            free = MAX_SEQS - num_running
            self._channel.send(Load(self.num_sent, num_running=num_running, num_available_blocks=free, num_received=self.num_received))

    def send_events(self, num_events: int) -> None:
        """So many, in one message; fewer when there are fewer attempts, for a step gives each of them one."""
        events = []
        for _ in range(min(num_events, len(self.attempts))):
            attempt = self.attempts.popleft()
            if attempt.key in self._dropped:
                self._dropped.discard(attempt.key)
                continue
            attempt.num_left -= 1
            if attempt.num_left:
                events.append(Event(attempt.key, text=TEXT, token_ids=[attempt.token_id]))
                self.attempts.append(attempt)
            else:
                events.append(Event(attempt.key, text=TEXT, token_ids=[attempt.token_id], finish_reason=FinishReason.LENGTH))
        if events and self._channel is not None:
            self.num_sent += len(events)
            self._channel.send(Events(events))


def _ready(welcome: Welcome) -> Ready:
    """As an engine of that model would say, with room for any number of requests."""
    from octavo.models.catalog import ensure_model
    from octavo.models.loading import open_model

    config = config_of(welcome.config)
    body = open_model(ensure_model(config.model.model)).body
    context = config.model.max_model_len or body.program.context
    limits = WorkerLimits(context, context, MAX_SEQS, body.program.vocab_size, config.cache.block_size, MAX_SEQS, 1)
    return Ready(config.model.model, f"{body.fingerprint}/stub", limits)


async def run(address: Address, secret: bytes, num_workers: int, rate: float) -> str | None:
    """Until all of them have been told to end; why one was refused, if one was."""
    workers = [StubWorker(f"stub-{i}") for i in range(num_workers)]
    await asyncio.gather(*(worker.join(address, secret) for worker in workers))
    go = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    begun_s, num_due, told_s = 0.0, 0, 0.0
    while not all(worker.ended.is_set() for worker in workers):
        now_s = time.monotonic()
        if now_s - told_s >= HEARTBEAT_S:
            told_s = now_s
            for worker in workers:
                worker.beat()
            counts = {"attempts": sum(w.num_received for w in workers), "events": sum(w.num_sent for w in workers)}
            print(json.dumps(counts), flush=True)
        if go.done():
            begun_s = begun_s or now_s
            num_new = int((now_s - begun_s) * rate) - num_due
            num_due += num_new
            for place, worker in enumerate(workers):  # those numbered num_due - num_new to num_due, by turns
                worker.send_events((num_due - place) // num_workers - (num_due - num_new - place) // num_workers)
        await asyncio.sleep(TICK_S)
    return next((worker.refused for worker in workers if worker.refused), None)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("--connect", Address.parse), ("--secret-file", str), ("--workers", int), ("--rate", float)):
        parser.add_argument(name, type=kind, required=True)
    options = parser.parse_args()
    sys.exit(asyncio.run(run(options.connect, read_secret(options.secret_file), options.workers, options.rate)))


if __name__ == "__main__":
    main()
