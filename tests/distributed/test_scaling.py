"""Workers come while there is more to do and go when there is less, and no request fails of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.core.request import SamplingParams
from octavo.distributed import scaling, worker_engine
from octavo.distributed.autoscale import ScaleLimits
from octavo.distributed.channel import Address
from octavo.distributed.cluster_options import ClusterOptions, NewNames
from octavo.distributed.flight import Begun
from octavo.distributed.full_step import full_step_prices
from octavo.distributed.messages import Load
from octavo.distributed.told_load import ToldLoad
from tests.distributed.clusters import PATIENT, alone, cluster
from tests.distributed.test_front_end import Launcher as FrontEndLauncher
from tests.distributed.test_front_end import engine_of
from tests.distributed.test_worker import answer, front_end, until, worker
from tests.engine.scripted import bigram_config

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, seed=0)


def test_a_second_worker_comes_with_the_load_and_goes_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "ASK_S", 0.05)  # a step of these workers takes ten times what is waited for below: any load is too much
    limits = ScaleLimits(least=1, most=2, up_wait_s=0.001, down_after_s=0.3, start_s=0.5, rate_s=0.5)
    options = ClusterOptions(liveness=PATIENT, scale={"both": limits})

    async def run() -> None:
        async with cluster(1, delay_s=0.01, config=bigram_config(max_num_seqs=4), options=options) as grown:
            running = set[asyncio.Task[object]]()
            num_done = 0

            def names() -> set[str]:
                return {link.name for link in grown.engine.open_links()}

            async def keep_busy() -> None:
                nonlocal num_done
                while True:
                    output = await grown.run([50, 51, 52, num_done % 200 + 3], PARAMS)
                    assert output.error is None and len(output.outputs[0].token_ids) == 20
                    num_done += 1

            running = {asyncio.create_task(keep_busy()) for _ in range(24)}
            await grown.until(lambda: names() == {"worker-0", "worker-1"})
            seen = num_done
            await grown.until(lambda: num_done > seen + 24)
            for task in running:
                task.cancel()
            assert all(isinstance(ended, asyncio.CancelledError) for ended in await asyncio.gather(*running, return_exceptions=True))
            await grown.until(lambda: len(grown.processes.names) == 1 and len(list(grown.engine.control)) == 1)
            await grown.until(lambda: len(names()) == 1)
            assert grown.engine.flights.num_lost == 0
            assert (await grown.run([5, 6, 7], PARAMS)).error is None

    asyncio.run(run())


class Launcher:
    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self._new_names = NewNames(names)
        self.trouble: dict[str, str] = {}
        self.released: list[str] = []

    def add(self, role: str) -> str:
        self.names.append(self._new_names.next(role))
        return self.names[-1]

    def role_of(self, name: str) -> str:
        role = name.partition("-")[0]
        return "both" if role == "worker" else role

    def trouble_of(self, name: str) -> str | None:
        return self.trouble.get(name)

    def release(self, name: str) -> None:
        self.names.remove(name)
        self.released.append(name)


@dataclass(eq=False)
class Told:
    """A worker, as far as scaling sees one."""

    name: str
    index: int
    draining: bool = False
    keys: set[int] = field(default_factory=set)
    view: ToldLoad = field(default_factory=lambda: ToldLoad(0))
    load: Load = field(default_factory=Load)

    @property
    def worker(self) -> Told:
        return self

    @property
    def role(self) -> str:
        return Launcher().role_of(self.name)

    @property
    def takes_requests(self) -> bool:
        return not self.draining


@dataclass
class Came:
    """Flights, as far as scaling sees them."""

    num_waiting_tokens: int = 0
    num_waiting: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_ended: int = 0
    begun: Begun = field(default_factory=Begun)
    handovers: Any = None

    def __len__(self) -> int:
        return self.num_waiting


def test_a_worker_with_one_stream_has_room_for_others() -> None:
    """Two workers make a step every 10 ms for a stream each; a step of 50 streams would take 12 ms: one of them drains. 150 streams more
    would need both, and then it is kept."""
    drained, kept, now = list[Any](), list[Any](), [0.0]
    told = Load(pending_tokens=1, pending_s=0.01, output_token_s=0.012 / 50)
    workers = [Told(f"worker-{i}", i, keys={i}, load=told) for i in range(2)]  # they keep their streams: neither is empty

    def drain(worker: Told) -> None:
        worker.draining = True
        drained.append(worker)

    def keep(worker: Told) -> None:
        worker.draining = False
        kept.append(worker)

    control = cast(Any, type("Control", (), {"fleet": SimpleNamespace(drain=drain, keep=keep), "__iter__": lambda self: iter(workers)})())
    came, operations = Came(), cast(Any, SimpleNamespace(is_restarting=False, is_leaving=lambda link: False))
    limits = ScaleLimits(least=1, most=2, down_after_s=5.0, rate_s=2.0)
    scaler = scaling.Scaling({"both": limits}, control, cast(Any, came), operations, Launcher("worker-0", "worker-1"), lambda: now[0])

    def run(num_seconds: int, tokens_per_s: int) -> None:
        for _ in range(num_seconds):
            now[0] += 1.0
            came.num_output_tokens += tokens_per_s
            scaler.look()

    run(20, 200)
    assert drained == [workers[1]] and not kept
    run(20, 6000)
    assert kept == [workers[1]]


def test_prices_are_those_of_full_steps() -> None:
    """Of a law for steps: 10 ms, 0.1 ms a row. 16 rows are the most that is trusted before larger steps were seen."""
    engine = alone(bigram_config(num_kv_blocks=4096, max_num_seqs=64))
    engine.step_cost = cast(Any, SimpleNamespace(seconds_of=lambda shape: 0.01 + 1e-4 * shape.num_rows, max_trusted_rows=16))
    assert full_step_prices(engine) == pytest.approx((0.0116 / 16, 0.0116 / 16))
    engine.step_cost.max_trusted_rows = 1 << 20
    rows = engine.config.scheduler.max_num_batched_tokens
    assert full_step_prices(engine) == pytest.approx(((0.01 + 1e-4 * rows) / rows, 0.0164 / 64))


@pytest.mark.parametrize(("leaving", "started"), [(False, 0), (True, 1)])
def test_a_worker_that_somebody_sent_away_is_not_counted_on(leaving: bool, started: int) -> None:
    """One that drains for want of work is kept when there is work again; one that leaves is not, and another has to come."""
    launcher, kept = Launcher("worker-0"), list[Any]()
    workers = [Told("worker-0", 0), Told("worker-1", 1, draining=True, keys={1})]
    if not leaving:
        launcher.names.append("worker-1")
    fleet = SimpleNamespace(keep=kept.append)
    control = cast(Any, type("Control", (), {"fleet": fleet, "__iter__": lambda self: iter(workers)})())
    flights = cast(Any, Came(num_waiting_tokens=10**6))
    operations = cast(Any, SimpleNamespace(is_restarting=False, is_leaving=lambda link: leaving and link.name == "worker-1"))
    workers[0].load = Load(prompt_token_s=1e-3)
    scaler = scaling.Scaling({"both": ScaleLimits(least=1, most=2)}, control, flights, operations, launcher, lambda: 1.0)
    scaler.look()
    assert kept == ([] if leaving else [workers[1]])
    assert len(launcher.names) == (1 if leaving else 2) + started


class Cluster:
    """Workers that are there, and what is done to them."""

    def __init__(self, launcher: Launcher, limits: ScaleLimits | dict[str, ScaleLimits], *workers: Told) -> None:
        self.workers, self.drained, self.now = list(workers), list[Any](), 1.0
        fleet = SimpleNamespace(drain=self.drained.append, keep=lambda worker: None)
        control = type("Control", (), {"fleet": fleet, "__iter__": lambda control: iter(self.workers)})()
        operations = SimpleNamespace(is_restarting=False, is_leaving=lambda link: False)
        known = (cast(Any, control), cast(Any, Came()), cast(Any, operations))
        by_role = limits if isinstance(limits, dict) else {"both": limits}
        self.scaler = scaling.Scaling(by_role, *known, launcher, lambda: self.now)

    def look(self, num_seconds: int) -> None:
        for _ in range(num_seconds):
            self.now += 1.0
            self.scaler.look()


def test_a_worker_that_can_never_run_is_not_counted_on() -> None:
    """One that serves would be drained in its favour. Another is started in its place, now and then, until one is ready."""
    launcher = Launcher("worker-0", "worker-1", "worker-2")
    two = Cluster(launcher, ScaleLimits(least=2, most=4, down_after_s=1.0), Told("worker-0", 0), Told("worker-1", 1))
    launcher.trouble["worker-2"] = "it cannot run"
    two.look(60)
    assert not two.drained and launcher.names == ["worker-0", "worker-1"] and launcher.released == ["worker-2"]

    two.workers.pop()  # worker-1 is gone, and can never run again
    launcher.trouble |= {f"worker-{i}": "it cannot run" for i in (1, 3, 4, 5)}
    two.look(1)
    assert launcher.released == ["worker-2", "worker-1"] and launcher.names == ["worker-0"], "the next one rests"
    rest_s = int(2 * scaling.FIRST_REST_S)
    two.look(rest_s)
    assert launcher.names == ["worker-0", "worker-3"]
    two.look(2 * rest_s)
    assert launcher.released[2:] == ["worker-3"] and launcher.names == ["worker-0"]
    two.look(1)
    assert launcher.names == ["worker-0", "worker-4"]
    two.workers.append(Told("worker-4", 1))  # it runs
    two.look(1)
    two.workers.pop()
    two.look(1)
    assert launcher.released[3:] == ["worker-4"]
    two.look(int(scaling.FIRST_REST_S))
    assert launcher.names == ["worker-0", "worker-5"], "the pauses have begun anew"


def test_workers_that_somebody_else_has_started_are_not_taken_from_them() -> None:
    """More of them than there may be of the launcher's, and the idlest of all."""
    launcher = Launcher("worker-0", "worker-1")
    others = [Told(f"worker-{i}", i) for i in (7, 8, 9)]
    own = [Told("worker-0", 0, keys={1}), Told("worker-1", 1, keys={2, 3})]
    mixed = Cluster(launcher, ScaleLimits(least=1, most=2, down_after_s=5.0), *own, *others)
    mixed.look(5)
    assert not mixed.drained
    mixed.look(5)
    assert mixed.drained == [own[0]], "one less will do, and one of its own is that"


def test_while_nobody_serves_nobody_is_given_up() -> None:
    """That no worker can run is the launcher's to tell whoever waits for the first."""
    launcher = Launcher("worker-0", "worker-1")
    launcher.trouble |= dict.fromkeys(launcher.names, "it cannot run")
    none = Cluster(launcher, ScaleLimits(least=2, most=4))
    none.look(60)
    assert launcher.names == ["worker-0", "worker-1"] and not launcher.released


def test_a_role_whose_workers_cannot_run_holds_up_no_other() -> None:
    """The decode worker that was added cannot run and is given up; prefill workers are started meanwhile, and its own pauses are its own.
    When the last one of a role that has served cannot run it is given up as well, since others serve: another is tried."""
    launcher, limits = Launcher("prefill-0", "decode-0", "decode-1"), ScaleLimits(least=1, most=3)
    pair = Cluster(launcher, {"prefill": limits, "decode": limits}, Told("prefill-0", 0), Told("decode-0", 1))
    launcher.trouble["decode-1"] = "it cannot run"
    pair.look(1)
    assert launcher.released == ["decode-1"]
    pair.workers.pop(0)
    launcher.names.remove("prefill-0")
    pair.workers.pop(0)
    pair.look(1)
    assert launcher.names == ["decode-0", "prefill-1"], "prefill does not rest"

    pair.workers.append(Told("prefill-1", 0))
    launcher.trouble["decode-0"] = "it cannot run"
    pair.look(1)
    assert launcher.released == ["decode-1", "decode-0"] and launcher.names == ["prefill-1"]
    pair.look(int(2 * scaling.FIRST_REST_S))
    assert launcher.names == ["prefill-1", "decode-2"]


def test_the_first_workers_of_a_role_are_not_given_up() -> None:
    launcher, limits = Launcher("prefill-0", "decode-0"), ScaleLimits(least=1, most=3)
    pair = Cluster(launcher, {"prefill": limits, "decode": limits}, Told("prefill-0", 0))
    launcher.trouble["decode-0"] = "it cannot run"
    pair.look(60)
    assert launcher.names == ["prefill-0", "decode-0"] and not launcher.released


def test_a_decode_worker_is_not_ended_while_a_hand_off_is_on_its_way_to_it() -> None:
    """It has no request yet, and drains: it is let go when the hand-off is over, one way or the other."""
    let_go = list[Any]()
    coming = [1]
    desk = SimpleNamespace(without_room=lambda now: (0, 0.0), num_coming=lambda index: coming[0] if index == 1 else 0)
    pools = SimpleNamespace(num_foreign=lambda index: 0, is_mixed=lambda index: False)
    workers = [Told("decode-0", 0), Told("decode-1", 1, draining=True)]
    control = cast(Any, type("Control", (), {"fleet": None, "__iter__": lambda self: iter(workers)})())
    operations = cast(Any, SimpleNamespace(is_restarting=False, is_leaving=lambda link: False, let_go=let_go.append))
    flights = cast(Any, Came(handovers=SimpleNamespace(desk=desk, pools=pools)))
    launcher = Launcher("decode-0", "decode-1")
    scaler = scaling.Scaling({"decode": ScaleLimits(least=1, most=2)}, control, flights, operations, launcher, lambda: 1.0)
    scaler.look()
    assert not let_go
    coming[0] = 0
    scaler.look()
    assert let_go == [workers[1]]


@pytest.mark.parametrize("is_scaled", [False, True])
def test_prices_are_worked_out_only_for_a_front_end_that_scales_by_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_scaled: bool
) -> None:
    """Every load has them then, and none otherwise; a worker that comes to another front end does as that one wants."""
    num_asked = 0

    def prices(engine: object) -> tuple[float, float]:
        nonlocal num_asked
        num_asked += 1
        return 0.25, 0.5

    address = Address(path=str(tmp_path / "workers"))

    async def load_told(wants_prices: bool) -> Load:
        async with front_end(address) as engine:
            engine.control._wants_prices = wants_prices  # as for options with a scale, which need a launcher that can start workers
            await until(lambda: bool(engine.open_links()))
            await answer(engine, "r", params=PARAMS)
            await until(lambda: next(iter(engine.control)).load.num_steps > 0)
            told = next(iter(engine.control)).load
            for link in engine.control:  # this front end ends as one that dies: the worker goes on
                link.channel.abort("the test ends it")
        return told

    async def run() -> None:
        _, task = worker(address, "a")
        told = await load_told(is_scaled)
        assert (told.prompt_token_s, told.output_token_s) == ((0.25, 0.5) if is_scaled else (0.0, 0.0))
        assert (num_asked > 0) == is_scaled
        told = await load_told(not is_scaled)
        assert (told.prompt_token_s, told.output_token_s) == ((0.0, 0.0) if is_scaled else (0.25, 0.5))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    monkeypatch.setattr(worker_engine, "full_step_prices", prices)
    asyncio.run(run())


@pytest.mark.parametrize("scale", [{}, {"both": ScaleLimits(least=1, most=2)}])
def test_whoever_scales_asks_for_prices(scale: dict[str, ScaleLimits]) -> None:
    engine = engine_of(FrontEndLauncher("a"), ClusterOptions(liveness=PATIENT, scale=scale))
    assert engine.control._wants_prices == bool(scale)
