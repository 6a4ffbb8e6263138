"""Workers on a real Ray of this machine: placed, killed and replaced, told what is wrong. Long, and only where Ray is installed (soak)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config import CacheConfig, EngineConfig, ModelConfig
from octavo.core.request import SamplingParams
from octavo.distributed import scaling
from octavo.distributed.autoscale import ScaleLimits
from octavo.distributed.cluster_engine import ClusterEngine
from octavo.distributed.cluster_file import ClusterFile, Ray, WorkerGroup
from octavo.distributed.cluster_options import ClusterOptions
from octavo.distributed.open_on_ray import open_on_ray
from octavo.distributed.placing import PlacingError
from octavo.engine.engine import Engine
from octavo.engine.event_stream import EngineUnavailable
from tests.cluster.known_requests import ask_all, difference, known_requests
from tests.cluster.processes import Server
from tests.models.tiny import write_tiny_gguf

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
from octavo.distributed import ray_cluster  # noqa: E402 - it imports Ray
from octavo.distributed.ray_cluster import RayLauncher, RayUnavailable, connect_ray  # noqa: E402

pytestmark = pytest.mark.soak
WAIT_S = 240.0  # Ray takes its time


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("ray") / "m.gguf", context=512)


@pytest.fixture(scope="module", autouse=True)
def own_ray() -> Iterator[None]:
    """One Ray for all tests, with a resource that one worker can have: each front end joins it, and leaves it."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    context: Any = ray.init(address="local", num_cpus=4, resources={"only_one": 1}, include_dashboard=False, log_to_driver=False)
    address = context.address_info["gcs_address"]
    os.environ["RAY_ADDRESS"] = address
    yield
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()


def config_of(path: Path) -> EngineConfig:
    return EngineConfig(ModelConfig(str(path)), CacheConfig(num_kv_blocks=64))


def params_of(number: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=number, max_tokens=24, logprobs=2)


async def answer(engine: ClusterEngine, number: int) -> tuple[list[int], list[Any], str]:
    """Tokens, their log-probabilities, and the text of request ``number``."""
    prepared = engine.prepare_checked([1, 5 + number % 7, 9, number], engine.check_params(params_of(number)), f"request-{number}")
    stream = engine.submit([prepared])
    tokens, logprobs, text = [], [], ""
    while events := await stream.read():
        for event in events:
            assert event.error is None, event.error
            tokens += event.token_ids
            logprobs += event.logprobs or []
            text += event.text
    return tokens, logprobs, text


def answers_alone(path: Path, count: int) -> list[tuple[list[int], list[Any], str]]:
    engine = Engine.load(config_of(path))
    found = []
    for number in range(count):
        engine.add(engine.prepare([1, 5 + number % 7, 9, number], params_of(number)))
        tokens, logprobs, text = [], [], ""
        while engine.has_work:
            for event in engine.step():
                tokens += event.token_ids
                logprobs += event.logprobs or []
                text += event.text
        found.append((tokens, logprobs, text))
    engine.close()
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.05)


def with_cluster(
    path: Path, groups: tuple[WorkerGroup, ...], work: Callable[[ClusterEngine], Any], options: ClusterOptions | None = None
) -> None:
    """``work`` with a front end in this process whose workers are ready, on the Ray of ``own_ray``."""

    async def run() -> None:
        described = ClusterFile(str(path), groups, control_port=0, ray=Ray())
        engine = open_on_ray(config_of(path), str(path), described, options or ClusterOptions())
        engine.start()
        try:
            async with asyncio.timeout(WAIT_S):
                await engine.ready()
                await work(engine)
        finally:
            await engine.stop()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end would join and leave Ray; here this process is in it all the time."""

    monkeypatch.setattr(ray_cluster, "connect_ray", lambda address: False)
    monkeypatch.setattr(ray_cluster, "disconnect_ray", lambda: None)


def test_a_killed_worker_is_replaced_and_no_answer_changes(path: Path) -> None:
    right = answers_alone(path, 40)

    async def work(engine: ClusterEngine) -> None:
        assert sorted(worker.name for worker in engine.control.fleet) == ["worker-0", "worker-1"]
        before = {worker.name: worker.pid for worker in engine.control.fleet}
        running = [asyncio.create_task(answer(engine, number)) for number in range(40)]
        await asyncio.sleep(0.05)
        os.kill(before["worker-0"], signal.SIGKILL)
        assert await asyncio.gather(*running) == right
        pids = lambda: {link.name: link.worker.pid for link in engine.open_links()}  # noqa: E731
        await until(lambda: len(pids()) == 2 and pids()["worker-0"] != before["worker-0"])
        after = pids()
        assert after["worker-0"] != before["worker-0"] and after["worker-1"] == before["worker-1"]
        assert await answer(engine, 3) == right[3]

    with_cluster(path, (WorkerGroup(number=2),), work)


def test_a_rolling_restart_replaces_all_and_fails_nothing(path: Path) -> None:
    right = answers_alone(path, 8)

    async def work(engine: ClusterEngine) -> None:
        before = {worker.pid for worker in engine.control.fleet}
        await engine.cluster.restart()
        while engine.cluster.status()["restart"] is not None:
            assert await asyncio.gather(*(answer(engine, number) for number in range(8))) == right
        assert {worker.pid for worker in engine.control.fleet}.isdisjoint(before) and len(engine.open_links()) == 2

    with_cluster(path, (WorkerGroup(number=2),), work)


def test_a_second_worker_comes_with_the_load_and_goes_when_it_is_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "ASK_S", 0.05)
    right = answers_alone(path, 40)
    limits = ScaleLimits(least=1, most=2, up_wait_s=1e-6, down_after_s=0.5, start_s=5.0, rate_s=0.5)  # any load is too much

    async def work(engine: ClusterEngine) -> None:
        assert isinstance(engine.launcher, RayLauncher)
        while len(engine.open_links()) < 2:
            assert await asyncio.gather(*(answer(engine, number) for number in range(40))) == right
        assert {link.name for link in engine.open_links()} == {"worker-0", "worker-1"}
        await until(lambda: len(list(engine.control)) == 1 and len(engine.launcher.names) == 1)
        await until(lambda: sum(node is not None for node in engine.launcher.nodes.values()) == 1)
        assert await answer(engine, 3) == right[3] and engine.flights.num_lost == 0

    with_cluster(path, (WorkerGroup(number=1),), work, ClusterOptions(scale={"both": limits}))


def test_a_decode_worker_that_lacks_is_placed_as_the_first_of_its_role(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are to be there, of which the description has one; the prefill worker has what only one can."""
    monkeypatch.setattr(scaling, "ASK_S", 0.05)
    right = answers_alone(path, 6)

    async def work(engine: ClusterEngine) -> None:
        await until(lambda: {link.name for link in engine.open_links()} == {"prefill-0", "decode-0", "decode-1"})
        assert [await answer(engine, number) for number in range(6)] == right
        await engine.cluster.drain("decode-0")  # another comes in its place
        await until(lambda: {link.name for link in engine.open_links()} == {"prefill-0", "decode-1", "decode-2"})
        assert [await answer(engine, number) for number in range(6)] == right
        assert engine.handovers.desk.stats.num_handed_over == 12 and engine.flights.num_lost == 0

    groups = (WorkerGroup("prefill", cpus=1, resources={"only_one": 1.0}), WorkerGroup("decode", cpus=1))
    with_cluster(path, groups, work, ClusterOptions(scale={"decode": ScaleLimits(least=2, most=2)}))


def test_resources_and_roles(path: Path) -> None:
    right = answers_alone(path, 6)

    async def work(engine: ClusterEngine) -> None:
        assert {worker.name: worker.role for worker in engine.control.fleet} == {"prefill-0": "prefill", "decode-0": "decode"}
        assert [await answer(engine, number) for number in range(6)] == right
        assert engine.handovers.desk.stats.num_handed_over == 6

    with_cluster(path, (WorkerGroup("prefill", cpus=1, resources={"only_one": 1.0}), WorkerGroup("decode", cpus=1)), work)


def test_what_no_node_could_hold_is_said_at_once(path: Path) -> None:
    async def work(engine: ClusterEngine) -> None:
        raise AssertionError("it must not get ready")

    with pytest.raises(PlacingError, match="cpus: 5000 is not allowed; the most that one of Ray's nodes has is 4"):
        with_cluster(path, (WorkerGroup(cpus=1000 * 5),), work)
    with pytest.raises(PlacingError, match="node: '203.0.113.9' is not allowed; Ray has no such node"):
        with_cluster(path, (WorkerGroup(node="203.0.113.9"),), work)


def test_a_model_that_is_not_there_is_trouble_and_not_tried_again(path: Path) -> None:
    async def run() -> None:
        missing = str(path.parent / "none.gguf")
        described = ClusterFile(missing, (WorkerGroup(),), control_port=0, ray=Ray())
        engine = open_on_ray(config_of(path.parent / "none.gguf"), str(path), described, ClusterOptions())
        engine.start()
        try:
            with pytest.raises(EngineUnavailable, match="none.gguf"):
                async with asyncio.timeout(WAIT_S):
                    await engine.ready()
        finally:
            await engine.stop()

    asyncio.run(run())


def test_a_drained_worker_is_placed_again(path: Path) -> None:
    right = answers_alone(path, 6)

    async def work(engine: ClusterEngine) -> None:
        await engine.cluster.drain("worker-1")
        await until(lambda: [link.name for link in engine.control] == ["worker-0"])
        assert list(engine.launcher.released) == ["worker-1"]  # type: ignore[union-attr]
        assert (await engine.cluster.undrain("worker-1"))["state"] == "starting"
        await until(lambda: {link.name for link in engine.open_links()} == {"worker-0", "worker-1"})
        assert await asyncio.gather(*(answer(engine, number) for number in range(6))) == right

    with_cluster(path, (WorkerGroup(number=2, cpus=1),), work)


def test_a_worker_that_hangs_and_is_drained_is_ended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot do what it is told; its cores are Ray's again, and another may have its name."""
    monkeypatch.setattr(ray_cluster, "END_S", 1.0)

    async def work(engine: ClusterEngine) -> None:
        pid = next(link.worker.pid for link in engine.open_links() if link.name == "worker-1")
        os.kill(pid, signal.SIGSTOP)
        await engine.cluster.drain("worker-1")
        await until(lambda: not Path(f"/proc/{pid}").exists())
        assert (await engine.cluster.undrain("worker-1"))["state"] == "starting"
        await until(lambda: {link.name for link in engine.open_links()} == {"worker-0", "worker-1"})

    with_cluster(path, (WorkerGroup(number=2, cpus=1),), work)


def test_when_no_worker_can_run_any_more_what_waits_ends(path: Path, tmp_path: Path) -> None:
    moved, hidden = tmp_path / "m.gguf", tmp_path / "hidden.gguf"
    moved.write_bytes(path.read_bytes())

    async def work(engine: ClusterEngine) -> None:
        moved.rename(hidden)
        (link,) = engine.control
        os.kill(link.worker.pid, signal.SIGKILL)
        await until(lambda: not len(engine.control.fleet))
        with pytest.raises((AssertionError, EngineUnavailable), match="no worker can run; the server's log says why"):
            await answer(engine, 1)  # an answer that ends with an error, or is refused at once
        await until(lambda: engine.outlook.hopeless() is not None)
        hidden.rename(moved)
        await engine.cluster.restart()
        await until(lambda: bool(engine.open_links()))
        await answer(engine, 2)

    with_cluster(moved, (WorkerGroup(cpus=1),), work, ClusterOptions(worker_wait_s=3600.0))


def test_served_and_described(path: Path, tmp_path: Path) -> None:
    """`octavo serve --ray` and `octavo cluster up` as processes, beside a plain server; SIGTERM ends them in good order."""
    requests = known_requests(20, seed=5, max_prompt_words=40, max_output=12)
    flags = ["--num-kv-blocks", "64", "--max-num-seqs", "16"]
    with Server(["serve", "--port", "0", "-m", str(path), *flags], tmp_path / "one.log") as server:
        right = asyncio.run(ask_all(server.port, requests, 4))
    described = tmp_path / "cluster.toml"
    described.write_text(
        f'model = "{path}"\n[serve]\nport = 0\n[control]\nport = 0\n[engine]\nnum_kv_blocks = 64\nmax_num_seqs = 16\n'
        f'[ray]\naddress = "auto"\n[[workers]]\nnumber = 2\ncpus = 1\n'
    )
    by_flags = ["serve", "--port", "0", "-m", str(path), *flags, "--workers", "2", "--ray"]
    for arguments in (by_flags, ["cluster", "up", str(described)]):
        with Server(arguments, tmp_path / "cluster.log") as server:
            answers = asyncio.run(ask_all(server.port, requests, 8))
            assert len(server.get("/v1/cluster")["workers"]) == 2
            assert server.stop() == 0, server.text
        assert [difference(a, b) for a, b in zip(answers, right, strict=True)] == [None] * len(right)


@pytest.mark.parametrize("said", ["127.0.0.1:1", None])
def test_an_address_of_the_environment_that_leads_nowhere_is_an_error(said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no reason to start a Ray of this machine alone, as there is where nobody has said any."""
    tried = list[str]()

    def init(address: str, **options: Any) -> None:
        tried.append(address)
        if address != "local":
            raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "init", init)
    if said is None:
        monkeypatch.delenv("RAY_ADDRESS")
        assert connect_ray(None) and tried == ["auto", "local"]
        return
    monkeypatch.setenv("RAY_ADDRESS", said)
    with pytest.raises(RayUnavailable, match=r"^\$RAY_ADDRESS: '127.0.0.1:1' is not allowed; .*nobody answers"):
        connect_ray(None)
    assert tried == ["auto"]
