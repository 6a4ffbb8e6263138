"""Processes that are kept running: what happens between two of them, and when none can be started."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from octavo.backends import machine
from octavo.config import ConfigError, EngineConfig, ModelConfig
from octavo.distributed import launcher, process_worker
from octavo.distributed.channel import Address
from octavo.distributed.local_cluster import SOCKET, ClusterPlan, open_cluster, sweep_folders
from octavo.distributed.process_worker import LocalProcesses, share_of_cores
from tests.models.tiny import write_tiny_gguf

ENDS = (sys.executable, "-c", "raise SystemExit(1)")
STAYS = (sys.executable, "-c", "import time; time.sleep(600)")
NOWHERE = Address("127.0.0.1", 1)


async def until(condition: object) -> None:
    async with asyncio.timeout(60):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


def test_a_worker_that_ended_by_itself_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its pause would have been, and without waiting for the end of the one that takes its place."""
    monkeypatch.setattr(process_worker, "END_S", 0.1)

    async def run() -> None:
        processes = LocalProcesses({"worker-0": "both"}, "secret", command=ENDS)
        child = processes._workers["worker-0"]
        child.pause_s = 3600.0
        await processes.start(NOWHERE)
        await until(lambda: child.process is not None and child.process.returncode == 1)
        first = child.process
        processes._command = list(STAYS)
        async with asyncio.timeout(60):
            await processes.replace("worker-0")
        await until(lambda: child.process is not first)
        assert set(processes.pids) == {"worker-0"}
        await processes.stop()
        assert not processes.pids

    asyncio.run(run())


def test_the_end_waits_for_no_worker_that_has_not_connected_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a start is broken off: nobody but whoever started it can tell it that it is enough."""
    monkeypatch.setattr(process_worker, "END_S", 3600.0)

    async def run() -> None:
        processes = LocalProcesses({"worker-0": "both", "worker-1": "both"}, "secret", command=STAYS)
        await processes.start(NOWHERE)
        await until(lambda: len(processes.pids) == 2)
        async with asyncio.timeout(120):
            await processes.stop()
        assert not processes.pids

    asyncio.run(run())


ENDS_WHEN_TOLD = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path({folder!r}, "signalled").touch())
pathlib.Path({folder!r}, "up").touch()
while not pathlib.Path({folder!r}, "told").exists():
    time.sleep(0.005)
"""


def test_a_worker_that_was_ready_ends_without_a_signal(tmp_path: Path) -> None:
    """It has been told over its channel. Whoever ended the server may have sent all its processes one (systemd does): a second one would
    end the worker at once, whatever it is writing."""

    async def run() -> None:
        command = (sys.executable, "-c", ENDS_WHEN_TOLD.format(folder=str(tmp_path)))
        processes = LocalProcesses({"worker-0": "both"}, "secret", command=command)
        await processes.start(NOWHERE)
        await until((tmp_path / "up").exists)
        processes.ready("worker-0")
        stopping = asyncio.create_task(processes.stop())
        await asyncio.sleep(0)
        (tmp_path / "told").touch()
        async with asyncio.timeout(120):
            await stopping
        assert not processes.pids and not (tmp_path / "signalled").exists()

    asyncio.run(run())


def test_a_worker_that_could_not_run_is_tried_again_when_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_worker, "END_S", 0.1)

    async def run() -> None:
        processes = LocalProcesses({"worker-0": "both", "worker-1": "both"}, "secret", command=STAYS)
        children = processes._workers
        await processes.start(NOWHERE)
        await until(lambda: len(processes.pids) == 2)
        processes._command = [sys.executable, "-c", f"raise SystemExit({process_worker.HOPELESS})"]
        children["worker-1"].process.kill()  # type: ignore[union-attr]
        await until(lambda: processes.trouble is not None)
        assert not processes.is_at_end, "the other one works"
        assert processes.trouble_of("worker-0") is None and processes.trouble_of("worker-1") == processes.trouble
        assert children["worker-1"].keeper.done() and set(processes.pids) == {"worker-0"}  # type: ignore[union-attr]
        processes._command = list(STAYS)
        await processes.replace("worker-1")
        await until(lambda: set(processes.pids) == {"worker-0", "worker-1"})
        assert processes.trouble is None
        processes._command = [sys.executable, "-c", f"raise SystemExit({process_worker.HOPELESS})"]
        for child in children.values():
            child.process.kill()  # type: ignore[union-attr]
        await until(lambda: processes.is_at_end)
        assert all(child.keeper.done() for child in children.values())  # type: ignore[union-attr]
        processes._command = list(STAYS)
        await processes.replace("worker-0")
        assert not processes.is_at_end, "one may come"
        processes.release("worker-0")
        processes.release("worker-1")
        assert processes.is_at_end and not processes.names
        await processes.stop()

    asyncio.run(run())


def test_a_worker_that_was_released_is_kept_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its process has ended another is started; one that has not ended goes on, or is followed by another when it has."""
    monkeypatch.setattr(process_worker, "END_S", 0.1)

    async def run() -> None:
        processes = LocalProcesses({"worker-0": "both", "decode-0": "decode"}, "secret", command=STAYS)
        assert (processes.role_of("worker-0"), processes.role_of("decode-0")) == ("both", "decode")
        await processes.start(NOWHERE)
        await until(lambda: len(processes.pids) == 2)
        first = processes.pids["worker-0"]
        processes.release("worker-0")
        assert processes.released == ["worker-0"] and list(processes.names) == ["decode-0"]
        assert not processes.keep("worker-0"), "its process goes on"
        assert processes.pids["worker-0"] == first and not processes.released

        processes.release("worker-0")
        assert not processes.keep("worker-0"), "as when it has been told to end, and has not yet"
        await processes.replace("worker-0")
        await until(lambda: processes.pids.get("worker-0") not in (None, first))
        second = processes.pids["worker-0"]
        processes.release("worker-0")
        child = processes._workers["worker-0"]
        child.process.kill()  # type: ignore[union-attr]
        await until(lambda: child.keeper is not None and child.keeper.done())
        assert "worker-0" not in processes.pids
        child.trouble, child.is_hopeless = "it could not run, once", True
        assert processes.keep("worker-0") and list(processes.names) == ["worker-0", "decode-0"]
        assert processes.trouble is None and not processes.is_at_end
        await until(lambda: processes.pids.get("worker-0") not in (None, second))
        await processes.stop()

    asyncio.run(run())


def test_of_workers_that_have_ended_for_good_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load comes and goes for months: names are new each time, and of the old ones the last can be had back."""
    monkeypatch.setattr(launcher, "MAX_RELEASED", 3)
    monkeypatch.setattr(process_worker, "END_S", 0.1)

    async def run() -> None:
        processes = LocalProcesses({"worker-0": "both", "worker-2": "both", "decode-0": "decode"}, "secret", command=STAYS)
        await processes.start(NOWHERE)
        await until(lambda: len(processes.pids) == 3)
        added = list[str]()
        processes._command = list(ENDS)
        for i in range(9):
            added.append(processes.add("decode" if i % 3 == 2 else "both"))
            processes.release(added[-1])
            child = processes._workers[added[-1]]
            await until(lambda child=child: child.keeper.done())
        assert [name for name in added if name.startswith("worker")] == [f"worker-{i}" for i in (1, 3, 4, 5, 6, 7)]
        assert [name for name in added if name.startswith("decode")] == ["decode-1", "decode-2", "decode-3"]
        assert processes.released == added[-4:] and len(processes._workers) == 7
        processes.release("worker-2")  # whose process goes on: it is none of those that have ended, and those are three now
        assert processes.released == [*added[-3:], "worker-2"]
        assert list(processes.names) == ["worker-0", "decode-0"] and set(processes.pids) == {"worker-0", "worker-2", "decode-0"}
        assert processes.keep(added[-1]) and processes.names[-1] == added[-1]
        await processes.stop()

    asyncio.run(run())


def test_a_process_that_cannot_be_started_is_tried_again() -> None:
    """A host without room for it has room some time."""

    async def run() -> None:
        processes = LocalProcesses({"worker-0": "both"}, "secret", command=("/nowhere/to/be/found",))
        child = processes._workers["worker-0"]
        child.pause_s = 0.01
        await processes.start(NOWHERE)
        await until(lambda: child.pause_s > 0.02)
        assert child.keeper is not None and not child.keeper.done() and processes.trouble is None
        processes._command = list(ENDS)
        await until(lambda: child.process is not None and child.process.returncode == 1)
        await processes.stop()

    asyncio.run(run())


def test_a_worker_that_ends_whenever_it_is_started_is_trouble_and_tried_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for it is told, so that nobody waits for ever; once it is ready, or replaced, that is forgotten."""
    monkeypatch.setattr(process_worker, "MAX_FAILED", 2)
    monkeypatch.setattr(process_worker, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(process_worker, "END_S", 0.1)

    async def run() -> None:
        processes = LocalProcesses({"worker-0": "both"}, "secret", command=ENDS)
        child = processes._workers["worker-0"]
        child.pause_s = 0.01
        await processes.start(NOWHERE)
        await until(lambda: processes.trouble is not None)
        assert processes.trouble is not None and "was never ready in" in processes.trouble and processes.trouble.endswith("status 1")
        assert child.keeper is not None and not child.keeper.done() and not processes.is_at_end
        processes._command = list(STAYS)
        await until(lambda: set(processes.pids) == {"worker-0"})  # it is tried on
        processes.ready("worker-0")
        assert processes.trouble is None
        processes._command = list(ENDS)
        child.process.kill()  # type: ignore[union-attr]
        await until(lambda: processes.trouble_of("worker-0") is not None)
        processes._command = list(STAYS)
        await processes.replace("worker-0")
        assert processes.trouble is None
        await until(lambda: set(processes.pids) == {"worker-0"})
        processes.release("worker-0")
        child.trouble = "it was, and is of no interest any more"
        assert processes.trouble is None
        await processes.stop()

    asyncio.run(run())


def test_what_a_killed_front_end_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    def listening(folder: str, name: str = SOCKET) -> socket.socket:
        (tmp_path / folder).mkdir()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / folder / name))
        listener.listen()
        return listener

    alive = listening("octavo-alive")
    for folder, name in (("octavo-dead", SOCKET), ("octavo-more", SOCKET), ("octavo-other", "socket"), ("others", SOCKET)):
        listening(folder, name).close()
    (tmp_path / "octavo-more" / "notes").write_text("of somebody")
    (tmp_path / "octavo-file").mkdir()
    (tmp_path / "octavo-file" / SOCKET).write_text("no socket")
    for name in ("octavo-a1_bcdef", "octavo-somebodys", "octavo-mine"):  # the first is as mkdtemp names it, and so is the second
        (tmp_path / name).mkdir()
    (tmp_path / "octavo-somebodys" / "notes").touch()
    before = {path.name for path in tmp_path.iterdir()}
    sweep_folders(tmp_path, min_age_s=3600.0)
    assert {path.name for path in tmp_path.iterdir()} == before
    sweep_folders(tmp_path, min_age_s=0.0)
    assert before - {path.name for path in tmp_path.iterdir()} == {"octavo-dead", "octavo-a1_bcdef"}
    assert (tmp_path / "octavo-more" / "notes").exists() and (tmp_path / "octavo-alive" / SOCKET).exists()
    alive.close()


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts it again and again would have as many."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = EngineConfig(ModelConfig(str(write_tiny_gguf(tmp_path / "m.gguf", context=512)), max_model_len=10**7))
    with pytest.raises(ConfigError, match="max_model_len"):
        open_cluster(config, config.model.model, ClusterPlan({"both": 1}))
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_share_of_the_cores_where_no_system_call_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(machine, "_CGROUP", Path("/nowhere"))
    assert [share_of_cores(n) for n in (1, 5, 13)] == [12, 2, 1]
