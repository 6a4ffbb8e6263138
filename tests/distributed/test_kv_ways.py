"""Where KV is brought to: workers on the front end's host, on others, and on both; and who is told when there is no way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.bench.stub_worker import StubWorker
from octavo.config import ConfigError
from octavo.distributed import worker_handover
from octavo.distributed.channel import Address
from octavo.distributed.cluster_options import HandoverOptions
from octavo.distributed.handovers import Handovers, _Ticketed
from octavo.distributed.kv_ways import KVPlace, addresses_of, kv_host_for, way
from octavo.distributed.messages import Ready, Welcome
from octavo.distributed.tcp_transport import TcpTransport
from octavo.distributed.transport import Piece, TransferError
from octavo.distributed.worker import WorkerOptions, WorkerServer
from octavo.distributed.worker_engine import WorkerEngine
from octavo.distributed.worker_handover import handing_over
from tests.distributed.pair import tiny_engine
from tests.distributed.test_stub_worker import TOKENIZER
from tests.distributed.test_stub_worker import front_end as front_end_of_stubs
from tests.distributed.test_transports import HEAD, KeepingSink, send_all
from tests.distributed.test_worker import SECRET, front_end, load, until
from tests.models.tiny import write_tiny_gguf
from tests.server.harness import reserved_port


def place(tcp: str, host: str, peer: str | None, front: str | None, has_shm: bool = True) -> KVPlace:
    """``host``: of the worker; on each of them ``shm`` is another."""
    shm = f" shm=@octavo-kv-{host}-0123456789abcdef" if has_shm else ""
    return KVPlace.told(f"tcp={tcp}{shm}", ["tcp", "shm"] if has_shm else ["tcp"], peer, front)


HERE = place("127.0.0.1:5000", "here", "127.0.0.1", "127.0.0.1")
BY_SOCKET = place("127.0.0.1:5001", "here", None, None)
OPEN_HERE = place("0.0.0.0:5002", "here", "127.0.0.1", "127.0.0.1")
OPEN_BY_V6 = place("[::]:5003", "here", "::1", "::1")
FAR = place("10.0.0.2:5004", "far", "10.0.0.2", "10.0.0.1")
OPEN_FAR = place("0.0.0.0:5005", "farther", "10.0.0.3", "10.0.0.1")
FAR_BY_V6 = place("[fd00::2]:5006", "v6", "fd00::2", "fd00::1")
TUNNELLED = place("127.0.0.1:5007", "tunnel", "127.0.0.1", "127.0.0.1")  # seen as if it were here


@pytest.mark.parametrize(
    ("sender", "receiver", "address"),
    [
        (HERE, BY_SOCKET, "127.0.0.1:5001"),
        (FAR, BY_SOCKET, None),
        (FAR, HERE, None),  # it would reach itself
        (TUNNELLED, HERE, None),
        (HERE, TUNNELLED, None),
        (HERE, OPEN_HERE, "127.0.0.1:5002"),
        (FAR, OPEN_HERE, "10.0.0.1:5002"),  # where it reaches the front end
        (OPEN_FAR, OPEN_HERE, "10.0.0.1:5002"),
        (FAR_BY_V6, OPEN_BY_V6, "[fd00::1]:5003"),
        (HERE, OPEN_BY_V6, "[::1]:5003"),
        (TUNNELLED, OPEN_HERE, None),  # nobody knows how it reaches this host
        (HERE, FAR, "10.0.0.2:5004"),
        (FAR, FAR_BY_V6, "[fd00::2]:5006"),
        (FAR, OPEN_FAR, "10.0.0.3:5005"),
        (HERE, OPEN_FAR, "10.0.0.3:5005"),
        (OPEN_FAR, OPEN_FAR, "127.0.0.1:5005"),
    ],
)
def test_the_address_that_a_sender_is_told(sender: KVPlace, receiver: KVPlace, address: str | None) -> None:
    assert way(sender, receiver, "tcp") == (None if address is None else ("tcp", address))


def test_shared_memory_is_for_those_of_one_host() -> None:
    assert way(HERE, OPEN_HERE, "auto") == way(HERE, OPEN_HERE, "shm") == ("shm", "@octavo-kv-here-0123456789abcdef")
    assert way(FAR, OPEN_HERE, "auto") == ("tcp", "10.0.0.1:5002") and way(FAR, OPEN_HERE, "shm") is None
    without = place("127.0.0.1:5008", "here", "127.0.0.1", "127.0.0.1", has_shm=False)
    assert way(HERE, without, "auto") == way(without, without, "auto") == ("tcp", "127.0.0.1:5008")
    assert way(FAR, without, "auto") is None and way(KVPlace({}, ()), FAR, "auto") is None and way(FAR, KVPlace({}, ()), "auto") is None


def test_who_came_by_loopback_to_a_front_end_for_all_hosts_is_to_be_reached_by_all() -> None:
    assert kv_host_for("0.0.0.0", "127.0.0.1") == "0.0.0.0" and kv_host_for("::", "::1") == "::"
    quiet = [("127.0.0.1", "127.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("0.0.0.0", "10.0.0.2"), ("0.0.0.0", "10.0.0.1"), ("", None)]
    assert [kv_host_for(*one) for one in quiet] == [""] * len(quiet)


class Side:
    """What moves the KV of a worker that moves none: where it listens."""

    transports = ["tcp"]

    def __init__(self, host: str) -> None:
        self.hosts = [host]

    @property
    def address(self) -> str:
        return f"tcp={self.hosts[-1]}:5000"

    def listen(self, host: str) -> None:
        if host != self.hosts[-1]:
            self.hosts.append(host)

    def ignore(self, *anything: object) -> None:
        pass

    submitted = take = after_step = dropped = dropped_all = close = ignore


def serving(address: Address, **options: object) -> tuple[WorkerServer, asyncio.Task[None]]:
    def make(worker: WorkerEngine, host: str) -> Side:
        return Side(host)

    server = WorkerServer(address, SECRET, WorkerOptions("w", **options), load, make)  # type: ignore[arg-type]
    return server, asyncio.create_task(server.run())


def test_a_worker_listens_where_its_front_end_of_now_wants_it(tmp_path: Path) -> None:
    """An engine outlives connections; its address is that of the last one."""

    async def run() -> None:
        server: WorkerServer | None = None
        hosts = list[str]()
        for address in (Address(path=str(tmp_path / "socket")), Address("0.0.0.0", 0), Address("127.0.0.1", 0)):
            async with front_end(address) as engine:
                at = engine.control.address
                to = at if at.path else Address("127.0.0.1", at.port)
                if server is None:
                    server, task = serving(to)
                server._address = to
                await until(lambda now=engine: bool(now.open_links()))  # type: ignore[misc]
                hosts.append(engine.open_links()[0].kv.addresses["tcp"])
                server._channel.abort("the network is cut")  # type: ignore[union-attr]
        assert hosts == ["127.0.0.1:5000", "0.0.0.0:5000", "127.0.0.1:5000"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_worker_that_is_told_where_to_listen_does() -> None:
    async def run() -> None:
        async with front_end() as engine:
            server, task = serving(engine.control.address, kv_listen=Address("10.1.2.3", 7071))
            await until(lambda: bool(engine.open_links()))
            assert engine.open_links()[0].kv.addresses == {"tcp": "10.1.2.3:5000"}
        server._end()
        await asyncio.gather(task)

    asyncio.run(run())


def test_where_nobody_can_listen_is_said() -> None:
    def make(worker: WorkerEngine, host: str) -> Side:
        raise OSError(99, "Cannot assign requested address")

    async def run() -> None:
        async with front_end() as engine:
            options = WorkerOptions("w", kv_listen=Address("10.1.2.3", 7071))
            await WorkerServer(engine.control.address, SECRET, options, load, make).run()

    with pytest.raises(ConfigError, match="kv_listen: 10.1.2.3:7071 is not allowed; nobody can listen there: .*Cannot assign"):
        asyncio.run(run())


def test_a_port_that_was_chosen_is_taken_again_and_again() -> None:
    with reserved_port() as port:
        for _ in range(2):
            sink = KeepingSink()
            listener = TcpTransport(SECRET, port=port).listen("0.0.0.0", sink)
            assert listener.address == f"0.0.0.0:{port}"
            send_all(TcpTransport(SECRET), f"127.0.0.1:{port}", [Piece(0, 1, 0, 1)])
            assert sink.finished and sink.heads == [HEAD]
            listener.close()


class Placed(StubWorker):
    """A stub that others could bring KV to, on a host of its own."""

    def _ready(self, welcome: Welcome) -> Ready:
        address = f"tcp=127.0.0.1:1 shm=@octavo-kv-{self.name}-0123456789abcdef"
        return msgspec.structs.replace(StubWorker._ready(self, welcome), kv_address=address, transports=["tcp", "shm"])


def test_two_that_cannot_hand_over_to_each_other_are_named(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        engine = await front_end_of_stubs()
        workers = [Placed(role, "bigram", TOKENIZER.vocab_size, role=role) for role in ("prefill", "decode", "both")]
        tasks = [asyncio.create_task(worker.run(engine.control.address, SECRET)) for worker in workers]
        await until(lambda: len(engine.open_links()) == 3)
        await engine.stop()
        await asyncio.gather(*tasks)

    caplog.set_level(logging.WARNING, "octavo.cluster")
    asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("KV has no way")]
    where = "tcp 127.0.0.1:1, shm @octavo-kv-decode-0123456789abcdef"
    assert lines == [f"KV has no way: from worker prefill by auto to worker decode, which listens at {where}"]


def test_what_waits_is_looked_through_without_looking_through_all_workers_for_each() -> None:
    """The front end's loop does so ten times a second."""
    num_waiting, num_looks = 300, 0

    def link(index: int, role: str) -> Any:
        kv = place(f"10.0.0.{index}:5000", f"host-{index}", f"10.0.0.{index}", "10.0.0.100")
        view, channel = SimpleNamespace(num_available_blocks=0), SimpleNamespace(send=lambda message: None, is_open=True)
        return SimpleNamespace(index=index, kv=kv, worker=SimpleNamespace(role=role, boot_id=str(index)), view=view, channel=channel)

    links = [link(index, "prefill" if index < 8 else "decode") for index in range(16)]

    def every() -> list[Any]:
        nonlocal num_looks
        num_looks += 1
        return links

    faults = SimpleNamespace(guarded=lambda flight: contextlib.nullcontext())
    flights: Any = SimpleNamespace(faults=faults, fits=lambda view: True)
    handovers = Handovers(flights, SimpleNamespace(), lambda: links, every, HandoverOptions(), lambda: 0.0)  # type: ignore[arg-type]
    for key in range(num_waiting):
        handovers.desk.offered(key, _Ticketed(flights, 100, 8 + key % 8), key % 8, 100, 100, 0.0, [1])
    way.cache_clear()
    handovers._give_up()
    assert num_looks <= 1 and way.cache_info().misses <= 8 * 8, "it depends on what there is, and not on what waits"
    assert way.cache_info().hits + way.cache_info().misses <= num_waiting, "one that may take it is enough"
    assert len(handovers.desk) == num_waiting


def test_blocks_that_no_piece_can_hold_go_nowhere_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and not by every hand-off that fails."""
    engine = tiny_engine(write_tiny_gguf(tmp_path / "m.gguf"))
    try:
        worker = WorkerEngine(engine, lambda message: None, lambda reason: None)
        bytes_of_layer = engine.backend.wire_layer_bytes(0)  # type: ignore[attr-defined]
        for most, moves in ((bytes_of_layer, True), (bytes_of_layer - 1, False)):
            monkeypatch.setattr(worker_handover, "MAX_PIECE_BYTES", most)
            side = handing_over(SECRET)(worker, "127.0.0.1")
            assert (side is not None) is moves
            if side is not None:
                side.close()
    finally:
        engine.close()
    limit = f"block_size: 16 is too large for KV to go to other workers; a layer of a block has {bytes_of_layer} bytes, and at most"
    assert [record.getMessage() for record in caplog.records if record.name == "octavo.worker"] == [f"{limit} {most} go at a time"]


def test_what_listens_moves_and_its_address_with_it(tmp_path: Path) -> None:
    engine = tiny_engine(write_tiny_gguf(tmp_path / "m.gguf"))
    try:
        side = handing_over(SECRET)(WorkerEngine(engine, lambda message: None, lambda reason: None), "127.0.0.1")
        assert side is not None
        addresses = list[dict[str, str]]()
        for host in ("127.0.0.1", "127.0.0.1", "0.0.0.0"):
            side.listen(host)
            addresses.append(addresses_of(side.address or ""))
        assert addresses[0] == addresses[1] and addresses[2]["tcp"].startswith("0.0.0.0:")
        assert set(addresses[0]) == set(addresses[2]) == set(side.transports)
        for number, reason in ((0, "ConnectionRefusedError"), (2, "nothing is expected here under the key 7")):
            with pytest.raises(TransferError, match=reason):
                TcpTransport(SECRET).connect(addresses[number]["tcp"], HEAD)
        side.close()
    finally:
        engine.close()
