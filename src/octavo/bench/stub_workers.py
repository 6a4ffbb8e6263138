"""Several stub workers in a process of their own, which answer at a rate of all of them together once they are told to.

    python -m octavo.bench.stub_workers --connect unix:PATH --secret-file FILE --workers 4 --rate 2000 --fingerprint F --vocab-size V \\
        --max-model-len L

What is sent to them waits until a line is read from stdin; then every attempt in turn gets an event with one token, ``rate`` a second in
all, until it has its max_tokens. Each line on stdout is a JSON object: how many attempts there have been, and how many events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

from octavo.bench.stub_worker import StubWorker
from octavo.distributed.channel import Address
from octavo.distributed.fleet import HEARTBEAT_S
from octavo.distributed.handshake import read_secret

TICK_S = 0.005  # between two messages with events: a short step


async def _join(worker: StubWorker, address: Address, secret: bytes) -> None:
    """Until it is told to end; before there is a listener it looks for one."""
    while True:
        try:
            return await worker.run(address, secret)
        except (FileNotFoundError, ConnectionRefusedError):
            await asyncio.sleep(0.1)


async def run(workers: list[StubWorker], address: Address, secret: bytes, rate: float) -> None:
    """Until all of them have been told to end."""
    joined = asyncio.gather(*(_join(worker, address, secret) for worker in workers))
    go = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    begun_s, num_due, told_s, num = 0.0, 0, 0.0, len(workers)
    while not joined.done():
        now_s = time.monotonic()
        if now_s - told_s >= HEARTBEAT_S:
            told_s = now_s
            counts = {"attempts": sum(w.num_received for w in workers), "events": sum(w.num_sent for w in workers)}
            print(json.dumps(counts), flush=True)
        if go.done():
            begun_s = begun_s or now_s
            before, num_due = num_due, int((now_s - begun_s) * rate)
            for place, worker in enumerate(workers):  # the events from number ``before`` on, by turns
                worker.give_in_turn((num_due - place) // num - (before - place) // num)
        await asyncio.sleep(TICK_S)
    await joined


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("--connect", Address.parse), ("--secret-file", str), ("--workers", int), ("--rate", float)):
        parser.add_argument(name, type=kind, required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    options = parser.parse_args()
    model = (options.fingerprint, options.vocab_size)
    workers = [StubWorker(f"stub-{i}", *model, max_model_len=options.max_model_len) for i in range(options.workers)]
    asyncio.run(run(workers, options.connect, read_secret(options.secret_file), options.rate))


if __name__ == "__main__":
    main()
