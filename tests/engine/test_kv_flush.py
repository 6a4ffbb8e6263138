"""An idle engine writes to disk what pool and host memory offer, in pieces, once, at the disk's pace: who is killed loses little."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.config import ConfigError
from octavo.engine import kv_flush
from octavo.engine.kv_disk import list_stores
from octavo.engine.kv_flush import IdleFlush
from tests.engine.test_kv_tiers import OTHERS, PARAMS, PROMPT, restored_always, tiered, tiering_of
from tests.models.tiny import write_tiny_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "rand.gguf", context=1024)


class Clock:
    """Stands still but for ``tick_s`` at each look."""

    def __init__(self, tick_s: float) -> None:
        self.now_s, self.tick_s = 100.0, tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def flush_of(llm: LLM, tick_s: float) -> tuple[IdleFlush, Clock]:
    """The engine's flush, its clock replaced, and an interval of 10 s from now."""
    flush, clock = tiering_of(llm)._flush, Clock(tick_s)
    assert flush is not None
    flush._clock, flush._due_s, flush._interval_s = clock, clock.now_s + 10.0, 10.0
    return flush, clock


def finish(llm: LLM, longest: int = 10_000) -> int:
    """Be idle until there is nothing to do; the number of pieces."""
    for i in range(longest):
        if llm.engine.idle() is None:
            return i
    raise AssertionError("there is always more to do")


def num_files(tmp_path: Path) -> int:
    return sum(1 for _ in tmp_path.rglob("*.kv"))


def written(llm: LLM, tmp_path: Path) -> int:
    """Blocks on disk when its thread has nothing left to write."""
    disk = tiering_of(llm).disk
    assert disk is not None
    with disk._written:
        assert disk._written.wait_for(lambda: not disk._queued, 120)
    return num_files(tmp_path)


def test_a_sweep_is_made_when_it_is_due_and_something_was_computed(path: Path, tmp_path: Path) -> None:
    with tiered(path, num_kv_blocks=40, kv_disk_path=str(tmp_path)) as llm:
        flush, clock = flush_of(llm, 0.0)
        clock.now_s += 99.0
        assert llm.engine.idle() is None and flush.stats.num_pieces == 0, "nothing was computed"
        clock.now_s -= 99.0
        llm.generate(PROMPT, PARAMS)
        assert llm.engine.idle() == 10.0
        clock.now_s += 10.0
        assert finish(llm) == 0 and written(llm, tmp_path) == flush.stats.num_blocks == 8
        clock.now_s += 99.0
        assert llm.engine.idle() is None and flush.stats.num_sweeps == 1, "nothing was computed since"
        llm.generate(OTHERS[0], PARAMS)
        finish(llm)
        assert written(llm, tmp_path) == flush.stats.num_blocks == 8 + 7, "what is there is not written again"
        llm.engine.scheduler.check_invariants()


def test_what_host_memory_holds_is_written_too_and_all_of_it_is_good(path: Path, tmp_path: Path) -> None:
    options = {"kv_host_memory": 8 << 20, "kv_disk_path": str(tmp_path)}
    with tiered(path, **options) as llm:
        _, clock = flush_of(llm, 0.0)
        expected = [llm.generate(prompt, PARAMS)[0].outputs for prompt in (PROMPT, *OTHERS)]
        clock.now_s += 10.0
        finish(llm)
        assert written(llm, tmp_path) == 8 + 4 * 7
        tiering_of(llm).close = lambda scheduler: None  # type: ignore[method-assign]  # as if it were killed
    with tiered(path, **options) as llm:
        restored_always(llm)
        for prompt, outputs in zip((PROMPT, *OTHERS), expected, strict=True):
            (output,) = llm.generate(prompt, PARAMS)
            assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16 and output.outputs == outputs
        assert tiering_of(llm).disk.store.num_damaged == 0  # type: ignore[union-attr]


def test_a_piece_ends_in_time_and_steps_come_in_between(path: Path, tmp_path: Path) -> None:
    """Every look at the clock takes a piece's time: so a piece is one block. The pool changes meanwhile."""
    with tiered(path, num_kv_blocks=17, kv_disk_path=str(tmp_path)) as llm:
        flush, clock = flush_of(llm, kv_flush.PIECE_S)
        llm.generate(PROMPT, PARAMS)
        llm.generate(OTHERS[0], PARAMS)
        clock.now_s += 10.0
        for i in range(1, 4):
            assert llm.engine.idle() == 0.0 and (flush.stats.num_pieces, flush.stats.num_blocks) == (i, i)
        llm.generate(OTHERS[1], PARAMS)  # takes the place of blocks that the sweep has not seen
        assert finish(llm) > 4
        llm.engine.scheduler.check_invariants()
        assert written(llm, tmp_path) <= 8 + 7 + 7
        tiering_of(llm).close = lambda scheduler: None  # type: ignore[method-assign]
    with tiered(path, num_kv_blocks=40, kv_disk_path=str(tmp_path)) as llm:
        restored_always(llm)
        with LLM(str(path), num_kv_blocks=64, enable_prefix_caching=False) as plain:
            for prompt in (PROMPT, *OTHERS[:2]):
                assert llm.generate(prompt, PARAMS)[0].outputs == plain.generate(prompt, PARAMS)[0].outputs
        assert tiering_of(llm).tiers.stats.disk_hit_tokens > 0


def test_a_slow_disk_sets_the_pace_and_no_block_is_dropped(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_flush, "QUEUE_BYTES", 3 * 4096)
    with tiered(path, num_kv_blocks=40, kv_disk_path=str(tmp_path)) as llm:
        _, clock = flush_of(llm, 0.0)
        disk = tiering_of(llm).disk
        assert disk is not None
        disk._queue_bytes, put = 5 * 4096, disk.store.put
        go = threading.Semaphore(0)
        disk.store.put = lambda *args: go.acquire(timeout=120) and put(*args)  # type: ignore[method-assign]
        llm.generate(PROMPT, PARAMS)
        clock.now_s += 10.0
        assert llm.engine.idle() == 0.0 and llm.engine.idle() == kv_flush.PAUSE_S
        for _ in range(8):
            go.release()
        while llm.engine.idle() is not None:
            pass
        assert written(llm, tmp_path) == 8 and disk.num_dropped == 0


def test_no_more_is_written_than_the_disk_may_hold(path: Path, tmp_path: Path) -> None:
    """The most recently used first; a second sweep finds nothing to do."""
    with tiered(path, num_kv_blocks=60, kv_disk_path=str(tmp_path), kv_disk_size=10 * 4400) as llm:
        flush, clock = flush_of(llm, 0.0)
        store = tiering_of(llm).disk.store  # type: ignore[union-attr]
        most = int(0.9 * 10 * 4400) // store.file_bytes
        for prompt in (*OTHERS, PROMPT):
            llm.generate(prompt, PARAMS)
        for _ in range(2):
            clock.now_s += 10.0
            finish(llm)
            llm.generate(PROMPT[:20], PARAMS)
        assert written(llm, tmp_path) == flush.stats.num_blocks == most and store.num_evicted == 0


def test_a_failing_backend_ends_it_and_nothing_else(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiered(path, num_kv_blocks=40, kv_disk_path=str(tmp_path)) as llm:
        _, clock = flush_of(llm, 0.0)
        expected = llm.generate(PROMPT, PARAMS)[0].outputs
        clock.now_s += 10.0
        with monkeypatch.context() as patch:
            patch.setattr(type(llm.engine.backend), "read_host_block", lambda *_: (_ for _ in ()).throw(MemoryError("no")))
            assert llm.engine.idle() is None
        assert llm.generate(PROMPT, PARAMS)[0].outputs == expected
        assert llm.engine.idle() is None


SERVER = """
import asyncio
from tests.engine.test_kv_flush import *
from octavo.engine.async_engine import AsyncEngine

async def main():
    llm = tiered(Path({path!r}), kv_disk_path={folder!r}, kv_disk_flush_seconds=0.01, num_kv_blocks=40, **{options!r})
    engine = AsyncEngine(llm.engine)
    engine.start()
    stream = engine.submit([llm.engine.prepare(PROMPT, PARAMS)])
    tokens = []
    while not stream.finished:
        tokens += [token for event in await stream.read() for token in event.token_ids]
    async with asyncio.timeout(120):
        while num_files(Path({folder!r})) < 8:
            await asyncio.sleep(0.01)
    print(tokens, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("options", [{}, {"kv_host_dtype": "int8"}], ids=str)
def test_a_process_that_is_killed_has_kept_its_prefix(path: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    script = SERVER.format(path=str(path), folder=str(tmp_path), options=options)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            tokens = process.stdout.readline()
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    with tiered(path, kv_disk_path=str(tmp_path), **options) as llm:
        restored_always(llm)
        (output,) = llm.generate(PROMPT, PARAMS)
        assert output.num_cached_tokens == 112 and tiering_of(llm).tiers.stats.disk_hit_tokens == 112
        assert options or tokens.strip() == str(list(output.outputs[0].token_ids))
    assert len(list_stores(tmp_path)) == 1


def test_switched_off(path: Path, tmp_path: Path) -> None:
    for options in ({"kv_disk_path": str(tmp_path), "kv_disk_flush_seconds": 0}, {"kv_host_memory": 1 << 20}):
        with tiered(path, **options) as llm:
            llm.generate(PROMPT, PARAMS)
            assert llm.engine.idle() is None and num_files(tmp_path) == 0
            tiering_of(llm).close = lambda scheduler: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_disk_flush_seconds": 3.0}, "kv_disk_flush_seconds: 3.0 is not allowed; it is for kv_disk_path, which is not set"),
        ({"kv_disk_path": "x", "kv_disk_flush_seconds": -1.0}, "kv_disk_flush_seconds: -1.0 is not allowed; a finite number"),
        ({"kv_disk_path": "x", "kv_disk_flush_seconds": float("inf")}, "kv_disk_flush_seconds: inf is not allowed; a finite number"),
    ],
)
def test_configurations_that_cannot_be(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiered(path, **options)
