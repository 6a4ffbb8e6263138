"""A cluster under load whose workers are killed, stopped, cut off and slowed down at random, and what its clients saw of it.

    python -m tests.cluster.chaos --minutes 20 --seed 1 --model smollm2 --report docs/soak/DATE-chaos.md

    clients ── front end ──┬── proxy 0 ── veth ── worker 0 (namespace)
                           ├── proxy 1 ── veth ── worker 1 (namespace)
                           └── proxy 2 ── veth ── worker 2 (namespace)

The clients send requests whose right answers one plain engine has given before, each as soon as its last one has ended. Held to: no failed
request, no wrong answer, no block in use at the end on any worker, the full rate again within ``RECOVERY_S`` of each round's end, and no
worker that stays away. Owns the cluster and the report; ``schedule`` says what happens, ``figures`` what it means.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from octavo.bench import netns
from octavo.bench.netns import Network
from octavo.distributed.handshake import SECRET_VARIABLE, new_secret
from tests.cluster.chaos_report import ChaosCase, ChaosResult, report
from tests.cluster.figures import Rate, Seen, drift, judge
from tests.cluster.known_requests import KnownRequest, RequestFailed, ask, ask_all, difference, known_requests
from tests.cluster.processes import Process, Server
from tests.cluster.proxy import Proxy
from tests.cluster.schedule import LEAD_S, ChaosEvent, Kind, Round, rounds

CONTROL_PORT = 7070  # of an address that is this network's own
WARM_S = 4.0  # of the lead, in which caches fill
ENGINE_FLAGS = ["--threads", "1", "--num-kv-blocks", "1024", "--max-num-seqs", "16"]


class Victim:
    """One worker, its host and its proxy: what can be done to it and undone. The undoing of what is not done does nothing."""

    def __init__(self, process: Process, proxy: Proxy, host: netns.Host) -> None:
        self.process, self.proxy, self.host = process, proxy, host

    def begin(self, event: ChaosEvent) -> None:
        if event.kind is Kind.KILL:
            self.process.kill()
        elif event.kind is Kind.STOP:
            self.process.signal(signal.SIGSTOP)
        elif event.kind is Kind.LINK:
            self.host.set_link(up=False)
        elif event.kind is Kind.DELAY:
            self.proxy.delay_s = event.delay_s
        elif event.kind is Kind.STALL:
            self.proxy.stall()
        elif event.kind is Kind.CUT:
            self.proxy.refuse(True)
            self.proxy.cut()

    def end(self, event: ChaosEvent) -> None:
        if event.kind is Kind.KILL:
            self.process.start()
        elif event.kind is Kind.STOP:
            self.process.signal(signal.SIGCONT)
        elif event.kind is Kind.LINK:
            self.host.set_link(up=True)
        elif event.kind is Kind.DELAY:
            self.proxy.delay_s = 0.0
        elif event.kind is Kind.STALL:
            self.proxy.resume()
        elif event.kind is Kind.CUT:
            self.proxy.refuse(False)


@dataclass(slots=True)
class Cluster:
    server: Server
    victims: list[Victim]


@contextlib.contextmanager
def cluster(case: ChaosCase, folder: Path) -> Iterator[Cluster]:
    """A front end on this machine's network and one worker in each namespace, all of them ready."""
    environment = {SECRET_VARIABLE: new_secret()}
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(len(case.roles)))
        front = Server(front_end_arguments(case, network.address), folder / "front-end.log", environment)
        front.start()
        stack.callback(front.stop)
        victims = []
        for number, (role, host) in enumerate(zip(case.roles, network.hosts, strict=True)):
            proxy = stack.enter_context(Proxy((network.address, CONTROL_PORT), network.address))
            arguments = ["worker", "--connect", f"{network.address}:{proxy.port}", "--name", f"worker-{number}", "--role", role]
            worker = Process(arguments, folder / f"worker-{number}.log", host, environment)
            stack.callback(worker.kill)
            worker.start()
            victims.append(Victim(worker, proxy, host))
        front.wait_until_ready()
        front.wait_for(lambda: num_ready(front) == len(victims))
        yield Cluster(front, victims)


def run_chaos(case: ChaosCase, folder: Path, say: Any = print) -> ChaosResult:
    """Minutes of it. ``folder`` gets the logs. Raises NetworkError where there are no namespaces, RequestFailed for a plain engine's own
    failures."""
    requests = known_requests(case.num_requests, case.seed)
    say("the right answers, from one engine")
    with Server(["serve", "--port", "0", "-m", case.model, *ENGINE_FLAGS], folder / "one.log") as one:
        answers = asyncio.run(ask_all(one.port, requests, 4))
    duration_s = 60 * case.minutes
    kinds = [tuple(Kind)] * len(case.roles)
    plan = rounds(case.seed, duration_s, kinds)
    with cluster(case, folder) as made:
        say(f"{len(plan)} rounds in {case.minutes:g} minutes")
        seen = asyncio.run(_load_and_chaos(case, made, list(zip(requests, answers, strict=True)), plan, duration_s, say))
        server = made.server
        # The load is over: what is still in use some seconds later is never given back.
        with contextlib.suppress(AssertionError):
            server.wait_for(lambda: not any(blocks_in_use(server).values()) and num_ready(server) == len(case.roles), timeout_s=30)
        left, workers = blocks_in_use(server), server.get("/v1/cluster")["workers"]
    write_timeline(folder / "timeline.txt", seen, plan, duration_s)
    results = judge(seen, plan, (WARM_S, LEAD_S), duration_s)
    return ChaosResult(case, seen, results, left, workers, drift(seen, (WARM_S, LEAD_S), duration_s))


def write_timeline(path: Path, seen: Sequence[Seen], plan: Sequence[Round], duration_s: float) -> None:
    """Second by second, for whoever looks into a run: characters, requests that ended, and what happened."""
    rate, events = Rate(seen), [event for one in plan for event in one.events]
    lines = []
    for second in range(int(duration_s)):
        ended = sum(second <= one.end_s < second + 1 for one in seen)
        begun = [f"{event} begins" for event in events if int(event.at_s) == second]
        words = "; ".join(begun + [f"{event} ends" for event in events if int(event.end_s) == second])
        lines.append(f"{second:5d} s {rate.over(second, second + 1):8.0f} {ended:5d}  {words}".rstrip())
    path.write_text("\n".join(lines) + "\n")


async def _load_and_chaos(
    case: ChaosCase, made: Cluster, known: Sequence[tuple[KnownRequest, Any]], plan: Sequence[Round], duration_s: float, say: Any
) -> list[Seen]:
    started_s = time.monotonic()
    seen: list[Seen] = []
    order = itertools.cycle(known)

    def arrived(one: Seen, size: int) -> None:
        one.arrivals.append((time.monotonic() - started_s, size))

    async def client() -> None:
        while time.monotonic() - started_s < duration_s:
            request, right = next(order)
            seen.append(one := Seen(request.number, time.monotonic() - started_s))
            try:
                answer = await ask(made.server.port, request, partial(arrived, one))
                one.wrong = difference(answer, right)
            except RequestFailed as error:
                one.failure = str(error)
                await asyncio.sleep(0.5)  # a front end that refuses everything is not to be asked thousands of times a second
            one.end_s = time.monotonic() - started_s

    async with asyncio.TaskGroup() as tasks:
        for _ in range(case.num_clients):
            tasks.create_task(client())
        for event in (event for one in plan for event in one.events):
            tasks.create_task(_happen(event, made.victims[event.worker], started_s, say))
    return seen


async def _happen(event: ChaosEvent, victim: Victim, started_s: float, say: Any) -> None:
    """An event and its end, each in a thread: commands that set links take their time."""
    await asyncio.sleep(started_s + event.at_s - time.monotonic())
    say(f"{event.at_s:7.1f} s  {event}")
    await asyncio.to_thread(victim.begin, event)
    try:
        await asyncio.sleep(started_s + event.end_s - time.monotonic())
    finally:
        victim.end(event)


def front_end_arguments(case: ChaosCase, address: str) -> list[str]:
    return ["serve", "--port", "0", "-m", case.model, "--workers-listen", f"{address}:{CONTROL_PORT}", *ENGINE_FLAGS]


def num_ready(server: Server) -> int:
    return sum(worker["state"] == "ready" for worker in server.get("/v1/cluster")["workers"])


def blocks_in_use(server: Server) -> dict[str, float]:
    """By worker; of one that has no engine yet, none."""
    return {worker["name"]: float((worker["load"] or {"used_blocks": 0})["used_blocks"]) for worker in server.get("/v1/cluster")["workers"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 when something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.chaos", description="A cluster whose workers are hit at random.")
    parser.add_argument("--model", default="smollm2", help="as of `octavo serve`")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--roles", default="both,both,both", help="of the workers: both, prefill, decode")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--report", type=Path, help="the file that gets the result")
    parser.add_argument("--logs", type=Path, help="the folder that gets the processes' logs (default: one that is taken away again)")
    given = parser.parse_args(arguments)
    case = ChaosCase(given.model, given.minutes, given.seed, tuple(given.roles.split(",")), given.clients)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = run_chaos(case, folder)
    text = report(result, datetime.date.today())
    print(text)
    if given.report is not None:
        given.report.write_text(text)
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
